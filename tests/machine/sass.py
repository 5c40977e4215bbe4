"""Reads SASS as nvdisasm prints it: instructions, loops, and what a warp does in each.

Loops are those of the control-flow graph; an inner loop's instructions are its own alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .flow import natural_loops


class Instruction(NamedTuple):
    address: int
    name: str  # "HGMMA.64x64x16.F32.BF16"
    operands: str
    guard: str  # "@P0", "@!UP1" or ""

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """A loop of the code and the instructions that are its own, those of inner loops left out."""

    first: int  # address of its head
    last: int  # of its last instruction
    own: tuple[Instruction, ...]


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_\w+):", re.M)


def instructions(text: str) -> list[Instruction]:
    """Those of the kernel, in program order; branches name addresses."""
    places: dict[str, int] = {}
    found: list[Instruction] = []
    waiting: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _LINE.search(line):
            address = int(match[1], 16)
            places |= dict.fromkeys(waiting, address)
            waiting.clear()
            found.append(Instruction(address, match[3], match[4].strip(), match[2] or ""))
    return [_with_target(one, places) for one in found]


def _with_target(one: Instruction, places: dict[str, int]) -> Instruction:
    target = re.search(r"`\((\.L_\w+)\)", one.operands)
    if one.kind != "BRA" or target is None or target[1] not in places:
        return one
    return one._replace(operands=one.operands.replace(target[0], hex(places[target[1]])))


def _target(one: Instruction) -> int | None:
    match = re.search(r"(0x[0-9a-f]+)$", one.operands) if one.kind == "BRA" else None
    return None if match is None else int(match[1], 16)


def _blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks, and the successors of each."""
    starts = {one.address for one in code[:1]} | {_target(one) for one in code}
    blocks: list[list[Instruction]] = []
    ended = True
    for one in code:
        if ended or one.address in starts:
            blocks.append([])
        blocks[-1].append(one)
        ended = one.kind in ("BRA", "EXIT", "RET")
    place = {block[0].address: i for i, block in enumerate(blocks)}
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1]
        target = _target(last)
        leaves = (
            last.kind in ("BRA", "EXIT", "RET") and last.guard == "" and "UP" not in last.operands
        )
        following = [] if leaves or i + 1 == len(blocks) else [i + 1]
        successors.append(following + ([place[target]] if target in place else []))
    return blocks, successors


def loops(code: list[Instruction]) -> list[Loop]:
    """The loops of a kernel, in the order of their heads."""
    blocks, successors = _blocks(code)
    found = natural_loops(successors)
    result = []
    for loop in found:
        inner = {b for other in found if other.blocks < loop.blocks for b in other.blocks}
        own = [one for b in sorted(loop.blocks - inner) for one in blocks[b]]
        first = blocks[loop.head][0].address
        result.append(Loop(first, max(blocks[b][-1].address for b in loop.blocks), tuple(own)))
    return result


_HGMMA = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
_HMMA = re.compile(r"HMMA\.(16)(8)(\d+)")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
FLOAT = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2"}
CONVERSIONS = {"MUFU", "I2F", "F2I", "F2F"}  # on the unit of special functions
# Neither arithmetic nor logic: control, memory, and what other units do.
ELSEWHERE = {
    "BRA",
    "EXIT",
    "NOP",
    "BAR",
    "WARPSYNC",
    "BSSY",
    "BSYNC",
    "LDC",
    "ULDC",
    "S2R",
    "S2UR",
    "CS2R",
    "SHFL",
    "LDG",
    "STG",
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "LDGSTS",
    "LDGDEPBAR",
    "DEPBAR",
    "HMMA",
    "HGMMA",
    "IMAD",
    "WARPGROUP",
    "FENCE",
    "MEMBAR",
    "SYNCS",
    "UTMALDG",
    "UTMASTG",
    "LDL",
    "STL",
    "R2UR",
    "ERRBAR",
    "CCTL",
    "ELECT",
    "VOTEU",
    "VOTE",
}


@dataclass(frozen=True)
class Counts:
    """What one warp does once in a piece of code."""

    instructions: int
    products: tuple[tuple[str, int, int, int, int], ...]  # (HGMMA or HMMA, M, N, K, how many)
    special: int  # MUFU and conversions
    fp32: int
    integer: int  # arithmetic, logic, minimum, selection: the ALU's
    shared_bytes: int  # of LDS, STS, LDSM, STSM
    async_bytes: int  # of LDGSTS
    barriers: int  # BAR
    waits: int  # WARPGROUP.DEPBAR: until products have ended
    operand_bytes: int = 0  # of shared memory that a warp's quarter of its HGMMA reads

    @property
    def hgmma(self) -> int:
        return sum(count for kind, *_, count in self.products if kind == "HGMMA")


def _bytes(name: str) -> int:
    """Bytes a warp moves by one LDS, STS, LDG, LDGSTS or LDSM."""
    parts = name.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 128 * int(parts[-1] if parts[-1].isdigit() else 1)
    return 4 * next((_BITS[part] for part in parts[1:] if part in _BITS), 32)


def count(code: Iterable[Instruction]) -> Counts:
    """What one warp does where it runs this code once."""
    code = list(code)
    products: Counter[tuple[str, int, int, int]] = Counter()
    operand_bytes = 0
    for one in code:
        if match := _HGMMA.match(one.name):
            M, N, K = (int(size) for size in match.groups())
            products["HGMMA", M, N, K] += 1
            from_registers = re.match(r"R\w+, R\d", one.operands) is not None
            operand_bytes += (N + M * (not from_registers)) * 32 // 4  # a row of K is 32 bytes
        elif match := _HMMA.match(one.name):
            products["HMMA", int(match[1]), int(match[2]), int(match[3])] += 1
    kinds = Counter(one.kind for one in code)
    shared = [one for one in code if one.kind in ("LDS", "STS", "LDSM", "STSM")]
    integer = sum(
        n
        for kind, n in kinds.items()
        if kind not in ELSEWHERE | FLOAT | CONVERSIONS and not kind.startswith("U")
    )
    return Counts(
        instructions=sum(n for kind, n in kinds.items() if kind != "NOP"),
        products=tuple((*shape, n) for shape, n in sorted(products.items())),
        special=sum(kinds[kind] for kind in CONVERSIONS),
        fp32=sum(kinds[kind] for kind in FLOAT) + kinds["IMAD"],
        integer=integer,
        shared_bytes=sum(_bytes(one.name) for one in shared),
        async_bytes=sum(_bytes(one.name) for one in code if one.kind == "LDGSTS"),
        barriers=kinds["BAR"],
        waits=sum(one.name.startswith("WARPGROUP.DEPBAR") for one in code),
        operand_bytes=operand_bytes,
    )
