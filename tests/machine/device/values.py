"""Numbers as registers hold them: bits, seen as one type or another.

A register of all threads of several blocks is a numpy array of bits, of shape (blocks, threads).
Where all blocks, or all threads, hold the same number its shape is (1, threads), (blocks, 1) or
(1, 1), and numpy broadcasts: an address that depends on the thread alone is computed once for all
blocks. Arrays are never changed in place, so a `mov` copies nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TYPES: dict[str, np.dtype] = {
    "pred": np.dtype(bool),
    **{
        f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}")
        for letter, kind in (("b", "u"), ("u", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    # Types that numpy does not have stay bits: bf16 is the upper half of an f32.
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
    "tf32": np.dtype(np.uint32),
}

U16, U32, U64 = np.dtype("u2"), np.dtype("u4"), np.dtype("u8")
S32, S64, F16, F32 = (np.dtype(x) for x in ("i4", "i8", "f2", "f4"))

POISON_BYTES = (0xFF, 0x7F)  # NaN as f16, bf16, f32 and f64; a far address as an integer


@cache
def poison(kind: np.dtype) -> Array:
    """What an unwritten register holds. A predicate holds: what it guards should not run."""
    if kind == np.dtype(bool):
        return np.ones((1, 1), bool)
    return np.frombuffer(bytes(POISON_BYTES) * (kind.itemsize // 2), kind).reshape(1, 1)


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(U32) << 16).view(F32)


def f32_to_bf16(x: Array) -> Array:
    """Round to nearest, ties to even; every NaN becomes PTX's canonical one, 0x7FFF."""
    bits = x.view(U32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(U16)


def f32_to_f16(x: Array) -> Array:
    """Round to nearest, ties to even; every NaN becomes 0x7FFF."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(F16).view(U16))


def halves(bits: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits of 32."""
    return (bits & 0xFFFF).astype(U16), (bits >> 16).astype(U16)


def joined(low: Array, high: Array) -> Array:
    return low.astype(U32) | (high.astype(U32) << 16)
