"""Runs items in processes of their own: a hang is killed and named, a crash costs one item.

An illegal access ends every later launch of its process, and a kernel that hangs cannot be
interrupted from Python. So each chunk of items has a process, in a process group with whatever it
starts; it prints a JSON object for each item, in order, and what it leaves undone goes to another.
Not concurrent.futures: a process that dies breaks its whole pool, and a pool can neither kill one
that hangs nor say what a dead one complained of.
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fastvit_kernels.accuracy.runner import first_line

POLL_S = 0.05
REAPED_S = 10.0  # how long a killed process may take to end: one that hangs in a driver never does
LOST = 4  # exit status of a process whose device is lost, by an item whose line says so

Item = dict[str, Any]  # what JSON can hold


class _Running:
    """A process at work on a chunk."""

    def __init__(self, chunk: Sequence[Item], command: Sequence[str], now: float):
        self.chunk, self.printed, self.since = chunk, 0, now
        self.out = tempfile.TemporaryFile()  # noqa: SIM115, closed as it is read
        self.err = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, json.dumps(chunk)],
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            start_new_session=True,
        )

    def silence(self, now: float) -> float:
        """Seconds since it last printed."""
        printed = os.fstat(self.out.fileno()).st_size
        if printed != self.printed:
            self.printed, self.since = printed, now
        return now - self.since

    def kill(self) -> None:
        """The process and what it started. It may have ended by itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, timeout: float) -> tuple[list[dict[str, Any]], str | None]:
        """Its lines, and what ended it before its time: a process that still works is killed."""
        status, failure = self.process.poll(), None
        if status is None:
            failure = f"not finished after {timeout:g} s, killed"
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
        lines = []
        for line in printed.splitlines():
            with suppress(ValueError):  # what a library prints, and a torn last line
                if isinstance(content := json.loads(line), dict):
                    lines.append(content)
        return lines, failure

    @staticmethod
    def _read(file: Any) -> str:
        with file:
            file.seek(0)
            return file.read().decode(errors="replace")


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
    chunks: Sequence[Sequence[Item]],
    command: Sequence[str],
    workers: int,
    timeout: float,
    *,
    budget: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Item, dict[str, Any] | str]]:
    """Run chunks of items, at most `workers` at once.

    Args:
        command: gets a chunk as its last word.
        timeout: a process that prints no line for so many seconds is killed.
        budget: seconds after which what still runs is killed.
    Yields: as a process ends each item that it has run, with its line, or with what ended the
        process.
    """
    waiting, running, end = deque(chunks), list[_Running](), now() + budget
    with term_interrupts():
        try:
            while (waiting or running) and now() < end:
                while waiting and len(running) < workers:
                    running.append(_Running(waiting.popleft(), command, now()))
                time.sleep(POLL_S)
                for one in [*running]:
                    if one.process.poll() is None and one.silence(now()) <= timeout:
                        continue
                    running.remove(one)
                    lines, failure = one.end(timeout)
                    done = len(lines)
                    yield from zip(one.chunk, lines, strict=False)
                    if failure is not None and one.process.returncode != LOST:
                        done = min(done, len(one.chunk) - 1)  # or it died of what it had run
                        yield one.chunk[done], failure
                        done += 1
                    if done < len(one.chunk):
                        waiting.append(one.chunk[done:])
            while running:
                one = running.pop()
                yield from zip(one.chunk, one.end(timeout)[0], strict=False)
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
