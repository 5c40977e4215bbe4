"""TMA: boxes of a tensor between global and shared memory, copied next to the warps.

PTX ISA, "cp.async.bulk.tensor", "tensormap.replace". One thread issues a copy. A tensor map of 128
bytes says where the tensor lies, how long its axes are and how large a box is; what a box has
outside of the tensor is zero. Axis 0 is the innermost; only the outer ones have strides, in bytes.
A load reports its bytes, those outside too, to an mbarrier; a store belongs to a bulk group of its
thread, as with cp.async, and shared memory must not change before `wait_group.read`; what it has
written is there after `wait_group`, or when the kernel has ended.

PTX leaves the bytes of a tensor map open; here they are `MAP`. The host makes one and passes it by
value, or a kernel builds one in shared memory, copies it to global memory (cp_fenceproxy) and says
that it will be read as a map (fence.proxy.tensormap); one without that fence is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from . import proxies
from .faults import Fault, MachineError, Misaligned, OutOfBounds, Race, Unfenced
from .mbarriers import Landing, each_offset, found
from .memory import UNITS
from .program import SHARED_BASE, Op
from .registry import Run, instruction
from .values import Array, poison

MAP = np.dtype(
    [
        ("global_address", "u8"),
        ("global_stride", "u8", 4),
        ("rank", "u4"),
        ("elemtype", "u4"),
        ("interleave_layout", "u4"),
        ("swizzle_mode", "u4"),
        ("fill_mode", "u4"),
        ("box_dim", "u4", 5),
        ("global_dim", "u4", 5),
        ("element_stride", "u4", 5),
        ("unused", "u4", 2),
    ]
)
# By elemtype: u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2)
F32 = 7
SPANS = (1, 2, 4, 8)  # units of 16 bytes, by swizzle_mode: none, 32, 64, 128 bytes
POISON_UNIT = poison(UNITS[16])[0, 0]
_BOX = re.compile(r"\[\s*(%?[\w$]+)\s*,\s*(\{[^}]*\})\s*\]")


def host_map(
    x: Tensor,
    box: Sequence[int],
    swizzle: int,
    elemtype: int,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """The bytes of a map of x, or of a tensor that begins where x does, outermost axis first."""
    m = np.zeros((), MAP)
    shape, strides = x.shape if shape is None else shape, strides or x.stride()
    m["global_address"], m["rank"], m["elemtype"] = x.data_ptr(), len(shape) - 1, elemtype
    m["swizzle_mode"] = swizzle
    for name, values in (
        ("box_dim", box),
        ("global_dim", shape),
        ("element_stride", [1] * len(shape)),
        ("global_stride", [n * x.element_size() for n in strides[:-1]]),
    ):
        m[name][: len(values)] = values[::-1]
    return m.reshape(1).view(np.uint8)


class WrongMap(Fault):
    """A tensor map that does not describe such a copy."""


@dataclass
class Box:
    """A box of a tensor, and where it lies in shared memory."""

    map: np.void
    offset: int  # in shared memory
    at: tuple[int, ...]  # in the tensor, innermost axis first
    op: Op

    def __post_init__(self):
        m, op = self.map, self.op
        self.rank = len(self.at)
        if int(m["rank"]) + 1 != self.rank:
            raise WrongMap(f"a map of {int(m['rank']) + 1} axes, {self.rank} coordinates", op)
        apart = (m["element_stride"][: self.rank] != 1).any()
        if m["interleave_layout"] or m["fill_mode"] or apart:
            raise NotImplementedError(f"{op.where}: interleaved, NaN outside, or element strides")
        self.width = ELEMENT_BYTES[int(m["elemtype"])]
        self.shape = tuple(int(n) for n in m["box_dim"][: self.rank])
        row, span = self.shape[0] * self.width, SPANS[int(m["swizzle_mode"])]
        if not all(0 < n <= 256 for n in self.shape) or row % 16:
            raise WrongMap(f"a box of {self.shape}", op)
        if span > 1 and row > 16 * span:
            raise WrongMap(f"rows of {row} bytes, swizzled by {16 * span}", op)
        if span > 1 and row < 16 * span:
            raise NotImplementedError(f"{op.where}: a box narrower than its swizzle")
        strides = m["global_stride"][: self.rank - 1]
        if int(m["global_address"]) % 16 or (strides % 16).any() or self.offset % 128:
            raise Misaligned("a tensor or box of TMA", op)
        self.bytes = int(np.prod(self.shape)) * self.width
        unit = (self.offset + SHARED_BASE) // 16 + np.arange(self.bytes // 16)
        self.units = (unit ^ ((unit >> 3) & (span - 1))) - SHARED_BASE // 16

    def addresses(self) -> tuple[Array, Array, int]:
        """Of what a box has of the tensor, in the largest pieces: addresses, which of them are
        inside, and their width; each of shape (1, pieces)."""
        width, length = self.width, self.shape[0]
        start, size = self.at[0], int(self.map["global_dim"][0])
        whole = start >= 0 and start + length <= size
        if whole and start * width % 16 == 0:
            start, length, size, width = start * width // 16, length * width // 16, 2**31, 16
        address, inside = np.full(1, int(self.map["global_address"])), np.ones(1, bool)
        for axis in range(self.rank):
            if axis > 0:
                start, length = self.at[axis], self.shape[axis]
                size = int(self.map["global_dim"][axis])
            step = width if axis == 0 else int(self.map["global_stride"][axis - 1])
            place = start + np.arange(length)
            address = (place * step)[:, None] + address
            inside = ((place >= 0) & (place < size))[:, None] & inside
            address, inside = address.reshape(-1), inside.reshape(-1)
        return address[None].view(np.uint64), inside[None], width


def _map_at(group, address: int, op: Op) -> np.void:
    units = np.uint64(address) + 16 * np.arange(8, dtype=np.uint64)[None]
    raw = group.memory.load(units, 16, None, op)
    return np.ascontiguousarray(raw).view(MAP)[0, 0]


def _cells(races, box: Box) -> slice:
    return slice(box.offset // races.grain, (box.offset + box.bytes) // races.grain)


def _boxes(group, op: Op, map_and_place: Callable, target):
    """Of each thread that issues a copy: its block, number, warp, and the box."""
    threads = group.running(op)
    addresses, coordinates = map_and_place(group.registers)
    addresses, target = group.full(addresses), group.full(target(group.registers))
    coordinates = [group.full(x) for x in coordinates]
    for block, thread in zip(*np.nonzero(threads), strict=True):
        address = int(addresses[block, thread])
        warp = int(group.warp_of_thread[thread])
        _check_map(group, address, block, warp, op)
        at = tuple(int(x[block, thread]) for x in coordinates)
        offset = int(target[block, thread]) - SHARED_BASE
        box = Box(_map_at(group, address, op), offset, at, op)
        if offset < 0 or offset + box.bytes > group.shared.bytes:
            raise OutOfBounds(f"byte {offset} of {group.shared.bytes} of shared memory", op)
        yield int(block), int(thread), warp, box


def _map_and_place(op: Op, place: int) -> Callable:
    match = _BOX.fullmatch(op.operands[place])
    if match is None:
        raise MachineError(f"what box is {op.operands[place]!r}?", op)
    address = op.reader(match[1], "b64")
    coordinates = [op.reader(x.strip(), "s32") for x in match[2][1:-1].split(",")]
    return lambda r: (address(r), [read(r) for read in coordinates])


@instruction(
    "cp.async.bulk.tensor.{1d,2d,3d,4d,5d}.{shared::cluster,shared::cta}.global[.tile]"
    ".mbarrier::complete_tx::bytes"
)
def load_box(op: Op) -> Run:
    """[to], [map, {coordinates}], [mbarrier]."""
    target, box_of, barrier_at = op.address(0), _map_and_place(op, 1), op.address(2)
    op.width = 16

    def run(group):
        chunk, races = group.chunk, group.chunk.races
        chunk.at_end.add(check_at_end)
        barriers = {
            int(block): found(group, op, offset, threads)
            for offset, threads in each_offset(group, op, barrier_at)
            for block in np.flatnonzero(threads.any(1))
        }
        for block, _, warp, box in _boxes(group, op, box_of, target):
            rows = np.flatnonzero(races.rows == block)
            for row in rows:
                proxies.check_write(races, row, _cells(races, box), warp, op)
                proxies.begin_write(races, row, _cells(races, box), op)
            group.shared.units[16][block, box.units] = POISON_UNIT
            landing = Landing(op, box.bytes, _landing(group, box, block, rows))
            barriers[block].copies[block].append(landing)

    return run


def _landing(group, box: Box, block: int, rows) -> Callable[[], int]:
    def land() -> int:
        address, inside, width = box.addresses()
        data = group.memory.load(address, width, inside, box.op)
        if data is None:
            data = np.zeros(address.shape, UNITS[width])
        data = np.where(inside, data, UNITS[width].type(0))
        group.shared.units[16][block, box.units] = np.ascontiguousarray(data).view(UNITS[16])[0]
        epoch = group.chunk.extra["tma"] = group.chunk.extra.get("tma", 0) + 1
        for row in rows:
            proxies.end_write(group.chunk.races, row, _cells(group.chunk.races, box), epoch)
        return epoch

    return land


# Stores, and sums


@dataclass(eq=False)
class Store:
    """A box on its way to global memory, or one that is added to what is there."""

    group: Any
    box: Box
    block: int
    warp: int
    adds: bool

    def __post_init__(self):
        self._watch(proxies.check_read, proxies.begin_read)
        self.data: Array | None = None

    def _watch(self, *actions) -> None:
        races, warps, op = self.group.chunk.races, np.array([self.warp]), self.box.op
        for row in np.flatnonzero(races.rows == self.block):
            for action in actions:
                action(races, row, _cells(races, self.box), warps, op)

    def read(self) -> None:
        """From here on shared memory may change."""
        if self.data is not None:
            return
        self.data = self.group.shared.units[16][self.block, self.box.units].copy()
        self._watch(proxies.end_read)

    def write(self) -> None:
        self.read()
        assert self.data is not None
        address, inside, width = self.box.addresses()
        data, memory = self.data.view(UNITS[width])[None], self.group.memory
        if self.adds:
            old = memory.load(address, width, inside, self.box.op)
            if old is None:
                return
            total = data.view(np.float32) + np.ascontiguousarray(old).view(np.float32)
            data = total.view(UNITS[width]).reshape(data.shape)
        memory.store(address, data, inside, self.box.op)

    def meets(self, other: Store) -> bool:
        """Whether they write the same bytes."""
        pieces = [
            a[inside] // np.uint64(16)
            for a, inside, _ in (x.box.addresses() for x in (self, other))
        ]
        return bool(np.isin(*pieces).any())


@dataclass
class Bulk:
    """The stores of a thread: a group leaves when all of it is written."""

    open: list[Store] = field(default_factory=list)
    committed: list[list[Store]] = field(default_factory=list)

    def unwritten(self) -> list[Store]:
        return [store for stores in (*self.committed, self.open) for store in stores]


def _bulks(group, op: Op):
    threads = group.running(op)
    for (block, warp, lane), bulk in group.chunk.extra.get("bulk", {}).items():
        place = np.flatnonzero(group.warps == warp)
        if len(place) and threads[block, 32 * place[0] + lane]:
            yield bulk


@instruction(
    "cp.async.bulk.tensor.{1d,2d,3d,4d,5d}.global.shared::cta[.tile].bulk_group",
    "cp.reduce.async.bulk.tensor.{1d,2d,3d,4d,5d}.global.shared::cta.add[.tile].bulk_group",
)
def store_box(op: Op) -> Run:
    """[map, {coordinates}], [from]; of reduce fp32 is added, in whatever order it arrives: two sums
    of the same bytes, or a sum and a store, need a wait between them that is no `.read`."""
    box_of, source, op.width = _map_and_place(op, 0), op.address(1), 16
    adds = op.name.startswith("cp.reduce")

    def run(group):
        chunk = group.chunk
        chunk.at_end.add(check_at_end)
        bulks = chunk.extra.setdefault("bulk", {})
        for block, thread, warp, box in _boxes(group, op, box_of, source):
            if adds and int(box.map["elemtype"]) != F32:
                raise NotImplementedError(f"{op.where}: sums of anything but fp32")
            store = Store(group, box, block, warp, adds)
            for other in (x for bulk in bulks.values() for x in bulk.unwritten()):
                if (adds or other.adds) and store.meets(other):
                    raise Race(f"it and {other.box.op.where} in any order", op)
            bulks.setdefault((block, warp, thread % 32), Bulk()).open.append(store)

    return run


@instruction("cp.async.bulk.commit_group")
def commit_bulk(op: Op) -> Run:
    def run(group):
        for bulk in _bulks(group, op):
            bulk.committed.append(bulk.open)
            bulk.open = []

    return run


@instruction("cp.async.bulk.wait_group[.read]")
def wait_bulk(op: Op) -> Run:
    most, reads = int(op.operands[0], 0), op.name.endswith(".read")

    def run(group):
        for bulk in _bulks(group, op):
            done = max(len(bulk.committed) - most, 0)
            for store in (x for stores in bulk.committed[:done] for x in stores):
                store.read() if reads else store.write()
            if not reads:
                bulk.committed = bulk.committed[done:]

    return run


def check_at_end(chunk) -> None:
    """A block may not end while TMA still works on its shared memory."""
    left = [x for bulk in chunk.extra.get("bulk", {}).values() for x in bulk.unwritten()]
    if any(store.data is None for store in left):
        raise Race(f"{chunk.program.name} ends with stores of TMA in flight")
    for store in left:
        store.write()
    for barrier in chunk.extra.get("mbarriers", {}).values():
        for copies in barrier.copies:
            if copies:
                raise Race("the block ends with this copy in flight", copies[0].op)


# Tensor maps


FIELDS = dict(MAP.fields or {})


@instruction(
    *(
        f"tensormap.replace.tile.{name}.shared::cta.b1024.b{8 * kind.base.itemsize}"
        for name, (kind, *_) in FIELDS.items()
        if name != "unused"
    )
)
def replace_field(op: Op) -> Run:
    """[map], value; or of a field with axes [map], axis, value."""
    field = FIELDS[op.parts[3]]
    kind, start = field[0].base, field[1]
    axis = int(op.operands[1], 0) if field[0].shape else 0
    if field[0].shape and not axis < field[0].shape[0]:
        raise MachineError(f"axis {axis}", op)
    read, value = op.address(0, "b64"), op.read(len(op.operands) - 1)
    start, op.width = np.uint64(start + axis * kind.itemsize), kind.itemsize

    def run(group):
        r = group.registers
        address, number = read(r) + start, value(r).view(kind)
        group.shared.store(address, number, group.active(op), op, group.warp_of_thread)

    return run


@instruction(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
)
def publish_map(op: Op) -> Run:
    """[to in global memory], [from in shared memory], 128, by a warp."""
    to, source, op.width = op.address(0, "b64"), op.address(1, "b64"), 16
    if int(op.operands[2], 0) != 128:
        raise MachineError("a tensor map has 128 bytes", op)

    def run(group):
        group.whole_warps(op)
        r, lanes = group.registers, 16 * np.arange(8, dtype=np.uint64)
        runs = group.by_warp(group.running(op))[..., :8]
        runs = runs.reshape(runs.shape[0], -1)
        if not runs.any():
            return
        warps = np.repeat(group.warps, 8)
        parts = [group.by_warp(read(r))[..., :8] + lanes for read in (to, source)]
        targets, sources = (x.reshape(x.shape[0], -1) for x in parts)
        units = group.shared.load(sources, 16, runs, op, warps)
        targets, units, runs = np.broadcast_arrays(targets, units, runs)
        group.memory.store(targets, units, runs, op)
        for address in targets[:, ::8][runs[:, ::8]]:
            group.chunk.extra.setdefault("maps", {})[int(address)] = None

    return run


@instruction("fence.proxy.tensormap::generic.acquire.gpu")
def acquire_map(op: Op) -> Run:
    """[map], 128: from here on, and for who learns of this, it is what was published."""
    read = op.address(0, "b64")

    def run(group):
        threads, races = group.running(op), group.chunk.races
        address, maps = group.full(read(group.registers)), group.chunk.extra.setdefault("maps", {})
        for block in np.flatnonzero(threads.any(1)):
            thread = int(np.flatnonzero(threads[block])[0])
            warp, epoch = int(group.warp_of_thread[thread]), 0
            for row in np.flatnonzero(races.rows == block):
                epoch = int(races.clock[row, warp, warp])
                races.clock[row, warp, warp] += 1
            maps[int(address[block, thread])] = warp, epoch

    return run


def _check_map(group, address: int, block: int, warp: int, op: Op) -> None:
    maps, races = group.chunk.extra.get("maps", {}), group.chunk.races
    if address not in maps:
        return  # made by the host
    if maps[address] is None:
        raise Unfenced("a tensor map without fence.proxy.tensormap", op)
    maker, epoch = maps[address]
    for row in np.flatnonzero(races.rows == block):
        if races.clock[row, warp, maker] < epoch:
            raise Race(f"no barrier since warp {maker}'s fence.proxy.tensormap", op)
