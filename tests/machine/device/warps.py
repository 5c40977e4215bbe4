"""What the lanes of a warp do together: shuffles, reductions, votes.

PTX ISA, "shfl.sync", "redux.sync", "vote.sync". A lane that has left gives poison.
"""

from __future__ import annotations

import numpy as np

from .program import Op
from .registry import Run, instruction
from .values import TYPES, Array

_LANE = np.arange(32)


def source_lane(kind: str, b: Array, c: Array) -> tuple[Array, Array]:
    """From which lane each lane reads, and whether that is in its segment.

    Args:
        b: the lane, or how far it is.
        c: bits 0 to 4 the last lane, bits 8 to 12 which bits of a lane's number name its segment.
    """
    segment, clamp = (c >> 8) & 31, c & 31
    last = (_LANE & segment) | (clamp & ~segment)
    if kind == "bfly":
        lane = _LANE ^ b
        inside = lane <= last
    elif kind == "idx":
        lane = (_LANE & segment) | (b & ~segment & 31)
        inside = lane <= last
    elif kind == "up":
        lane = _LANE - b
        inside = lane >= last
    else:
        lane = _LANE + b
        inside = lane <= last
    return np.where(inside, lane, _LANE), inside


@instruction("shfl.sync.{bfly,idx,up,down}.b32")
def shuffle(op: Op) -> Run:
    target, _, holds = op.operands[0].partition("|")
    slot, predicate = op.slot(target), op.slot(holds) if holds else None
    a, b, c, kind = op.read(1), op.read(2, "s32"), op.read(3, "s32"), op.parts[2]

    def run(group):
        r, mask = group.registers, group.whole_warps(op)
        value, by, limits = group.by_warp(a(r)), b(r), c(r)
        if by.shape[1] > 1:
            by = group.by_warp(by)
        lane, inside = source_lane(kind, by & 31, limits[..., None] if by.ndim == 3 else limits)
        if lane.shape == (1, 32):
            moved = value[..., lane[0]]
        else:
            lane = np.broadcast_to(
                lane if lane.ndim == 3 else lane[:, None],
                (max(value.shape[0], lane.shape[0]), len(group.warps), 32),
            )
            value = np.broadcast_to(value, lane.shape)
            moved = np.take_along_axis(value, lane, -1)
        group.write(slot, moved.reshape(moved.shape[0], -1), mask)
        if predicate is not None:
            inside = np.broadcast_to(inside, (inside.shape[0], len(group.warps), 32))
            group.write(predicate, inside.reshape(inside.shape[0], -1), mask)

    return run


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux.sync.{add,min,max}.{u32,s32}", "redux.sync.{and,or,xor}.b32")
def reduce_warp(op: Op) -> Run:
    a, slot, reduce = op.read(1), op.destination(), _REDUCE[op.parts[2]].reduce

    def run(group):
        mask = group.whole_warps(op)
        value = group.by_warp(a(group.registers))
        total = reduce(value, axis=-1, keepdims=True).astype(TYPES[op.type])
        total = np.broadcast_to(total, value.shape).reshape(value.shape[0], -1)
        group.write(slot, total, mask)

    return run


@instruction("bar.warp.sync")
def synchronise_warp(op: Op) -> Run:
    """Lanes run in lock step here, so there is nothing to wait for."""

    def run(group):
        group.whole_warps(op)

    return run
