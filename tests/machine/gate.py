"""The gate: compiles the CASES of steps.py for every target and applies the rules.

It fails where a kernel does not compile, spills, asks for more shared memory than a block may have,
misses wgmma on sm_90, has one of the faults of faults.py, or takes more than resources.csv says.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fastvit_kernels.runtime.triton import triton
from tests.machine import aot
from tests.machine.aot import TARGETS, CompileError

from .examine import Examined, examine
from .launches import code_of, trace_step
from .steps import CASES, is_compiled
from .table import compare, read_table, write_table

HERE = Path(__file__).parent
TABLE = HERE / "resources.csv"
# What decides whether a kernel passes: where it changes, every kernel is compiled again.
RULES = (
    "gate",
    "examine",
    "faults",
    "flow",
    "launches",
    "machine_code",
    "ptx",
    "resources",
    "sass",
    "scalar",
)


def broken_rules(kernels: Iterable[Examined]) -> list[str]:
    """What the gate forbids whatever the table says: one sentence for each kernel and rule."""
    found = []
    for k in kernels:
        found += [*k.problems(), *(f"{k}: {fault}" for fault in k.faults)]
    return found


class Compiled(NamedTuple):
    """What compiling the cases gave."""

    kernels: list[Examined]
    errors: list[str]  # what does not compile
    met: set[str]  # digests of all that the cases ask for, compiled or left out


_DONE: set[str] = set()  # digests of what this process has compiled for an earlier case


def _compile_case(task: tuple[str, str, frozenset[str]]) -> Compiled:
    """One of CASES for one target, but for specialisations of these digests."""
    arch, case, known = task
    kernels: dict[str, Examined] = {}
    try:
        trace = trace_step(CASES[case], TARGETS[arch], skip=known | _DONE)
    except CompileError as error:
        return Compiled([], [f"{case}: {error}"], set())
    for launch in trace.launches:
        if launch.digest not in kernels:
            kernels[launch.digest] = examine(launch)
    _DONE.update(kernels)
    return Compiled(list(kernels.values()), [], trace.met)


def compile_cases(
    archs: Sequence[str], jobs: int, known: Iterable[str] = (), every: int = 1
) -> Compiled:
    """CASES for these targets, each kernel once, but for specialisations of these digests."""
    known = frozenset(known)
    tasks = [(arch, case, known) for arch in archs for case in CASES if is_compiled(case, arch)]
    tasks = tasks[::every]
    # spawned: a fork would carry the state of torch's and LLVM's threads
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_compile_case, tasks))
    kernels = {kernel.digest: kernel for found in reversed(results) for kernel in found.kernels}
    errors = [error for found in results for error in found.errors]
    return Compiled(list(kernels.values()), errors, set().union(*(found.met for found in results)))


def rules_digest() -> str:
    """Of the gate's own code, however it is laid out."""
    files = [*(HERE / f"{name}.py" for name in RULES), Path(aot.__file__)]
    code = "".join(code_of(file.read_text()) for file in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class Record(NamedTuple):
    """Beside the table: the triton that it is of, and the rules that its kernels passed."""

    triton: str
    rules: str

    @classmethod
    def read(cls, table: Path) -> Record:
        path = table.with_suffix(".sha256")
        version, rules, *_ = path.read_text().split() if path.is_file() else ("", "")
        return cls(version, rules)

    def write(self, table: Path) -> None:
        table.with_suffix(".sha256").write_text("\n".join((*self, "")))


def run_gate(
    archs: Sequence[str],
    table: Path,
    update: bool,  # write the table, of what broke no rule
    changed: bool,  # leave out what the table has by the same triton and rules
    jobs: int | None,
    every: int = 1,  # compile each so many-th case; above 1 no table is compared
) -> int:
    """Compile, apply the rules, compare with the table. 0 where all hold."""
    started = time.perf_counter()
    record, now = Record.read(table), Record(triton.__version__, rules_digest())
    try:
        rows = read_table(table) if table.is_file() else {}
    except ValueError as error:
        print(f"{table} cannot be read: {error}")
        return 1
    known: set[str] = set()
    if changed and record == now:  # one in 64 is compiled all the same: a row that lies is found
        known = {digest for digest in rows if update or int(digest[:2], 16) >= 4}
    compiled = compile_cases(archs, jobs or os.cpu_count() or 1, known, every)
    kernels = compiled.kernels
    problems = compiled.errors + broken_rules(kernels)
    left_out = compiled.met.intersection(known)
    if update:
        passed = [kernel for kernel in kernels if not broken_rules([kernel])]
        write_table(passed, table, kept=[rows[digest] for digest in left_out])
        now.write(table)
        print(f"wrote {table}")
    elif every > 1:
        print(f"every {every}th case, by the rules alone")
    elif not rows:
        problems.append(f"there is no table {table}; write it with gate --update")
    elif record.triton != now.triton:
        print(f"{table} is of triton {record.triton}, this is {now.triton}: not compared")
    else:
        regressions, remarks = compare(kernels, rows.values(), whole=not known)
        print(*remarks, sep="\n", end="\n" if remarks else "")
        problems += [f"more than {table} says: {line}" for line in regressions]
    print(*problems, sep="\n", end="\n" if problems else "")
    for arch in archs:
        count = sum(k.arch == arch for k in kernels)
        print(f"{arch}: {count} specialisations", end="; ")
    if changed:
        print(f"{len(left_out)} not compiled, since they passed before", end="; ")
    print(f"{time.perf_counter() - started:.0f} s")
    print("compile gate: " + (f"{len(problems)} problems" if problems else "every rule holds"))
    return 1 if problems else 0
