"""Global memory, which is the launch's tensors and nothing else, and a block's shared memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .faults import Misaligned, OutOfBounds
from .program import SHARED_BASE, Op
from .races import Races
from .values import POISON_BYTES, Array

# What moves this many bytes at once. The 16 bytes are copied, never computed with.
UNITS = {np.dtype(kind).itemsize: np.dtype(kind) for kind in ("u1", "u2", "u4", "u8", "c16")}


def _of_those_that_run(address: Array, mask: Array | None) -> Array:
    if mask is None:
        return address
    address, mask = np.broadcast_arrays(address, mask)
    return address[mask]


class Region(NamedTuple):
    """Bytes that one or several tensors of the launch span."""

    start: int
    end: int
    units: dict[int, Array]  # by width, from the multiple of 16 at or below `start`
    holes: Array | None  # of each byte whether no tensor has it; None where there are none

    def index(self, address: Array, width: int) -> Array:
        """Of the units of `width` bytes at these addresses."""
        return ((address - np.uint64(self.start & ~15)) // np.uint64(width)).astype(np.int64)


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to its last, with both."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class GlobalMemory:
    """The tensors of a launch: every access must lie inside of an element of one of them."""

    def __init__(self, tensors: Sequence[Tensor]):
        spans = sorted((x.data_ptr(), x.data_ptr() + extent(x)) for x in tensors if x.numel())
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.regions = [self._region(start, end, tensors) for start, end in merged]
        self.starts = [region.start for region in self.regions]

    @staticmethod
    def _region(start: int, end: int, tensors: Sequence[Tensor]) -> Region:
        base = start & ~15
        size = (-(-end // 16) * 16) - base
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
        inside = torch.zeros(end - start, dtype=torch.bool)
        for x in tensors:
            if x.numel() and start <= x.data_ptr() < end:
                width = x.element_size()
                strides = [s * width for s in x.stride()]
                inside.as_strided((*x.shape, width), (*strides, 1), x.data_ptr() - start).fill_(1)
        holes = None if bool(inside.all()) else ~inside.numpy()
        return Region(start, end, {w: raw.view(unit) for w, unit in UNITS.items()}, holes)

    def add(self, parameters: Array) -> None:
        """Parameters have addresses too, which `cvta.param` gives."""
        start, given = parameters.ctypes.data, torch.from_numpy(parameters)
        place = bisect_right(self.starts, start)
        self.starts.insert(place, start)
        self.regions.insert(place, self._region(start, start + len(parameters), [given]))

    def find(self, address: Array, width: int, mask: Array | None, op: Op) -> list[tuple]:
        """Checks an access; each region that it is in, and the mask of the threads there."""
        if mask is not None and not mask.any():
            return []
        asked = _of_those_that_run(address, mask)
        low, high = int(asked.min()), int(asked.max())
        at = bisect_right(self.starts, low) - 1
        region = self.regions[at] if at >= 0 else None
        if (asked & (width - 1)).any():
            raise Misaligned(f"an address that is no multiple of {width}", op)
        if region is None or low >= region.end:
            raise OutOfBounds(self._describe(low), op)
        if high + width <= region.end:
            self._check_holes(region, address, width, mask, op)
            return [(region, mask)]
        found = []
        left = np.array(np.broadcast_to(True if mask is None else mask, address.shape))
        for region in self.regions:
            inside = left & (address >= region.start) & (address + width <= region.end)
            if inside.any():
                self._check_holes(region, address, width, inside, op)
                found.append((region, inside))
                left &= ~inside
        if left.any():
            raise OutOfBounds(self._describe(int(address[left].min())), op)
        return found

    def _check_holes(self, region: Region, address: Array, width: int, mask, op: Op) -> None:
        if region.holes is None:
            return
        asked = _of_those_that_run(address, mask)
        offset = (asked - np.uint64(region.start)).astype(np.int64)
        for i in {0, width - 1}:
            if region.holes[offset + i].any():
                raise OutOfBounds("between the elements of a tensor, where rows are padded", op)

    def _describe(self, address: int) -> str:
        near = min(self.regions, key=lambda r: min(abs(address - r.start), abs(address - r.end)))
        return (
            f"address {address:#x} is in no tensor of the launch; the nearest one is "
            f"{near.end - near.start} bytes long, this is {address - near.start} from its start"
        )

    def load(self, address: Array, width: int, mask: Array | None, op: Op) -> Array | None:
        """Units of `width` bytes for each thread, where it runs; None where none does."""
        found = self.find(address, width, mask, op)
        result = None
        for region, inside in found:
            index = region.index(address, width)
            if inside is not None:
                index = np.where(inside, index, index.min(where=inside, initial=2**62))
            part = region.units[width].take(index)
            result = part if result is None else np.where(inside, part, result)
        return result

    def store(self, address: Array, value: Array, mask: Array | None, op: Op) -> None:
        width = value.dtype.itemsize
        for region, inside in self.find(address, width, mask, op):
            index = region.index(address, width)
            if inside is None:
                region.units[width][index] = value
            else:
                index, part, inside = np.broadcast_arrays(index, value, inside)
                region.units[width][index[inside]] = part[inside]


class SharedMemory:
    """Of the blocks of a chunk. Unwritten bytes are poison; `races` sees each access."""

    def __init__(self, blocks: int, size: int, warps: int, grain: int):
        self.blocks, self.bytes = blocks, size
        self.padded = max(16, -(-size // 16) * 16)
        raw = np.tile(np.array(POISON_BYTES, np.uint8), (blocks, self.padded // 2))
        self.units = {w: raw.view(unit) for w, unit in UNITS.items()}
        self._first = np.arange(blocks)[:, None] * self.padded
        self.races = Races(blocks, self.padded, warps, grain)

    def offset(self, address: Array, width: int, mask: Array | None, op: Op) -> Array:
        """From the start of shared memory, checked; where no thread runs it is 0."""
        offset = address.astype(np.int64) - SHARED_BASE
        if mask is not None:
            offset = np.where(mask, offset, 0)
        low, high = int(offset.min()), int(offset.max())
        if low < 0 or high + width > self.bytes:
            wrong = low if low < 0 else high
            raise OutOfBounds(f"byte {wrong} of {self.bytes} of shared memory", op)
        if width > 1 and (offset & (width - 1)).any():
            raise Misaligned(f"an address in shared memory that is no multiple of {width}", op)
        return offset

    def load(self, address: Array, width: int, mask: Array | None, op: Op, warp: Array) -> Array:
        """Units of `width` bytes for each thread; where it does not run, any."""
        if mask is not None and not mask.any():
            return np.zeros((1, 1), UNITS[width])
        offset = self.offset(address, width, mask, op)
        self.races.loaded(offset, width, mask, warp, op)
        return self.peek(offset, width)

    def peek(self, offset: Array, width: int) -> Array:
        units = self.units[width]
        if offset.shape[0] == 1:
            return units.take(offset[0] // width, axis=1)
        return units.reshape(-1).take((offset + self._first) // width)

    def store(self, address: Array, value: Array, mask: Array | None, op: Op, warp: Array) -> None:
        width = value.dtype.itemsize
        if mask is not None and not mask.any():
            return
        offset = self.offset(address, width, mask, op)
        self.races.stored(offset, width, mask, warp, op)
        self.poke(offset, value, mask)

    def poke(self, offset: Array, value: Array, mask: Array | None) -> None:
        units = self.units[value.dtype.itemsize]
        if offset.shape[0] == 1 and (mask is None or mask.shape[0] == 1):
            index = offset[0] // value.dtype.itemsize
            index = np.broadcast_to(index, max(len(index), value.shape[1]))
            if mask is not None:
                chosen = np.broadcast_to(mask[0], index.shape)
                index = index[chosen]
                value = np.broadcast_to(value, (value.shape[0], len(chosen)))[:, chosen]
            units[:, index] = value
            return
        index = (offset + self._first) // value.dtype.itemsize
        index = np.broadcast_to(index, (self.blocks, index.shape[1]))
        if mask is not None:
            index, value, mask = np.broadcast_arrays(index, value, mask)
            index, value = index[mask], value[mask]
        units.reshape(-1)[index] = value
