"""`python -m bench quick`: one GPU, ten minutes: what is right, how fast, tuned.

    python -m bench quick --out DIR                 the stages, one after the other
    python -m bench quick --out DIR --resume        goes on: each stage skips what DIR has
    python -m bench quick --dry-run                 the stages and their seconds

Each stage is an ordinary command and can be run alone. A stage is killed when its seconds are over;
what is left goes to those after it. Every row is in DIR the moment it exists.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.rows import RESULTS, TRYING, bad_rows, environment, read_results, read_rows
from bench.run import CUT_SHORT
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError
from tests.check.isolated import python, term_interrupts
from tests.check.results_cache import ResultsCache

LOG, CHECKED = "log.txt", "check.jsonl"
SECONDS, LEAST, RESERVE = 600.0, 10, 8.0  # reserve: for the table at the end
KILL_S = 6.0  # from SIGTERM to SIGKILL
MOST_LINES = 12  # of what is wrong
FINISHED = (0, 1)  # exit statuses of a command that has done all it was told to; 1: with failures


@dataclass(frozen=True)
class Stage:
    """A command. In its words {out}, {seconds} and {jobs} are filled in.

    share: of the time that is left, as the stages after it have theirs.
    needed: if it fails, nothing after it makes sense.
    """

    name: str
    share: float
    command: tuple[str, ...]
    why: str
    needed: bool = False

    def words(self, places: dict[str, Any]) -> list[str]:
        return [word.format(**places) for word in self.command]


_CHECK = python("tests.check", "--time-budget", "{seconds}", "--case-timeout", "60")
_SMOKE = (*_CHECK, "--jobs", "0", "--only", "layer_norm_and", "--dtype", "bf16")
_ALL = (*_CHECK, "--jobs", "{jobs}", "--keep", f"{{out}}/{CHECKED}")
_BENCH = python("bench", "all", "--out", "{out}", "--resume", "--time-budget", "{seconds}")
_TUNE = python("fastvit_kernels", "tune", "--batch", "256", "--time-budget", "{seconds}")
STAGES = (
    Stage("smoke", 8, _SMOKE, "one kernel compiles, runs and is right", needed=True),
    Stage("check", 22, _ALL, "every op and a model by the 2x rule, every dtype, on all cores"),
    Stage("configs", 12, (*_ALL, "--all-configs"), "every launch config that ships, twice"),
    Stage("bench", 50, _BENCH, "the most telling rows, alone on the machine"),
    Stage("tune", 6, _TUNE, "launch configs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = options.within(float, LEAST, options.MOST)
    parser.add_argument("--seconds", type=kind, default=SECONDS, metavar="N", help="in all (600)")
    options.add(parser, "--out", help="folder of the results (default bench-out)")
    parser.add_argument("--resume", action="store_true", help="go on with what --out has")
    parser.add_argument("--dry-run", action="store_true", help="print the stages and run nothing")
    options.add(parser, "--device")


def limits(stages: Sequence[Stage], seconds: float) -> list[float]:
    """What each would get if all used theirs up."""
    whole = sum(stage.share for stage in stages)
    return [seconds * stage.share / whole for stage in stages]


def run_stage(stage: Stage, limit: float, places: dict[str, Any], log: Path) -> int | None:
    """Its exit status, None if it had to be killed: SIGTERM, so that it writes what it has, then
    SIGKILL for it and its process group."""
    words = stage.words({**places, "seconds": f"{max(limit - 2 * KILL_S, 0.6 * limit):.0f}"})
    print(f"== {stage.name}, at most {limit:.0f} s: {' '.join(words)}", flush=True)
    # A table that is tuned here changes no row that is measured with --resume later
    own = f"{places['out']}/{stage.name}"
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": own}
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env=variables, start_new_session=True
        )
        try:
            return process.wait(max(limit - KILL_S, 0.8 * limit))
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_stages(
    stages: Sequence[Stage], seconds: float, places: dict[str, Any], wrong: list[str]
) -> None:
    """Run them; `wrong` gets what is wrong with stages, and which are not done.

    A command whose process ended amid a case, which its file TRYING tells, is begun again: with
    --resume it leaves that case out.
    """
    started, folder = time.monotonic(), Path(places["out"])
    for i, stage in enumerate(stages):
        status, trying = 0, True
        while trying:
            left = seconds - (time.monotonic() - started)
            if left < LEAST / 2:
                print(f"== {stage.name}: not done: no time was left")
                return
            status = run_stage(stage, limits(stages[i:], left)[0], places, folder / LOG)
            trying = status is not None and (folder / TRYING).exists()
        said = {None: "killed", CUT_SHORT: "not done: too little time"}
        print(f"== {stage.name}: {said.get(status, f'exit status {status}')}")
        if status not in (*FINISHED, *said):
            wrong.append(f"stage {stage.name}: exit status {status}")
        if stage.needed and status != 0:
            wrong.append(f"stage {stage.name}: it failed, and nothing was run after it")
            return


def faults(folder: Path) -> list[str]:
    """What is wrong: cases, configs, rows of ours."""
    found = []
    for line in ResultsCache(folder / CHECKED).lines:
        if line.get("fault"):
            config = " ".join(f"{k}={v}" for k, v in (line["config"] or {}).items())
            found.append(f"config {line['table']} [{config}], {line['case']}: {line['fault']}")
        elif line.get("why"):
            found.append(f"check {line['label']}: {line['why']}")
    rows = read_rows(folder) if (folder / RESULTS).exists() else []
    return found + [row.describe() for row in bad_rows(rows)]


def run(arguments: argparse.Namespace, has_gpu: bool, stages: Sequence[Stage] = STAGES) -> int:
    """The command: 0, 1 if something is wrong, 130 after an interrupt."""
    folder = (arguments.out or Path("bench-out")).resolve()
    places = {"out": str(folder), "jobs": max(1, (os.cpu_count() or 1) - 2)}
    seconds = arguments.seconds - RESERVE
    if arguments.dry_run:
        for stage, limit in zip(stages, limits(stages, seconds), strict=True):
            words = " ".join(stage.words({**places, "seconds": f"{limit:.0f}"})[1:])
            print(f"{stage.name:6} {limit:3.0f} s: {stage.why}\n             python {words}")
        return 0
    if not has_gpu:
        raise CommandError("torch sees no GPU, so nothing was run; --dry-run lists the stages")
    if (folder / RESULTS).exists() and not arguments.resume:
        raise CommandError(f"{folder / RESULTS} exists: --resume goes on, or name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{name}: {value}" for name, value in environment().items() if value))
    wrong: list[str] = []
    status = 0
    try:
        with term_interrupts():
            run_stages(stages, seconds, places, wrong)
    except KeyboardInterrupt:
        status = 130
    if (folder / RESULTS).exists():
        report.show(read_results(folder))
    wrong += faults(folder)
    print(f"WRONG: {len(wrong)}" if wrong else "nothing wrong in what ran")
    print(*(f"  {line}"[:200] for line in wrong[:MOST_LINES]), sep="\n")
    print(f"what each stage said: {folder / LOG}; --resume goes on")
    return status or int(bool(wrong))
