"""`python -m bench contact`: what half an hour on a GPU is spent on, wrong results first.

    python -m bench contact --seconds 540 --out DIR             a first look
    python -m bench contact --seconds 540 --out DIR --resume    goes on with what is not done
    python -m bench contact --seconds 540 --dry-run             the stages and their seconds

Each stage is an ordinary command and can be run alone. First what is right, on all cores, in
processes of their own; then, alone on the machine, how fast. Every result is in DIR the moment it
exists. What hangs is killed, named, and left alone by --resume; so is what loses the device: its
process ends, and the next case has a fresh one. What is run again is what the sources changed, and
on another GPU, driver, torch or triton everything.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import plan
from bench.rows import RESULTS, bad_rows, conditions, environment, read_rows, this_machine
from bench.run import CUT_SHORT
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned, term_interrupts
from fastvit_kernels.verify.runner import Result
from tests.check.isolated import Job, python, run_isolated
from tests.check.results_cache import ResultsCache, sources_hash

LOG, EVENTS, CHECKED = "log.txt", "stages.jsonl", "check.jsonl"
TERM_S, KILL_S = 12.0, 6.0  # before its end a stage should end by itself; before it, SIGTERM
POLL_S = 0.1
REAPED_S = 5.0  # how long a killed process may take to end
DONE, UNFINISHED, KILLED, ABSENT = "done", "unfinished", "killed", "no time"
FINISHED = (0, 1)  # exit statuses of a command that has done all it was told to; 1: with failures
RESERVE = 8.0  # seconds for the table at the end
SECONDS, LEAST = 540.0, 10
MOST_LINES = 12  # of what is wrong
PACKAGES = (
    "numpy",
    "timm",
    "transformers",
    "torchvision",
    "flash_attn",
    "flash_attn_interface",
    "xformers",
    "liger_kernel",
    "quack-kernels",
)
RED, YELLOW, PLAIN = "\033[31m", "\033[33m", "\033[0m"


# --- stages: commands one after the other, each with a share of the seconds that are there. A
# command is told its seconds; one that goes on past them gets SIGTERM, then SIGKILL, with all it
# has started. What it leaves goes to those after it.


@dataclass(frozen=True)
class Stage:
    """A command. In its words {out}, {seconds}, {jobs} and {case} are filled in.

    share: of the time that is left, as the stages after it have theirs.
    least: seconds that it gets at least; with less left it is not begun.
    needed: if it fails, nothing after it makes sense.
    again: a resumed run goes on with it, for it never knows that it is done.
    fills: it fills the caches of this machine: another machine's are empty.
    """

    name: str
    share: float
    command: tuple[str, ...]
    why: str
    least: float = 10.0
    needed: bool = False
    again: bool = False
    fills: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def words(self, places: dict[str, Any]) -> list[str]:
        # seconds after which a case counts as hung: others must have their turn too
        case = max(10.0, min(90.0, float(places.get("seconds", SECONDS)) / 3))
        return [word.format(**{"case": f"{case:.0f}", **places}) for word in self.command]


_CHECK = python("tests.check", "--time-budget", "{seconds}", "--case-timeout", "{case}")
_ALL = (*_CHECK, "--jobs", "{jobs}", "--keep", f"{{out}}/{CHECKED}")

STAGES = (
    Stage(
        "smoke",
        8,
        (*_CHECK, "--jobs", "0", "--only", "layer_norm_and", "--dtype", "bf16"),
        "one kernel compiles, runs and is right",
        40.0,
        needed=True,
    ),
    Stage("check", 22, _ALL, "every op and a model by the 2x rule, every dtype, on all cores"),
    Stage("configs", 12, (*_ALL, "--all-configs"), "every launch config that ships, twice"),
    Stage(
        "warm",
        10,
        python("bench", "warm", "--jobs", "{jobs}", "--time-budget", "{seconds}", "--out", "{out}"),
        "the first launches at the targets' shapes, side by side: kernels compile",
        fills=True,
    ),
    Stage(
        "targets",
        40,
        python("bench", "targets", "--out", "{out}", "--resume", "--time-budget", "{seconds}"),
        "the rows of the goals, alone on the machine",
        40.0,
    ),
    Stage(
        "tune",
        6,
        python("fastvit_kernels", "tune", "--batch", "256", "--time-budget", "{seconds}"),
        "launch configs, the costly kernels first",
        30.0,
        again=True,
        environment=(("XDG_CACHE_HOME", "{out}"),),  # a tuned table changes no row before it
    ),
)


@dataclass(frozen=True)
class Ending:
    stage: str
    state: str
    seconds: float
    status: int | None  # of its process

    @property
    def failed(self) -> bool:
        """Whether something is wrong; what only had no time is not."""
        if self.state == DONE:
            return self.status != 0
        return self.state == UNFINISHED and self.status not in (None, CUT_SHORT)


def limits(stages: Sequence[Stage], seconds: float) -> list[float]:
    """What each would get if all used theirs up."""
    found, left = [], seconds
    for i, stage in enumerate(stages):
        limit = left * stage.share / sum(s.share for s in stages[i:])
        if limit < stage.least <= left:
            limit = stage.least
        found.append(limit)
        left -= limit
    return found


def descendants(pid: int) -> set[int]:
    """The processes that `pid` has started, and they in turn; empty without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = set[int](), [pid]
    while todo:
        todo += (own := children.get(todo.pop(), []))
        found.update(own)
    return found


