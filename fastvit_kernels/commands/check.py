"""Compare every kernel, forward and backward, with float64 on this machine.

The table shows each output's and gradient's error, PyTorch's own error in the same dtype, and the
limit of the 2x rule (docs/numerics.md). Without a GPU the kernels run in Triton's interpreter, in
fp32 and fp16 only, because it multiplies bf16 wrongly.

--json prints a line as each case ends, then a summary line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from ..accuracy.accuracy import Error
from ..accuracy.cases import cases_on
from ..accuracy.op import Case
from ..accuracy.runner import Result, first_line, quiet_interpreter, run_case
from ..measure.compare import machine_on
from ..runtime.backend import INTERPRETED
from ..runtime.dtypes import DTYPES
from . import options
from .console import CommandError, finite

COLUMNS = ("max error", "PyTorch's", "limit", "RMS error", "PyTorch's", "limit")
LINE = "{:50}  {:5}" + 6 * "  {:>9}" + "  {}"
MOST_JOBS = 14  # by default, on a GPU: each has a CUDA context and compiles kernels


def _rows(result: Result, every: bool) -> list[Error]:
    """The output and the gradient nearest their limits; every tensor where asked or failed."""
    if every or not result.passed:
        return result.errors
    parts = [[e for e in result.errors if e.name.startswith("d") == d] for d in (False, True)]
    return [max(part, key=lambda e: e.share) for part in parts if part]


def _print(result: Result, every: bool) -> None:
    """Its lines of the table, then what is wrong with it."""
    for e in _rows(result, every):
        values = (e.max, e.torch_max, e.limit_max, e.rms, e.torch_rms, e.limit_rms)
        cells = (f"{value:.1e}" for value in values)
        verdict = "ok" if e.passed else "FAILED"
        print(LINE.format(f"{result.name}: {e.name}", result.dtype, *cells, verdict))
    if not result.passed:
        print(f"FAILED {result.label}: {result.why}")
    sys.stdout.flush()


def where(device: torch.device) -> str:
    name = machine_on(device)["device"]
    return name if device.type == "cuda" else f"Triton's interpreter on a {name}"


def print_json(content: dict[str, Any]) -> None:
    """One line; a number that is not finite is null."""
    print(json.dumps(finite(content)), flush=True)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that say what is checked."""
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains TEXT")
    options.add(parser, "--dtype", help="one dtype (default: all supported)")
    options.add(parser, "--device", "--json")
    parser.add_argument(
        "--jobs",
        type=options.within(int, 0, options.MOST_PROCESSES),
        metavar="N",
        help=f"processes; 0: only this one (default 0, on a GPU up to {MOST_JOBS})",
    )


def selected(arguments: argparse.Namespace) -> tuple[torch.device, list[str], int]:
    """Device, dtypes and processes: those asked for, else those that run here."""
    if INTERPRETED and arguments.device is None:
        arguments.device = "cpu"
    device = options.chosen_device(arguments)
    options.require_kernels(device, arguments.dtype)
    dtypes = [arguments.dtype] if arguments.dtype else list(DTYPES)
    if INTERPRETED and arguments.dtype is None:
        dtypes.remove("bf16")
    dtypes.sort(key=lambda name: name != "bf16")  # what models train in comes first
    if arguments.jobs is None:
        arguments.jobs = min(MOST_JOBS, os.cpu_count() or 1) if device.type == "cuda" else 0
    return device, dtypes, arguments.jobs


def summary(
    passed: bool, cases: int, failed: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """The line that ends --json."""
    return {
        "passed": passed,
        "cases": cases,
        "failed": failed,
        "device": where(device),
        "interpreted": INTERPRETED,
        "versions": machine_on(device),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("--all", action="store_true", help="a row for every gradient")


def _run_named(device: torch.device, dtype: str, name: str) -> Result:
    """What a process of --jobs does."""
    (case,) = (case for case in cases_on(device, dtype) if case.name == name)
    return run_case(case, dtype)


def run_cases(pairs: Sequence[tuple[str, Case]], device: torch.device, jobs: int) -> Iterator[Any]:
    """The result of each (dtype, case) as it ends."""
    if not jobs:
        yield from (run_case(case, dtype) for dtype, case in pairs)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = {
            pool.submit(_run_named, device, dtype, case.name): (case.name, dtype)
            for dtype, case in pairs
        }
        for done in as_completed(waiting):
            error = done.exception()  # of a process that died
            lost = None if error is None else Result(*waiting[done], [], first_line(error), 0.0)
            yield lost or done.result()


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where a kernel breaks the 2x rule or raises."""
    device, dtypes, jobs = selected(arguments)
    every = [(dtype, case) for dtype in dtypes for case in cases_on(device, dtype)]
    pairs = [(dtype, case) for dtype, case in every if arguments.only in case.name]
    if not pairs:
        known = ", ".join(dict.fromkeys(case.name.split(",")[0] for _, case in every))
        raise CommandError(
            f"--only {arguments.only}: no case has it in its name; there are cases of {known}"
        )
    results: list[Result] = []
    started = time.perf_counter()
    if not arguments.json:
        print(LINE.format("kernel and tensor", "dtype", *COLUMNS, ""))
    with quiet_interpreter():
        for result in run_cases(pairs, device, jobs):
            results.append(result)
            if arguments.json:
                print_json(result.as_dict())
            else:
                _print(result, arguments.all)
    failed = [result.label for result in results if not result.passed]
    if arguments.json:
        print_json(summary(not failed, len(results), failed, device))
        return int(bool(failed))
    tensors = sum(len(result.errors) for result in results)
    print(
        f"{len(results) - len(failed)} of {len(results)} cases passed ({tensors} outputs and "
        f"gradients, {time.perf_counter() - started:.0f} s), {where(device)}. An error may be "
        "twice PyTorch's own in the same dtype plus rounding, both against float64."
    )
    if INTERPRETED and arguments.dtype is None:
        print("bf16 needs a GPU: Triton's interpreter multiplies it wrongly.")
    return int(bool(failed))
