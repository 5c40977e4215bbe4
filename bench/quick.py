"""`python -m bench quick`: one GPU, ten minutes: what is right, how fast, tuned.

    python -m bench quick --out DIR                 the stages, one after the other
    python -m bench quick --out DIR --resume        goes on with what is not done
    python -m bench quick --dry-run                 the stages and their seconds

Each stage is an ordinary command and can be run alone. A stage is killed when its seconds are over;
what is left goes to those after it. Every row is in DIR the moment it exists.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import plan
from bench.rows import RESULTS, TRYING, bad_rows, conditions, environment, read_rows, this_machine
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned, term_interrupts
from tests.check.isolated import python
from tests.check.results_cache import ResultsCache, sources_hash

LOG, DONE, CHECKED = "log.txt", "stages.json", "check.jsonl"
SECONDS, LEAST, RESERVE = 600.0, 10, 8.0  # reserve: for the table at the end
KILL_S = 6.0  # from SIGTERM to SIGKILL
FINISHED = (0, 1)  # exit statuses of a command that has done all it was told to; 1: with failures
MOST_LINES = 12  # of what is wrong


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
_ALL = (*_CHECK, "--jobs", "{jobs}", "--keep", f"{{out}}/{CHECKED}")

STAGES = (
    Stage(
        "smoke",
        8,
        (*_CHECK, "--jobs", "0", "--only", "layer_norm_and", "--dtype", "bf16"),
        "one kernel compiles, runs and is right",
        needed=True,
    ),
    Stage("check", 22, _ALL, "every op and a model by the 2x rule, every dtype, on all cores"),
    Stage("configs", 12, (*_ALL, "--all-configs"), "every launch config that ships, twice"),
    Stage(
        "targets",
        50,
        python("bench", "targets", "--out", "{out}", "--resume", "--time-budget", "{seconds}"),
        "the rows of the goals, alone on the machine",
    ),
    Stage(
        "tune",
        6,
        python("fastvit_kernels", "tune", "--batch", "256", "--time-budget", "{seconds}"),
        "launch configs",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seconds = options.within(float, LEAST, options.MOST)
    whole = f"of the whole (default {SECONDS:.0f})"
    parser.add_argument("--seconds", type=seconds, default=SECONDS, metavar="N", help=whole)
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
    # A tuned table changes no row that is measured with --resume later
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": places["out"]}
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
    stages: Sequence[Stage], folder: Path, seconds: float, done: list[str], places: dict[str, Any]
) -> list[str]:
    """Run those that are not in `done`, which grows. Returns: what is wrong with stages.

    A command whose process ended amid a case, which its file TRYING tells, is begun again: with
    --resume it leaves that case out.
    """
    started, wrong = time.monotonic(), []
    todo = [stage for stage in stages if stage.name not in done]
    for i, stage in enumerate(todo):
        status, trying = 0, True
        while trying:
            left = seconds - (time.monotonic() - started)
            if left < LEAST / 2:
                return wrong
            limit = limits(todo[i:], left)[0]
            status = run_stage(stage, limit, places, folder / LOG)
            trying = status is not None and (folder / TRYING).exists()
        print(f"== {stage.name}: " + ("killed" if status is None else f"exit status {status}"))
        if status in FINISHED:
            done.append(stage.name)
        elif status is not None and status != plan.CUT_SHORT:
            wrong.append(f"stage {stage.name}: exit status {status}")
        if stage.needed and status != 0:
            return wrong or [f"stage {stage.name}: it failed, and nothing was run after it"]
    return wrong


def report(folder: Path) -> tuple[list[str], str]:
    """What is wrong (cases, configs, rows of ours), and the table of the goals."""
    wrong = []
    for line in ResultsCache(folder / CHECKED).lines:
        if line.get("fault"):
            config = " ".join(f"{k}={v}" for k, v in (line["config"] or {}).items())
            wrong.append(f"config {line['table']} [{config}], {line['case']}: {line['fault']}")
        elif line.get("why"):
            wrong.append(f"check {line['label']}: {line['why']}")
    rows = read_rows(folder) if (folder / RESULTS).exists() else []
    wrong += [row.describe() for row in bad_rows(rows)]
    return wrong, f"\n{plan.claim_table(rows)}\n\n{conditions(rows)}"


def _done_before(folder: Path, resume: bool) -> list[str]:
    """Stages that a former run has done here with the same sources."""
    path, here = folder / DONE, {"sources": sources_hash(), "machine": this_machine()}
    if not resume or not path.exists():
        return []
    former = json.loads(path.read_text())
    return former["done"] if {n: former[n] for n in here} == here else []


def run(arguments: argparse.Namespace, has_gpu: bool, stages: Sequence[Stage] = STAGES) -> int:
    """The command: 0, 1 if something is wrong, 130 after an interrupt."""
    folder = (arguments.out or Path("bench-out")).resolve()
    places = {"out": str(folder), "jobs": max(1, (os.cpu_count() or 1) - 2)}
    seconds = arguments.seconds - RESERVE
    if arguments.dry_run:
        lines = [("stage", "s", "what", "command")]
        for stage, limit in zip(stages, limits(stages, seconds), strict=True):
            words = stage.words({**places, "seconds": f"{limit:.0f}"})[1:]
            lines.append((stage.name, f"{limit:.0f}", stage.why, " ".join(("python", *words))))
        print(aligned(lines))
        return 0
    if not has_gpu:
        raise CommandError("torch sees no GPU, so nothing was run; --dry-run lists the stages")
    if (folder / RESULTS).exists() and not arguments.resume:
        raise CommandError(f"{folder / RESULTS} exists: --resume goes on, or name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"{name}: {value}" for name, value in environment().items() if value))
    done, wrong, status = _done_before(folder, arguments.resume), [], 0
    try:
        with term_interrupts():
            wrong = run_stages(stages, folder, seconds, done, places)
    except KeyboardInterrupt:
        status = 130
    about = {"sources": sources_hash(), "machine": this_machine(), "done": done}
    (folder / DONE).write_text(json.dumps(about))
    found, table = report(folder)
    wrong += found
    shown = [*wrong[:MOST_LINES], *(["..."] if len(wrong) > MOST_LINES else [])]
    print(f"WRONG: {len(wrong)}" if wrong else "nothing wrong in what ran")
    print(*(f"  {line}"[:200] for line in shown), sep="\n")
    print(table)
    if left := [stage.name for stage in stages if stage.name not in done]:
        print(f"not done: {', '.join(left)}; --resume goes on. All of it: {folder / LOG}")
    return status or int(bool(wrong))
