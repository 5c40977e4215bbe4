"""PTX text -> a program: instructions, grouped in blocks that have one way in and one way out.

Every register, constant and special register has a number, its slot. Labels and registers belong
to the braces that they stand in (inline assembly repeats its names). `.loc` says from which line of
Python an instruction comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..ptx import _operands as split_operands
from .faults import MachineError
from .registry import ENDS_BLOCK, INSTRUCTIONS, Run
from .values import TYPES, Array, poison

END = -1  # where a program ends, as the number of a block

_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):(?!:)")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s[^,]*?(\w+_param_\d+)(\[\d+\])?")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_ADDRESS = re.compile(r"\[\s*(%?[\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


class Parameter(NamedTuple):
    name: str
    type: str  # "u64", "f32"; "b8" for a structure passed by value
    size: int  # bytes


Read = Callable[[Sequence[Array]], Array]  # the registers of a group -> an operand's values


@dataclass
class Op:
    """One instruction of a program."""

    program: Program
    line: int  # of the PTX text
    text: str
    name: str  # with all modifiers
    operands: Sequence[str]
    guard: int | None = None  # slot of its predicate
    negated: bool = False
    source: str = ""  # "kernels.py:57"
    names: dict[str, str] = field(default_factory=dict)  # of the scope's registers and labels
    run: Run = lambda group: None
    width: int = 0  # bytes of shared memory that it takes at once; 0: none

    @property
    def where(self) -> str:
        return f"{self.program.name}, PTX line {self.line} ({self.source}): {self.text}"

    def __post_init__(self):
        self.parts = self.name.split(".")

    @property
    def type(self) -> str:
        """The last type of its name: the operands' type, of cvt the source's."""
        return self.parts[-1]

    def has(self, modifier: str) -> bool:
        return modifier in self.parts

    def items(self, place: int) -> Sequence[str]:
        """An operand in braces, as its parts; any other as the only one."""
        text = self.operands[place]
        return split_operands(text[1:-1]) if text.startswith("{") else [text]

    def slot(self, text: str, type: str = "") -> int:
        """Of a register, special register, symbol or constant; a constant takes the type."""
        name = self.names.get(text, text)
        program = self.program
        if name in program.slots:
            return program.slots[name]
        if name.startswith("%"):
            if name not in SPECIAL_REGISTERS:
                raise MachineError(f"no register {name}", self)
            return program.new_slot(name, "b64" if "64" in name else "b32")
        if name in program.shared_symbols:
            return program.constant(program.shared_symbols[name], "b32")
        if name in program.places:
            return program.constant(program.places[name], type or self.type)
        return program.constant(self._number(name), type or self.type)

    def _number(self, text: str) -> int:
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
            return int(text[2:], 16)
        try:
            return int(text.rstrip("U"), 0)
        except ValueError:
            raise MachineError(f"what is {text!r}?", self) from None

    def destination(self) -> int:
        return self.slot(self.operands[0])

    def destinations(self) -> list[int]:
        return [self.slot(text) for text in self.items(0)]

    def reader(self, text: str, type: str = "") -> Read:
        """Reads a register or constant as numbers of this type."""
        type = type or self.type
        slot, dtype = self.slot(text, type), TYPES[type]
        stored = self.program.kinds[slot]
        if stored == dtype:
            return lambda r: r[slot]
        if stored.itemsize == dtype.itemsize:
            return lambda r: r[slot].view(dtype)
        if stored.itemsize < dtype.itemsize:
            raise MachineError(f"{text} is narrower than {type}", self)
        return lambda r: r[slot].astype(f"u{dtype.itemsize}").view(dtype)

    def read(self, place: int, type: str = "") -> Read:
        return self.reader(self.operands[place], type)

    def address(self, place: int, type: str = "b32") -> Read:
        """Reads the address of an operand `[register + offset]`."""
        match = _ADDRESS.fullmatch(self.operands[place])
        if match is None:
            raise MachineError(f"what address is {self.operands[place]!r}?", self)
        base, dtype = self.reader(match[1], type), TYPES[type]
        offset = int(match[2] or "0", 0)
        if offset == 0:
            return base
        number = np.array(offset % 2 ** (8 * dtype.itemsize), dtype)
        return lambda r: base(r) + number

    def pure(self, compute: Read) -> Run:
        """Writes what `compute` makes of the registers to the first operand, where it runs."""
        slot, guard, negated = self.destination(), self.guard, self.negated
        kind = self.program.kinds[slot]

        def run(group):
            r = group.registers
            value = compute(r)
            if value.dtype != kind:
                value = value.view(kind)
            mask = group.mask
            if guard is not None:
                holds = ~r[guard] if negated else r[guard]
                mask = holds if mask is None else holds & mask
            r[slot] = value if mask is None else np.where(mask, value, r[slot])

        return run

    def label(self, text: str) -> int:
        """Number of the block that a label names."""
        return self.program.labels[self.names.get(text, text)]


# What a group fills in when it starts: see execution.py.
SPECIAL_REGISTERS = ("%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z")
SPECIAL_REGISTERS += ("%nctaid.x", "%nctaid.y", "%nctaid.z")

SHARED_BASE = 1024  # where shared memory begins: a multiple of every alignment, and not 0


class Program:
    """A kernel's PTX, ready to run."""

    def __init__(self, text: str):
        self.slots: dict[str, int] = {}
        self.kinds: list[np.dtype] = []  # of each slot
        self.constants: dict[int, Array] = {}  # by slot
        self._constants: dict[tuple[int, np.dtype], int] = {}
        self.labels: dict[str, int] = {}
        self.branch_targets: dict[str, list[str]] = {}  # of brx.idx, by the label of the list
        self.blocks: list[list[Op]] = [[]]  # the last Op may leave its block: ENDS_BLOCK
        self.shared_symbols: dict[str, int] = {}
        before, _, rest = text.partition(".entry ")
        if not rest:
            raise MachineError("there is no .entry in this PTX")
        signature, _, body = rest.partition("{")
        self.name = re.split(r"[\s(]", signature, maxsplit=1)[0]
        self.parameters = [
            Parameter(m[2], m[1], int(m[3][1:-1]) if m[3] else TYPES[m[1]].itemsize)
            for m in _PARAMETER.finditer(signature)
        ]
        self.places: dict[str, int] = {}  # of parameters in their state space, which begins at 0
        self.parameter_bytes = 0
        for name, type, size in self.parameters:
            align = 64 if type == "b8" else size
            self.places[name] = -(-self.parameter_bytes // align) * align
            self.parameter_bytes = self.places[name] + size
        for name in re.findall(r"\.extern \.shared .*?\.b8 (\w+)\[\]", before):
            self.shared_symbols[name] = SHARED_BASE
        threads = re.search(r"\.reqntid (\d+)", signature)
        self.threads = int(threads[1]) if threads else 32
        self.files = {int(m[1]): m[2].rpartition("/")[2] for m in _FILE.finditer(text)}
        first_line = (before + ".entry " + signature).count("\n") + 1
        self._read(body, first_line)
        # Of each block, where threads that part at its end meet again, or END.
        self.meets = immediate_post_dominators(self.successors)
        for op in self.ops:
            try:
                op.run = INSTRUCTIONS[op.name](op)
            except (KeyError, IndexError, ValueError) as error:
                if op.name in INSTRUCTIONS:
                    raise MachineError(f"{type(error).__name__}: {error}", op) from error
                raise MachineError(f"unknown instruction {op.name}", op) from None

    @property
    def ops(self) -> list[Op]:
        return [op for block in self.blocks for op in block]

    @cached_property
    def parts_for_good(self) -> bool:
        """Whether warps take different roles: barriers of some of them alone say so."""
        return any(op.parts[0] in ("barrier", "setmaxnreg") for op in self.ops)

    @cached_property
    def parts_at(self) -> list[bool]:
        """Of each block whether its branch gives warps roles: one side waits for others before the
        sides meet. Where numbers decide, as in erf, they meet at once."""
        return [self.parts_for_good and self._waits_within(i) for i in range(len(self.blocks))]

    def _waits_within(self, at: int) -> bool:
        seen, left = {self.meets[at], END}, list(self.successors[at])
        while left:
            block = left.pop()
            if block in seen:
                continue
            if any(op.parts[0] in _WAITS for op in self.blocks[block]):
                return True
            seen.add(block)
            left.extend(self.successors[block])
        return False

    @cached_property
    def grain(self) -> int:
        """Bytes of the narrowest access to shared memory."""
        return min((op.width for op in self.ops if op.width), default=16)

    def new_slot(self, name: str, type: str) -> int:
        slot = self.slots[name] = len(self.kinds)
        self.kinds.append(register_kind(type))
        return slot

    def constant(self, number: int, type: str) -> int:
        kind = register_kind(type)
        number %= 256**kind.itemsize
        key = number, kind
        if key not in self._constants:
            self._constants[key] = slot = len(self.kinds)
            self.kinds.append(kind)
            self.constants[slot] = np.full((1, 1), number, kind)
        return self._constants[key]

    def initial_registers(self) -> list[Array]:
        """An unwritten register is poison."""
        return [self.constants.get(i, poison(kind)) for i, kind in enumerate(self.kinds)]

    def _read(self, body: str, line: int) -> None:
        scopes: list[dict[str, str]] = [{}]
        source, number = "", 0
        # A statement ends at its semicolon; braces that open or close a scope stand alone.
        text = re.sub(r"//[^\n]*", "", body)
        at = 0
        while at < len(text):
            letter = text[at]
            if letter in " \t\n\r;":
                line += letter == "\n"
                at += 1
            elif letter == "{":
                number += 1
                scopes.append(self._scope(text, at + 1, scopes[-1], number))
                at += 1
            elif letter == "}":
                scopes.pop()
                at += 1
                if not scopes:
                    return
            elif label := _LABEL.match(text, at):
                at = label.end()
                if not label[1].startswith("$L__tmp"):
                    self._begin(scopes[-1].get(label[1], label[1]))
            elif letter == "." and text.startswith((".loc", ".pragma", ".file", ".section"), at):
                end = text.find("\n", at)
                if loc := _LOC.match(text, at):
                    source = f"{self.files.get(int(loc[1]), '?')}:{loc[2]}"
                at = end
            else:
                end = text.find(";", at)
                if end < 0:
                    raise MachineError(f"no end of {text[at : at + 60]!r}")
                self._statement(text[at:end], line, source, scopes[-1])
                line += text.count("\n", at, end)
                at = end + 1

    def _scope(self, text: str, at: int, outer: dict[str, str], number: int) -> dict[str, str]:
        """Names of what is declared inside of a pair of braces, each with the pair's number."""
        depth, end = 1, at
        while depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        inside = text[at : end - 1]
        names = {
            label: f"{label}@{number}"
            for label in re.findall(r"(?:^|[;{}])\s*([\w$]+):(?!:)", inside, re.M)
        }
        return {**outer, **names, "": str(number)}

    def _begin(self, label: str) -> None:
        if self.blocks[-1]:
            self.blocks.append([])
        self.labels[label] = len(self.blocks) - 1
        self._last_label = label

    def _statement(self, text: str, line: int, source: str, names: dict[str, str]) -> None:
        text = " ".join(text.split())
        if text.startswith("."):
            self._declare(text, names, line)
            return
        match = _STATEMENT.fullmatch(text)
        if match is None:
            raise MachineError(f"{self.name}, PTX line {line}: what is {text!r}?")
        op = Op(self, line, text, match[3], split_operands(match[4]), source=source, names=names)
        if match[2]:
            op.guard, op.negated = op.slot(match[2], "pred"), match[1] == "!"
        self.blocks[-1].append(op)
        if op.name in ENDS_BLOCK:
            self.blocks.append([])

    def _declare(self, text: str, names: dict[str, str], line: int) -> None:
        if match := _DECLARED.match(text):
            for name in split_operands(match[2]):
                if many := re.fullmatch(r"(%[\w$]+)<(\d+)>", name):
                    for i in range(int(many[2])):
                        self.new_slot(f"{many[1]}{i}", match[1])
                else:
                    inner = f"{name}@{names['']}" if "" in names else name
                    names[name] = inner
                    self.new_slot(inner, match[1])
        elif text.startswith(".branchtargets"):
            targets = split_operands(text.removeprefix(".branchtargets"))
            self.branch_targets[self._last_label] = targets
        elif not text.startswith(".maxnreg"):
            raise MachineError(f"{self.name}, PTX line {line}: what is {text!r}?")

    @cached_property
    def successors(self) -> list[list[int]]:
        """The blocks that may follow each; END is where the program ends."""
        found = []
        for i, block in enumerate(self.blocks):
            following = i + 1 if i + 1 < len(self.blocks) else END
            last = block[-1] if block else None
            if last is None or last.parts[0] not in ("bra", "ret", "exit", "brx"):
                found.append([following])
                continue
            if last.parts[0] == "brx":
                found.append([last.label(x) for x in self.branch_targets[last.operands[1]]])
                continue
            targets = [END] if last.parts[0] in ("ret", "exit") else [last.label(last.operands[0])]
            found.append(targets + [following] * (last.guard is not None))
        return found


def register_kind(type: str) -> np.dtype:
    """A register holds bits: an unsigned number of its width, or a boolean."""
    return np.dtype(bool) if type == "pred" else np.dtype(f"u{max(TYPES[type].itemsize, 2)}")


_WAITS = ("bar", "barrier", "mbarrier", "setmaxnreg", "wgmma", "brx")


def immediate_post_dominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """Of each block the first that every path from it to the end passes, itself left out."""
    count = len(successors)
    everything = set(range(count))
    after: list[set[int]] = [set(everything) for _ in range(count)]  # all that post-dominate it
    changed = True
    while changed:
        changed = False
        for i in reversed(range(count)):
            ways = [after[s] if s != END else set[int]() for s in successors[i]]
            new = {i} | (set.intersection(*ways) if ways else set())
            if new != after[i]:
                after[i], changed = new, True
    # The nearest one has the most behind it.
    return [max(after[i] - {i}, key=lambda b: len(after[b]), default=END) for i in range(count)]