def end(process: subprocess.Popen[bytes], seconds: float = KILL_S) -> None:
    """SIGTERM, so that it writes what it has; after `seconds` SIGKILL for it and what it started.

    Jobs are in sessions of their own, so that their group would not name them.
    """
    started = descendants(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    if process.poll() is None:
        started |= descendants(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver never ends
        process.wait(REAPED_S)


class Stages:
    """A run of stages into one folder: a log, and a line for each that has ended.

    sources, machine, caches: of which a stage that is done need not be run again; caches counts
    for those that fill them.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        folder: Path,
        seconds: float,
        *,
        resume: bool = False,
        sources: str = "",
        machine: str = "",
        caches: str = "",
        places: dict[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
    ):
        self.stages, self.folder, self.seconds = stages, folder, seconds
        self._now, self.started = now, now()
        self._key = {"machine": machine, "caches": caches}
        self._say = say or functools.partial(print, end="", flush=True)
        self.places = {"out": str(folder), **(places or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self._events = ResultsCache(folder / EVENTS, lambda: sources)
        self.former = self._done() if resume else set[str]()
        self.endings: list[Ending] = []

    def _done(self) -> set[str]:
        """Stages that a former run has done here with the same sources."""
        found, events, here = set(), self._events.lines, self._key
        if any(event["machine"] != here["machine"] for event in events):
            with suppress(FileNotFoundError):  # what was right on another machine says little here
                (self.folder / CHECKED).rename(self.folder / f"elsewhere-{CHECKED}")
        for stage, event in itertools.product(self.stages, events):
            good = (0,) if stage.needed else FINISHED
            same = all(event[n] == here[n] for n in here if n != "caches" or stage.fills)
            done = event["state"] == DONE and event["status"] in good and not stage.again
            if stage.name == event["stage"] and same and done:
                found.add(stage.name)
        return found

    def say(self, text: str, color: str = "") -> None:
        """A line for the reader, in colour on a terminal, and for the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(text + "\n")
        shown = f"{color}{text}{PLAIN}" if color and sys.stdout.isatty() else text
        self._say(shown + "\n")

    def run(self) -> bool:
        """Run them in order. Returns: whether all came to an end that makes sense.

        Raises: KeyboardInterrupt, after the stage at work has ended.
        """
        todo = [stage for stage in self.stages if stage.name not in self.former]
        for i, stage in enumerate(todo):
            left = self.seconds - (self._now() - self.started)
            limit = limits(todo[i:], max(left, 0.0))[0]
            if limit < stage.least:
                self._ended(Ending(stage.name, ABSENT, 0.0, None))
                continue
            ending = self._run(stage, limit)
            if stage.needed and (ending.failed or ending.state != DONE):
                return False
        return True

    def _run(self, stage: Stage, limit: float) -> Ending:
        budget = max(limit - TERM_S, 0.6 * limit)
        places = {**self.places, "seconds": f"{budget:.0f}"}
        words = stage.words(places)
        self.say(f"== {stage.name}, at most {limit:.0f} s: {' '.join(words)}")
        started, state, path = self._now(), DONE, self.folder / LOG
        variables = {name: value.format(**places) for name, value in stage.environment}

        def copy() -> None:
            if text := reader.read().decode(errors="replace"):
                self._say(text)

        with path.open("ab") as log, path.open("rb") as reader:
            reader.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
            )
            try:
                soft = limit - min(KILL_S, 0.2 * limit)
                while process.poll() is None and self._now() - started < soft:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_S)
                    copy()
                if process.poll() is None:
                    state = KILLED
                    end(process, min(KILL_S, 0.2 * limit))
            except BaseException:
                end(process)
                self._ended(Ending(stage.name, UNFINISHED, self._now() - started, None))
                raise
            finally:
                copy()
        if state == DONE and process.returncode not in FINISHED:
            state = UNFINISHED
        return self._ended(Ending(stage.name, state, self._now() - started, process.returncode))

    def _ended(self, ending: Ending) -> Ending:
        self.endings.append(ending)
        self._events.add(**{**vars(ending), "seconds": round(ending.seconds, 1), **self._key})
        about = "" if ending.status in (None, 0) else f", exit status {ending.status}"
        self.say(f"== {ending.stage}: {ending.state} after {ending.seconds:.0f} s{about}")
        return ending


