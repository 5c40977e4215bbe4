"""The integer instructions of PTX as Python functions: each is read once and run many times.

A register whose value no instruction here can tell is unknown: None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

Registers = dict[str, "int | None"]
Evaluate = Callable[[Registers], "int | None"]


class Op(NamedTuple):
    """One instruction; `guard` is its predicate, with "!" in front where it is negated."""

    guard: str
    name: str  # "add.s32"
    operands: tuple[str, ...]

    @property
    def is_branch(self) -> bool:
        return self.name.startswith("bra")

    @property
    def leaves(self) -> bool:
        """Whether another block, or none, may follow it."""
        return self.is_branch or self.name in ("ret", "exit")

    @property
    def is_copy(self) -> bool:
        """cp.async.ca or .cg; cp.async.commit_group has no operands."""
        return self.name.startswith("cp.async.c") and len(self.operands) > 2


REGISTER = re.compile(r"%[a-z]+\d+")
_WIDTH = re.compile(r"\.([subf])(8|16|32|64)\b")
_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}


def _quotient(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) % abs(b) * (-1 if a < 0 else 1)


_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _quotient,
    "rem": _remainder,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
}
SCALAR = {*_BINARY, "ld", "selp", "mov", "cvta", "cvt", "setp", "not", "neg", "abs", "bfe", "mad"}


def is_scalar(op: Op) -> bool:
    """Whether `evaluator` may know the result from known operands."""
    return op.name.split(".")[0] in SCALAR and (
        not op.name.startswith("ld") or op.name.startswith("ld.param")
    )


def written(op: Op) -> list[str]:
    """The registers that an instruction writes."""
    if not op.operands or op.name.startswith(("st.", "bra", "bar", "red.", "cp.")):
        return []
    return REGISTER.findall(op.operands[0])


def _unknown(registers: Registers) -> None:
    return None


def _reader(text: str, bits: int, signed: bool) -> Evaluate:
    """Reads an operand: a register of this width, a constant, or what the launch gives by name."""
    text = text.strip("[] ")
    if REGISTER.fullmatch(text):
        mask, sign = (1 << bits) - 1, 1 << (bits - 1) if signed else 0

        def read(registers: Registers) -> int | None:
            value = registers.get(text)
            return None if value is None else ((value & mask) ^ sign) - sign

        return read
    try:
        constant = int(text, 0)
    except ValueError:
        return lambda registers: registers.get(text)
    return lambda registers: constant


def evaluator(op: Op) -> Evaluate:
    """What an integer instruction with one result makes of the registers' values."""
    kind, *modifiers = op.name.split(".")
    types = _WIDTH.findall(op.name)
    predicate = op.name.endswith(".pred")
    if (not types and not predicate) or (types and types[-1][0] == "f"):
        return _unknown
    signed, bits = (False, 1) if predicate else (types[-1][0] == "s", int(types[-1][1]))
    sources = op.operands[1:]
    read = [_reader(source, bits, signed) for source in sources]
    if kind == "ld":
        return read[0] if "param" in modifiers else _unknown
    if kind == "selp":
        return _selected(read[0], read[1], sources[2])
    if kind in ("mov", "cvta", "cvt"):
        return read[0]
    if kind in ("not", "neg", "abs"):
        mask = (1 << bits) - 1
        f = {"not": lambda a: ~a & mask, "neg": lambda a: -a, "abs": abs}[kind]
        return _applied(f, read[0])
    if kind == "bfe" and not signed:
        return _applied(lambda a, b, c: (a >> b) & ((1 << c) - 1), *read)
    if kind == "mad" and "hi" not in modifiers:
        return _applied(lambda a, b, c: a * b + c, *read)
    if kind == "setp" and len(modifiers) == 2:
        compare = _COMPARE[modifiers[0]]
        return _applied(lambda a, b: int(compare(a, b)), *read)
    if kind in _BINARY and "hi" not in modifiers and len(read) == 2:
        return _applied(_BINARY[kind], *read)
    return _unknown


def _selected(first: Evaluate, second: Evaluate, condition: str) -> Evaluate:
    def value(registers: Registers) -> int | None:
        chosen = registers.get(condition)
        return None if chosen is None else (first if chosen else second)(registers)

    return value


def _applied(f: Callable[..., int | None], *read: Evaluate) -> Evaluate:
    """f of the operands; unknown where one is."""

    def value(registers: Registers) -> int | None:
        operands = [one(registers) for one in read]
        return None if None in operands else f(*operands)

    return value
