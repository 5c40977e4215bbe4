"""What the machine notices: instructions left out or changed, one at a time.

    python -m tests.machine left-out      # writes left_out.csv, beside this file

One launch of each kernel is recorded, with the memory before it. Then each barrier, wait, commit,
mask and swizzle of its program is changed, the launch is run again from the same memory, and the
row says what noticed: a race, poison (NaN where there was none), an access out of bounds, another
value; or why nothing did, from what the unchanged run saw. A store without its mask comes last.
"""

from __future__ import annotations

import csv
import multiprocessing
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.common.samples import keep_samples

from . import left_out_async
from .driver import Recorded, ptx_machine
from .execution import Group
from .faults import Deadlock, Diverged, MachineError, Misaligned, OutOfBounds, Race
from .global_memory import joined_units
from .kernels import cases
from .program import Op, Program
from .registry import INSTRUCTIONS

TABLE = Path(__file__).with_name("left_out.csv")
FAR = 0.01  # of a tensor's RMS: a number that is further off is another value


class Row(NamedTuple):
    target: str
    kernel: str
    case: str  # of `check`, whose launch is changed
    source: str  # the line of Python that the instruction comes from
    line: int  # of the PTX
    instruction: str
    change: str
    noticed: str  # "race", "poison", "bounds", "value", "deadlock"; "" nothing did
    why: str  # where nothing did


@dataclass
class Seen:
    """What the unchanged run saw of an instruction."""

    runs: int = 0  # how often it ran
    held_back: bool = False  # whether its mask ever kept a thread from it


class Change(NamedTuple):
    words: str
    apply: Callable[[Op], None]


def _leave_out(op: Op) -> None:
    op.run = lambda group: None


def _make(op: Op) -> None:
    op.run = INSTRUCTIONS[op.name](op)


def _drop_guard(op: Op) -> None:
    op.guard, op.negated = None, False
    _make(op)


def _store_last(op: Op) -> None:
    """Those that the mask holds back store too, behind the others, who would hide it."""
    address, value, run = op.address(0, "b64"), joined_units(op, 1), op.run

    def store(group: Group):
        run(group)
        active, r = group.active(op), group.registers
        held = ~active if group.mask is None else group.mask & ~active  # pyright: ignore
        addresses, values = np.broadcast_arrays(address(r), value(r))
        group.chunk.at_end.add(lambda _: group.memory.store(addresses, values, held, op))

    op.run = store


def _with_operands(*operands: str) -> Callable[[Op], None]:
    def apply(op: Op) -> None:
        op.operands = list(operands)
        _make(op)

    return apply


def changes(op: Op) -> Iterator[Change]:
    """Every change of one instruction that the table tries."""
    kind = op.parts[0]
    for words, operands in left_out_async.changes(op):
        yield Change(words, _with_operands(*operands) if operands else _leave_out)
    if op.name.startswith(("bar.sync", "bar.warp.sync", "barrier.sync")):
        yield Change("left out", _leave_out)
    elif op.name.startswith(("cp.async.wait", "cp.async.commit")):
        yield Change("left out", _leave_out)
        if op.operands:
            more = str(int(op.operands[0], 0) + 1)
            yield Change(f"waits for all but {more}", _with_operands(more))
    elif op.name.startswith("cp.async") and len(op.operands) > 3:
        yield Change("without its mask", _with_operands(*op.operands[:3]))
    elif kind in ("ld", "st") and op.guard is not None:
        is_stored = op.name.startswith("st.global")
        yield Change("without its mask", _store_last if is_stored else _drop_guard)
    elif op.name == "xor.b32" and _is_address(op):
        a, b = op.operands[1:]
        if b.isdigit():
            yield Change(f"xor {int(b) ^ 16}", _with_operands(op.operands[0], a, str(int(b) ^ 16)))
        else:
            yield Change("xor 0", _with_operands(op.operands[0], a, "0"))


def _is_address(op: Op) -> bool:
    """Whether an address in shared memory is computed from what it writes."""
    program = op.program
    if not hasattr(program, "address_registers"):
        reached: set[str] = set()
        ops = program.ops
        for one in ops:
            if ".shared" in one.name or one.name.startswith("cp.async"):
                place = next((t for t in one.operands if t.startswith("[")), "")
                reached.add(place.strip("[] ").split("+")[0].strip())
        for one in reversed([*ops, *ops]):  # twice, for what a loop carries
            if one.operands and one.operands[0] in reached and one.parts[0] in _COMPUTES:
                reached.update(t for t in one.operands[1:] if t.startswith("%"))
        program.address_registers = reached  # pyright: ignore[reportAttributeAccessIssue]
    return op.operands[0] in program.address_registers  # pyright: ignore


