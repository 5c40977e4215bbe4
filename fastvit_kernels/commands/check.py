"""Compare every kernel, forward and backward, with float64 on this machine.

The table shows the error of each output and gradient beside PyTorch's own in the same dtype, and
the limit of the 2x rule (docs/numerics.md). On a GPU the kernels run there; without one they run in
Triton's interpreter, in fp32 and fp16: that multiplies bf16 wrongly.

With --all-configs every launch config that ships is forced in turn, not the default alone, and run
twice for equal bits. With --jobs each case has a process of its own: one that hangs is killed after
--case-timeout, one that crashes costs no other.

--json prints a line as each case ends, then a line that sums up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..runtime.backend import INTERPRETED
from ..runtime.configs import TABLES
from ..runtime.dtypes import DTYPES
from ..runtime.triton import HAS_TRITON, triton
from ..runtime.tuned_table import fields
from ..verify import all_configs
from ..verify.accuracy import Error
from ..verify.all_configs import Run
from ..verify.plain_vit import worst_error
from ..verify.results_cache import ResultsCache, finite
from ..verify.runner import Result, quiet_interpreter
from ..verify.selection import NoSuchCase, Selection, as_dict, run_cases, run_configs
from . import options
from .console import (
    ERROR_COLUMNS,
    aligned,
    error_cells,
    make_console,
    make_table,
    refusing,
    require,
)

CASE_TIMEOUT = 300.0  # seconds
MOST_JOBS = 14  # by default, on a GPU: each has a CUDA context and compiles kernels
CUT_SHORT = 3  # exit status where --time-budget left something out


def _rows(result: Result, every: bool) -> list[Error]:
    """The output and the gradient nearest their limits; every tensor where asked or failed."""
    if every or not result.passed:
        return result.errors
    outputs = [e for e in result.errors if not e.name.startswith("d")]
    gradients = [e for e in result.errors if e.name.startswith("d")]
    return [worst_error(part) for part in (outputs, gradients) if part]


def _table(results: list[Result], every: bool) -> Any:
    escape = require("rich.markup", "rich").escape
    table = make_table("kernel and tensor", "dtype", figures=ERROR_COLUMNS)
    table.add_column("")
    for name in dict.fromkeys(result.name for result in results):
        table.add_row(f"[bold]{escape(name)}[/bold]")
        for result in (r for r in results if r.name == name):
            if result.failure is not None:
                failed = ("  [red]raised[/red]", result.dtype, *[""] * 6, "[red]FAILED[/red]")
                table.add_row(*failed)
            for e in _rows(result, every):
                verdict = "ok" if e.passed else "[red]FAILED[/red]"
                table.add_row(f"  {e.name}", result.dtype, *error_cells(e), verdict)
    return table


CONFIG_HEADER = ("table", "shipped", "forced", "runs", "worst error / limit", "")


def config_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each table of configs."""
    rows = []
    for name, table in sorted(TABLES.items()):
        mine = [run for run in runs if run.table == name]
        configs = {run.config for run in mine}
        faults = sum(run.fault is not None for run in mine)
        worst = max((run.share for run in mine), default=0.0)
        rows.append(
            (
                name, str(len(table.configs)), str(len(configs)), str(len(mine)), f"{worst:.2f}",
                f"{faults} FAILED" if faults else "ok" if mine else "not reached",
            )
        )  # fmt: skip
    return rows


def _name(found: Result | Run) -> str:
    if isinstance(found, Result):
        return f"{found.name}, {found.dtype}"
    config = {} if found.config is None else fields(found.config)
    return f"{found.table} [{','.join(f'{k}={v}' for k, v in config.items())}], {found.case}"


def _fault(found: Result | Run) -> str | None:
    """What is wrong with it, in a line."""
    if isinstance(found, Run):
        return found.fault
    return None if found.passed else found.why


def _print_json(content: dict[str, Any]) -> None:
    """One line; a number that is not finite is null."""
    print(json.dumps(finite(content)), flush=True)


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"Triton's interpreter on a {platform.machine()} CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastvit-kernels check`."""
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains TEXT")
    options.add_dtype(parser, tuple(DTYPES), help="one dtype (default: each that runs)")
    options.add_device(parser)
    parser.add_argument("--all", action="store_true", help="a row for every gradient")
    options.add_json(parser)
    parser.add_argument(
        "--all-configs", action="store_true", help="every launch config that ships, each forced"
    )
    parser.add_argument(
        "--jobs", type=options.within(int, 0, options.MOST_PROCESSES), metavar="N",
        help="cases at once, each in a process of its own; 0: all in this one, in turn (default "
        f"0, on a GPU up to {MOST_JOBS})",
    )  # fmt: skip
    parser.add_argument(
        "--case-timeout", type=options.positive(float), metavar="SECONDS", default=CASE_TIMEOUT,
        help="a process of --jobs that says nothing for so long is killed (default "
        f"{CASE_TIMEOUT:.0f})",
    )  # fmt: skip
    options.add_budget(
        parser, f"run nothing more after these; the exit status is {CUT_SHORT} if that left "
        "something out",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=Path, metavar="FILE",
        help="write each result to FILE as a JSON line; what FILE has is not run again, unless the "
        "package has changed",
    )  # fmt: skip


