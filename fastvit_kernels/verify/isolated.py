"""Runs jobs in processes of their own: a hang is killed and named, a crash costs one job.

An illegal access ends every later launch of its process, and a kernel that hangs cannot be
interrupted from Python. So each job has a process, in a process group with whatever it starts. A
job hangs when it prints nothing for its timeout.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

POLL_S = 0.2
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


class _Processes:
    """Those that run, so that none outlives an interrupt."""

    def __init__(self) -> None:
        self._lock, self._running, self._closed = threading.Lock(), set(), False

    def start(self, job: Job, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """The process and what it started. It may have ended by itself."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                self.kill(process)


def _lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output; what else it holds, and a torn last line, are left out."""
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            if isinstance(content := json.loads(line), dict):
                found.append(content)
    return found


def _status(
    process: subprocess.Popen[bytes], out: Any, timeout: float, now: Callable[[], float]
) -> int | None:
    """The status of a process; None where it prints nothing for `timeout` seconds."""
    size, since = 0, now()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        printed = os.fstat(out.fileno()).st_size
        if printed != size:
            size, since = printed, now()
        elif now() - since > timeout:
            return None


def _run(job: Job, timeout: float, processes: _Processes, now: Callable[[], float]) -> Outcome:
    timeout = timeout if job.timeout is None else job.timeout
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = processes.start(job, out, err)
        failure = None
        status = _status(process, out, timeout, now)
        if status is None:
            failure = f"not finished after {timeout:g} s, killed"
        elif status < 0:
            failure = f"the process was ended by {signal.Signals(-status).name}"
        elif status > 0:
            failure = f"the process ended with status {status}"
        processes.kill(process)
        try:
            process.wait(REAPED_S)
        except subprocess.TimeoutExpired:
            failure = f"{failure}, and still there {REAPED_S:g} s later"
        processes.ended(process)
        out.seek(0)
        err.seek(0)
        printed = out.read().decode(errors="replace")
        complaints = err.read().decode(errors="replace").strip().splitlines()
    if failure is not None and complaints:
        failure = f"{failure}: {complaints[-1].strip()[:300]}"
    return Outcome(job, _lines(printed), failure)


@contextmanager
def term_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt: what runs is ended, what is at work is written."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_isolated(
    jobs: Sequence[Job], workers: int, timeout: float, *, budget: float = math.inf,
    then: Callable[[Outcome], Sequence[Job]] = lambda outcome: (),
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:  # fmt: skip
    """Run jobs, at most `workers` at once.

    Args:
        timeout: a job that prints no line for so many seconds is killed.
        budget: seconds after which what still runs is killed; its outcome has what it printed.
        then: further jobs that follow from an outcome: what a dead process has left undone.
    Yields: the outcome of each as it ends.
    """
    processes, end = _Processes(), now() + budget
    with term_interrupts(), ThreadPoolExecutor(workers) as pool:
        try:
            pending = {pool.submit(_run, job, timeout, processes, now) for job in jobs}
            while pending and (left := end - now()) > 0:
                most = None if math.isinf(left) else left
                done, pending = wait(pending, most, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    more = then(outcome)
                    pending |= {pool.submit(_run, j, timeout, processes, now) for j in more}
                    yield outcome
            pool.shutdown(wait=False, cancel_futures=True)
            processes.close()
            for future in wait(pending, REAPED_S).done:
                if not future.cancelled() and future.exception() is None:
                    outcome = future.result()
                    is_cut = outcome.failure is not None  # else it has just ended by itself
                    yield replace(outcome, failure=None, is_cut=is_cut)
        finally:
            processes.close()
            pool.shutdown(wait=False, cancel_futures=True)


def python(*words: str) -> tuple[str, ...]:
    """The command that runs a module with this interpreter."""
    return (sys.executable, "-m", *words)