_COMPUTES = ("add", "sub", "xor", "or", "and", "shl", "shr", "mad", "mul", "mov", "bfe")


@contextmanager
def changed(op: Op, change: Change) -> Iterator[None]:
    """Inside, the program has this change."""
    former = op.run, op.guard, op.negated, op.operands
    change.apply(op)
    op.program.__dict__.pop("runs", None)
    try:
        yield
    finally:
        op.run, op.guard, op.negated, op.operands = former
        op.program.__dict__.pop("runs", None)


def watched(recorded: Recorded, ops: Sequence[Op]) -> dict[int, Seen]:
    """Runs the launch as it is; what it saw of these instructions, by PTX line."""
    seen = {op.line: Seen() for op in ops}
    former = [op.run for op in ops]

    def watching(op: Op, run, note: Seen):
        size = (
            op.read(3, "u32") if op.name.startswith("cp.async.c") and len(op.operands) > 3 else None
        )

        def watch(group: Group):
            mask, active = group.mask, group.active(op)
            note.runs += active is None or bool(active.any())
            if op.guard is not None:
                back = ~active if mask is None else mask & ~active  # pyright: ignore
                note.held_back |= bool(back.any())
            if size is not None:
                none = size(group.registers) == 0
                note.held_back |= bool((none if active is None else none & active).any())
            return run(group)

        return watch

    for op in ops:
        op.run = watching(op, op.run, seen[op.line])
    recorded.program.__dict__.pop("runs", None)
    try:
        recorded.run()
    finally:
        for op, run in zip(ops, former, strict=True):
            op.run = run
        recorded.program.__dict__.pop("runs", None)
    return seen


_NAMES = (
    (Race, "race"),
    (OutOfBounds, "bounds"),
    (Misaligned, "bounds"),
    (Deadlock, "deadlock"),
    (Diverged, "parted"),
    *left_out_async.NAMES,
)


