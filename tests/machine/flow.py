"""Natural loops of a control-flow graph: blocks by number, each with its successors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NaturalLoop(NamedTuple):
    """Blocks that can come back to `head` without leaving what `head` dominates."""

    head: int
    blocks: frozenset[int]


def _predecessors(successors: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Of each block that can be reached from block 0, those that can be reached themselves."""
    found: dict[int, list[int]] = {0: []}
    open_ = [0]
    while open_:
        at = open_.pop()
        for to in successors[at]:
            if to not in found:
                found[to] = []
                open_.append(to)
            found[to].append(at)
    return found


def _dominators(before: Mapping[int, Sequence[int]]) -> dict[int, set[int]]:
    """The blocks that every path from block 0 to a block goes through, itself included."""
    found = {at: set(before) for at in before} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for at in sorted(before.keys() - {0}):
            now = set.intersection(*(found[b] for b in before[at])) | {at}
            if now != found[at]:
                found[at], changed = now, True
    return found


def natural_loops(successors: Sequence[Sequence[int]]) -> list[NaturalLoop]:
    """The loops, by back edges to a block that dominates; in the order of their heads.

    A branch back out of a block that stands behind its function, as for a wait that seldom takes
    long, is no loop, and what is never reached has none.
    """
    before = _predecessors(successors)
    dominators = _dominators(before)
    bodies: dict[int, set[int]] = {}
    for at in before:
        for head in successors[at]:
            if head not in dominators[at]:
                continue
            body = bodies.setdefault(head, {head})
            open_ = [at]
            while open_:
                block = open_.pop()
                if block not in body:
                    body.add(block)
                    open_ += before[block]
    return [NaturalLoop(head, frozenset(body)) for head, body in sorted(bodies.items())]
