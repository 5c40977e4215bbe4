"""`python -m bench contact`: what half an hour on a GPU is spent on, wrong results first.

    python -m bench contact --seconds 540 --out DIR             a first look
    python -m bench contact --seconds 540 --out DIR --resume    goes on with what is not done
    python -m bench contact --seconds 540 --dry-run             the stages and their seconds

Each stage is an ordinary command and can be run alone. First what is right, on all cores, each case
in a process of its own; then, alone on the machine, how fast. Every result is in DIR the moment it
exists. What hangs is killed, named, and left alone by --resume; so is what loses the device: its
process ends, and the next case has a fresh one. What is run again is what the sources changed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import targets
from bench.rows import RESULTS, Row, conditions, read_rows, sources_hash
from bench.session import bad_rows, describe
from bench.stages import EVENTS, LOG, Interrupted, Stage, Stages, interruptible, limits
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned
from fastvit_kernels.verify.isolated import python
from fastvit_kernels.verify.results_cache import ResultsCache
from fastvit_kernels.verify.runner import Result

CHECKED = "check.jsonl"
RESERVE = 8.0  # seconds for the table at the end
SECONDS, LEAST = 540.0, 10
MOST_WRONG = 12  # lines of what is wrong

_CHECK = python("fastvit_kernels", "check", "--time-budget", "{seconds}", "--case-timeout", "90")
_ALL = (*_CHECK, "--jobs", "{jobs}", "--keep", f"{{out}}/{CHECKED}")

STAGES = (
    Stage(
        "facts", 2, python("bench", "facts"), "which GPU, driver, versions, sources", 5.0,
        needed=True,
    ),
    Stage(
        "smoke", 8, (*_CHECK, "--jobs", "0", "--only", "layer_norm_and", "--dtype", "bf16"),
        "one kernel compiles, runs and is right", needed=True,
    ),
    Stage("check", 22, _ALL, "every op and a model by the 2x rule, every dtype, on all cores"),
    Stage("configs", 12, (*_ALL, "--all-configs"), "every launch config that ships, twice"),
    Stage(
        "warm", 10, python("bench", "warm", "--jobs", "{jobs}", "--time-budget", "{seconds}"),
        "the first launches at the targets' shapes, side by side: kernels compile",
    ),
    Stage(
        "targets", 40,
        python("bench", "targets", "--out", "{out}", "--resume", "--time-budget", "{seconds}"),
        "the rows of the goals, alone on the machine", 40.0,
    ),
    Stage(
        "tune", 6,
        python("fastvit_kernels", "tune", "--batch", "256", "--time-budget", "{seconds}"),
        "launch configs, the costly kernels first", 30.0, again=True,
        environment=(("XDG_CACHE_HOME", "{out}"),),  # a tuned table changes no row before it
    ),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m bench contact`."""
    parser.add_argument(
        "--seconds", type=options.within(float, LEAST, options.MOST), default=SECONDS, metavar="N",
        help=f"of the whole; nothing outlives them (default {SECONDS:.0f})",
    )  # fmt: skip
    options.add_out(parser, "folder of the results (default bench-out)")
    parser.add_argument("--resume", action="store_true", help="go on with what --out has")
    parser.add_argument("--dry-run", action="store_true", help="print the stages and run nothing")
    options.add_device(parser)


def jobs() -> int:
    """Processes at once: two cores stay free for the compilers that they start."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores - 2)


def stage_table(stages: Sequence[Stage], seconds: float, places: dict[str, Any]) -> str:
    """Stage, share, seconds if all use theirs up, what it is for, command."""
    times = limits(stages, seconds - RESERVE)
    lines = [("stage", "share", "s", "what", "command")]
    for stage, limit in zip(stages, times, strict=True):
        words = ("python", *stage.words({**places, "seconds": f"{limit:.0f}"})[1:])
        share = f"{100 * limit / sum(times):.0f} %"
        lines.append((stage.name, share, f"{limit:.0f}", stage.why, " ".join(words)))
    return aligned(lines)


def wrong(folder: Path, run: Stages | None, rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong, a line each: stages, cases, configs, rows of ours."""
    for ending in run.endings if run else ():
        if ending.failed or ending.state in ("unfinished", "killed"):
            yield f"stage {ending.stage}: {ending.state}, exit status {ending.status}"
    for line in ResultsCache(folder / CHECKED).lines:
        if "tensors" in line:
            result = Result.from_dict(line)
            if not result.passed:
                yield f"check {result.name}, {result.dtype}: {result.why}"
        elif line.get("fault"):
            config = " ".join(f"{k}={v}" for k, v in (line["config"] or {}).items())
            yield f"config {line['table']} [{config}], {line['case']}: {line['fault']}"
    for row in bad_rows(rows):
        yield describe(row)


def report(folder: Path, run: Stages | None = None) -> tuple[str, bool]:
    """What ends a run: what is wrong, then the table of the goals; and whether nothing is wrong."""
    rows = read_rows(folder) if (folder / RESULTS).exists() else []
    found = list(wrong(folder, run, rows))
    text = [f"WRONG: {len(found)}" if found else "nothing wrong in what ran"]
    text += [f"  {line}"[:200] for line in found[:MOST_WRONG]]
    if len(found) > MOST_WRONG:
        text.append(f"  and {len(found) - MOST_WRONG} more: {folder / CHECKED}, {folder / RESULTS}")
    lines = targets.lines(rows)
    text += ["", aligned([targets.HEADER, *lines]), "", conditions(rows)]
    return "\n".join(text), not found


def run(arguments: argparse.Namespace, has_gpu: bool, stages: Sequence[Stage] = STAGES) -> int:
    """The command: 0, 1 where something is wrong, 130 after an interrupt."""
    folder = (arguments.out or Path("bench-out")).resolve()
    places = {"out": str(folder), "jobs": jobs()}
    if arguments.dry_run:
        print(stage_table(stages, arguments.seconds, places))
        return 0
    if not has_gpu:
        raise CommandError(
            "torch sees no GPU, so nothing was run and nothing was written; --dry-run lists the "
            "stages, and `fastvit-kernels check` runs the kernels in Triton's interpreter"
        )
    for name in (EVENTS, RESULTS):
        if (folder / name).exists() and not arguments.resume:
            raise CommandError(
                f"{folder / name} exists: --resume goes on, another --out starts anew"
            )
    todo = Stages(
        stages, folder, arguments.seconds - RESERVE, resume=arguments.resume,
        sources=sources_hash(), places=places,
    )  # fmt: skip
    interrupted = False
    try:
        with interruptible():
            todo.run()
    except Interrupted:
        interrupted = True
    text, right = report(folder, todo)
    todo.say(text)
    done = {ending.stage for ending in todo.endings if ending.state == "done"} | todo.former
    if open_stages := [stage.name for stage in stages if stage.name not in done]:
        todo.say(f"not done: {', '.join(open_stages)}; --resume goes on. All of it: {folder / LOG}")
    return 130 if interrupted else 0 if right else 1
