"""Reads PTX: its blocks, how often a launch runs each, and what its warps do there.

PTX keeps what SASS hides: a scalar program that decides the branches. `executions` runs only those
instructions, for one thread of one program, so the trip count of every loop comes from the code
and the launch's arguments. What depends on memory or on floating point is unknown: a branch on it
falls through, and a loop that ends so runs as often as the caller says, else counts as guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .flow import NaturalLoop, natural_loops
from .sass import Counts
from .scalar import REGISTER, SCALAR, Evaluate, Op, Registers, evaluator, is_scalar, written

MAX_STEPS = 2_000_000


@dataclass
class Block:
    """Instructions that run together, from a label or a branch to the next."""

    label: str
    ops: list[Op] = field(default_factory=list)


_STATEMENT = re.compile(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):")


def _operands(text: str) -> tuple[str, ...]:
    """Split at the commas that are not inside braces or brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return (*parts, text[start:].strip()) if text.strip() else ()


class Run(NamedTuple):
    """What one thread of one program does."""

    blocks: list[int]  # how often it runs each
    copied: int  # bytes, by cp.async
    guessed: bool  # the end of a loop is not known


class _Step(NamedTuple):
    """An instruction that bears on a branch, as `executions` takes it."""

    kind: str  # "set", "branch", "copy", "end"
    guard: str  # the register of its predicate; "" without
    negated: bool
    ends_a_loop: bool
    stays: bool  # where it ends a loop: taken, the loop goes on
    number: int  # the block that a branch goes to; the bytes of a copy
    names: list[str]  # registers that it writes; of a copy the one with its own size
    value: Evaluate


