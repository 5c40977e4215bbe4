"""wgmma: a warp group's product, D += A B, of 64 rows, computed next to its warps.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Four warps issue it together:

    wgmma.fence         what they wrote to registers is there for the wgmma that follow
    wgmma.mma_async     one product of 16 (tf32: 8) columns of A; D stays in flight
    wgmma.commit_group  those since the last one are a group
    wgmma.wait_group n  until all groups but the newest n are done

In flight, D's registers hold a NaN of their own, a tag: who reads them computes NaN, who writes
them is found out when they land. A `mov` of such a register is a second name for it, which lands
with it: LLVM places some before the wait, and ptxas makes no move of them. The operands in shared
memory are read at the wait; the hardware may read them at any time before, and who writes them
meanwhile is found out.

B always, and A unless it is in registers, are tiles in shared memory that a descriptor of 64 bits
names. In units of 16 bytes, with span = 8, 4, 2 for a swizzle of 128, 64, 32 bytes; none is used:

    bits 0-13   address               K-major   row r, half c of the 32 bytes of K, c = 0, 1:
    bits 16-29  leading offset LBO              (r % 8) span + (r // 8) SBO + c
    bits 32-45  stride offset SBO     MN-major  eight rows j, column k of K:
    bits 62-63  swizzle                         j % span + (j // span) LBO + (k % 8) span
                                                + (k // 8) SBO

The swizzle exchanges units by the bits of the final address: unit ^= (unit >> 3) & (span - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from . import proxies
from .execution import Issued
from .faults import Diverged, InFlight, MachineError, OutOfBounds
from .mma import unpacked
from .program import SHARED_BASE, Op
from .registry import Run, instruction
from .values import F32, U32, Array

SPANS = {1: 8, 2: 4, 3: 2}  # units of 16 bytes in a row of the swizzle, by bits 62-63


@lru_cache(16384)
def tile_units(descriptor: int, rows: int, mn_major: bool) -> Array:
    """Where a tile's units of 16 bytes lie, from the start of shared memory.

    Returns: (rows, 2), or where it is MN-major (16, rows // 8).
    """
    if descriptor >> 49 & 7 or not descriptor >> 62:
        raise NotImplementedError("a base offset in a descriptor of shared memory, or no swizzle")
    address, span = descriptor & 0x3FFF, SPANS[descriptor >> 62]
    leading, stride = descriptor >> 16 & 0x3FFF, descriptor >> 32 & 0x3FFF
    if mn_major:
        k, j = np.arange(16)[:, None], np.arange(rows // 8)
        unit = j % span + j // span * leading + k % 8 * span + k // 8 * stride
    else:
        r, c = np.arange(rows)[:, None], np.arange(2)
        unit = r % 8 * span + r // 8 * stride + c
    unit = address + unit
    unit ^= (unit >> 3) & (span - 1)
    return unit - SHARED_BASE // 16


@lru_cache(16384)
def tile_cells(descriptor: int, rows: int, mn_major: bool, grain: int) -> Array:
    """The race detector's cells of a tile, in order."""
    each = 16 // grain
    units = np.unique(tile_units(descriptor, rows, mn_major))
    return (units[:, None] * each + np.arange(each)).reshape(-1)


@dataclass
class Tile:
    """An operand in shared memory."""

    descriptors: Array  # (blocks or 1, warp groups)
    rows: int
    mn_major: bool

    def of(self, block: int, group: int) -> int:
        return int(self.descriptors[block if self.descriptors.shape[0] > 1 else 0, group])


@dataclass(eq=False)  # its arrays are not compared
class Product:
    """One wgmma in flight."""

    op: Op
    type: str
    accumulator: Accumulator
    a: Tile | list[Array]  # or its registers
    b: Tile
    keeps: Array  # of each block whether D is added to
    blocks: Array  # that issued it
    todo: Array  # of those whose product is not computed yet


@dataclass
class Accumulator:
    """D of wgmma in flight, as matrices of 64 rows."""

    slots: tuple[int, ...]
    tags: list[Array]  # what its registers hold meanwhile
    value: Array  # (blocks, warp groups, 64, N)
    left: Array  # of each block, how many wgmma
    line: int  # of the first one
    products: list[Product] = field(default_factory=list)


class Flight:
    """The wgmma in flight of a group of warps."""

    def __init__(self):
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}
        self.names: dict[int, list[tuple[Accumulator, int]]] = {}  # of copies, by slot
        self.products = Issued()
        self.serial = 0

    def tag(self) -> Array:
        self.serial = (self.serial + 1) & 0x3FFFFF
        return np.full((1, 1), 0x7FC00000 | self.serial, U32)

    def copied(self, slot: int, source: int) -> None:
        """A mov of a register in flight."""
        found = [
            (accumulator, accumulator.slots.index(source))
            for accumulator in self.accumulators.values()
            if source in accumulator.slots
        ] + self.names.get(source, [])
        if found:
            names = self.names.setdefault(slot, [])
            names += [pair for pair in found if pair not in names]


