"""Runs jobs in processes of their own: a hang is killed and named, a crash costs one job.

An illegal access ends every later launch of its process, and a kernel that hangs cannot be
interrupted from Python. So each job has a process, in a process group with whatever it starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

REAPED_S = 10.0  # how long a killed process may take to end: one that hangs in a driver never does


@dataclass(frozen=True)
class Job:
    """A command that prints a JSON object a line."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a job printed, and what ended it before its time."""

    job: Job
    lines: list[dict[str, Any]]
    failure: str | None


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
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def _run(job: Job, timeout: float, processes: _Processes) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = processes.start(job, out, err)
        failure = None
        try:
            status = process.wait(timeout)
            if status < 0:
                failure = f"the process was ended by {signal.Signals(-status).name}"
            elif status > 0:
                failure = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            failure = f"not finished after {timeout:g} s, killed"
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


def run_isolated(jobs: Sequence[Job], workers: int, timeout: float) -> Iterator[Outcome]:
    """Run jobs, at most `workers` at once, each for at most `timeout` seconds.

    Yields: the outcome of each as it ends.
    """
    processes = _Processes()
    with ThreadPoolExecutor(workers) as pool:
        try:
            pending = {pool.submit(_run, job, timeout, processes) for job in jobs}
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            processes.close()
            pool.shutdown(wait=False, cancel_futures=True)


def python(*words: str) -> tuple[str, ...]:
    """The command that runs a module with this interpreter."""
    return (sys.executable, "-m", *words)
