"""Mends Triton's interpreter, so that kernels can be tested without a GPU, on any CPU alike.

Its interpreter (3.5 to 3.9) holds bf16 as uint16; its dot multiplies those raw bits, and its
fp32 -> bf16 cast truncates where the hardware rounds to nearest even. Both are replaced here by
what the hardware does. Its dot in fp32 is NumPy's, whose order of sums is that of the CPU's BLAS
and may differ between the rows of one tile, which no GPU does: products of a tile are summed in
float64 here and rounded once; the 13 lowest bits of tf32 operands, which its dot keeps, are cut. A
masked load without `other` gives zeros there and whatever a register held on a GPU: here it gives
NaN, of integers 1, which is a place like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_TensorHandle = interpreter.TensorHandle
_original_cast = _Builder.cast_impl
_original_fp_to_fp = _Builder.create_fp_to_fp
_original_masked_load = _Builder.create_masked_load


def float32_to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, round to nearest even, NaN kept quiet."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16)


def bf16_bits_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _as_float64(handle) -> np.ndarray:
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = bf16_bits_to_float32(data)
    return data.astype(np.float64)


def _operand(handle, input_precision) -> np.ndarray:
    if handle.dtype.scalar == tl.float32 and str(input_precision).split(".")[-1].lower() == "tf32":
        return (handle.data.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)
    return _as_float64(handle)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_operand(a, input_precision), _operand(b, input_precision))
    product = product.astype(d.data.dtype)
    return _TensorHandle(product + d.data, d.dtype.scalar)


def _cast(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if target == tl.bfloat16 and source in (tl.float32, tl.float16):
        return _TensorHandle(float32_to_bf16_bits(src.data.astype(np.float32)), target)
    if source == tl.bfloat16 and target in (tl.float32, tl.float16):
        data = bf16_bits_to_float32(src.data)
        return _TensorHandle(data.astype(np.float16) if target == tl.float16 else data, target)
    return _original_cast(self, src, dst_type)


def _fp_to_fp(self, src, dst_type, rounding_mode):
    if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
        return _cast(self, src, dst_type)
    return _original_fp_to_fp(self, src, dst_type, rounding_mode)


def poison(dtype: np.dtype) -> Any:
    """What a masked lane holds that nobody filled."""
    if dtype == np.uint16:
        return 0x7FC0  # NaN as bf16
    return np.nan if dtype.kind == "f" else 1


def _masked_load(self, ptrs, mask, other, *options, **named):
    if other is None:
        dtype = ptrs.get_element_ty()
        kind = interpreter._get_np_dtype(dtype)
        other = _TensorHandle(np.full(ptrs.data.shape, poison(kind), kind), dtype)
    return _original_masked_load(self, ptrs, mask, other, *options, **named)


def mend_interpreter() -> None:
    """Install the replacements; a second call changes nothing."""
    _Builder.create_dot = _dot
    _Builder.cast_impl = _cast
    _Builder.create_fp_to_fp = _fp_to_fp
    _Builder.create_masked_load = _masked_load
    # create_fp_trunc and create_fp_ext call self.cast_impl and need no replacement.
