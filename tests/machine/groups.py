"""Kernels whose groups of warps have roles of their own (Gluon's `warp_specialize`), role by role.

The first group goes on from the kernel's beginning. The others wait at a switch, `brx.idx` in PTX
and BRX in SASS, run their part and come back to it. Here each role becomes straight code: what it
can reach, the way back to the switch cut off. Loops that wait for an mbarrier are none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import sass, scalar
from .ptx import Block, Ptx
from .sass import Instruction
from .scalar import Op

RETURN = Op("", "ret", ())


class Role(NamedTuple):
    """What one group of warps runs."""

    warps: int
    thread: int  # one of its threads
    ptx: Ptx  # in which it alone runs
    blocks: frozenset[int]  # of that, its own
    code: list[Instruction]
    computes: bool  # others copy


class RolePtx(Ptx):
    """A kernel's PTX in which one role alone runs."""

    def _step(self, at: int, op: Op) -> Any:
        step = super()._step(at, op)
        if op.name not in ("mul.hi.s32", "mul.hi.u32"):  # of a division by a constant
            return step
        signed = op.name.endswith("s32")
        mask = -1 if signed else 2**32 - 1  # constants are written as if signed
        read = [scalar._reader(source, 32, signed) for source in op.operands[1:]]
        high = scalar._applied(lambda a, b: (a & mask) * (b & mask) >> 32, *read)
        return step._replace(value=high)


def has_roles(ptx: Ptx) -> bool:
    return any(op.name.startswith("brx") for block in ptx.blocks for op in block.ops)


def _reached(start: int, successors: Sequence[Sequence[int]], without: int) -> frozenset[int]:
    """What can be reached from a block, but not through another."""
    found, open_ = {start}, [start]
    while open_:
        new = {b for b in successors[open_.pop()] if b != without} - found
        found |= new
        open_ += new
    return frozenset(found)


def _entries(successors: Sequence[Sequence[int]], switch: int) -> list[int]:
    """Blocks that the switch alone leads to."""
    own = [() if b == switch else each for b, each in enumerate(successors)]
    first = _reached(0, own, -1)
    left = [b for b in range(len(own)) if b not in first]
    inner = {b for entry in left for b in _reached(entry, own, -1) - {entry}}
    return [b for b in left if b not in inner]


def _waitless(ptx: Ptx) -> Ptx:
    """Without the loops that wait for mbarriers, whose labels are not unique."""
    made = copy.copy(ptx)
    made.__class__ = RolePtx
    for name in ("place", "successors", "loops", "_deciding", "work", "_program"):
        made.__dict__.pop(name, None)
    made.blocks = []
    for block in ptx.blocks:
        waits = any("try_wait" in op.name for op in block.ops)
        ops = [op for op in block.ops if not (waits and op.is_branch)]
        made.blocks.append(Block(block.label, ops))
    made.blocks = [b for b in made.blocks if b.label or b.ops or b is made.blocks[0]]
    return made


def _of_ptx(whole: Ptx) -> list[tuple[int, Ptx, frozenset[int]]]:
    """Of each role the entry, PTX in which it runs, and its blocks."""
    whole = _waitless(whole)
    at = next(i for i, b in enumerate(whole.blocks) for op in b.ops if op.name.startswith("brx"))
    head = next(i for i in range(at, -1, -1) if whole.blocks[i].label.startswith("$L__BB"))
    found = []
    for entry in [0, *_entries(whole.successors, at)]:
        mine = _waitless(whole)
        blocks = _reached(entry, whole.successors, head)
        for i in blocks:
            mine.blocks[i].ops = [_cut(op, whole.place, head) for op in mine.blocks[i].ops]
        if head - 1 in blocks and entry:
            mine.blocks[head - 1].ops.append(RETURN)  # after a branch to the switch none runs it
        fork = next(b for b in mine.blocks if b.ops and b.ops[-1].guard and b.ops[-1].is_branch)
        branch = fork.ops.pop()  # of the first group, or of those that go to the switch
        if (entry == 0) != branch.guard.startswith("!"):
            fork.ops.append(branch._replace(guard=""))
        to = Op("", "bra.uni", (mine.blocks[entry].label,)) if entry else RETURN
        ops = mine.blocks[at].ops
        mine.blocks[at].ops = [to if op.name.startswith("brx") else op for op in ops]
        found.append((entry, mine, blocks))
    return found


def _cut(op: Op, place: Mapping[str, int], head: int) -> Op:
    """A way back to the switch ends a role."""
    if op.is_branch and place[op.operands[0]] == head:
        return RETURN._replace(guard=op.guard)
    return op


def _of_sass(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """Of each role its instructions, from its first on."""
    code = [one._replace(name="EXIT.BRX") if one.kind == "BRX" else one for one in code]
    blocks, successors = sass._blocks(code)
    targets = {sass._target(one) for one in code}
    at = next(i for i, block in enumerate(blocks) if block[-1].name == "EXIT.BRX")
    head = next(i for i in range(at, -1, -1) if blocks[i][0].address in targets)
    found = []
    for entry in [0, *_entries(successors, at)]:
        mine = sorted(_reached(entry, successors, head))
        found.append([one for b in mine for one in _without_waits(blocks[b])])
    return found


def _without_waits(block: list[Instruction]) -> list[Instruction]:
    """Without the second try of a wait, which stands behind the kernel, and that for registers."""
    again = sass._target(block[-1]) == block[0].address
    if again and {one.kind for one in block} <= {"SYNCS", "BRA", "NOP"}:
        return []
    tries = any(one.name.startswith("USETMAXREG.TRY") for one in block)
    return [one for one in block if not (tries and one.kind == "BRA")]


WORKS = {
    "wgmma": {"HGMMA"},
    "cp.async.bulk": {"UTMALDG", "UTMASTG"},
    "cp.reduce": {"UTMAREDG"},
    "st.global": {"STG"},
}


def _warps(ops: Sequence[Op], computes: bool) -> int:
    """As many as a barrier of the role's own says; else four, or one that copies."""
    met = [int(op.operands[1]) for op in ops if op.name == "bar.sync" and len(op.operands) > 1]
    return max(met) // 32 if met else 4 if computes else 1


def roles(code: Sequence[Instruction], ptx: Ptx) -> list[Role]:
    """Those that multiply, copy or store; of those that do the same in order."""
    of_ptx = []
    for entry, mine, blocks in _of_ptx(ptx):
        ops = [op for b in blocks for op in mine.blocks[b].ops]
        does = [work for work in WORKS if any(op.name.startswith(work) for op in ops)]
        if does:
            computes = does != ["cp.async.bulk"]
            role = Role(_warps(ops, computes), 128 if entry else 0, mine, blocks, [], computes)
            of_ptx.append((does, role))
    of_sass = []
    for own in _of_sass(code):
        kinds = {one.kind for one in own}
        does = [work for work, its in WORKS.items() if kinds & its]
        if does:
            of_sass.append((does, own))
    assert len(of_ptx) == len(of_sass), "roles of PTX and SASS differ in number"
    of_ptx.sort(key=lambda pair: pair[0], reverse=True)
    of_sass.sort(key=lambda pair: pair[0], reverse=True)
    return [role._replace(code=own) for (_, role), (_, own) in zip(of_ptx, of_sass, strict=True)]
