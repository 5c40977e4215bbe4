"""Runs jobs in processes of their own: a hang is killed and named, a crash costs one job.

An illegal access ends every later launch of its process, and a kernel that hangs cannot be
interrupted from Python. So each job has a process, in a process group with whatever it starts. A
job hangs when it prints nothing for its timeout. Not concurrent.futures: a process that dies breaks
its whole pool, and a pool can neither kill one that hangs nor say what a dead one complained of.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastvit_kernels.accuracy.runner import first_line
from fastvit_kernels.commands.console import term_interrupts

POLL_S = 0.05
REAPED_S = 10.0  # how long a killed process may take to end: one that hangs in a driver never does


@dataclass(frozen=True)
class Job:
    """A command that prints a JSON object a line."""

    name: str
    command: tuple[str, ...]
    timeout: float | None = None  # seconds without a line; None: that of the run


@dataclass(frozen=True)
class Outcome:
    """What a job printed, and what ended it before its time: a fault, or the end of the budget."""

    job: Job
    lines: list[dict[str, Any]]
    failure: str | None
    is_cut: bool = False


def _lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output; what else it holds, and a torn last line, are left out."""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            if isinstance(content := json.loads(line), dict):
                found.append(content)
    return found


class _Running:
    """A job at work."""

    def __init__(self, job: Job, timeout: float, now: float):
        self.job, self.timeout = job, timeout if job.timeout is None else job.timeout
        self.out = tempfile.TemporaryFile()  # noqa: SIM115, closed as it is read
        self.err = tempfile.TemporaryFile()  # noqa: SIM115
        self.printed, self.since = 0, now
        self.process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            start_new_session=True,
        )

    def is_silent(self, now: float) -> bool:
        """Whether it printed nothing for its timeout."""
        printed = os.fstat(self.out.fileno()).st_size
        if printed != self.printed:
            self.printed, self.since = printed, now
        return now - self.since > self.timeout

    def kill(self) -> None:
        """The process and what it started. It may have ended by itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def outcome(self, now: float) -> Outcome | None:
        """None while it works."""
        if self.process.poll() is None and not self.is_silent(now):
            return None
        return self.end()

    def end(self) -> Outcome:
        """What it came to: a process that still works is killed."""
        status = self.process.poll()
        failure = None
        if status is None:
            failure = f"not finished after {self.timeout:g} s, killed"
        elif status < 0:
            failure = f"the process was ended by {signal.Signals(-status).name}"
        elif status > 0:
            failure = f"the process ended with status {status}"
        self.kill()
        try:
            self.process.wait(REAPED_S)
        except subprocess.TimeoutExpired:
            failure = f"{failure}, and still there {REAPED_S:g} s later"
        printed, complaints = self._read(self.out), self._read(self.err).strip().splitlines()
        if failure is not None and complaints:
            failure = f"{failure}: {complaints[-1].strip()[:300]}"
        return Outcome(self.job, _lines(printed), failure)

    @staticmethod
    def _read(file: Any) -> str:
        with file:
            file.seek(0)
            return file.read().decode(errors="replace")


def run_isolated(
    jobs: Sequence[Job],
    workers: int,
    timeout: float,
    *,
    budget: float = math.inf,
    then: Callable[[Outcome], Sequence[Job]] = lambda outcome: (),
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Run jobs, at most `workers` at once.

    Args:
        timeout: a job that prints no line for so many seconds is killed.
        budget: seconds after which what still runs is killed; its outcome has what it printed.
        then: further jobs that follow from an outcome: what a dead process has left undone.
    Yields: the outcome of each as it ends.
    """
    waiting, running, end = deque(jobs), list[_Running](), now() + budget
    with term_interrupts():
        try:
            while (waiting or running) and now() < end:
                while waiting and len(running) < workers:
                    running.append(_Running(waiting.popleft(), timeout, now()))
                time.sleep(POLL_S)
                for one in [*running]:
                    outcome = one.outcome(now())
                    if outcome is not None:
                        running.remove(one)
                        waiting += then(outcome)
                        yield outcome
            while running:
                outcome = running.pop().end()
                is_cut = outcome.failure is not None  # else it has just ended by itself
                yield replace(outcome, failure=None, is_cut=is_cut)
        finally:
            for one in running:
                one.kill()


def python(*words: str) -> tuple[str, ...]:
    """The command that runs a module with this interpreter."""
    return (sys.executable, "-m", *words)


def device_lost(device: torch.device) -> str | None:
    """The error that a CUDA context keeps after an illegal access; None where the device works.

    An error of one launch is reported once: a context that reports it at the second synchronisation
    too is lost, and every later launch of its process fails.
    """
    if device.type != "cuda":
        return None
    for _ in range(2):
        try:
            torch.cuda.synchronize(device)
            return None
        except RuntimeError as error:
            found = first_line(error)
    return found