class Ptx:
    """One kernel's PTX as blocks in program order."""

    def __init__(self, text: str):
        _, _, body = text.partition(".entry ")
        signature, _, body = body.partition("{")
        self.parameters = re.findall(r"\.param \S+ .*?(\w+_param_\d+)", signature)
        threads = re.search(r"\.reqntid (\d+)", signature)
        self.num_warps = int(threads[1]) // 32 if threads else 0
        self.blocks = [Block("")]
        body = re.sub(r"//[^\n]*|^\s*\.(?:loc|pragma|file|section)[^\n]*", "", body, flags=re.M)
        body = re.sub(r"^\$L__tmp\d+:$", "", body, flags=re.M)  # places of line numbers
        for piece in body.split(";"):
            self._add(piece)

    def _add(self, text: str) -> None:
        text = text.strip().lstrip("{}").strip()
        while match := _LABEL.match(text):
            self.blocks.append(Block(match[1]))
            text = text[match.end() :].strip().lstrip("{}").strip()
        match = _STATEMENT.fullmatch(text)
        if match is None:  # declarations
            return
        op = Op(match[1] or "", match[2], _operands(match[3]))
        self.blocks[-1].ops.append(op)
        if op.leaves:
            self.blocks.append(Block(""))

    @cached_property
    def place(self) -> dict[str, int]:
        """Label -> number of its block."""
        return {block.label: i for i, block in enumerate(self.blocks) if block.label}

    @cached_property
    def successors(self) -> list[list[int]]:
        """The blocks that may follow each."""
        found = []
        for at, block in enumerate(self.blocks):
            following = [at + 1] if at + 1 < len(self.blocks) else []
            last = block.ops[-1] if block.ops else None
            if last is not None and last.leaves:
                following = following if last.guard else []
                following += [self.place[last.operands[0]]] if last.is_branch else []
            found.append(following)
        return found

    @cached_property
    def loops(self) -> list[NaturalLoop]:
        """In the order of their heads."""
        return natural_loops(self.successors)

    @cached_property
    def _deciding(self) -> list[list[Op]]:
        """The ops of each block that bear on a branch."""
        ops = [op for block in self.blocks for op in block.ops]
        writers: dict[str, list[Op]] = {}
        for op in ops:
            for name in written(op):
                writers.setdefault(name, []).append(op)
        wanted: set[str] = set()
        open_ = [op.guard.lstrip("!") for op in ops if op.guard and op.leaves]
        open_ += [op.operands[3] for op in ops if _is_partial_copy(op)]
        while open_:
            name = open_.pop()
            if name in wanted:
                continue
            wanted.add(name)
            for op in filter(is_scalar, writers.get(name, ())):
                open_ += REGISTER.findall(" ".join((op.guard, *op.operands[1:])))
        return [
            [op for op in block.ops if op.leaves or op.is_copy or wanted.intersection(written(op))]
            for block in self.blocks
        ]

    def _ends_a_loop(self, at: int, op: Op) -> tuple[bool, bool]:
        """Whether this branch decides how often a loop runs, and whether taken it stays there.

        One that waits for a copy decides nothing.
        """
        target = self.place.get(op.operands[0]) if op.operands else None
        waits = any("try_wait" in other.name for other in self.blocks[at].ops)
        ended = [
            loop
            for loop in self.loops
            if at in loop.blocks and (loop.head == target or target not in loop.blocks)
        ]
        return bool(ended) and not waits, any(loop.head == target for loop in ended)

    @cached_property
    def work(self) -> list[tuple[Counts, Traffic]]:
        """What a warp does in each block."""
        return [(count(block.ops), traffic(block.ops)) for block in self.blocks]

    @cached_property
    def _program(self) -> list[list[_Step]]:
        """What decides the branches of each block, read once for all programs and launches."""
        return [[self._step(at, op) for op in ops] for at, ops in enumerate(self._deciding)]

    def _step(self, at: int, op: Op) -> _Step:
        kind, number, names, value = "set", 0, written(op), evaluator(op)
        if op.is_branch:
            kind, number = "branch", self.place[op.operands[0]]
        elif op.leaves:
            kind = "end"
        elif op.is_copy:
            kind, number = "copy", int(op.operands[2], 0)
            names = [op.operands[3]] if _is_partial_copy(op) else []
        ends, stays = self._ends_a_loop(at, op) if op.guard and op.leaves else (False, False)
        guard = op.guard.lstrip("!")
        return _Step(kind, guard, op.guard != guard, ends, stays, number, names, value)

    def executions(
        self,
        arguments: Sequence[int | None],  # of the kernel, in order; None: not an integer
        program: Sequence[int],  # its ids, up to three
        grid: Sequence[int],
        thread: int = 0,
        trips: int | None = None,  # how often a loop runs whose end is unknown
    ) -> Run:
        """How often one program of a launch runs each block, by one of its threads."""
        registers: Registers = dict(zip(self.parameters, arguments, strict=False))
        for axis, i, n in zip("xyz", (*program, 0, 0), (*grid, 1, 1), strict=False):
            registers |= {f"%ctaid.{axis}": i, f"%nctaid.{axis}": n}
        registers |= {"%tid.x": thread, "%tid.y": 0, "%tid.z": 0, "%laneid": thread % 32}
        registers |= {"%ntid.x": 32 * self.num_warps, "%clusterid.x": program[0]}
        counts = [0] * len(self.blocks)
        gone = [0] * len(self.blocks)  # round a loop whose end is unknown, since it was entered
        at, steps, copied, guessed = 0, 0, 0, False
        while at < len(self.blocks):
            counts[at] += 1
            steps += 1 + len(self._program[at])
            if steps > MAX_STEPS:
                return Run(counts, copied, True)
            following = at + 1
            for kind, guard, negated, ends_a_loop, stays, number, names, value in self._program[at]:
                holds = True
                if guard:
                    known = registers.get(guard)
                    holds = known is not None and bool(known) != negated
                    if known is None:
                        if ends_a_loop and trips is not None:
                            gone[at] = (gone[at] + 1) % trips
                            holds = (gone[at] > 0) == stays
                        else:
                            guessed |= ends_a_loop
                        if kind == "set":
                            registers |= dict.fromkeys(names)
                if not holds:
                    continue
                if kind == "set":
                    if len(names) == 1:
                        registers[names[0]] = value(registers)
                    else:
                        registers |= dict.fromkeys(names)
                elif kind == "branch":
                    following = number
                    break
                elif kind == "copy":
                    own = registers.get(names[0]) if names else None
                    copied += number if own is None else own
                else:
                    return Run(counts, copied, guessed)
            at = following
        return Run(counts, copied, guessed)