def outcome(recorded: Recorded, wanted: Sequence[Tensor], odd: Container[str] = ()) -> str:
    """What notices that the program has been changed; "" nothing.

    Args:
        odd: what the unchanged run noted; anything else is "note".
    """
    try:
        if recorded.program.parts_for_good:
            recorded.run(order=1)
        noted = recorded.run()
    except MachineError as error:
        return next((name for kind, name in _NAMES if isinstance(error, kind)), "error")
    worst = ""
    for x, y in zip(recorded.tensors, wanted, strict=True):
        if x.dtype.is_floating_point:
            if (x.isnan() & ~y.isnan()).any():
                return "poison"
            gap = (x.double() - y.double()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
            finite = y.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            infinite = (x.isinf() != y.isinf()).any()
            if infinite or gap.max() > FAR * finite.square().mean().sqrt():
                worst = "value"
        elif not torch.equal(x, y):
            worst = "value"
    return worst or ("note" if any(text not in odd for text in noted) else "")


def why_not(op: Op, note: Seen, recorded: Recorded) -> str:
    """Why nothing noticed a change, from what the unchanged run saw."""
    if note.runs == 0:
        return "not reached at these sizes"
    if why := left_out_async.why_not(op):
        return why
    if op.name.startswith("bar.warp"):
        return "beyond the machine: it runs the lanes of a warp in lock step"
    if op.name.startswith("bar."):
        if recorded.program.threads == 32:
            return "needless: the block is one warp"
        return "needless: no byte passes from one warp to another over it alone"
    if op.name.startswith("cp.async.wait"):
        return "needless: another wait covers its copies before anyone reads them, or nobody does"
    if op.name.startswith("cp.async.commit"):
        return "needless: the next commit takes its copies, and the waits still cover them"
    if op.parts[0] == "xor":
        return "needless: writers and readers take the same other place"
    if not note.held_back:
        return "needless: the mask is full at these sizes"
    if op.parts[0] == "ld":
        return "needless: it reads inside of a tensor, or poison, that a later mask leaves out"
    if op.name.startswith("st.shared"):
        return "needless: those held back would write the same numbers, or bytes that nobody reads"
    if op.name.startswith("st.global"):
        return "needless: those held back would write the same numbers"
    return "needless: it copies from inside of a tensor what a later mask leaves out"


def record(target: str, only: str = "") -> list[tuple[str, Recorded]]:
    """One launch of each kernel of `check` in bf16, with its case: the one with the most to change.

    Args:
        only: the case to run, by its name; "": all but the model, and on sm_90 `longer`.
    """
    best: dict[str, tuple[int, str, Recorded]] = {}
    for case in cases("check", "bf16"):
        if case.name == "VisionTransformer" or (only and case.name != only):
            continue
        with ptx_machine(target, recorded=[]) as machine:
            case.reference.run(case.function)
        for one in machine.recorded or []:
            name = one.program.name
            size = sum(1 for op in tried(target, one.program) for _ in changes(op))
            size += 10_000 * ("T=260" in case.name)  # whose loops go round
            if name not in best or size > best[name][0]:
                best[name] = size, case.name, one
    found = [(case, one) for size, case, one in best.values() if size]
    if not only:
        found += [pair for pair in others(target) if tried(target, pair[1].program)]
        found += left_out_async.longer() if target == "sm_90" else []
    return found


def others(target: str) -> list[tuple[str, Recorded]]:
    """The kernels that no case of `check` launches."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size).bfloat16() for size in ((2, 37, 100), (100, 100), 100))
    with ptx_machine(target, recorded=[]) as machine:
        with forced_route("library"):
            fk.linear(x, weight, bias, activation="gelu", residual=x)
        fk.mlp(x, weight, bias, weight, bias, residual=x)
        keep_samples(5, 0.5, torch.device("cpu"))
    names = ("linear, the library's product", "mlp without gradients", "keep_samples")
    return list(zip(names, machine.recorded or [], strict=True))


def tried(target: str, program: Program) -> list[Op]:
    """The instructions that the target's table changes."""
    return program.ops if target == "sm_80" else left_out_async.ordering(program)


def rows_of(target: str, case: str, recorded: Recorded, every: int = 1) -> list[Row]:
    """A row for each `every`-th change of its program."""
    program = recorded.program
    pairs = [(op, change) for op in tried(target, program) for change in changes(op)][::every]
    with np.errstate(all="ignore"):
        seen = watched(recorded, list({op.line: op for op, _ in pairs}.values()))
        wanted, odd = [x.clone() for x in recorded.tensors], recorded.run()
        rows = []
        for op, change in pairs:
            note = seen[op.line]
            noticed = ""
            if note.runs:
                with changed(op, change):
                    noticed = outcome(recorded, wanted, odd)
            why = "" if noticed else why_not(op, note, recorded)
            guard = op.text.split(" ")[0] + " " if op.text.startswith("@") else ""
            counts = op.name.startswith(("bar.", "cp.async.wait_group"))
            last = op.operands[-1] if counts else ""
            text = f"{guard}{op.name} {last}"
            place = (target, program.name, case, op.source, op.line)
            rows.append(Row(*place, text.strip(), change.words, noticed, why))
    return rows


def _rows_by_place(task: tuple[str, int, int]) -> list[Row]:
    """Kernels number `place`, `place + of` and so on; each process records them for itself."""
    target, place, of = task
    torch.set_num_threads(1)
    found = sorted(record(target), key=lambda pair: pair[1].program.name)
    rows = []
    for case, one in found[place::of]:
        rows += rows_of(target, case, one)
        print(f"{one.program.name}: {len(rows)} rows", flush=True)
    return rows


def table(targets: Sequence[str], count: int) -> list[Row]:
    tasks = [(target, place, count) for target in targets for place in range(count)]
    if count == 1:
        return [row for task in tasks for row in _rows_by_place(task)]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        return sorted(row for rows in pool.map(_rows_by_place, tasks) for row in rows)


def write(rows: Sequence[Row], path: Path = TABLE) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


def read(path: Path = TABLE) -> list[Row]:
    with open(path, newline="") as file:
        return [Row(**{**row, "line": int(row["line"])}) for row in csv.DictReader(file)]  # pyright: ignore


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """How many of each kind of change were noticed, and by what."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        groups.setdefault((row.target, kind_of(row)), Counter())[row.noticed] += 1
    for (target, kind), by in sorted(groups.items()):
        noticed = ", ".join(f"{name} {n}" for name, n in sorted(by.items()) if name)
        yield f"{target} {kind}: {by.total() - by['']} of {by.total()} noticed ({noticed})"


def kind_of(row: Row) -> str:
    """What is changed, and how."""
    words = row.instruction.split(" ")[row.instruction[0] == "@"].split(".")
    is_new_number = row.change.startswith(("xor", "waits", "expects"))
    head = ".".join(words[: 3 if words[0] == "cp" else 2])
    return f"{head}, {'another number' if is_new_number else row.change}"


def table_of(target: str) -> Path:
    return TABLE if target == "sm_80" else TABLE.with_name(f"left_out_{target}.csv")


def run_left_out(targets: Sequence[str], count: int) -> int:
    for target in targets:
        rows = table([target], count)
        write(rows, table_of(target))
        print("\n".join(summary(rows)))
    return 0
