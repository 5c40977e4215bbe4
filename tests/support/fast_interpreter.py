"""Triton's interpreter without its repetitions, which are most of the time of a kernel's test.

triton 3.6.0 names and checks a type anew at each operation, and computes at each sum of integers
whether it overflows, to no effect outside its debug mode. Nothing here changes a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Let a device function that a kernel calls reuse the kernel's patches of triton.language.

    triton walks the whole module at each such call.
    """
    original, unpatched = interpreter._patch_lang, tl.static_range
    patched: set[int] = set()  # modules, since the kernel that now runs began
    seen_by: dict[int, set[int]] = {}  # of those, what the globals of a function hold

    def patch_lang(fn):
        if tl.static_range is unpatched:
            patched.clear()
        modules = seen_by.get(id(fn.__globals__))
        if modules is None:
            modules = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
            seen_by[id(fn.__globals__)] = modules
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return original(fn)

    interpreter._patch_lang = patch_lang


def unwrap(value: Any) -> Any:
    """core._unwrap_if_constexpr, the common cases first."""
    kind = value.__class__
    if kind is core.constexpr:
        return value.value
    if kind is int or kind is core.tensor or kind is core.dtype:
        return value
    if kind is list:
        return [unwrap(x) for x in value]
    if kind is tuple:
        return tuple(unwrap(x) for x in value)
    if kind is core.tuple:
        return core.tuple(unwrap(x) for x in value.values)
    return _unwrap(value)


_unwrap = core._unwrap_if_constexpr
_block_init = core.block_type.__init__
_blocks: dict[Any, Any] = {}  # element type and shape -> the one block type of them


def block_new(cls: Any, element_ty: Any, shape: Any) -> Any:
    """One block type for each element type and shape, named and checked once."""
    assert isinstance(shape, (list, core.tuple))
    sizes = tuple([x.value if x.__class__ is core.constexpr else x for x in shape])
    space = getattr(element_ty, "address_space", 0)
    key = element_ty.__class__, element_ty.name, space, sizes, *map(type, sizes)
    known = _blocks.get(key)
    if known is None:
        known = object.__new__(cls)
        _block_init(known, element_ty, shape)
        known.of_tensors = _shape_and_numel(known.shape.values)
        _blocks[key] = known
    return known


def _shape_and_numel(sizes: Any) -> tuple[Any, Any]:
    shape = core.tuple([core.constexpr(n) for n in sizes])
    return shape, core.constexpr(int(np.prod(sizes, dtype=np.int64)))


_SCALAR = _shape_and_numel(())


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    """tensor.__init__: its shape is that of its type, made once."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _SCALAR


def tuple_init(self: Any, args: Any, type: Any = None) -> None:
    """tuple.__init__; its type is made when it is asked for."""
    self.values = list(args)
    if isinstance(type, core.tuple_type):
        self._type = type
    else:
        self._type = None if type is None else core.tuple_type(type)


def _tuple_type(self: Any) -> Any:
    if self._type is None:
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _set_tuple_type(self: Any, type: Any) -> None:
    self._type = type


def tuple_eq(self: Any, other: Any) -> Any:
    """tuple.__eq__ without a tuple in between."""
    other = unwrap(other)
    return core.constexpr(self.values == list(other))


def dtype_eq(self: Any, other: Any) -> bool:
    """dtype.__eq__; there is one object of most."""
    return self is other or _dtype_eq(self, other)


def block_eq(self: Any, other: Any) -> bool:
    """block_type.__eq__; there is one object of each."""
    return self is other or _block_eq(self, other)


_dtype_eq, _block_eq = core.dtype.__eq__, core.block_type.__eq__
_get_np_dtype = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype] = {}


def numpy_type(type: Any) -> np.dtype:
    """interpreter._get_np_dtype, which makes its table at each call."""
    if type.is_block():
        type = type.element_ty
    known = _numpy_types.get(type.name)
    if known is None:
        known = _numpy_types[type.name] = _get_np_dtype(type)
    return known


def check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """What asserts in debug mode is computed there alone."""
    if self.builder.options.debug:
        _check_overflow(self, lhs, rhs, binary_op)


_check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl


def make_fast() -> None:
    """Install the replacements; those that name types in the triton they were written for alone."""
    patch_once_a_launch()
    if not triton.__version__.startswith("3.6."):
        return
    core._unwrap_if_constexpr = unwrap
    core.block_type.__new__ = staticmethod(block_new)
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.block_type.__eq__ = block_eq
    core.tensor.__init__ = tensor_init
    core.tuple.__init__ = tuple_init
    core.tuple.type = property(_tuple_type, _set_tuple_type)
    core.tuple.__eq__ = tuple_eq
    core.dtype.__eq__ = dtype_eq
    interpreter._get_np_dtype = numpy_type
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    from fast_operations import compute_at_once

    compute_at_once()
