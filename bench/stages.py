"""Commands one after the other, each with a share of the seconds that are there, none past its end.

A stage is an ordinary command that can be run alone. It is told its seconds; one that goes on past
them gets SIGTERM, then SIGKILL, with all it has started. What it ends early goes to those after
it. Nothing here imports torch: whatever happens to a device happens in another process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG, EVENTS = "log.txt", "stages.jsonl"
TERM_S, KILL_S = 12.0, 6.0  # before its end a stage should end by itself; before it, SIGTERM
POLL_S = 0.1
REAPED_S = 5.0  # how long a killed process may take to end
DONE, UNFINISHED, KILLED, ABSENT = "done", "unfinished", "killed", "no time"
CUT_SHORT = 3  # exit status of a command that its time has cut short
FINISHED = (0, 1)  # exit statuses of a command that has done all it was told to; 1: with failures


@dataclass(frozen=True)
class Stage:
    """A command. In its words {out}, {seconds} and {jobs} are filled in.

    share: of the time that is left, beside the shares of the stages after it.
    least: seconds below which it is not worth its start.
    needed: where it fails, nothing after it makes sense.
    again: a resumed run goes on with it, for it never knows that it is done.
    """

    name: str
    share: float
    command: tuple[str, ...]
    why: str
    least: float = 10.0
    needed: bool = False
    again: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def words(self, places: dict[str, Any]) -> list[str]:
        return [word.format(**places) for word in self.command]


@dataclass(frozen=True)
class Ending:
    """What became of a stage."""

    stage: str
    state: str
    seconds: float
    status: int | None  # of its process

    @property
    def failed(self) -> bool:
        return self.status not in (0, None) and self.state == DONE


def limits(stages: Sequence[Stage], seconds: float) -> list[float]:
    """What each would get if all used theirs up."""
    total = sum(stage.share for stage in stages)
    return [seconds * stage.share / total for stage in stages]


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and they in turn; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end(process: subprocess.Popen[bytes], seconds: float = KILL_S) -> None:
    """SIGTERM, so that it writes what it has; after `seconds` SIGKILL for it and what it started.

    Jobs are in sessions of their own, so that their group would not name them.
    """
    started = set(descendants(process.pid))
    _signal(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    if process.poll() is None:
        started |= set(descendants(process.pid))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        _signal(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver never ends
        process.wait(REAPED_S)


class Interrupted(BaseException):
    """SIGINT or SIGTERM."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise Interrupted in the main thread."""

    def interrupted(*_: Any) -> None:
        raise Interrupted

    former = [(s, signal.signal(s, interrupted)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in former:
            signal.signal(number, handler)


class Stages:
    """A run of stages into one folder: a log, and a line for each that has ended."""

    def __init__(
        self, stages: Sequence[Stage], folder: Path, seconds: float, *, resume: bool = False,
        sources: str = "", places: dict[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic, say: Callable[[str], None] | None = None,
    ):  # fmt: skip
        self.stages, self.folder, self.seconds = stages, folder, seconds
        self.sources, self._now, self.started = sources, now, now()
        self._say = say or self._print
        self.places = {"out": str(folder), **(places or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self.former = self._done() if resume else set()
        self.endings: list[Ending] = []

    @property
    def left(self) -> float:
        return self.seconds - (self._now() - self.started)

    def _done(self) -> set[str]:
        """Stages that a former run of the same sources has done; what a kill tore is left out."""
        found: set[str] = set()
        path = self.folder / EVENTS
        good = {s.name: (0,) if s.needed else FINISHED for s in self.stages if not s.again}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError):
                event = json.loads(line)
                same = event["state"] == DONE and event["sources"] == self.sources
                if same and event["status"] in good.get(event["stage"], ()):
                    found.add(event["stage"])
        return found

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """A line for the reader and for the log."""
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(text + "\n")
        self._say(text + "\n")

    def run(self) -> bool:
        """Run them in order. Returns: whether all came to an end that makes sense.

        Raises: Interrupted, after the stage at work has ended.
        """
        todo = [stage for stage in self.stages if stage.name not in self.former]
        for i, stage in enumerate(todo):
            limit = limits(todo[i:], max(self.left, 0.0))[0]
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
        with path.open("ab") as log, path.open("rb") as reader:
            reader.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables}, start_new_session=True,
            )  # fmt: skip
            try:
                soft = limit - min(KILL_S, 0.2 * limit)
                while process.poll() is None and self._now() - started < soft:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_S)
                    self._copy(reader)
                if process.poll() is None:
                    state = KILLED
                    end(process, min(KILL_S, 0.2 * limit))
            except BaseException:
                end(process)
                self._ended(Ending(stage.name, UNFINISHED, self._now() - started, None))
                raise
            finally:
                self._copy(reader)
        if state == DONE and process.returncode not in FINISHED:
            state = UNFINISHED
        return self._ended(Ending(stage.name, state, self._now() - started, process.returncode))

    def _copy(self, reader: Any) -> None:
        """What the stage has printed, for the reader too."""
        text = reader.read().decode(errors="replace")
        if text:
            self._say(text)

    def _ended(self, ending: Ending) -> Ending:
        self.endings.append(ending)
        event = {**vars(ending), "seconds": round(ending.seconds, 1), "sources": self.sources}
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
        about = "" if ending.status in (None, 0) else f", exit status {ending.status}"
        self.say(f"== {ending.stage}: {ending.state} after {ending.seconds:.0f} s{about}")
        return ending
