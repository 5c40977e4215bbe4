"""Tensors of Triton's interpreter by hand, and what a function of triton's makes of them."""

from __future__ import annotations

import math
from unittest import mock

import fast_memory
import fast_operations
import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

SEMANTIC = interpreter.interpreter_semantic
SHAPES = [(), (4,), (4, 1), (1, 2), (4, 2)]


def tensor(data, dtype):
    """Of an array; of one without axes a scalar, which kernels have as an array of one element."""
    type = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    return tl.tensor(interpreter.TensorHandle(data if data.ndim else data.reshape(1), dtype), type)


def operand(dtype, shape):
    """1, 2, 3, ..."""
    values = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    return tensor(values.astype(interpreter._get_np_dtype(dtype)), dtype)


def outcome(function, *arguments, **options):
    """What a call gives: types and bits, or the kind of its error."""
    with np.errstate(all="ignore"):
        try:
            results = function(*arguments, **options)
        except Exception as error:
            return type(error)
    results = results if isinstance(results, tuple) else (results,)
    return [
        (
            str(x.type),
            str(x.handle.dtype),
            x.handle.data.dtype,
            x.handle.data.shape,
            x.handle.data.tobytes(),
        )
        for x in results
        if x.handle is not None
    ]


def as_triton_does(function, *arguments, **options):
    """The outcome with triton's own types, casts, broadcasts, loads and stores."""
    theirs = dict(
        binary_op_type_checking_impl=fast_operations._typed_operands,
        broadcast_impl_value=fast_operations._broadcast_values,
        cast=fast_operations._cast,
        to_tensor=fast_operations._to_tensor,
    )
    moves = "create_load", "create_masked_load", "create_store", "create_masked_store"
    moves = {name: getattr(fast_memory, f"_{name}") for name in moves}
    with (
        mock.patch.multiple(TritonSemantic, **theirs),
        mock.patch.multiple(interpreter.InterpreterBuilder, **moves),
    ):
        return outcome(function, *arguments, **options)
