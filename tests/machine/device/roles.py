"""Warps with roles of their own: elect.sync, setmaxnreg, brx.idx.

Where `Program.parts_for_good` the groups of warps run apart: execution.py.
"""

from __future__ import annotations

import numpy as np

from .faults import Diverged, MachineError
from .program import Op
from .registry import Run, instruction
from .values import U32


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