def caches_id() -> str:
    """A name of this machine's cache of compiled kernels: a file in it, gone where it is new."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    path = folder / "bench-id"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(uuid.uuid4().hex, encoding="utf-8")
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # nowhere to keep kernels either


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=options.within(float, LEAST, options.MOST),
        default=SECONDS,
        metavar="N",
        help=f"of the whole; nothing outlives them (default {SECONDS:.0f})",
    )
    options.add(parser, "--out", help="folder of the results (default bench-out)")
    parser.add_argument("--resume", action="store_true", help="go on with what --out has")
    parser.add_argument("--dry-run", action="store_true", help="print the stages and run nothing")
    options.add(parser, "--device")


def jobs() -> int:
    """Processes at once: two cores stay free for the compilers that they start."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores - 2)


def facts() -> str:
    found = {name: value for name, value in environment().items() if value}
    found["python"] = f"{platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}"
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def stage_table(stages: Sequence[Stage], seconds: float, places: dict[str, Any]) -> str:
    """Stage, share, seconds if all use theirs up, what it is for, command."""
    times = limits(stages, seconds - RESERVE)
    lines = [("stage", "share", "s", "what", "command")]
    for stage, limit in zip(stages, times, strict=True):
        words = ("python", *stage.words({**places, "seconds": f"{limit:.0f}"})[1:])
        share = f"{100 * limit / sum(times):.0f} %"
        lines.append((stage.name, share, f"{limit:.0f}", stage.why, " ".join(words)))
    return aligned(lines)


def report(folder: Path, run: Stages | None = None) -> tuple[list[str], list[str], str]:
    """What ends a run: what is wrong (stages, cases, configs, rows of ours; equal faults share a
    line), what had no time, and the table of the goals."""
    wrong: dict[str, list[str]] = {}

    def add(why: str, name: str) -> None:
        wrong.setdefault(why, []).append(name)

    endings = run.endings if run else []
    for ending in (e for e in endings if e.failed):
        add(f"exit status {ending.status}", f"stage {ending.stage}")
    for line in ResultsCache(folder / CHECKED).lines:
        if "tensors" in line:
            result = Result.from_dict(line)
            if not result.passed:
                add(result.why, f"check {result.name}, {result.dtype}")
        elif line.get("fault"):
            config = " ".join(f"{k}={v}" for k, v in (line["config"] or {}).items())
            add(line["fault"], f"config {line['table']} [{config}], {line['case']}")
    rows = read_rows(folder) if (folder / RESULTS).exists() else []
    for row in bad_rows(rows):
        where, what = row.describe().rsplit(f"{row.provider}: ", 1)
        add(row.note or what, f"{where}{row.provider}")
    found = [
        f"{len(names)} times: {why}: {'; '.join(names)}" if names[1:] else f"{names[0]}: {why}"
        for why, names in wrong.items()
    ]
    unfinished = [
        f"stage {e.stage}: {e.state} after {e.seconds:.0f} s"
        for e in endings
        if e.state != DONE and not e.failed
    ]
    return found, unfinished, "\n".join(["", plan.claim_table(rows), "", conditions(rows)])


