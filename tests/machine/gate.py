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
    digests: set[str]  # of what was compiled
    known: set[str]  # of what was left out


_DONE: set[str] = set()  # digests of what this process has compiled for an earlier case


def _compile_case(task: tuple[str, str, frozenset[str]]) -> Compiled:
    """One of CASES for one target, but for specialisations of these digests."""
    arch, case, known = task
    kernels: dict[str, Examined] = {}
    try:
        trace = trace_step(CASES[case], TARGETS[arch], skip=known | _DONE)
        for launch in trace.launches:
            if launch.kernel.key not in kernels:
                kernels[launch.kernel.key] = examine(launch)
    except CompileError as error:
        return Compiled(list(kernels.values()), [f"{case}: {error}"], set(), set())
    _DONE.update(trace.digests)
    return Compiled(list(kernels.values()), [], trace.digests, trace.known & known)


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
    kernels = {kernel.key: kernel for found in reversed(results) for kernel in found.kernels}
    errors = [error for found in results for error in found.errors]
    digests = set().union(*(found.digests for found in results))
    met = set().union(*(found.known for found in results))
    return Compiled(list(kernels.values()), errors, digests, met)


def rules_digest() -> str:
    """Of the gate's own code, however it is laid out."""
    files = [*(HERE / f"{name}.py" for name in RULES), Path(aot.__file__)]
    code = "".join(code_of(file.read_text()) for file in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class Record(NamedTuple):
    """Beside the table: the triton that it is of, and the digests of what passed which rules."""

    triton: str
    rules: str
    digests: list[str]

    @classmethod
    def read(cls, table: Path) -> Record:
        path = table.with_suffix(".sha256")
        version, rules, *digests = path.read_text().split() if path.is_file() else ("", "")
        return cls(version, rules, digests)

    def write(self, table: Path) -> None:
        lines = (self.triton, self.rules, *sorted(self.digests), "")
        table.with_suffix(".sha256").write_text("\n".join(lines))

    def passed(self) -> set[str]:
        """Digests of what need not be compiled again. One in sixteen is compiled all the same,
        so that a record that lies is found."""
        current = self.rules == rules_digest()
        return {d for d in self.digests if d[0] != "0"} if current else set()


def run_gate(
    archs: Sequence[str],
    table: Path,
    update: bool,
    changed: bool,
    jobs: int | None,
    every: int = 1,
) -> int:
    """Compile, apply the rules, compare with the table. 0 where all hold.

    Args:
        archs: targets; the table is written only where they are all.
        changed: leave out what passed when the table was written, but for one in sixteen.
        jobs: processes; one for each processor by default.
        every: compile each so many-th case; above 1 the rules apply, and no table is compared.
    """
    started = time.perf_counter()
    record = Record.read(table)
    known = record.passed() if changed else set()
    compiled = compile_cases(archs, jobs or os.cpu_count() or 1, known, every)
    kernels = compiled.kernels
    problems = compiled.errors + broken_rules(kernels)
    if update:
        write_table(kernels, table)
        passed = [] if problems else sorted(compiled.digests)
        Record(triton.__version__, rules_digest(), passed).write(table)
        print(f"wrote {table}")
    elif every > 1:
        print(f"every {every}th case, by the rules alone")
    elif not table.is_file():
        problems.append(f"there is no table {table}; write it with gate --update")
    elif record.triton != triton.__version__:
        print(f"{table} is of triton {record.triton}, this is {triton.__version__}: not compared")
    else:
        try:
            regressions, remarks = compare(kernels, read_table(table), whole=not known)
        except ValueError as error:
            regressions, remarks = [f"{table} cannot be read: {error}"], []
        print(*remarks, sep="\n", end="\n" if remarks else "")
        problems += [f"more than {table} says: {line}" for line in regressions]
    print(*problems, sep="\n", end="\n" if problems else "")
    for arch in archs:
        count = sum(k.arch == arch for k in kernels)
        print(f"{arch}: {count} specialisations", end="; ")
    if changed:
        print(f"{len(compiled.known)} not compiled, since they passed before", end="; ")
    print(f"{time.perf_counter() - started:.0f} s")
    print("compile gate: " + (f"{len(problems)} problems" if problems else "every rule holds"))
    return 1 if problems else 0
