"""Guard pages: known bits on both sides of every tensor, so that a stray access is seen.

Inside `guard_pages()` every tensor that the package or torch allocates lies in a larger buffer and
starts as NaN, and `place` moves the inputs of a call into such buffers. A store outside a tensor
changes a guard, which `check` compares byte for byte; a load outside one brings NaN (of integers,
a large number) into the result, and in the interpreter is seen even where nobody uses its value.
Masked elements are never accessed, on a GPU or in the interpreter.
"""

from __future__ import annotations

import itertools
from bisect import bisect, insort
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import fast_memory
import numpy as np
import torch
from private import NoDispatch, shares_memory, tree_leaves, tree_map_only
from torch import Tensor

from fastvit_kernels.runtime import compat, operator as operators

GUARD_BYTES = 64 * 1024  # wider than a tile, so that a tile that starts inside ends in the guard
ALIGNMENT = 16

# Every word is a NaN read as fp16, bf16, fp32 (twice the word) or fp64 (four times), and neighbours
# in time have different ones: a NaN that was read from one guard and stored in another is seen.
WORDS = [sign | low for low in range(0x7FF1, 0x8000) for sign in (0, 0x8000)]


@dataclass(frozen=True)
class _Buffer:
    raw: Tensor  # uint8: guard, tensor, guard
    word: int
    end: int  # of the tensor, in bytes from the start of raw
    description: str
    snapshot: Tensor | None  # of raw, where the tensor too must keep its bits


def _fill(raw: Tensor, word: int) -> None:
    raw.view(torch.int16).fill_(word - 0x10000 if word & 0x8000 else word)


def _extent(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to one past the last, of strides that are not negative."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


class GuardPages(compat.TorchDispatchMode):
    """The mode; use `guard_pages`, which also checks at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded = 0
        self._buffers: list[_Buffer] = []
        self._starts: list[tuple[int, int]] = []  # address of a buffer, its place; in order
        self._read: dict[str, None] = {}  # what was accessed beside a tensor
        self._words = itertools.cycle(WORDS)
        self._where = "torch"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "fastvit_kernels":
            # A mode is off inside its own handler, and the launcher's allocations are wanted too.
            former, self._where = self._where, func.name()
            try:
                with self:
                    return operators.LAUNCHERS[func.name().split("::")[1]](*args, **kwargs)
            finally:
                self._where = former
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            return out
        known = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and x.layout is torch.strided
        }
        fill = "empty" in func.name()

        def guard(x: Tensor) -> Tensor:
            if x.layout is not torch.strided or x.untyped_storage().data_ptr() in known:
                return x
            return self._house(x, f"{func.name()} in {self._where}", copy=not fill)

        return tree_map_only(Tensor, guard, out)

    def _house(self, x: Tensor, description: str, *, copy: bool, keep: bool = False) -> Tensor:
        """x by its own size and strides in a guarded buffer; what no element covers is NaN."""
        if x.numel() == 0:
            return x
        extent = _extent(x.shape, x.stride())
        end = GUARD_BYTES + extent * x.itemsize
        total = -(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        raw = torch.empty(total, dtype=torch.uint8, device=x.device)
        word = next(self._words)
        _fill(raw, word)
        flat = raw.view(x.dtype)
        offset = GUARD_BYTES // x.itemsize
        housed = flat.as_strided(x.shape, x.stride(), offset)
        if copy and shares_memory(x) == 0:
            housed.copy_(x)
        elif copy:  # copy_ refuses elements that share memory
            places = torch.arange(extent, device=x.device).as_strided(x.shape, x.stride())
            flat[offset : offset + extent][places.reshape(-1)] = x.reshape(-1)
        description = f"{x.dtype} {tuple(x.shape)}, {description}"
        snapshot = raw.clone() if keep else None
        insort(self._starts, (raw.data_ptr(), len(self._buffers)))
        self._buffers.append(_Buffer(raw, word, end, description, snapshot))
        self.guarded += 1
        return housed

    def place(self, x: Tensor, name: str = "input") -> Tensor:
        """x by its own size and strides in a guarded buffer whose every bit `check` compares."""
        with torch.no_grad(), NoDispatch():
            housed = self._house(x.detach(), name, copy=True, keep=True)
        return housed.detach().requires_grad_(x.requires_grad)

    def watching(self) -> Any:
        """Inside, each access of the interpreter is looked at."""
        return patch.object(fast_memory, "watchers", [self._watch])

    def _watch(self, pointers: np.ndarray, size: int) -> None:
        """Note a tile whose first or last element, of `size` bytes, lies in a guard."""
        if not pointers.size:
            return
        for address in (int(pointers.min()), int(pointers.max()) + size - 1):
            place = bisect(self._starts, (address, len(self._buffers))) - 1
            if place < 0:
                continue
            start, number = self._starts[place]
            buffer, at = self._buffers[number], address - start
            if at < buffer.raw.numel() and not GUARD_BYTES <= at < buffer.end:
                self._read[f"{buffer.description}: byte {at - GUARD_BYTES}"] = None

    def check(self) -> None:
        """Raise AssertionError where a guard, or any bit of a placed tensor, has changed, or the
        interpreter has looked at one."""
        with NoDispatch():
            faults = [fault for b in self._buffers for fault in _faults(b)]
        if faults:
            raise AssertionError("memory outside a tensor was written:\n  " + "\n  ".join(faults))
        if self._read:
            raise AssertionError("memory outside a tensor was read:\n  " + "\n  ".join(self._read))


def _faults(buffer: _Buffer) -> list[str]:
    raw, end = buffer.raw, buffer.end
    if buffer.snapshot is not None:
        expected = buffer.snapshot
    else:
        expected = torch.empty_like(raw)
        _fill(expected, buffer.word)
    parts = {"before": slice(0, GUARD_BYTES), "after": slice(end, None)}
    if buffer.snapshot is not None:
        parts["inside"] = slice(GUARD_BYTES, end)
    faults = []
    for where, part in parts.items():
        if torch.equal(raw[part], expected[part]):
            continue
        changed = (raw[part] != expected[part]).nonzero().flatten() + (part.start or 0)
        first, last = int(changed[0]) - GUARD_BYTES, int(changed[-1]) - GUARD_BYTES
        faults.append(f"{where} {buffer.description}: bytes {first} to {last}")
    return faults


def unwatched(is_direct: bool) -> Any:
    """Inside, calls go past torch's dispatcher, as a user's do, though a guard looks on."""
    return patch.object(compat, "num_modes", lambda: 0) if is_direct else nullcontext()


@contextmanager
def guard_pages() -> Iterator[GuardPages]:
    """Inside, new tensors lie between guards; at the end all guards are checked.

    Allocations are seen below autograd (backward included), whichever function of torch makes them
    and whether or not the launcher is called through its operator.
    """
    guard = GuardPages()
    with guard, guard.watching():
        yield guard
    guard.check()
