"""Global memory, which is the launch's tensors and nothing else, and a block's shared memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .faults import MachineError, Misaligned, OutOfBounds
from .program import SHARED_BASE, Op
from .races import Races
from .values import POISON_BYTES, Array

# What moves this many bytes at once. The 16 bytes are copied, never computed with.
UNITS = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


def _is_aligned(address: Array, mask: Array | None, width: int) -> bool:
    odd = (address & (width - 1)) != 0
    return not (odd if mask is None else odd & mask).any()


def _range(address: Array, mask: Array | None) -> tuple[int, int]:
    """The lowest and the highest address of those that run."""
    if mask is None:
        return int(address.min()), int(address.max())
    address, mask = np.broadcast_arrays(address, mask)
    chosen = address[mask]
    return int(chosen.min()), int(chosen.max())


class Region(NamedTuple):
    """Bytes that one or several tensors of the launch span."""

    start: int
    end: int
    units: dict[int, Array]  # by width, from the multiple of 16 at or below `start`
    holes: Array | None  # of each byte whether no tensor has it; None where there are none

    @property
    def base(self) -> int:
        return self.start & ~15


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to its last, with both."""
    if x.numel() == 0:
        return 0
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
        """Checks an access.

        Returns: pairs of a region and the mask of the threads that are in it; none runs: [].
        """
        if mask is not None and not mask.any():
            return []
        low, high = _range(address, mask)
        at = bisect_right(self.starts, low) - 1
        region = self.regions[at] if at >= 0 else None
        if not _is_aligned(address, mask, width):
            raise Misaligned(f"an address that is no multiple of {width}", op)
        if region is None or low >= region.end:
            raise OutOfBounds(self._describe(low), op)
        if high + width <= region.end:
            self._check_holes(region, address, width, mask, op)
            return [(region, mask)]
        found = []
        left = np.broadcast_to(True if mask is None else mask, address.shape)
        left = np.array(np.broadcast_to(left, np.broadcast_shapes(left.shape, address.shape)))
        for region in self.regions:
            inside = left & (address >= region.start) & (address + width <= region.end)
            if inside.any():
                self._check_holes(region, address, width, inside, op)
                found.append((region, inside))
                left &= ~inside
        if left.any():
            raise OutOfBounds(self._describe(_range(address, left)[0]), op)
        return found

    def _check_holes(self, region: Region, address: Array, width: int, mask, op: Op) -> None:
        if region.holes is None:
            return
        offset = (address - np.uint64(region.start)).astype(np.int64)
        if mask is not None:
            offset, mask = np.broadcast_arrays(offset, mask)
            offset = offset[mask]
        for i in {0, width - 1}:
            if region.holes[offset + i].any():
                raise OutOfBounds("between the elements of a tensor, where rows are padded", op)

    def _describe(self, address: int) -> str:
        near = min(
            self.regions,
            key=lambda r: min(abs(address - r.start), abs(address - r.end)),
            default=None,
        )
        if near is None:
            return f"address {address:#x}, and the launch has no tensor"
        return (
            f"address {address:#x} is in no tensor of the launch; the nearest one is "
            f"{near.end - near.start} bytes long, this is {address - near.start} from its start"
        )

    def load(self, address: Array, width: int, mask: Array | None, op: Op) -> Array | None:
        """Units of `width` bytes for each thread, where it runs; None where none does."""
        found = self.find(address, width, mask, op)
        result = None
        for region, inside in found:
            index = ((address - np.uint64(region.base)) >> _LOG[width]).astype(np.int64)
            if inside is not None:
                index = np.where(inside, index, index.min(where=inside, initial=2**62))
            part = region.units[width].take(index)
            result = part if result is None else np.where(inside, part, result)
        return result

    def store(self, address: Array, value: Array, mask: Array | None, op: Op) -> None:
        width = value.dtype.itemsize
        for region, inside in self.find(address, width, mask, op):
            index = ((address - np.uint64(region.base)) >> _LOG[width]).astype(np.int64)
            if inside is None:
                region.units[width][index] = value
            else:
                index, part, inside = np.broadcast_arrays(index, value, inside)
                region.units[width][index[inside]] = part[inside]


_LOG = {1: np.uint64(0), 2: np.uint64(1), 4: np.uint64(2), 8: np.uint64(3), 16: np.uint64(4)}


class SharedMemory:
    """Of the blocks of a chunk. Unwritten bytes are poison.

    Attributes:
        races: sees each access; None: nothing does.
    """

    def __init__(self, blocks: int, size: int, warps: int, grain: int):
        self.blocks, self.bytes = blocks, size
        self.padded = max(16, -(-size // 16) * 16)
        raw = np.empty((blocks, self.padded // 2, 2), np.uint8)
        raw[...] = POISON_BYTES
        raw = raw.reshape(blocks, -1)
        self.units = {w: raw.view(unit) for w, unit in UNITS.items()}
        self._first = np.arange(blocks)[:, None] * self.padded
        self.races = Races(blocks, self.padded, warps, grain) if warps > 1 else None

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
        """Units of `width` bytes for each thread; where it does not run, any.

        Args:
            warp: number of each thread's warp, for the race detector.
        """
        if mask is not None and not mask.any():
            return np.zeros((1, 1), UNITS[width])
        offset = self.offset(address, width, mask, op)
        if self.races is not None:
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
        if self.races is not None:
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


def check_size(shared_bytes: int, limit: int) -> None:
    if shared_bytes > limit:
        raise MachineError(f"{shared_bytes} bytes of shared memory, a block has {limit}")
