"""Runs a program: blocks side by side, groups of warps each with a program counter of its own.

    Launch   a grid, its arguments, the memory that it may touch
    Chunk    some blocks of the grid that run in lock step, with their shared memory
    Group    warps of these blocks that run together: registers, place, mask

A kernel starts as one group of all warps. Threads that part at a branch run one side after the
other under a mask and meet again where every path must pass (`Program.meets`). Where whole warps
part for good (warp specialisation) the group splits, and `Chunk.run` takes turns between groups,
each until it waits. Blocks of a chunk whose loops differ in length wait for each other under the
same mask; what waits is not counted as being there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .faults import Deadlock, Diverged
from .memory import GlobalMemory, SharedMemory
from .program import END, Op, Program
from .values import TYPES, U32, Array

WAIT = -2  # what an instruction returns whose group must wait; `group.ready` then says until when
LANES = 32
CHUNK_THREADS = 8192  # of the blocks that run in lock step

Mask = Array | None  # of shape (1 or blocks, 1 or threads); None: all


class Side(NamedTuple):
    """Where threads go on that wait for others to come to the block `meets`."""

    at: int
    mask: Mask
    meets: int


@dataclass
class Launch:
    """One launch of a kernel."""

    program: Program
    grid: tuple[int, int, int]
    arguments: Sequence[Any]  # numpy scalars in the order of the parameters
    memory: GlobalMemory
    shared_bytes: int
    order: int = 0  # of the groups of warps that part: 0 in turns, 1 the other way round

    def __post_init__(self):
        size = self.program.parameter_bytes
        room = np.zeros(size + 64, np.uint8)
        start = -room.ctypes.data % 64
        self.parameters = room[start : start + size]  # the arguments' bytes, see ld.param
        places = self.program.places.values()
        for place, value in zip(places, self.arguments, strict=True):
            self.parameters[place : place + value.nbytes] = np.frombuffer(value, np.uint8)
        if size:
            self.memory.add(self.parameters)

    def run(self) -> None:
        x, y, z = self.grid
        most = 1 if self.program.parts_for_good else CHUNK_THREADS // self.program.threads
        most = max(1, most)
        for start in range(0, x * y * z, most):
            Chunk(self, np.arange(start, min(start + most, x * y * z), dtype=U32)).run()


class Chunk:
    """Blocks of a launch in lock step, by their numbers in the grid."""

    def __init__(self, launch: Launch, blocks: Array):
        self.launch, self.program, self.blocks = launch, launch.program, blocks
        self.warps = launch.program.threads // LANES
        self.shared = SharedMemory(len(blocks), launch.shared_bytes, self.warps, self.program.grain)
        self.races = self.shared.races
        self.groups = [Group(self, np.arange(self.warps), self._registers())]
        # What files of instructions keep for a chunk, by their own keys (mbarriers, say), and what
        # they look at once all groups have ended.
        self.extra: dict[str, Any] = {}
        self.at_end: set[Callable[[Chunk], None]] = set()

    def _registers(self) -> list[Array]:
        program, (x, y, z) = self.program, self.launch.grid
        registers = program.initial_registers()
        threads, blocks = np.arange(program.threads, dtype=U32)[None], self.blocks[:, None]
        known = {
            "%tid.x": threads,
            "%ntid.x": program.threads,
            "%ctaid.x": blocks % x,
            "%ctaid.y": blocks // x % y,
            "%ctaid.z": blocks // (x * y),
            "%nctaid.x": x,
            "%nctaid.y": y,
            "%nctaid.z": z,
        }
        for name, slot in program.slots.items():
            if name in known:
                registers[slot] = np.array(known[name], U32, ndmin=2)
        return registers

    def run(self) -> None:
        """Every group until it ends, each in turn until it waits."""
        while self.groups:
            moved = False
            for group in self.groups[:: -1 if self.launch.order else 1]:
                if group.ready is None or group.ready():
                    group.ready, moved = None, True
                    group.run()
            self.groups = [group for group in self.groups if group.at != END]
            if not moved:
                waits = "; ".join(group.waits_at for group in self.groups)
                raise Deadlock(f"every group of warps waits: {waits}")
        for check in self.at_end:
            check(self)


class Issued:
    """What a group of warps has issued, by groups that are committed together."""

    def __init__(self):
        self.open: list[Any] = []
        self.committed: list[tuple[list[Any], Array]] = []  # with its blocks

    def commit(self, blocks: Array) -> None:
        self.committed.append((self.open, np.array(blocks)))
        self.open = []

    def wait(self, most: int, waiting: Array) -> list[tuple[Any, Array]]:
        """All groups of the blocks that wait but the newest `most`, each with its blocks, oldest
        first."""
        newer, done = np.zeros(len(waiting), int), []
        for issued, blocks in reversed(self.committed):
            now = blocks & waiting & (newer >= most)
            newer += blocks
            if now.any():
                done[:0] = [(each, now) for each in issued]
                blocks &= ~now
        self.committed = [pair for pair in self.committed if pair[1].any()]
        return done


class Group:
    """Warps of a chunk's blocks that run together."""

    def __init__(self, chunk: Chunk, warps: Array, registers: list[Array]):
        self.chunk, self.warps = chunk, warps
        self.registers = registers  # an array for each slot, see values.py
        self.shared, self.memory = chunk.shared, chunk.launch.memory
        self.threads = LANES * len(warps)
        self.warp_of_thread = np.repeat(warps, LANES)
        self.mask: Mask = None  # the threads that run; None: all of its own
        self.at, self.meets = 0, END  # numbers of blocks: the next one, and where it meets others
        self.stack: list[Side] = []
        self.ready: Callable[[], bool] | None = None  # where it waits, whether it may go on
        self.waits_at = ""
        self.copies = Issued()  # of cp.async
        self.extra: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.chunk.blocks), self.threads

    def full(self, x: Array) -> Array:
        """An array for each block and thread."""
        return x if x.shape == self.shape else np.broadcast_to(x, self.shape)

    def by_warp(self, x: Array) -> Array:
        """(blocks or 1, warps, lanes)."""
        if x.shape[1] == 1:
            x = np.broadcast_to(x, (x.shape[0], self.threads))
        return x.reshape(x.shape[0], -1, LANES)

    def active(self, op: Op) -> Mask:
        """The threads that run an instruction: by the mask and its predicate."""
        if op.guard is None:
            return self.mask
        holds = self.registers[op.guard]
        if op.negated:
            holds = ~holds
        return holds if self.mask is None else holds & self.mask

    def running(self, op: Op) -> Array:
        """As `active`, of each block and thread."""
        mask = self.active(op)
        return self.full(np.ones((1, 1), bool) if mask is None else mask)

    def write(self, slot: int, value: Array, mask: Mask) -> None:
        kind = self.chunk.program.kinds[slot]
        if value.dtype != kind:
            value = value.view(kind)
        self.registers[slot] = (
            value if mask is None else np.where(mask, value, self.registers[slot])
        )

    def whole_warps(self, op: Op) -> Mask:
        """As `active`; raises where a warp would run the instruction in part."""
        mask = self.active(op)
        if mask is not None and mask.shape[1] > 1:
            by_warp = mask.reshape(mask.shape[0], -1, LANES)
            if (by_warp.any(-1) != by_warp.all(-1)).any():
                raise Diverged("lanes of a warp have parted", op)
        return mask

    def whole_blocks(self, op: Op) -> Array:
        """Of each block whether it runs the instruction; raises where one does in part."""
        mask = self.active(op)
        if mask is None:
            return np.ones(len(self.chunk.blocks), bool)
        some = mask.any(1)
        if (some != mask.all(1)).any():
            raise Diverged("threads of a block have parted", op)
        return np.broadcast_to(some, len(self.chunk.blocks))

    def run(self) -> None:
        """Until it ends or waits."""
        blocks = self.chunk.program.blocks
        while True:
            while self.at == self.meets and self.stack:
                self.at, self.mask, self.meets = self.stack.pop()
            if self.at == END:
                return
            at, following = self.at, None
            for op in blocks[at]:
                following = op.run(self)
            if following == WAIT:
                self.at = at + 1
                return
            if following is None:
                following = at + 1 if at + 1 < len(blocks) else END
            if following == END and blocks[at]:
                if not self._leave():
                    return
            else:
                self.at = following

    def branch(self, op: Op, target: int) -> int | None:
        """Where the group goes on after a branch; None: the next block."""
        if op.guard is None:
            return target
        at, mask, taken = self.at, self.mask, self.active(op)
        assert taken is not None  # there is a guard
        others = ~taken if mask is None else mask & ~taken
        if not taken.any():
            return None
        if not others.any():
            return target
        meets = self.chunk.program.meets[at]
        if self.chunk.program.parts_at[at] and self.part(taken, target):
            return None
        if meets != self.meets:  # else those who wait there already come with them
            self.stack.append(Side(meets, mask, self.meets))
        for side, threads in ((at + 1, others), (target, taken)):
            if side != meets:
                self.stack.append(Side(side, threads, meets))
        self.at, self.mask, self.meets = self.stack.pop()
        return self.at

    def part(self, taken: Array, target: int) -> bool:
        """Whole warps part for good: those that take the branch become a group of their own."""
        by_warp = self.full(taken).reshape(-1, len(self.warps), LANES)
        if (by_warp.any((0, 2)) != by_warp.all((0, 2))).any() or self.mask is not None:
            return False
        going = by_warp.all((0, 2))
        lanes = np.repeat(going, LANES)
        other = Group(self.chunk, self.warps[going], _of_lanes(self.registers, lanes))
        other.at, other.meets = target, END
        other.extra = dict(self.extra)
        self.chunk.groups.append(other)
        self.warps, self.threads = self.warps[~going], int((~lanes).sum())
        self.warp_of_thread = np.repeat(self.warps, LANES)
        self.registers = _of_lanes(self.registers, ~lanes)
        return True

    def _leave(self) -> bool:
        """Threads that run end; False where none is left."""
        gone = self.mask
        self.at = END
        if gone is None:
            self.stack.clear()
            return False
        sides = [
            Side(at, ~gone if mask is None else mask & ~gone, meets)
            for at, mask, meets in self.stack
        ]
        self.stack = [side for side in sides if side.mask is not None and side.mask.any()]
        if not self.stack:
            return False
        self.at, self.mask, self.meets = self.stack.pop()
        return True


def _of_lanes(registers: list[Array], lanes: Array) -> list[Array]:
    return [r if r.shape[1] == 1 else r[:, lanes] for r in registers]


def argument(type: str, value: Any) -> Array:
    """A kernel's argument as its parameter holds it; "b8" is an array with a structure's bytes."""
    if type == "b8":
        return value
    dtype = TYPES[type]
    if dtype.kind == "f":
        return np.array(value, dtype)
    return np.array(int(value) % 256**dtype.itemsize, f"u{dtype.itemsize}").view(dtype)
