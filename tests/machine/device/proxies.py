"""What wgmma and TMA see of shared memory, and who may touch what they work on.

Both reach memory by another way than ld and st, the async proxy. Bytes that the ordinary way (the
generic proxy) wrote they see after the writer's fence.proxy.async and a barrier, or a barrier and
the reader's own fence. Both run next to the warps: from issue to wait no warp may write what
they read, nor touch what they write.

So the race detector's `clock[row, w]`, what warp w knows, has more columns than warps:

    v                 the latest epoch of warp v, as in races.py
    warps             the latest of TMA's writes whose mbarrier w has seen complete
    warps + 1 + v     the latest epoch of warp v whose writes a fence has passed on to that proxy
    the last          TMA's own writes need no fence: always larger than every epoch
"""

from __future__ import annotations

import numpy as np

from .faults import Race, Unfenced
from .program import Op
from .races import Races
from .registry import Run, instruction
from .values import Array


@instruction("fence.proxy.async[.shared::cta]")
def fence_async_proxy(op: Op) -> Run:
    """What its warp knows of now, wgmma and TMA may see, once a warp knows of this fence."""

    def run(group):
        races = group.chunk.races
        by_warp = group.by_warp(group.running(op)).any(-1)
        for i, block in enumerate(races.rows):
            warps = group.warps[by_warp[block]]
            clock, n = races.clock[i], races.warps
            known = clock[warps]
            known[:, n + 1 : -1] = np.maximum(known[:, n + 1 : -1], known[:, :n])
            clock[warps] = known
            clock[warps, warps] += 1  # what it writes from here on is not fenced

    return run


def check_read(races: Races, row: int, cells, warps: Array, op: Op) -> None:
    """wgmma or TMA is about to read cells on behalf of these warps."""
    clock = races.clock[row, warps].min(0)
    writer, written = races.writer[row, cells], races.written[row, cells]
    if races.flying[row, cells].any():
        _report(races, row, cells, races.flying[row, cells], "reads", "TMA writes", Race, op)
    late = written > clock[writer]
    if late.any():
        _report(races, row, cells, late, "reads", "a warp wrote", Race, op)
    late = written > clock[writer + races.warps + 1]
    if late.any():
        _report(races, row, cells, late, "reads", "st wrote", Unfenced, op)


def check_write(races: Races, row: int, cells, warp: int, op: Op) -> None:
    """TMA is about to write cells on behalf of a warp."""
    if races.busy[row, cells].any():
        _report(races, row, cells, races.busy[row, cells] > 0, "writes", "wgmma reads", Race, op)
    check_read(races, row, cells, np.array([warp]), op)
    late = (races.read[row, cells] > races.clock[row, warp, : races.warps]).any(-1)
    if late.any():
        _report(races, row, cells, late, "writes", "a warp read", Race, op)


def _report(races, row, cells, late, does, did, kind, op) -> None:
    """Which byte, and the other instruction's line."""
    numbers = np.arange(races.written.shape[1])[cells]
    cell = numbers[late][0]
    lines = races.read_line if did.endswith(("read", "reads")) else races.line
    what = "no fence.proxy.async" if kind is Unfenced else "nothing"
    raise kind(
        f"{does} byte {cell * races.grain} of shared memory, which {did} at PTX line "
        f"{lines[row, cell]}; {what} between",
        op,
    )


def begin_read(races: Races, row: int, cells, warps: Array, op: Op) -> None:
    races.busy[row, cells] += 1
    races.read_line[row, cells] = op.line


def end_read(races: Races, row: int, cells, warps: Array, op: Op) -> None:
    """These warps' wait is over: to them the bytes count as read just now."""
    races.busy[row, cells] -= 1
    for warp in warps:
        races.read[row, cells, warp] = races.clock[row, warp, warp]


def begin_write(races: Races, row: int, cells: slice, op: Op) -> None:
    races.flying[row, cells] = True
    races.line[row, cells] = op.line


def end_write(races: Races, row: int, cells: slice, epoch: int) -> None:
    races.flying[row, cells] = False
    races.writer[row, cells], races.written[row, cells] = races.warps, epoch


def meet_through(races: Races, row: int, warp: int, released: Array) -> None:
    """A warp learns what those knew who arrived at an mbarrier."""
    np.maximum(races.clock[row, warp], released, out=races.clock[row, warp])
