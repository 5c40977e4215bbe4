"""What the lanes of a warp do together: shuffles, reductions, elections. A lane that has left gives
poison."""

from __future__ import annotations

import numpy as np

from .faults import MachineError
from .program import Op
from .registry import Run, instruction
from .values import S32, U32

_LANES = np.arange(32)


@instruction("shfl.sync.{bfly,idx}.b32")
def shuffle(op: Op) -> Run:
    """Across the whole warp: what names segments of one is 31."""
    if int(op.operands[3], 0) != 31:
        raise MachineError("a shuffle within a segment of a warp", op)
    slot, a, b, by_distance = op.destination(), op.read(1), op.read(2, "s32"), op.has("bfly")

    def run(group):
        r, mask = group.registers, group.whole_warps(op)
        lane = group.by_warp(b(r)) & 31
        value, lane = np.broadcast_arrays(group.by_warp(a(r)), lane ^ _LANES * by_distance)
        moved = np.take_along_axis(value, lane, -1)
        group.write(slot, moved.reshape(moved.shape[0], -1), mask)

    return run


@instruction("redux.sync.{add,max}.s32")
def reduce_warp(op: Op) -> Run:
    a, slot = op.read(1), op.destination()
    reduce = np.add.reduce if op.has("add") else np.max

    def run(group):
        mask = group.whole_warps(op)
        value = group.by_warp(a(group.registers))
        total = reduce(value, axis=-1, keepdims=True).astype(S32)
        total = np.broadcast_to(total, value.shape).reshape(value.shape[0], -1)
        group.write(slot, total, mask)

    return run


@instruction("bar.warp.sync")
def synchronise_warp(op: Op) -> Run:
    """Lanes run in lock step here, so there is nothing to wait for."""

    def run(group):
        group.whole_warps(op)

    return run


@instruction("elect.sync")
def elect(op: Op) -> Run:
    """elect.sync d|p, members: p holds in the first member of each warp, d is its lane."""
    lane, _, chosen = op.operands[0].partition("|")
    slots = None if lane == "_" else op.slot(lane), op.slot(chosen)
    members = int(op.operands[1], 0) & 0xFFFFFFFF
    first = (members & -members).bit_length() - 1

    def run(group):
        mask = group.whole_warps(op)
        if slots[0] is not None:
            group.write(slots[0], np.full((1, 1), first, U32), mask)
        group.write(slots[1], (np.arange(group.threads) % 32 == first)[None], mask)

    return run


@instruction("setmaxnreg.{inc,dec}.sync.aligned.u32")
def set_registers(op: Op) -> Run:
    """How many registers a thread may have from here on: 24 to 256, by eights."""
    count = int(op.operands[0], 0)
    if not 24 <= count <= 256 or count % 8:
        raise MachineError(f"{count} registers", op)

    def run(group):
        group.whole_warps(op)

    return run
