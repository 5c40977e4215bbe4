"""Loads and stores of Triton's interpreter through numpy, which moves a tile at once.

triton's own loop takes a tenth of a microsecond an element. Masked elements are never accessed here
either. For triton 3.6 and 3.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from interpreter import poison
from triton import language as tl
from triton.runtime import interpreter

_START = 64  # numpy allocates where an array is to start at 0
_SHIFTS = {1 << k: np.uint64(k) for k in range(4)}
_builder = interpreter.InterpreterBuilder


class _Memory:
    """All of a process's memory from _START on, as an array that numpy has not looked at."""

    def __init__(self, dtype: np.dtype) -> None:
        self.__array_interface__ = {
            "data": (_START, False),
            "shape": (2**47 // dtype.itemsize,),
            "typestr": dtype.str,
            "version": 3,
        }


_memories: dict[np.dtype, np.ndarray] = {}
watchers: list[Callable[[np.ndarray, int], None]] = []  # of each access: addresses, bytes of one


def _memory(dtype: np.dtype) -> np.ndarray:
    known = _memories.get(dtype)
    if known is None:
        known = _memories[dtype] = np.asarray(_Memory(dtype))
    return known


def _places(pointers: np.ndarray, size: int) -> np.ndarray | None:
    """Elements of a memory; None where one of the addresses is not aligned."""
    for watch in watchers:
        watch(pointers, size)
    if size > 1 and np.bitwise_or.reduce(pointers, axis=None) & np.uint64(size - 1):
        return None
    return ((pointers - np.uint64(_START)) >> _SHIFTS[size]).view(np.int64)


def read(pointers: np.ndarray, mask: Any, other: Any, dtype: np.dtype) -> np.ndarray | None:
    """What is at the pointers, where the mask holds (None: everywhere); None for triton to read.

    `other` is an array that broadcasts to the rest, or None: nobody filled the rest.
    """
    shape = pointers.shape
    whole = mask is None or bool(mask.all())
    if mask is not None and mask.shape != shape:
        mask = np.broadcast_to(mask, shape)
    places = _places(pointers if whole else pointers[mask], dtype.itemsize)
    if places is None:
        return None
    found = _memory(dtype).take(places)
    if whole:
        return found
    result = np.empty(shape, dtype)
    result[...] = poison(dtype) if other is None else other
    result[mask] = found
    return result


def write(pointers: np.ndarray, values: np.ndarray, mask: Any) -> bool:
    """Store the values where the mask holds (None: everywhere); False leaves that to triton."""
    shape = pointers.shape
    if values.shape != shape:
        values = np.broadcast_to(values, shape)
    if mask is not None and not mask.all():
        if mask.shape != shape:
            mask = np.broadcast_to(mask, shape)
        pointers, values = pointers[mask], values[mask]
    places = _places(pointers, values.itemsize)
    if places is None:
        return False
    _memory(values.dtype)[places] = values
    return True


def create_load(self, ptr, cache, eviction, is_volatile) -> Any:
    dtype = ptr.get_element_ty()
    found = read(ptr.data, None, None, interpreter._get_np_dtype(dtype))
    if found is None:
        return _create_load(self, ptr, cache, eviction, is_volatile)
    return interpreter.TensorHandle(found, dtype)


def create_masked_load(
    self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile
) -> Any:
    dtype = ptrs.get_element_ty()
    kind = interpreter._get_np_dtype(dtype)
    if other is None or other.data.dtype == kind:
        found = read(ptrs.data, _array(mask), None if other is None else other.data, kind)
        if found is not None:
            return interpreter.TensorHandle(found, dtype)
    mask = np.broadcast_to(_array(mask), ptrs.data.shape).copy()
    if other is not None:
        other = _broadcast(other, ptrs)
    mask = interpreter.TensorHandle(mask, tl.int1)
    return _create_masked_load(
        self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile
    )


def create_store(self, ptr, value, cache, eviction) -> None:
    if not write(ptr.data, value.data, None):
        _create_store(self, ptr, _broadcast(value, ptr), cache, eviction)


def create_masked_store(self, ptrs, value, mask, cache, eviction) -> None:
    if not write(ptrs.data, value.data, _array(mask)):
        mask = interpreter.TensorHandle(
            np.broadcast_to(_array(mask), ptrs.data.shape).copy(), tl.int1
        )
        _create_masked_store(self, ptrs, _broadcast(value, ptrs), mask, cache, eviction)


def _broadcast(handle: Any, to: Any) -> Any:
    """What triton's own loops take: they refuse arrays that may not be written to."""
    data = np.broadcast_to(handle.data, to.data.shape).copy()
    return interpreter.TensorHandle(data, handle.dtype)


def _array(mask: Any) -> np.ndarray:
    """Of a handle; block pointers and descriptors have the array. triton takes integers too."""
    data = mask if isinstance(mask, np.ndarray) else mask.data
    return data if data.dtype == bool else data.astype(bool)


_create_load, _create_masked_load = _builder.create_load, _builder.create_masked_load
_create_store, _create_masked_store = _builder.create_store, _builder.create_masked_store


def move_at_once() -> None:
    """Install the replacements."""
    _builder.create_load, _builder.create_masked_load = create_load, create_masked_load
    _builder.create_store, _builder.create_masked_store = create_store, create_masked_store
