"""Branches, also of warps that take roles of their own, the end, and barriers of a block.

A barrier: `bar.sync id` waits for all warps of a block, `bar.sync id, n` for n threads. What they
did before is ordered before what they do after.
"""

from __future__ import annotations

import numpy as np

from .execution import WAIT
from .faults import Diverged, MachineError
from .program import END, Op
from .registry import Run, instruction


@instruction("bra[.uni]", ends_block=True)
def branch(op: Op) -> Run:
    target = op.label(op.operands[0])
    return lambda group: group.branch(op, target)


@instruction("ret", "exit", ends_block=True)
def leave(op: Op) -> Run:
    if op.guard is not None:
        raise MachineError("a guarded end", op)
    return lambda group: END


@instruction("bar.sync", "barrier.sync[.aligned]", ends_block=True)
def wait_at_barrier(op: Op) -> Run:
    name = int(op.operands[0], 0)
    count = int(op.operands[1], 0) if len(op.operands) > 1 else None

    def run(group):
        chunk, blocks = group.chunk, group.whole_blocks(op)
        wanted = chunk.warps if count is None else count // 32
        if len(group.warps) == wanted:
            chunk.races.meet(group.warps, blocks)
            return None
        return _join(group, name, wanted, op)

    return run


def _join(group, name: int, wanted: int, op: Op) -> int | None:
    """Of several groups: the last one lets all go on."""
    chunk = group.chunk
    barriers = chunk.extra.setdefault("barriers", {})
    waiting, done = barriers.setdefault(name, ([], [0]))
    waiting.append(group.warps)
    there = np.concatenate(waiting)
    if len(there) > wanted:
        raise Diverged(f"{len(there)} warps at a barrier of {wanted}", op)
    if len(there) == wanted:
        waiting.clear()
        done[0] += 1
        chunk.races.meet(there, np.ones(len(chunk.blocks), bool))
        return None
    turn = done[0]
    group.ready, group.waits_at = lambda: done[0] > turn, op.where
    return WAIT


@instruction("brx.idx[.uni]", ends_block=True)
def branch_by_number(op: Op) -> Run:
    """To the label of this number in a list; warps that go to different ones part for good."""
    read = op.read(0, "u32")
    targets = [op.label(x) for x in op.program.branch_targets[op.operands[1]]]

    def run(group):
        numbers = np.unique(group.full(read(group.registers)))
        if numbers[-1] >= len(targets):
            raise MachineError(f"number {numbers[-1]} of {len(targets)} labels", op)
        for number in numbers[1:]:
            if not group.part(group.full(read(group.registers)) == number, targets[number]):
                raise Diverged("lanes of a warp have parted", op)
        return targets[numbers[0]]

    return run
