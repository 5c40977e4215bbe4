"""Runs tasks until they are done or the time is over; a row is on disk before the next begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import Bench
from bench.plan import Task
from bench.providers import BASELINE
from bench.rows import ERROR, FAILED, OK, TIMEOUT, Results, Row, is_ours
from bench.timer import DeviceLost

CHECK = "check"
HUNG_S, HUNG_FACTOR = 60.0, 4.0  # a task hangs after so many seconds, and so many of its guesses
CHECK_SHARE = 0.3  # of a time budget that `fastvit-kernels check` may take


class TimeOver(BaseException):
    """The time budget has ended. Not an Exception: no provider's failure may swallow it."""


class Clock:
    """Seconds of a time budget; without one they never end."""

    def __init__(self, budget: float | None, now: Callable[[], float] = time.monotonic):
        self.budget, self._now, self.started = budget, now, now()

    @property
    def elapsed(self) -> float:
        return self._now() - self.started

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.budget - self.elapsed

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Raise TimeOver in the main thread when the budget ends inside; SIGTERM interrupts too."""

        def over(*_: Any) -> None:
            raise TimeOver

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        former = signal.signal(signal.SIGTERM, interrupted)
        alarm = signal.signal(signal.SIGALRM, over)
        if self.budget is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self.left, 0.01))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            signal.signal(signal.SIGTERM, former)


@contextmanager
def watched(seconds: float, expired: Callable[[], Any]) -> Iterator[None]:
    """Call `expired` from a thread where the body takes longer: SIGALRM waits for C code to end."""
    lock, done = threading.Lock(), False

    def end() -> None:
        with lock:
            if not done:
                expired()

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()


def limit_of(task: Task, clock: Clock) -> float:
    """Seconds after which a task counts as hung: well past its guess, or past the whole budget."""
    return min(HUNG_S + HUNG_FACTOR * task.seconds, max(clock.left, 0.0) + HUNG_S)


def pending(task: Task, results: Results) -> list[str]:
    """The task's providers without a row, in order."""
    return list(dict.fromkeys(key[1] for key in results.missing(task.keys)))


def run_tasks(
    tasks: Sequence[Task], bench: Bench, results: Results, clock: Clock,
    started: Callable[[Task], None] = lambda task: None,
    restart: Callable[[], Any] = lambda: None,
) -> int:  # fmt: skip
    """Measure what has no row yet. Returns how many tasks the time did not allow.

    A task that hangs gets a row that says so, and `restart`, from another thread, has to replace
    the process.

    Raises: DeviceLost, with a row that says so, where only a new process can go on.
    """
    skipped = 0
    bench.note = results.note
    for task in tasks:
        names = pending(task, results)
        if not names:
            continue
        if task.seconds > clock.left:
            skipped += 1
            continue
        started(task)
        wanted = set(results.missing(task.keys))
        bench.current = ""
        limit = limit_of(task, clock)

        def hung(task: Task = task, wanted: set[Any] = wanted, limit: float = limit) -> None:
            note = f"hung: not finished after {limit:.0f} s"
            _record_loss(task, wanted, bench.current, TIMEOUT, note, results)
            results.tried()
            restart()

        try:
            with results.trying(sorted(wanted)), watched(limit, hung):
                for row in task.run(bench, names):
                    # The baseline may have a row of an earlier task.
                    if row.key in wanted or (task.renews and row.status == OK):
                        results.append(row)
                    bench.say(describe(row))
        except DeviceLost as error:
            note = f"the GPU was lost: {error}"
            _record_loss(task, wanted, bench.current, ERROR, note, results)
            raise
    return skipped


def _record_loss(
    task: Task, wanted: set[Any], culprit: str, status: str, note: str, results: Results
) -> None:
    """Rows for the provider that ended the process, so that a resumed run leaves it out."""
    open_keys = set(results.missing(task.keys)) & wanted
    lost = {key for key in open_keys if key[1] == culprit}
    # Without a culprit the whole case is given up, or the next process would end here too.
    for op, provider, shape, dtype, mode in sorted(lost or open_keys):
        results.append(Row(op, provider, shape, dtype, mode, status=status, note=note))


def describe(row: Row) -> str:
    """One line for the console."""
    where = f"{row.op} {row.shape} {row.dtype} {row.mode}".strip()
    if row.ms is None or row.status not in (OK, FAILED):
        what = f"batch {row.batch}" if row.batch is not None else f"{row.status} {row.note}"
        return f"{where}: {row.provider}: {what}"
    text = f"{row.ms:.4g} ms"
    if row.graph_ms is not None:
        text += f", {row.graph_ms:.4g} ms as a graph"
    if row.images_per_s is not None:
        text += f", {row.images_per_s:,.0f} images/s"
    if row.status == FAILED:
        text += f", FAILED {row.note}"
    elif row.speedup is not None and row.provider != BASELINE:
        text += f", {row.speedup:.2f}x"
    return f"{where}: {row.provider}: {text}"


def run_check(folder: Path, timeout: float | None) -> Row:
    """`fastvit-kernels check` in a process of its own, whose end cannot be this one's."""
    row = Row(CHECK, "ours", "all", "all", CHECK)
    root = Path(__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "fastvit_kernels", "check", "--json"]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=timeout,
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        cases = check_lines(error.stdout)
        failed = failed_cases(cases)
        note = f"not finished after {timeout:.0f} s, {len(cases)} cases done"
        if failed:
            return replace(row, status=FAILED, note=f"{note}; failed: {', '.join(failed)}")
        return replace(row, status=TIMEOUT, note=note)
    *cases, summary = check_lines(done.stdout) or [{}]
    if "versions" not in summary:  # it ended before its last line
        lines = done.stderr.strip().splitlines() or ["no output"]
        return replace(row, status=FAILED, note=f"check ended with {done.returncode}: {lines[-1]}")
    failed = failed_cases(cases)
    good = f"{len(cases) - len(failed)} of {len(cases)}"
    note = f"{good} cases within the 2x rule, {summary['device']}"
    if failed:
        note += "; failed: " + ", ".join(failed)
    return replace(row, status=FAILED if failed or done.returncode else OK, note=note)


def check_lines(output: str | bytes | None) -> list[dict[str, Any]]:
    """What `check --json` has printed so far; a line that was cut off is left out."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def failed_cases(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Names of those that failed, with what ended them if they had no errors to show."""
    names = []
    for case in cases:
        if not case["passed"]:
            why = f" ({case['failure']})" if case["failure"] else ""
            names.append(f"{case['name']} {case['dtype']}{why}")
    return names


def bad_rows(rows: Sequence[Row]) -> list[Row]:
    """Those that make the exit status 1: a broken 2x rule, and errors of our own kernels."""
    return [r for r in rows if r.status == FAILED or (r.status == ERROR and _is_ours(r))]


def _is_ours(row: Row) -> bool:
    return row.op != "profile" and is_ours(row)
