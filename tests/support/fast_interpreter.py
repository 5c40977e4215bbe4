"""Triton's interpreter without its repetitions, which are most of the time of a kernel's test.

triton names and checks a type anew at each operation, and computes at each sum of integers whether
it overflows, to no effect outside its debug mode. Nothing here changes a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

VERSIONS = ("3.6.", "3.8.")  # that all of it was compared with
_ready: set[int] = set()  # functions that the kernel that now runs may call as they are
FUNCTIONS: dict[Any, Any] = {}  # functions in triton's language -> what is called in their place


def patch_once_a_launch() -> None:
    """Let a device function that a kernel calls reuse the kernel's patches of triton.language.

    triton walks the whole module at each such call, and at each launch. Here a module's patches
    are found once.
    """
    original, unpatched = interpreter._patch_lang, tl.static_range
    patched: set[int] = set()  # modules, since the kernel that now runs began
    seen_by: dict[int, set[int]] = {}  # of those, what the globals of a function hold
    patches: dict[Any, list[Any]] = {}  # modules before, modules -> (object, name, patch)

    def patch_lang(fn):
        if tl.static_range is unpatched:
            patched.clear()
            _ready.clear()
        _ready.add(id(fn))
        modules = seen_by.get(id(fn.__globals__))
        if modules is None:
            modules = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
            seen_by[id(fn.__globals__)] = modules
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        key = frozenset(patched), frozenset(modules)
        patched.update(modules)
        known = patches.get(key)
        if known is None:
            scope = original(fn)
            patches[key] = [(x, name, getattr(x, name)) for x, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for x, name, patch in known:
            scope.set_attr(x, name, patch)
        return scope

    interpreter._patch_lang = patch_lang


def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """InterpretedFunction.__call__."""
    function = self.fn
    fast = FUNCTIONS.get(function)
    if fast is not None and (result := fast(*args, **kwargs)) is not NotImplemented:
        return result
    if id(function) not in _ready:
        interpreter._patch_lang(function)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


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
        _blocks[key] = known
    return known


def of_tensors(type: Any) -> Any:
    """Element type, shape and number of elements of a type's tensors, made once."""
    known = type.of_tensors
    if known is None:
        sizes = type.shape.values if type.is_block() else ()
        shape = core.tuple([core.constexpr(n) for n in sizes])
        numel = core.constexpr(int(np.prod(sizes, dtype=np.int64)))
        known = type.of_tensors = type.scalar, shape, numel
    return known


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    """tensor.__init__: its shape is that of its type."""
    self.handle, self.type = handle, type
    self.dtype, self.shape, self.numel = type.of_tensors or of_tensors(type)


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
    """Install the replacements; those that name types in the tritons of VERSIONS alone."""
    patch_once_a_launch()
    if not triton.__version__.startswith(VERSIONS):
        return
    core._unwrap_if_constexpr = unwrap
    core.block_type.__new__ = staticmethod(block_new)
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.dtype.of_tensors = None
    core.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = numpy_type
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    from fast_language import call_at_once
    from fast_memory import move_at_once
    from fast_operations import compute_at_once

    interpreter.InterpretedFunction.__call__ = call_function
    compute_at_once()
    call_at_once()
    move_at_once()