def run(arguments: argparse.Namespace, has_gpu: bool, stages: Sequence[Stage] = STAGES) -> int:
    """The command: 0, 1 if something is wrong, 130 after an interrupt."""
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
    for path in (folder / EVENTS, folder / RESULTS):
        if path.exists() and not arguments.resume:
            raise CommandError(f"{path} exists: --resume goes on, another --out starts anew")
    todo = Stages(
        stages,
        folder,
        arguments.seconds - RESERVE,
        resume=arguments.resume,
        sources=sources_hash(),
        machine=this_machine(),
        caches=caches_id(),
        places=places,
    )
    todo.say(facts())
    interrupted = False
    try:
        with term_interrupts():
            todo.run()
    except KeyboardInterrupt:
        interrupted = True
    found, unfinished, table = report(folder, todo)
    if not found:
        todo.say("nothing wrong in what ran")
    for word, lines, color in (("WRONG", found, RED), ("NO TIME", unfinished, YELLOW)):
        more = [f"and {len(lines) - MOST_LINES} more: {folder / CHECKED}, {folder / RESULTS}"]
        shown = lines[:MOST_LINES] + (more if len(lines) > MOST_LINES else [])
        for line in [f"{word}: {len(lines)}", *(f"  {x}"[:200] for x in shown)] if lines else ():
            todo.say(line, color)
    todo.say(table)
    done = {ending.stage for ending in todo.endings if ending.state == DONE} | todo.former
    if open_stages := [stage.name for stage in stages if stage.name not in done]:
        todo.say(f"not done: {', '.join(open_stages)}; --resume goes on. All of it: {folder / LOG}")
    return 130 if interrupted else 1 if found else 0


# --- `python -m bench warm`: the first launches at the targets' shapes, side by side, to compile.
# Each case runs once forward and backward in a process of its own, so that Triton's and the
# compiler's caches are full when the timing begins; a case that hangs or dies is named here, where
# it costs the others no time. max-autotune is not warmed: its choices are timings, which need the
# machine to themselves.

WARM_TIMEOUT = 150.0  # seconds of silence: a model is built and compiled in them
WARMED = "warm.jsonl"


def add_warm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=options.within(int, 1, options.MOST_PROCESSES),
        default=4,
        metavar="N",
        help="processes at once",
    )
    options.add(parser, "--time-budget", help="what still runs after these is stopped")
    done = "a folder that remembers which cases have run on this machine"
    options.add(parser, "--out", help=done)
    parser.set_defaults(device=None)


def run_warm(
    jobs: Sequence[Job],
    workers: int,
    budget: float,
    folder: Path | None = None,
    say: Callable[[str], object] = print,
) -> int:
    """Run them: 0, 3 if the time was too short for all, else 1 if one has failed.

    Args:
        folder: has a line for each case that has run; those of the same sources and the same cache
            are not run again.
    """
    key = f"{sources_hash()} {caches_id()}"
    kept = ResultsCache(None if folder is None else folder / WARMED, lambda: key)
    former = {line["name"] for line in kept.lines}
    todo = [job for job in jobs if job.name not in former]
    started, left, bad = time.monotonic(), {job.name for job in todo}, 0
    timeout = min(WARM_TIMEOUT, max(10.0, budget / 2))
    for outcome in run_isolated(todo, workers, timeout, budget=budget):
        name = outcome.job.name
        if outcome.is_cut:
            continue
        left.discard(name)
        bad += outcome.failure is not None
        kept.add(name=name, failure=outcome.failure)
        what = outcome.failure or f"{outcome.lines[-1]['seconds']:.0f} s"
        say(f"{'FAILED ' if outcome.failure else ''}{name}: {what}")
    say(
        f"{len(todo) - len(left)} of {len(todo)} cases ran once, {bad} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    return CUT_SHORT if left else 1 if bad else 0


if __name__ == "__main__":
    # what a process of `warm` does: one target, once, and a line that says how long it took
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    plan.targets()[int(sys.argv[1])].touch(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"seconds": time.monotonic() - started}))
