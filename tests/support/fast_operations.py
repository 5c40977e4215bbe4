"""What kernels do most in Triton's interpreter, past triton's walk through types and broadcasts.

Arithmetic, comparisons and pointers of the types that kernels use are computed at once, where numpy
broadcasts as triton does; anything else takes triton's own way. No value changes.
For triton 3.6 and 3.8.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import Any

import numpy as np
import torch
from fast_interpreter import numpy_type, of_tensors
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Handle, Tensor = interpreter.TensorHandle, core.tensor
_semantic = interpreter.interpreter_semantic
_new = object.__new__
# Types that operations compute at once, by identity: there is one object of each.
_BITS = {id(t): t.primitive_bitwidth for t in (tl.float32, tl.int32, tl.int64)}
_NUMBERS, _INTEGERS = frozenset(_BITS), frozenset([id(tl.int32), id(tl.int64)])
_BOOL = frozenset([id(tl.int1)])
_HALVES = frozenset([id(tl.float16), id(tl.bfloat16)])
_CASTS = _NUMBERS | _HALVES


def handle_init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """TensorHandle.__init__, its check inline."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if dtype.__class__ is not core.pointer_type:
        bits = data.itemsize * 8
        if bits > 8 and bits > dtype.primitive_bitwidth:
            self.__post_init__()  # raises


_constants: dict[Any, Any] = {}  # (Python's type, value, tensor's type) -> array of one element


def _constant(value: Any, dtype: Any) -> Any:
    """A Python number as triton makes it of a tensor's type; None where triton is to say."""
    key = value.__class__, value, id(dtype)
    try:
        return _constants[key]
    except KeyError:
        pass
    except TypeError:  # not hashable: no number
        return None
    kind, found = value.__class__, None
    if kind is int and dtype is not tl.int1 and -(2**31) <= value < 2**31:
        found = np.array([value], numpy_type(dtype))
    elif (
        kind is float
        and dtype is tl.float32
        and (value == 0 or math.isinf(value) or 2.0**-126 <= abs(value) < 2.0**127)
    ):
        found = np.array([value or 0.0], np.float32)  # no -0.0, as in triton
    if value == value:
        _constants[key] = found
    return found


_broadcasts: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # by the ids of two types; the types


def _broadcast_type(a: Any, b: Any) -> Any:
    """Of two tensors' types, the first broadcast to the second; None where triton is to say."""
    if a is b:
        return a
    known = _broadcasts.get((id(a), id(b)))
    if known is None:
        known = _broadcasts[id(a), id(b)] = a, b, _broadcast(a, b)
    return known[2]


def _broadcast(a: Any, b: Any) -> Any:
    if not b.is_block():
        return a
    if not a.is_block():
        return tl.block_type(a, b.shape)
    left, right = a.shape.values, b.shape.values
    if len(left) != len(right) or any(
        m != n and m != 1 and n != 1 for m, n in zip(left, right, strict=True)
    ):
        return None
    return tl.block_type(a.scalar, [max(pair) for pair in zip(left, right, strict=True)])


_element_types: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # as above


def _of_element(type: Any, element: Any) -> Any:
    """A type with other elements."""
    if not type.is_block():
        return element
    known = _element_types.get((id(type), id(element)))
    if known is None:
        known = type, element, tl.block_type(element, type.shape)
        _element_types[id(type), id(element)] = known
    return known[2]


def _result(data: Any, handle_type: Any, type: Any) -> Any:
    handle, x = _new(Handle), _new(Tensor)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    x.handle, x.type = handle, type
    x.dtype, x.shape, x.numel = type.of_tensors or of_tensors(type)
    return x


