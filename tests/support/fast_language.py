"""Functions of triton.language in the interpreter, past triton's walk through their arguments.

What kernels call most, on the types that they use, computed at once as fast_operations does; other
arguments take triton's own way. No value changes. For triton 3.6 and 3.8.
"""

from __future__ import annotations

from typing import Any

import fast_interpreter
import fast_operations
import numpy as np
import triton
from fast_interpreter import unwrap
from fast_operations import _broadcast_type, _constant, _of_element, _result, cast, to_tensor
from triton import language as tl
from triton.language import core, random, standard
from triton.runtime import interpreter

Tensor = core.tensor
_semantic = interpreter.interpreter_semantic
_builder = interpreter.interpreter_builder
_FLOATS = frozenset([id(tl.float16), id(tl.bfloat16), id(tl.float32)])
_STORED = _FLOATS | {id(tl.int32), id(tl.int64), id(tl.uint8)}


def _shared(data: Any) -> Any:
    """An array that several tensors have."""
    data.flags.writeable = False
    return data


_others: dict[Any, Any] = {}  # (Python's type, value, element type) -> handle of one element


def _other(value: Any, element: Any) -> Any:
    """A number as a load's elements; None where triton is to say."""
    if value.__class__ not in (int, float):
        return None
    key = value.__class__, value, id(element)  # 1 is 1.0, and another number of bf16's bits
    known = _others.get(key)
    if known is None:
        known = _others[key] = cast(_semantic, to_tensor(_semantic, value), element).handle
        _shared(known.data)
    return known


def _spreads(x: Any, to: Any) -> bool:
    """Whether a type broadcasts to another, which it does not enlarge."""
    return x is to or _broadcast_type(to, x) is to


def _is_mask(mask: Any, type: Any) -> bool:
    return mask is None or (
        mask.__class__ is Tensor and mask.dtype is tl.int1 and _spreads(mask.type, type)
    )


def _element(pointer: Any) -> Any:
    """What a tensor of pointers points to, of the types that are moved at once; else None."""
    if pointer.__class__ is not Tensor or pointer.dtype.__class__ is not core.pointer_type:
        return None
    element = pointer.dtype.element_ty
    return element if id(element) in _STORED else None


def load(pointer, mask=None, other=None, *args, _semantic=_semantic, **kwargs) -> Any:
    element, mask, other = _element(pointer), unwrap(mask), unwrap(other)
    if element is not None and not args and not kwargs and _is_mask(mask, pointer.type):
        type = _of_element(pointer.type, element)
        if mask is None and other is None:
            return Tensor(_builder.create_load(pointer.handle, None, None, False), type)
        rest = None
        if other.__class__ is Tensor:
            if _spreads(other.type, pointer.type):
                rest = cast(_semantic, other, element).handle
        elif other is not None:
            rest = _other(other, element)
        if mask is not None and (other is None or rest is not None):
            found = _builder.create_masked_load(
                pointer.handle, mask.handle, rest, None, None, False
            )
            return Tensor(found, type)
    return _slow[load](pointer, mask, other, *args, _semantic=_semantic, **kwargs)


def store(pointer, value, mask=None, *args, _semantic=_semantic, **kwargs) -> Any:
    element, mask = _element(pointer), unwrap(mask)
    if (
        element is None
        or args
        or kwargs
        or value.__class__ is not Tensor
        or not _is_mask(mask, pointer.type)
        or not _spreads(value.type, pointer.type)
    ):
        return _slow[store](pointer, value, mask, *args, _semantic=_semantic, **kwargs)
    handle = cast(_semantic, value, element).handle
    if mask is None:
        _builder.create_store(pointer.handle, handle, None, None)
    else:
        _builder.create_masked_store(pointer.handle, handle, mask.handle, None, None)
    return Tensor(None, tl.void)


_products: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # ids of two types -> both, product's
_PRECISIONS = ("tf32", "tf32x3", "ieee")
_ZERO = interpreter.TensorHandle(_shared(np.zeros((1, 1), np.float32)), tl.float32)


def _product(a: Any, b: Any) -> Any:
    """The type of two matrices' product; None where triton is to say."""
    known = _products.get((id(a), id(b)))
    if known is None:
        product = None
        if a.is_block() and b.is_block() and a.scalar is b.scalar and id(a.scalar) in _FLOATS:
            left, right = a.shape.values, b.shape.values
            if len(left) == len(right) == 2 and left[1] == right[0]:
                product = tl.block_type(tl.float32, [left[0], right[1]])
        known = _products[id(a), id(b)] = a, b, product
    return known[2]


def dot(input, other, acc=None, input_precision=None, *args, _semantic=_semantic, **kwargs) -> Any:
    if not args and not kwargs and input.__class__ is Tensor and other.__class__ is Tensor:
        type = _product(input.type, other.type)
        if (
            type is not None
            and (acc is None or (acc.__class__ is Tensor and acc.type is type))
            and (precision := unwrap(input_precision)) in _PRECISIONS
        ):
            sum = _ZERO if acc is None else acc.handle
            return Tensor(_builder.create_dot(input.handle, other.handle, sum, precision, 0), type)
    return _slow[dot](input, other, acc, input_precision, *args, _semantic=_semantic, **kwargs)


def to(self, dtype, fp_downcast_rounding=None, bitcast=False, _semantic=_semantic) -> Any:
    """tensor.to and tl.cast."""
    dtype = unwrap(dtype)
    if fp_downcast_rounding is None and bitcast is False and isinstance(dtype, core.dtype):
        return cast(_semantic, to_tensor(_semantic, self), dtype)
    return _slow[to](self, dtype, fp_downcast_rounding, bitcast, _semantic=_semantic)