def flight(group) -> Flight:
    return group.extra.setdefault("wgmma", Flight())


# D, in registers and as matrices


def to_matrix(registers: list[Array], shape: tuple[int, int]) -> Array:
    """Register 4j + 2h + i is row 16 warp + g + 8h, column 8j + 2t + i: (blocks, groups, 64, N)."""
    full = np.stack([np.broadcast_to(x, shape) for x in registers]).view(F32)
    count, blocks = len(registers), shape[0]
    parts = full.reshape(count // 4, 2, 2, blocks, -1, 4, 8, 4)  # j h i, block, group, warp, g, t
    return parts.transpose(3, 4, 5, 1, 6, 0, 7, 2).reshape(blocks, -1, 64, 2 * count)


def to_registers(matrix: Array) -> Array:
    """(registers, blocks, threads)."""
    blocks, groups, _, columns = matrix.shape
    parts = matrix.reshape(blocks, groups, 4, 2, 8, columns // 8, 4, 2)
    parts = parts.transpose(5, 3, 7, 0, 1, 2, 4, 6)
    return np.ascontiguousarray(parts).view(U32).reshape(columns // 2, blocks, -1)


# Operands


def _numbers(units: Array, type: str) -> Array:
    """Units of 16 bytes as f32, (..., eight or four)."""
    units = np.ascontiguousarray(units)
    return unpacked(units[..., None].view(U32), type).reshape(*units.shape, -1)


def _from_shared(group, tiles: list[Tile], type: str, chosen: Array, like: int) -> Array:
    """Tiles side by side along K: (blocks, groups, K, rows), of the blocks `chosen`."""
    memory, first = group.shared.units[16], tiles[0]
    groups = range(first.descriptors.shape[1])
    index = np.stack(
        [
            np.stack([tile_units(tile.of(like, g), tile.rows, tile.mn_major) for tile in tiles])
            for g in groups
        ]
    )
    if index.min() < 0 or (index.max() + 1) * 16 > group.shared.bytes:
        raise OutOfBounds("a tile of wgmma outside of shared memory")
    units = memory[chosen[:, None], index.reshape(1, -1)].reshape(len(chosen), *index.shape)
    numbers = _numbers(units, type)  # blocks, groups, tiles, then 16, rows / 8, 8 or rows, 2, 8
    blocks, count = len(chosen), len(groups)
    if first.mn_major:
        return numbers.reshape(blocks, count, -1, first.rows)
    numbers = numbers.reshape(blocks, count, len(tiles), first.rows, -1).swapaxes(2, 3)
    return numbers.reshape(blocks, count, first.rows, -1).swapaxes(-1, -2)


def _from_registers(group, parts: list[list[Array]], type: str, chosen: Array) -> Array:
    """A of each wgmma, side by side along K: (blocks, groups, K, 64)."""
    found = []
    for registers in parts:
        full = np.stack([np.broadcast_to(x, group.shape)[chosen] for x in registers])
        left = unpacked(full.reshape(2, 2, len(chosen), -1, 4, 8, 4), type)
        # j h, block, group, warp, g, t, i -> block, group, j t i, warp h g
        found.append(left.transpose(2, 3, 0, 6, 7, 4, 1, 5).reshape(*left.shape[2:4], -1, 64))
    return np.concatenate(found, 2)


def _multiply(group, products: list[Product], blocks: Array) -> None:
    """Adds products of one accumulator, in the blocks, to its matrix."""
    accumulator, type = products[0].accumulator, products[0].type
    for product in products:
        product.todo = product.todo & ~blocks
    numbers = np.flatnonzero(blocks)
    tiles = [x for p in products for x in (p.a, p.b) if isinstance(x, Tile)]
    names = np.concatenate(
        [np.broadcast_to(x.descriptors, (len(blocks), x.descriptors.shape[1])) for x in tiles], 1
    )[numbers]
    same = (names == names[0]).all()
    for chosen in [numbers] if same else [numbers[i : i + 1] for i in range(len(numbers))]:
        like = int(chosen[0])
        if isinstance(products[0].a, Tile):
            a = _from_shared(group, [p.a for p in products], type, chosen, like)  # pyright: ignore
        else:
            a = _from_registers(group, [p.a for p in products], type, chosen)  # pyright: ignore
        b = _from_shared(group, [p.b for p in products], type, chosen, like)
        total = np.ascontiguousarray(a.swapaxes(-1, -2)) @ b
        keeps = products[0].keeps[chosen]
        if keeps.all():
            accumulator.value[chosen] += total
        else:
            before = accumulator.value[chosen]
            accumulator.value[chosen] = np.where(keeps[:, None, None, None], before, 0) + total


def _compute(group, products: list[Product], blocks: Array) -> None:
    """In order; those that differ in nothing but their place in K at once."""
    runs: list[list[Product]] = []
    for product in products:
        if runs and _joins(product, runs[-1][0], blocks):
            runs[-1].append(product)
        else:
            runs.append([product])
    for run in runs:
        todo = run[0].todo & blocks
        if todo.any():
            _multiply(group, run, todo)


def _joins(product: Product, first: Product, blocks: Array) -> bool:
    """Whether a product goes on along K where the first one of a run began."""
    return (
        product.accumulator is first.accumulator
        and bool(product.keeps.all())
        and getattr(product.a, "mn_major", None) == getattr(first.a, "mn_major", None)
        and product.b.mn_major == first.b.mn_major
        and np.array_equal(product.todo & blocks, first.todo & blocks)
    )


# Issue


def _shared_or_registers(op: Op, place: int, mn_major: bool, rows: int):
    """Reads A or B at the issue."""
    text = op.operands[place]
    if text.startswith("{"):
        slots = [op.slot(x) for x in op.items(place)]
        return lambda group: [group.registers[slot] for slot in slots]
    read = op.reader(text, "b64")

    def tile(group):
        value = read(group.registers)
        groups = group.threads // 128
        if value.shape[1] == 1:
            value = np.broadcast_to(value, (value.shape[0], groups))
        else:
            value = value[:, ::128]
        return Tile(value, rows, mn_major)

    return tile


@instruction(
    *(
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{{f16.f16,bf16.bf16}}"
        for n in range(8, 257, 8)
    ),
    *(f"wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32" for n in range(8, 257, 8)),
)
def multiply_async(op: Op) -> Run:
    """D, A, B, whether D is added to, 1, 1, [A is MN-major,] [B is MN-major]."""
    slots, type, op.width = tuple(op.destinations()), op.type, 16
    columns = 2 * len(slots)
    flags, in_registers = [x == "1" for x in op.operands[6:]], op.operands[1].startswith("{")
    if op.operands[4:6] != ("1", "1"):
        raise MachineError("a product of the negative", op)
    if len(flags) != (0 if type == "tf32" else 2 - in_registers):
        raise MachineError("operands too many or too few", op)
    read_a = _shared_or_registers(op, 1, len(flags) == 2 and flags[0], 64)
    read_b = _shared_or_registers(op, 2, bool(flags) and flags[-1], columns)
    added_to = op.operands[3]
    keeps = None if added_to in ("0", "1") else op.reader(added_to, "pred")

    def run(group):
        blocks = group.whole_blocks(op)
        if not blocks.any():
            return
        if len(group.warps) % 4 or group.warps[0] % 4:
            raise Diverged("a warp group needs its four warps", op)
        state, r = flight(group), group.registers
        adds = np.full(len(blocks), added_to == "1")
        if keeps is not None:
            adds = np.broadcast_to(keeps(r)[:, 0], len(blocks))
        accumulator = _accumulator(group, state, op, slots, blocks, adds)
        a, b = read_a(group), read_b(group)
        product = Product(op, type, accumulator, a, b, adds | ~blocks, blocks, blocks)
        _watch(group, product, blocks, proxies.check_read, proxies.begin_read)
        accumulator.left = accumulator.left + blocks
        accumulator.products.append(product)
        state.products.open.append(product)

    return run


def _accumulator(group, state: Flight, op: Op, slots, blocks: Array, adds: Array) -> Accumulator:
    """The one in flight in these registers, or a new one with what they hold."""
    r = group.registers
    found = state.accumulators.get(slots)
    if found is None:
        groups = group.threads // 128
        value = np.zeros((len(blocks), groups, 64, 2 * len(slots)), F32)
        left = np.zeros(len(blocks), int)
        found = Accumulator(slots, [state.tag() for _ in slots], value, left, op.line)
    going = blocks & (found.left > 0)
    if going.any():
        _check_tags(found, group, going, op)
    fresh = blocks & ~going
    if not fresh.any():
        return found
    if (adds & fresh).any():
        before = to_matrix([_settled(group, state, slot) for slot in slots], group.shape)
        found.value = (
            before if fresh.all() else np.where(fresh[:, None, None, None], before, found.value)
        )
    where = None if fresh.all() else fresh[:, None]
    for slot, tag in zip(slots, found.tags, strict=True):
        r[slot] = tag if where is None else np.where(where, tag, r[slot])
    state.accumulators[slots] = found
    return found


def _settled(group, state: Flight, slot: int) -> Array:
    """A register, or what will land there if it names one in flight: wgmma may go on with it."""
    value = group.registers[slot]
    for accumulator, i in state.names.get(slot, []):
        for product in accumulator.products:
            _compute(group, [product], product.todo)
        landed = to_registers(accumulator.value)[i]
        value = np.where(value == accumulator.tags[i], landed, value)
    return value


def _check_tags(accumulator: Accumulator, group, blocks: Array, op: Op) -> None:
    for slot, tag in zip(accumulator.slots, accumulator.tags, strict=True):
        held = group.registers[slot]
        if held is tag:
            continue
        if held.shape[0] > 1:
            held = held[blocks]
        if (held != tag).any():
            what = f"a register of the wgmma of PTX line {accumulator.line}"
            raise InFlight(f"{what} was written in flight", op)


def _watch(group, product: Product, blocks: Array, *actions) -> None:
    """Tells the race detector of an issue or of a retirement in these blocks."""
    races = group.chunk.races
    tiles = [x for x in (product.a, product.b) if isinstance(x, Tile)]
    for row in np.flatnonzero((product.blocks & blocks)[races.rows]):
        block = int(races.rows[row])
        for g in range(group.threads // 128):
            warps = group.warps[4 * g : 4 * g + 4]
            for tile in tiles:
                cells = tile_cells(tile.of(block, g), tile.rows, tile.mn_major, races.grain)
                low, high = races.grain * cells[0], races.grain * (cells[-1] + 1)
                if low < 0 or high > group.shared.bytes:
                    raise OutOfBounds(f"bytes {low} to {high} of shared memory", product.op)
                for action in actions:
                    action(races, row, cells, warps, product.op)


# Fence, commit, wait


@instruction("wgmma.fence.sync.aligned")
def fence_registers(op: Op) -> Run:
    """Where one is missing, ptxas adds it (C7519)."""

    def run(group):
        group.whole_blocks(op)

    return run


@instruction("wgmma.commit_group.sync.aligned")
def commit(op: Op) -> Run:
    return lambda group: flight(group).products.commit(group.whole_blocks(op))


@instruction("wgmma.wait_group.sync.aligned")
def wait(op: Op) -> Run:
    most = int(op.operands[0], 0)

    def run(group):
        state = flight(group)
        done = state.products.wait(most, group.whole_blocks(op))
        _land(group, state, [(product, now & product.blocks) for product, now in done], op)

    return run


def _land(group, state: Flight, landing: list[tuple[Product, Any]], op: Op) -> None:
    by_blocks: dict[bytes, tuple[list[Product], Array]] = {}
    for product, blocks in landing:
        by_blocks.setdefault(blocks.tobytes(), ([], blocks))[0].append(product)
    touched: dict[int, tuple[Accumulator, Array]] = {}
    for products, blocks in by_blocks.values():
        by_accumulator: dict[int, list[Product]] = {}
        for product in products:
            _check_operands(group, product, blocks, op)
            by_accumulator.setdefault(id(product.accumulator), []).append(product)
        for each in by_accumulator.values():
            _compute(group, each, blocks)
        for product in products:
            _watch(group, product, blocks, proxies.end_read)
            accumulator = product.accumulator
            accumulator.left = accumulator.left - (blocks & product.blocks)
            product.blocks = product.blocks & ~blocks
            if not product.blocks.any():
                accumulator.products.remove(product)
            _, before = touched.get(id(accumulator), (accumulator, blocks))
            touched[id(accumulator)] = accumulator, blocks | before
    for accumulator, blocks in touched.values():
        done = blocks & (accumulator.left == 0)
        if done.any():
            _write_back(group, state, accumulator, done, op)


def _check_operands(group, product: Product, blocks: Array, op: Op) -> None:
    """A's registers may not be written before the wait either."""
    if isinstance(product.a, Tile) or not blocks.all():
        return
    r = group.registers
    for text, value in zip(product.op.items(1), product.a, strict=True):
        if r[product.op.slot(text)] is not value:
            line = product.op.line
            raise InFlight(f"{text}, an operand of the wgmma of PTX line {line}, was written", op)


def _write_back(group, state: Flight, accumulator: Accumulator, done: Array, op: Op) -> None:
    _check_tags(accumulator, group, done, op)
    r, values = group.registers, to_registers(accumulator.value)
    where = None if done.all() else done[:, None]
    for slot, value in zip(accumulator.slots, values, strict=True):
        r[slot] = value if where is None else np.where(where, value, r[slot])
    for slot, pairs in state.names.items():
        for other, i in pairs:
            if other is accumulator:
                mine = (r[slot] == accumulator.tags[i]) & done[:, None]
                r[slot] = np.where(mine, values[i], r[slot])
    if not accumulator.left.any():
        del state.accumulators[accumulator.slots]
        state.names = {
            slot: kept
            for slot, pairs in state.names.items()
            if (kept := [pair for pair in pairs if pair[0] is not accumulator])
        }