def _moved(pointer: Any, offset: Any) -> Any:
    """pointer + offset; None where triton is to say."""
    if offset.__class__ is Tensor:
        if id(offset.dtype) not in _INTEGERS:
            return None
        type, elements = _broadcast_type(pointer.type, offset.type), offset.handle.data
    else:
        type, elements = pointer.type, _constant(offset, tl.int32)
    if type is None or elements is None:
        return None
    handle = pointer.handle
    size = max(1, handle.get_element_ty().primitive_bitwidth // 8)
    return _result(handle.data + size * elements.astype(np.uint64), handle.dtype, type)


def _operator(name: str, compute: Any, types: frozenset[int]) -> None:
    """Replace an operator of tensors where both operands are of one of the types, by id."""
    slow = getattr(Tensor, name).__wrapped__
    reflected = name.startswith("__r")
    compares = name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
    moves = name in ("__add__", "__radd__")

    def operate(self: Any, other: Any, _semantic: Any = _semantic) -> Any:
        dtype, given = self.dtype, other
        if other.__class__ is core.constexpr:
            other = other.value
        if id(dtype) in types:
            handle, type = self.handle, self.type
            handle_type = handle.dtype
            if other.__class__ is Tensor:
                right = other.handle.data
                if other.dtype is dtype:
                    type = _broadcast_type(type, other.type)
                elif id(dtype) in _INTEGERS and id(other.dtype) in _INTEGERS:
                    handle_type = tl.int64
                    type = _broadcast_type(_of_element(type, tl.int64), other.type)
                else:
                    type = None
            else:
                right = _constant(other, dtype)
            if type is not None and right is not None:
                left = handle.data
                if reflected:
                    left, right, handle_type = right, left, dtype
                data = compute(left, right)
                if compares:
                    type = _of_element(type, tl.int1)
                elif data.itemsize > 1 and data.itemsize * 8 > handle_type.primitive_bitwidth:
                    data = data.astype(numpy_type(handle_type))
                return _result(data, handle_type, type)
        elif moves and dtype.__class__ is core.pointer_type:
            moved = _moved(self, other)
            if moved is not None:
                return moved
        return slow(self, given, _semantic=_semantic)

    setattr(Tensor, name, operate)


def _quotient(a: Any, b: Any) -> Any:
    """Towards zero: InterpreterBuilder.create_idiv."""
    return (a - np.fmod(a, b)) // b


_indexed: dict[tuple[int, Any], tuple[Any, Any]] = {}  # (id of a block type, index) -> both types
_WHOLE = slice(None)


def _new_axes(slices: Any) -> tuple[int, ...] | None:
    """Where an index such as [:, None] has a new axis; None of other indices."""
    if len(slices) == 2:
        first, second = slices
        if second is None and first == _WHOLE:
            return (1,)
        if first is None and second == _WHOLE:
            return (0,)
    if all(one is None or one == _WHOLE for one in slices):
        return tuple([i for i, one in enumerate(slices) if one is None])
    return None


def getitem(self: Any, slices: Any, _semantic: Any = _semantic) -> Any:
    """tensor.__getitem__ of new axes, such as x[:, None]."""
    if slices.__class__ is tuple and self.type.is_block():
        news, rank = _new_axes(slices), len(self.shape.values)
        if news is not None and len(slices) - len(news) <= rank:
            known = _indexed.get((id(self.type), news))
            if known is None:
                shape = list(self.type.shape.values)
                for axis in news:
                    shape.insert(axis, 1)
                known = self.type, tl.block_type(self.type.scalar, shape)
                _indexed[id(self.type), news] = known
            return _result(self.handle.data[slices], self.handle.dtype.scalar, known[1])
    return _getitem(self, slices, _semantic=_semantic)


def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    """TritonSemantic.to_tensor, which every assignment of a kernel calls."""
    return x if x.__class__ is Tensor else _to_tensor(self, x, check_type)


def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
    """TritonSemantic.cast."""
    source, target = input.dtype, dst_ty.scalar
    if source is target:
        return input
    plain = fp_downcast_rounding is None and id(target) in _CASTS and id(source) in _CASTS | _BOOL
    if not plain or (id(source) in _HALVES and target is not tl.float32):
        return _cast(self, input, dst_ty, fp_downcast_rounding)
    handle = self.builder.cast_impl(input.handle, target)
    return Tensor(handle, _of_element(input.type, target))


BUILTINS: dict[Any, Any] = {}  # functions of triton.language -> what is called in their place


def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """_patch_attr, past the look at the argument that it adds."""
    fast = BUILTINS.get(member)
    if fast is not None:
        scope.set_attr(obj, name, fast)
        return
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


_signatures: dict[Any, tuple[list[str], set[str]]] = {}  # names and constexprs of a kernel


def _plain(x: Any) -> bool:
    """A value that a kernel takes as it is: no tensor elsewhere, no descriptor."""
    if x.__class__ is tuple:
        return all(map(_plain, x))
    if isinstance(x, torch.Tensor):
        return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return not hasattr(x, "data_ptr") and not isinstance(x, interpreter.TensorDescriptor)


def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
    """GridExecutor.__call__ of tensors that are on the host already."""
    known = _signatures.get(self.fn)
    if known is None:
        known = _signatures[self.fn] = inspect.getfullargspec(self.fn).args, set(self.constexprs)
    names, constexprs = known
    given = dict(zip(names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if name in names}
    if len(given) < len(names) or self.pre_run_hooks or not all(map(_plain, given.values())):
        return _run_grid(self, *args, **kwargs)
    scope = interpreter._patch_lang(self.fn)
    try:
        given = {
            name: given[name] if name in constexprs else interpreter._implicit_cvt(given[name])
            for name in names
        }
        grid = self.grid(given) if callable(self.grid) else self.grid
        grid = (*grid, *(1,) * (3 - len(grid)))
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            for index in itertools.product(*map(range, grid)):
                builder.set_grid_idx(*index)
                self.fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
    finally:
        scope.restore()


_getitem = Tensor.__getitem__.__wrapped__
_cast = TritonSemantic.cast
_to_tensor = TritonSemantic.to_tensor
_run_grid = interpreter.GridExecutor.__call__


def compute_at_once() -> None:
    """Install the replacements."""
    for name, compute in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _operator(f"__{name}__", compute, _NUMBERS)
        _operator(f"__r{name}__", compute, _NUMBERS)
    for name in ("__truediv__", "__rtruediv__"):
        _operator(name, np.divide, frozenset([id(tl.float32)]))
    _operator("__floordiv__", _quotient, _INTEGERS)
    _operator("__mod__", np.fmod, _INTEGERS)
    _operator("__and__", np.bitwise_and, _INTEGERS | _BOOL)
    _operator("__or__", np.bitwise_or, _INTEGERS | _BOOL)
    for name, compute in (("lt", np.less), ("gt", np.greater), ("eq", np.equal)):
        _operator(f"__{name}__", compute, _NUMBERS)
    for name, compute in (("le", np.less_equal), ("ge", np.greater_equal), ("ne", np.not_equal)):
        _operator(f"__{name}__", compute, _NUMBERS)
    Handle.__init__ = handle_init
    Tensor.__getitem__ = getitem
    TritonSemantic.to_tensor = to_tensor
    TritonSemantic.cast = cast
    interpreter.GridExecutor.__call__ = run_grid
    interpreter._patch_attr = patch_attribute
    tl.str_to_ty = functools.cache(tl.str_to_ty)  # one object of each pointer type