def where(condition, x, y, _semantic=_semantic) -> Any:
    x, y = unwrap(x), unwrap(y)
    if condition.__class__ is Tensor and condition.dtype is tl.int1:
        known = x if x.__class__ is Tensor else y
        if known.__class__ is Tensor and (dtype := known.dtype) in _COMPARED:
            left, right = _choice(x, dtype), _choice(y, dtype)
            if left is not None and right is not None:
                type = _broadcast_type(left[1], right[1])
                type = type and _broadcast_type(type, condition.type)
                if type is not None:
                    data = np.where(condition.handle.data, left[0], right[0])
                    return _result(data, dtype, type)
    return _slow[where](condition, x, y, _semantic=_semantic)


_COMPARED = frozenset([tl.float32, tl.int32, tl.int64])


def _choice(x: Any, dtype: Any) -> Any:
    """Data and type of an operand of one element type; None where triton is to say."""
    if x.__class__ is Tensor:
        return (x.handle.data, x.type) if x.dtype is dtype else None
    constant = _constant(x, dtype)
    return None if constant is None else (constant, dtype)


def _extreme(compute: Any) -> Any:
    """tl.minimum or tl.maximum."""

    def call(x: Any, y: Any, *args: Any, _semantic: Any = _semantic, **kwargs: Any) -> Any:
        x, y = unwrap(x), unwrap(y)
        known = x if x.__class__ is Tensor else y
        if not args and not kwargs and known.__class__ is Tensor and known.dtype in _COMPARED:
            left, right = _choice(x, known.dtype), _choice(y, known.dtype)
            if left is not None and right is not None:
                type = _broadcast_type(left[1], right[1])
                if type is not None:
                    return _result(compute(left[0], right[0]), known.dtype, type)
        return _slow[call](x, y, *args, _semantic=_semantic, **kwargs)

    return call


def _unary(compute: Any) -> Any:
    """A function of tl.math."""

    def call(x: Any, _semantic: Any = _semantic) -> Any:
        if x.__class__ is Tensor and x.dtype is tl.float32:
            return _result(compute(x.handle.data), tl.float32, x.type)
        return _slow[call](x, _semantic=_semantic)

    return call


# Functions that triton has written in its own language: NotImplemented leaves a call to them.

_reduced: dict[Any, Any] = {}  # shape -> type


def _reduction(compute: Any) -> Any:
    def call(input: Any, axis: Any = None, *args: Any, keep_dims: Any = False) -> Any:
        axis, keep_dims = unwrap(axis), unwrap(keep_dims)
        if input.__class__ is not Tensor or input.dtype is not tl.float32 or args:
            return NotImplemented
        values = input.handle.data
        if axis is not None and not 0 <= axis < len(input.shape):
            return NotImplemented
        found = compute(values, axis=axis, keepdims=keep_dims)
        if not found.shape:
            return _result(np.array([found], np.float32), tl.float32, tl.float32)
        type = _reduced.get(found.shape)
        if type is None:
            type = _reduced[found.shape] = tl.block_type(tl.float32, list(found.shape))
        return _result(found, tl.float32, type)

    return call


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = 10) -> Any:
    """philox_impl of 32 bits."""
    counters, type = (c0, c1, c2, c3), c0.type
    if not all(x.__class__ is Tensor and x.type is type for x in counters):
        return NotImplemented
    if not all(k.__class__ is Tensor and k.type is tl.uint32 for k in (k0, k1)):
        return NotImplemented
    a, b, c, d = (x.handle.data for x in counters)
    key, other_key = k0.handle.data, k1.handle.data
    for _ in range(unwrap(n_rounds)):
        left, right = a.astype(np.uint64) * 0xD2511F53, c.astype(np.uint64) * 0xCD9E8D57
        a = (right >> 32).astype(np.uint32) ^ b ^ key
        c = (left >> 32).astype(np.uint32) ^ d ^ other_key
        b, d = right.astype(np.uint32), left.astype(np.uint32)
        key, other_key = key + np.uint32(0x9E3779B9), other_key + np.uint32(0xBB67AE85)
    return tuple(_result(x, tl.uint32, type) for x in (a, b, c, d))


_NAN_WINS = triton.__version__.startswith("3.6.")
minimum = _extreme(np.minimum if _NAN_WINS else np.fmin)
maximum = _extreme(np.maximum if _NAN_WINS else np.fmax)
_builtins: dict[Any, Any] = {
    core.load: load,
    core.store: store,
    core.dot: dot,
    core.where: where,
    Tensor.to: to,
    core.cast: to,
    core.minimum: minimum,
    core.maximum: maximum,
    tl.math.exp: _unary(np.exp),
    tl.math.exp2: _unary(np.exp2),
    tl.math.log2: _unary(np.log2),
    tl.math.log: _unary(np.log),
    tl.math.sqrt: _unary(np.sqrt),
    tl.math.rsqrt: _unary(lambda x: 1 / np.sqrt(x)),
}
_slow = {fast: slow.__wrapped__ for slow, fast in _builtins.items()}  # triton's own
_functions = {
    standard.sum.fn: _reduction(np.sum),
    standard.max.fn: _reduction(np.fmax.reduce),
    standard.min.fn: _reduction(np.fmin.reduce),
    random.philox_impl.fn: philox,
}


def call_at_once() -> None:
    """Install the replacements."""
    fast_operations.BUILTINS.update(_builtins)
    fast_interpreter.FUNCTIONS.update(_functions)