def _jobs(arguments: argparse.Namespace, device: torch.device) -> int:
    if arguments.jobs is None:
        return min(MOST_JOBS, os.cpu_count() or 1) if device.type == "cuda" else 0
    return arguments.jobs


def run(arguments: argparse.Namespace) -> int:
    """The command: 0; 1 where a kernel breaks the 2x rule or raises; 3 where time was too short."""
    if INTERPRETED and arguments.device is None:
        arguments.device = "cpu"
    device = options.chosen_device(arguments)
    options.require_kernels(device, arguments.dtype)
    dtypes = [arguments.dtype] if arguments.dtype else list(DTYPES)
    if INTERPRETED and arguments.dtype is None:
        dtypes.remove("bf16")
    dtypes.sort(key=lambda name: name != "bf16")  # what models train in comes first
    with refusing(f"--keep {arguments.keep}", OSError, ValueError):
        kept = ResultsCache(arguments.keep)
    wanted = Selection(
        device, dtypes, arguments.only, _jobs(arguments, device), arguments.case_timeout, kept,
        arguments.time_budget or math.inf,
    )  # fmt: skip
    every = arguments.all_configs
    found: Iterator[Result | Run] = run_configs(wanted) if every else run_cases(wanted)
    results: list[Any] = []
    started = time.perf_counter()
    console = make_console(quiet=arguments.json)
    checking = console.status("checking")
    with refusing(f"--only {arguments.only}", NoSuchCase), checking as status, quiet_interpreter():
        for result in found:
            results.append(result)
            status.update(f"checked {_name(result)}")
            if arguments.json:
                _print_json(result.as_dict() if isinstance(result, Result) else as_dict(result))
            elif fault := _fault(result):  # at once: what is wrong comes first
                print(f"FAILED {_name(result)}: {fault}", flush=True)
    failed = [_name(result) for result in results if _fault(result)]
    passed = not failed
    # nobody asks of a selection, nor of what the time allowed, that it reaches every table
    if every and not (arguments.only or wanted.left_out):
        passed = all_configs.passed(results)
    if arguments.json:
        _print_json(_summary(passed, len(results), failed, device))
    else:
        say = _say_configs if every else _say_cases
        say(results, arguments, f"{time.perf_counter() - started:.0f} s", _where(device), console)
    if wanted.left_out and not arguments.json:
        print(f"the time is over: {wanted.left_out} did not run.")
    return CUT_SHORT if wanted.left_out else int(not passed)


def _summary(passed: bool, cases: int, failed: list[str], device: torch.device) -> dict[str, Any]:
    return {
        "passed": passed, "cases": cases, "failed": failed, "device": _where(device),
        "interpreted": INTERPRETED,
        "versions": {
            "fastvit_kernels": __version__, "torch": torch.__version__,
            "triton": triton.__version__ if HAS_TRITON else None,
        },
    }  # fmt: skip


def _say_cases(
    results: list[Result], arguments: argparse.Namespace, took: str, where: str, console: Any
) -> None:
    if not arguments.keep:  # what it keeps says more
        console.print(_table(results, arguments.all))
    passed = sum(result.passed for result in results)
    tensors = sum(len(result.errors) for result in results)
    console.print(
        f"{passed} of {len(results)} cases passed ({tensors} outputs and gradients, {took}), "
        f"{where}. An error may be twice PyTorch's own in the same dtype plus rounding, both "
        "against float64."
    )
    if INTERPRETED and arguments.dtype is None:
        console.print("bf16 needs a GPU: Triton's interpreter multiplies it wrongly.")


def _say_configs(
    runs: list[Run], arguments: argparse.Namespace, took: str, where: str, console: Any
) -> None:
    print(aligned([CONFIG_HEADER, *config_rows(runs)]))
    configs = {(run.table, run.config) for run in runs}
    shipped = sum(len(table.configs) for table in TABLES.values())
    print(
        f"{len(configs)} of {shipped} configs of {len(TABLES)} tables fit here and ran, "
        f"{len(runs)} runs of config and case, each twice for equal bits, {took}, {where}."
    )
