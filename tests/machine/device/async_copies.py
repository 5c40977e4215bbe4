"""cp.async: copies from global to shared memory that land later.

A thread's copies since its last commit_group are a group; `wait_group n` waits for all groups but
the newest n. From the issue on until then the destination is poison, for everyone: so late, and so
wrong before, the hardware may be. What lands counts as written by the thread that waited.

The blocks of a chunk may commit differently often, where their loops differ in length: each group
knows its blocks, and counts for these alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .program import Op
from .registry import Run, instruction
from .values import Array, poison


@dataclass
class Copy:
    offset: Array  # in shared memory
    units: Array
    mask: Array | None
    op: Op

    def land(self, group, blocks: Array) -> None:
        mask = self.mask
        if not blocks.all():
            mask = blocks[:, None] if mask is None else mask & blocks[:, None]
        width = self.units.dtype.itemsize
        group.shared.races.stored(self.offset, width, mask, group.warp_of_thread, self.op)
        group.shared.poke(self.offset, self.units, mask)


@instruction("cp.async.{ca,cg}.shared.global")
def copy_async(op: Op) -> Run:
    """cp.async [to], [from], size, used: from byte `used` on, zeros."""
    to, source = op.address(0), op.address(1, "b64")
    width = op.width = int(op.operands[2], 0)
    used = op.read(3, "u32") if len(op.operands) > 3 else None

    def run(group):
        r, mask = group.registers, group.active(op)
        if mask is not None and not mask.any():
            return
        address, reads = source(r), mask
        if used is not None:
            size = used(r)
            part = (size != 0) & (size != width)
            if (part if mask is None else part & mask).any():
                raise NotImplementedError(f"{op.where}: a part of {width} bytes")
            reads = size != 0 if mask is None else mask & (size != 0)
        shape = np.broadcast_shapes(address.shape, (1, 1) if reads is None else reads.shape)
        units = group.memory.load(np.broadcast_to(address, shape), width, reads, op)
        kind = group.shared.units[width].dtype
        if units is None:
            units = np.zeros((1, 1), kind)
        elif reads is not None:
            units = np.where(reads, units, kind.type(0))
        offset = group.shared.offset(to(r), width, mask, op)
        group.shared.races.stored(offset, width, mask, group.warp_of_thread, op)
        group.shared.poke(offset, poison(kind), mask)
        group.copies.open.append(Copy(offset, units, mask, op))

    return run


@instruction("cp.async.commit_group")
def commit_group(op: Op) -> Run:
    return lambda group: group.copies.commit(group.whole_blocks(op))


@instruction("cp.async.wait_group")
def wait_group(op: Op) -> Run:
    most = int(op.operands[0], 0)

    def run(group):
        for copy, blocks in group.copies.wait(most, group.whole_blocks(op)):
            copy.land(group, blocks)

    return run
