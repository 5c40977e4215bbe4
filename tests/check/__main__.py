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

import torch

from fastvit_kernels.accuracy.runner import quiet_interpreter
from fastvit_kernels.commands import check, options
from fastvit_kernels.commands.console import CommandError, refusing
from fastvit_kernels.runtime.configs import TABLES
from tests.machine.table import aligned

from . import worker
from .isolated import Item, python, run_isolated
from .results_cache import ResultsCache
from .worker import Line

CASE_TIMEOUT = 300.0  # seconds
CUT_SHORT = 3  # exit status where --time-budget left something out
CONFIG_HEADER = ("table", "shipped", "forced", "runs", "worst error / limit", "")


def config_rows(runs: Sequence[Line]) -> list[tuple[str, ...]]:
    """A row for each table of configs."""
    rows = []
    for name, table in sorted(TABLES.items()):
        mine = [run for run in runs if run["table"] == name]
        faults = sum(run["fault"] is not None for run in mine)
        worst = max((run["share"] for run in mine), default=0.0)
        verdict = f"{faults} FAILED" if faults else "ok" if mine else "not reached"
        counts = (str(len(table.configs)), str(_count_configs(mine)), str(len(mine)))
        rows.append((name, *counts, f"{worst:.2f}", verdict))
    return rows


def _count_configs(runs: Sequence[Line]) -> int:
    return len({(run["table"], str(run["config"])) for run in runs})


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


def _lines(
    arguments: argparse.Namespace, items: Sequence[Item], device: str, jobs: int
) -> Iterator[Line]:
    """Of each item as it ends, as far as the time goes."""
    budget = arguments.time_budget or math.inf
    if jobs:
        command = python("tests.check.worker", device)
        chunks = worker.chunks_of(items, jobs)
        for item, said in run_isolated(
            chunks, command, jobs, arguments.case_timeout, budget=budget
        ):
            yield worker.failed(item, said) if isinstance(said, str) else said
        return
    end = time.monotonic() + budget
    lines = worker.run_items(items, torch.device(device))
    while time.monotonic() <= end and (line := next(lines, None)) is not None:
        yield line


def _run(arguments: argparse.Namespace) -> int:
    device, dtypes, jobs = check.selected(arguments)
    every = arguments.all_configs
    with refusing(f"--keep {arguments.keep}", OSError, ValueError):
        kept = ResultsCache(arguments.keep)
    started = time.perf_counter()
    with quiet_interpreter():
        items, results = worker.items_of(device, dtypes, arguments.only, every)
        if not items and not results:
            known = dict.fromkeys(case.name for case in worker.cases_of(device, dtypes[0], every))
            raise CommandError(f"--only {arguments.only}: no case; there are {', '.join(known)}")
        former = {worker.key_of(line): line for line in kept.lines}
        keys = [worker.key_of(worker.failed(item, "")) for item in items]
        results += [former[key] for key in keys if key in former]
        todo = [item for item, key in zip(items, keys, strict=True) if key not in former]
        for line in [*results]:
            _say(line, arguments.json)
        for line in _lines(arguments, todo, str(device), jobs):
            results.append(line)
            kept.add(**line)
            _say(line, arguments.json)
    left_out = len(items) - len({*map(worker.key_of, results)} & {*keys})
    wrong = [line["label"] for line in results if line["why"]]
    passed = not wrong
    # a selection, or what the time allowed, need not reach every table
    if every and not (arguments.only or left_out):
        passed = passed and {line["table"] for line in results} >= set(TABLES)
    if arguments.json:
        check.print_json(check.summary(passed, len(results), wrong, device))
    else:
        if every:
            print(aligned([CONFIG_HEADER, *config_rows(results)]))
            shipped = sum(len(table.configs) for table in TABLES.values())
            counts = f"{_count_configs(results)} of {shipped} configs of {len(TABLES)} tables"
            print(f"{counts} fit here and ran")
        what = "runs of config and case, each twice for equal bits," if every else "cases"
        seconds = time.perf_counter() - started
        print(
            f"{len(results) - len(wrong)} of {len(results)} {what} passed, {seconds:.0f} s, "
            f"{check.where(device)}"
        )
        if left_out:
            print(f"the time is over: {left_out} did not run.")
    return CUT_SHORT if left_out else int(not passed)


def _say(line: Line, as_json: bool) -> None:
    """At once: what is wrong comes first."""
    if as_json:
        check.print_json(line)
    elif line["why"]:
        print(f"FAILED {line['label']}: {line['why']}", flush=True)


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