def _is_partial_copy(op: Op) -> bool:
    """A cp.async with a size of its own: 0 where the load is masked."""
    return op.is_copy and len(op.operands) > 3 and op.operands[3].startswith("%")


_WGMMA = re.compile(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)")
_MMA = re.compile(r"mma\.sync\S*\.m(\d+)n(\d+)k(\d+)")
_VECTOR = re.compile(r"(?:\.v(\d))?\.[subf](\d+)$")
_SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
_FLOAT = {"add", "sub", "mul", "fma"}


class Traffic(NamedTuple):
    """What a block asks of memory outside its SM: bytes a warp, and bytes a program by TMA."""

    loaded: int
    copied: int  # by cp.async
    stored: int
    bulk: int  # of a program: what its barriers expect


def _moved(name: str) -> int:
    """Bytes a warp moves by one ld or st."""
    match = _VECTOR.search(name)
    return 4 * int(match[1] or 1) * int(match[2]) if match else 128


def traffic(ops: Sequence[Op]) -> Traffic:
    expected = [op.operands[-1] for op in ops if "expect_tx" in op.name]
    return Traffic(
        sum(_moved(op.name) for op in ops if op.name.startswith("ld.global")),
        sum(32 * int(op.operands[2], 0) for op in ops if op.is_copy),
        sum(_moved(op.name) for op in ops if op.name.startswith("st.global")),
        sum(int(text, 0) for text in expected if text[:1].isdigit()),
    )


def count(ops: Sequence[Op]) -> Counts:
    """What one warp does where it runs these instructions once, by the classes of sass.count."""
    products: Counter[tuple[str, int, int, int]] = Counter()
    special = fp32 = integer = shared = operand_bytes = 0
    for op in ops:
        kind = op.name.split(".")[0]
        if match := _WGMMA.match(op.name):
            M, N, K = (int(size) for size in match.groups())
            products["HGMMA", M, N, K] += 1
            from_registers = op.operands[1].startswith("{")
            operand_bytes += (N + M * (not from_registers)) * 32 // 4  # a row of K is 32 bytes
        elif match := _MMA.match(op.name):
            M, N, K = (int(size) for size in match.groups())
            products["HMMA", M, N, K] += 1
        elif kind in _SPECIAL:
            special += 1
        elif kind == "div" and op.name.endswith("f32"):
            special, fp32 = special + 1, fp32 + 1
        elif kind in _FLOAT and op.name.endswith("f32"):
            fp32 += 1
        elif op.name.startswith(("ld.shared", "st.shared")):
            shared += _moved(op.name)
        elif op.name.startswith(("ldmatrix", "stmatrix")):
            shared += 128 * int(op.name.partition(".x")[2][:1] or 1)
        elif kind in SCALAR | {"lop3", "prmt", "shf", "bfi", "mul24", "min", "max"}:
            integer += kind not in ("ld", "mov", "cvta")
    return Counts(
        instructions=len(ops),
        products=tuple((*shape, n) for shape, n in sorted(products.items())),
        special=special,
        fp32=fp32,
        integer=integer,
        shared_bytes=shared,
        async_bytes=traffic(ops).copied,
        barriers=sum(op.name.startswith(("bar.sync", "barrier.sync")) for op in ops),
        waits=sum(op.name.startswith("wgmma.wait") for op in ops),
        operand_bytes=operand_bytes,
    )
