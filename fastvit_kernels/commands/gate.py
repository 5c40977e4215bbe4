"""The gate of `fastvit-kernels compile`: compiles CASES for every target and applies the rules.

It fails where a kernel does not compile, spills, asks for more shared memory than a block may have,
misses wgmma on sm_90, has one of the faults of tools/faults.py, or takes more than
docs/resources.md says.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ..tools.aot import TARGETS, CompileError, Kernel, trace_step
from ..tools.examine import examine
from .resources import compare, resources_page
from .steps import CASES, LISTED, LISTED_ONLY


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


def _compile_case(task: tuple[str, str]) -> tuple[list[Kernel], list[str]]:
    """The kernels of one of CASES for one target, and what does not compile."""
    arch, case = task
    kernels: dict[str, Kernel] = {}
    try:
        for launch in trace_step(CASES[case], TARGETS[arch]).launches:
            if launch.kernel.key not in kernels:
                kernels[launch.kernel.key] = examine(launch)
    except CompileError as error:
        return list(kernels.values()), [f"{case}: {error}"]
    return list(kernels.values()), []


def compile_cases(archs: Sequence[str], jobs: int) -> tuple[list[Kernel], list[str]]:
    """The kernels of CASES for these targets, each once, and what does not compile."""
    tasks = [
        (arch, case)
        for arch in archs
        for case in CASES
        if arch in LISTED or case not in LISTED_ONLY
    ]
    # spawned: a fork would carry the state of torch's and LLVM's threads
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_compile_case, tasks))
    kernels: dict[str, Kernel] = {}
    for found, _ in results:
        for kernel in found:
            kernels.setdefault(kernel.key, kernel)
    return list(kernels.values()), [error for _, errors in results for error in errors]


def run_gate(archs: Sequence[str], table: Path, update: bool, jobs: int | None) -> int:
    """Compile, apply the rules, compare with the table. 0 where all hold.

    Args:
        archs: targets; the table is written only where they are all.
        jobs: processes; one for each processor by default.
    """
    started = time.perf_counter()
    kernels, problems = compile_cases(archs, jobs or os.cpu_count() or 1)
    problems += broken_rules(kernels)
    if update:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(resources_page(kernels))
        print(f"wrote {table}")
    elif not table.is_file():
        problems.append(f"there is no table {table}; write it with --gate --update")
    else:
        try:
            regressions, remarks = compare(kernels, table.read_text())
        except ValueError as error:
            regressions, remarks = [f"{table} cannot be read: {error}"], []
        print(*remarks, sep="\n", end="\n" if remarks else "")
        problems += [f"more than {table} says: {line}" for line in regressions]
    print(*problems, sep="\n", end="\n" if problems else "")
    for arch in archs:
        count = sum(k.arch == arch for k in kernels)
        print(f"{arch}: {count} specialisations", end="; ")
    print(f"{time.perf_counter() - started:.0f} s")
    print("compile gate: " + (f"{len(problems)} problems" if problems else "every rule holds"))
    return 1 if problems else 0
