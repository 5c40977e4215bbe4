"""The gate of `fastvit-kernels compile`: compiles CASES for every target and applies the rules.

It fails where a kernel does not compile, spills, asks for more shared memory than a block may have,
misses wgmma on sm_90, has one of the faults of tools/faults.py, or takes more than
docs/resources.md says.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .. import tools
from ..tools.aot import CompileError, trace_step
from ..tools.examine import examine
from ..tools.resources import TARGETS, Kernel
from .resources import compare, resources_page
from .steps import CASES, LISTED, LISTED_ONLY
from .training.checkpoint import write_text


def _problems(k: Kernel) -> Iterator[str]:
    if k.shared > k.shared_limit:
        yield f"{k.shared} bytes of shared memory, a block has {k.shared_limit}"
    if k.arch not in LISTED:
        return
    if k.spills:
        yield f"spills {k.spills} bytes a thread"
    if k.arch == "sm_90" and k.needs_tensor_cores and "wgmma" not in k.tensor_cores:
        yield "multiplies 16-bit tiles without wgmma"
    yield from k.faults


def broken_rules(kernels: Iterable[Kernel]) -> list[str]:
    """What the gate forbids whatever the table says: one sentence for each kernel and rule."""
    return [
        f"{k.arch} {k.kernel} [{k.config}; {k.dtypes}]: {problem}"
        for k in kernels
        for problem in _problems(k)
    ]


class Compiled(NamedTuple):
    """What compiling the cases gave."""

    kernels: list[Kernel]
    errors: list[str]  # what does not compile
    digests: set[str]  # of what was compiled
    known: set[str]  # of what was left out


_DONE: set[str] = set()  # digests of what this process has compiled for an earlier case


def _compile_case(task: tuple[str, str, frozenset[str]]) -> Compiled:
    """One of CASES for one target, but for specialisations of these digests."""
    arch, case, known = task
    kernels: dict[str, Kernel] = {}
    try:
        trace = trace_step(CASES[case], TARGETS[arch], known=known | _DONE)
        for launch in trace.launches:
            if launch.kernel.key not in kernels:
                kernels[launch.kernel.key] = examine(launch)
    except CompileError as error:
        return Compiled(list(kernels.values()), [f"{case}: {error}"], set(), set())
    _DONE.update(trace.digests)
    return Compiled(list(kernels.values()), [], trace.digests, trace.known & known)


def compile_cases(archs: Sequence[str], jobs: int, known: Iterable[str] = ()) -> Compiled:
    """CASES for these targets, each kernel once, but for specialisations of these digests."""
    known = frozenset(known)
    tasks = [
        (arch, case, known)
        for arch in archs
        for case in CASES
        if arch in LISTED or case not in LISTED_ONLY
    ]
    # spawned: a fork would carry the state of torch's and LLVM's threads
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_compile_case, tasks))
    kernels = {kernel.key: kernel for found in reversed(results) for kernel in found.kernels}
    errors = [error for found in results for error in found.errors]
    digests = set().union(*(found.digests for found in results))
    met = set().union(*(found.known for found in results))
    return Compiled(list(kernels.values()), errors, digests, met)


def rules_digest() -> str:
    """Of the gate's own code: rules that change are asked of every kernel again."""
    files = [Path(__file__), *sorted(Path(tools.__path__[0]).glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def record_of(table: Path) -> Path:
    """Where --update writes the digests of what passed, beside the table."""
    return table.with_suffix(".sha256")


def passed_before(table: Path) -> set[str]:
    """Digests of what passed these rules when the table was written; some are compiled all the
    same, one in eight, so that a record that lies is found."""
    record = record_of(table)
    rules, *digests = record.read_text().split() if record.is_file() else [""]
    return {d for d in digests if d[0] not in "01"} if rules == rules_digest() else set()


def run_gate(
    archs: Sequence[str], table: Path, update: bool, changed: bool, jobs: int | None
) -> int:
    """Compile, apply the rules, compare with the table. 0 where all hold.

    Args:
        archs: targets; the table is written only where they are all.
        changed: leave out what passed when the table was written, but for one in eight.
        jobs: processes; one for each processor by default.
    """
    started = time.perf_counter()
    known = passed_before(table) if changed else set()
    compiled = compile_cases(archs, jobs or os.cpu_count() or 1, known)
    kernels = compiled.kernels
    problems = compiled.errors + broken_rules(kernels)
    if update:
        table.parent.mkdir(parents=True, exist_ok=True)
        write_text(table, resources_page(kernels))
        passed = [rules_digest(), *([] if problems else sorted(compiled.digests))]
        write_text(record_of(table), "\n".join([*passed, ""]))
        print(f"wrote {table}")
    elif not table.is_file():
        problems.append(f"there is no table {table}; write it with --gate --update")
    else:
        try:
            regressions, remarks = compare(kernels, table.read_text(), whole=not known)
        except ValueError as error:
            regressions, remarks = [f"{table} cannot be read: {error}"], []
        print(*remarks, sep="\n", end="\n" if remarks else "")
        problems += [f"more than {table} says: {line}" for line in regressions]
    print(*problems, sep="\n", end="\n" if problems else "")
    for arch in archs:
        count = sum(k.arch == arch for k in kernels)
        print(f"{arch}: {count} specialisations", end="; ")
    if changed:
        print(f"{len(compiled.known)} not compiled, as {record_of(table)} has them", end="; ")
    print(f"{time.perf_counter() - started:.0f} s")
    print("compile gate: " + (f"{len(problems)} problems" if problems else "every rule holds"))
    return 1 if problems else 0
