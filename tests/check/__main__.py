"""Check every op by the 2x rule, each case in a process that may hang or crash.

    python -m tests.check --jobs 4
    python -m tests.check --all-configs         every launch config that ships, twice for equal bits

`fastvit-kernels check` runs the same cases. A process that says nothing for --case-timeout is
killed and named, one that crashes costs no other case. --json prints a line as each case ends, then
a line that sums up.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastvit_kernels.accuracy.runner import Result, quiet_interpreter
from fastvit_kernels.commands import check, options
from fastvit_kernels.commands.console import CommandError, aligned, refusing
from fastvit_kernels.runtime.configs import TABLES

from . import all_configs
from .all_configs import Run
from .results_cache import ResultsCache
from .selection import NoSuchCase, Selection, as_dict, run_cases, run_configs

CASE_TIMEOUT = 300.0  # seconds
CUT_SHORT = 3  # exit status where --time-budget left something out
CONFIG_HEADER = ("table", "shipped", "forced", "runs", "worst error / limit", "")


def config_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each table of configs."""
    rows = []
    for name, table in sorted(TABLES.items()):
        mine = [run for run in runs if run.table == name]
        configs = {run.config for run in mine}
        faults = sum(run.fault is not None for run in mine)
        worst = max((run.share for run in mine), default=0.0)
        verdict = f"{faults} FAILED" if faults else "ok" if mine else "not reached"
        counts = (str(len(table.configs)), str(len(configs)), str(len(mine)))
        rows.append((name, *counts, f"{worst:.2f}", verdict))
    return rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_selection(parser)
    add = parser.add_argument
    add("--all-configs", action="store_true", help="every launch config that ships, each forced")
    add(
        "--case-timeout",
        type=options.positive(float),
        metavar="SECONDS",
        default=CASE_TIMEOUT,
        help=f"of silence, after which a process of --jobs is killed (default {CASE_TIMEOUT:.0f})",
    )
    cut = f"run nothing more after these; the exit status is {CUT_SHORT} if that left something out"
    options.add(parser, "--time-budget", help=cut)
    add(
        "--keep",
        type=Path,
        metavar="FILE",
        help="write each result to FILE; what FILE has is not run again with the same sources",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    device, dtypes, jobs = check.selected(arguments)
    with refusing(f"--keep {arguments.keep}", OSError, ValueError):
        kept = ResultsCache(arguments.keep)
    wanted = Selection(
        device,
        dtypes,
        arguments.only,
        jobs,
        arguments.case_timeout,
        kept,
        arguments.time_budget or math.inf,
    )
    every = arguments.all_configs
    found: Iterator[Result | Run] = run_configs(wanted) if every else run_cases(wanted)
    results: list[Any] = []
    started = time.perf_counter()
    with refusing(f"--only {arguments.only}", NoSuchCase), quiet_interpreter():
        for result in found:
            results.append(result)
            if arguments.json:
                as_line = result.as_dict() if isinstance(result, Result) else as_dict(result)
                check.print_json(as_line)
            elif not result.passed:  # at once: what is wrong comes first
                print(f"FAILED {result.label}: {result.why}", flush=True)
    failed = [result.label for result in results if not result.passed]
    passed = not failed
    # a selection, or what the time allowed, need not reach every table
    if every and not (arguments.only or wanted.left_out):
        passed = all_configs.passed(results)
    if arguments.json:
        check.print_json(check.summary(passed, len(results), failed, device))
    else:
        if every:
            print(aligned([CONFIG_HEADER, *config_rows(results)]))
            forced = {(run.table, run.config) for run in results}
            shipped = sum(len(table.configs) for table in TABLES.values())
            print(f"{len(forced)} of {shipped} configs of {len(TABLES)} tables fit here and ran")
        what = "runs of config and case, each twice for equal bits," if every else "cases"
        seconds = time.perf_counter() - started
        print(
            f"{len(results) - len(failed)} of {len(results)} {what} passed, {seconds:.0f} s, "
            f"{check.where(device)}"
        )
        if wanted.left_out:
            print(f"the time is over: {wanted.left_out} did not run.")
    return CUT_SHORT if wanted.left_out else int(not passed)


def main(words: Sequence[str] | None = None) -> int:
    """The command: 0; 1 where a kernel breaks the 2x rule or raises; 2 for a mistake in the words;
    3 where time was too short."""
    arguments = build_parser().parse_args(words)
    try:
        return _run(arguments)
    except CommandError as error:
        print(f"tests.check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
