"""mbarrier: a counter in shared memory that says when copies have landed or buffers are free.

PTX ISA, "Parallel Synchronization: mbarrier". A phase is complete once `count` threads have arrived
and as many bytes have landed as expect_tx announced; then the next one begins. `try_wait.parity P`
holds once the phase of parity P is complete: phases are counted from 0, so while it is the turn of
a phase of the other parity. Only P's lowest bit counts: Triton gives -1 for 1.

Copies of TMA land here only when a warp tests the mbarrier that they report to: so late they may.
Who tests it with success knows what all knew who arrived (proxies.py), and sees the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import proxies
from .execution import WAIT
from .faults import Deadlock, Fault, Race
from .program import Op
from .registry import Run, instruction
from .values import Array


class Miscounted(Fault):
    """An mbarrier that is not one, or where more arrive than it counts."""


@dataclass
class Mbarrier:
    """At one offset of shared memory, of each block of the chunk."""

    offset: int
    count: Array  # of threads that must arrive; 0: there is none
    missing: Array  # of these, in this phase
    bytes: Array  # that this phase waits for
    phase: Array
    copies: list[list[Landing]]  # in flight, by block
    released: Array  # what those knew who arrived, by watched block
    completed: Array  # the same when the last phase was complete
    made: Array  # warp and epoch of its init, by watched block


@dataclass
class Landing:
    """A copy of TMA in flight."""

    op: Op
    bytes: int
    land: Callable[[], int]  # returns TMA's epoch


def _all(chunk) -> dict[int, Mbarrier]:
    return chunk.extra.setdefault("mbarriers", {})


def each_offset(group, op: Op, read) -> Iterator[tuple[int, Array]]:
    """Offsets of the mbarriers that an instruction names, and the threads that name them."""
    mask, address = group.active(op), read(group.registers)
    if mask is not None and not mask.any():
        return
    offset = group.shared.offset(address, 8, mask, op)
    threads = group.running(op)
    if offset.size == 1:
        yield int(offset[0, 0]), threads
        return
    offset = group.full(offset)
    for where in np.unique(offset[threads]):
        yield int(where), threads & (offset == where)


def _warps_of(group, threads: Array, block: int) -> Array:
    return group.warps[threads[block].reshape(-1, 32).any(-1)]


def found(group, op: Op, offset: int, threads: Array) -> Mbarrier:
    """The mbarrier there, whose init these threads must know of."""
    races = group.chunk.races
    barrier = _all(group.chunk).get(offset)
    blocks = threads.any(1)
    if barrier is None or (barrier.count[blocks] == 0).any():
        raise Miscounted(f"no mbarrier at byte {offset} of shared memory", op)
    for row, block in enumerate(races.rows):
        warps = _warps_of(group, threads, block)
        maker, epoch = barrier.made[row]
        if (races.clock[row, warps, maker] < epoch).any():
            raise Race(f"no barrier since warp {maker}'s mbarrier.init", op)
    return barrier


@instruction("mbarrier.init.shared[::cta].b64")
def initialise(op: Op) -> Run:
    read, count = op.address(0), op.read(1, "u32")

    def run(group):
        chunk, races = group.chunk, group.chunk.races
        for offset, threads in each_offset(group, op, read):
            n, blocks = len(chunk.blocks), threads.any(1)
            if offset not in _all(chunk):
                rows, _, columns = races.clock.shape
                zero = [np.zeros(n, np.int64) for _ in range(4)]
                knows = [np.zeros((rows, columns), np.int32) for _ in range(2)]
                _all(chunk)[offset] = Mbarrier(
                    offset, *zero, [[] for _ in range(n)], *knows, np.zeros((rows, 2), int)
                )
            barrier = _all(chunk)[offset]
            used = (barrier.phase != 0) | (barrier.missing != barrier.count)
            if (used & blocks & (barrier.count != 0)).any():  # Triton makes an unused one anew
                raise Miscounted(f"byte {offset} of shared memory is an mbarrier already", op)
            arrivals = group.full(count(group.registers))[:, 0]
            for array, value in (
                (barrier.count, arrivals),
                (barrier.missing, arrivals),
                (barrier.bytes, 0),
                (barrier.phase, 0),
            ):
                array[blocks] = np.broadcast_to(value, n)[blocks]
            for row in np.flatnonzero(blocks[races.rows]):
                warp = _warps_of(group, threads, races.rows[row])[0]
                barrier.made[row] = warp, races.clock[row, warp, warp]
                barrier.released[row] = barrier.completed[row] = 0
                races.clock[row, warp, warp] += 1

    return run


@instruction("mbarrier.inval.shared[::cta].b64")
def invalidate(op: Op) -> Run:
    read = op.address(0)

    def run(group):
        for offset, threads in each_offset(group, op, read):
            barrier, blocks = found(group, op, offset, threads), threads.any(1)
            if any(barrier.copies[i] for i in np.flatnonzero(blocks)):
                raise Miscounted("copies to this mbarrier are in flight", op)
            barrier.count[blocks] = 0

    return run


def _complete(chunk, barrier: Mbarrier, blocks: Array) -> None:
    """Begin the next phase where nothing is missing."""
    done = blocks & (barrier.missing == 0) & (barrier.bytes == 0)
    barrier.phase[done] += 1
    barrier.missing[done] = barrier.count[done]
    for row in np.flatnonzero(done[chunk.races.rows]):
        barrier.completed[row] = barrier.released[row]


@instruction("mbarrier.arrive[.expect_tx][.release.cta].shared[::cta].b64")
def arrive(op: Op) -> Run:
    """mbarrier.arrive _, [at], how often; mbarrier.arrive.expect_tx _, [at], bytes."""
    read, expects = op.address(1), op.has("expect_tx")
    number = op.read(2, "u32") if len(op.operands) > 2 else lambda r: np.ones((1, 1), np.uint32)
    if op.operands[0] != "_":
        raise NotImplementedError(f"{op.where}: the state of an mbarrier")

    def run(group):
        chunk, races = group.chunk, group.chunk.races
        for offset, threads in each_offset(group, op, read):
            barrier, blocks = found(group, op, offset, threads), threads.any(1)
            each = np.where(threads, group.full(number(group.registers)), 0)
            total = each.astype(np.int64).sum(1)
            barrier.missing -= threads.sum(1) if expects else total
            if expects:
                barrier.bytes += total
            if (barrier.missing < 0).any():
                raise Miscounted(f"more arrive at byte {offset} than it counts", op)
            for row in np.flatnonzero(blocks[races.rows]):
                for warp in _warps_of(group, threads, races.rows[row]):
                    knows = races.clock[row, warp]
                    np.maximum(barrier.released[row], knows, out=barrier.released[row])
                    races.clock[row, warp, warp] += 1
            _complete(chunk, barrier, blocks)

    return run


@instruction("mbarrier.try_wait.parity[.acquire.cta].shared[::cta].b64", ends_block=True)
def try_wait(op: Op) -> Run:
    """Holds at once, or the group waits until it would and tries again by its own loop."""
    slot, read, parity = op.destination(), op.address(1), op.read(2, "u32")

    def run(group):
        chunk = group.chunk
        result, waits = np.zeros(group.shape, bool), []
        for offset, threads in each_offset(group, op, read):
            barrier = found(group, op, offset, threads)
            wanted = group.full(parity(group.registers) & 1)
            done = threads & _is_complete(chunk, barrier, threads, wanted)
            _learn(group, barrier, done)
            result |= done
            left = threads & ~done
            if left.any():
                waits.append((barrier, left, wanted))
        group.write(slot, result, group.active(op))
        if not waits:
            return None
        if len(chunk.groups) == 1:
            raise Deadlock(_waits_for(waits[0]), op)
        group.ready = lambda: all(
            _is_complete(chunk, barrier, threads, wanted)[threads].all()
            for barrier, threads, wanted in waits
        )
        group.waits_at = f"{op.where} ({_waits_for(waits[0])})"
        return WAIT

    return run


def _waits_for(wait: tuple[Mbarrier, Array, Array]) -> str:
    barrier, threads, _ = wait
    i = int(np.flatnonzero(threads.any(1))[0])
    return (
        f"mbarrier at byte {barrier.offset}, phase {barrier.phase[i]}: {barrier.missing[i]} of "
        f"{barrier.count[i]} arrivals and {barrier.bytes[i]} bytes missing"
    )


def _is_complete(chunk, barrier: Mbarrier, threads: Array, parity: Array) -> Array:
    """By thread; what is in flight to this mbarrier lands first."""
    blocks = threads.any(1)
    waiting = blocks & (barrier.phase % 2 == parity[:, 0])
    for i in np.flatnonzero(waiting & (barrier.missing == 0)):
        for copy in barrier.copies[i]:
            epoch = copy.land()
            barrier.bytes[i] -= copy.bytes
            for row in np.flatnonzero(chunk.races.rows == i):
                knows = barrier.released[row]
                knows[chunk.races.warps] = max(knows[chunk.races.warps], epoch)
        barrier.copies[i] = []
    _complete(chunk, barrier, waiting)
    return (barrier.phase[:, None] % 2) != parity


def _learn(group, barrier: Mbarrier, threads: Array) -> None:
    races = group.chunk.races
    for row, block in enumerate(races.rows):
        for warp in _warps_of(group, threads, block):
            proxies.meet_through(races, row, warp, barrier.completed[row])
