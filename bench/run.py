"""Runs what a command asks for: roofs, then tasks as far as the time goes.

A row is on disk before the next begins. A task that hangs, or that loses the device, gets a row
that says so, and a new process goes on; not after MOST_RESTARTS in which nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import plan, report
from bench.host import measure_host
from bench.measure import Bench, Roofs, measure_roof, planned_roofs
from bench.plan import Task, Wanted, named_cases, tasks
from bench.rows import ERROR, LOST, OK, TIMEOUT, Key, Results, bad_rows
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned, term_interrupts
from fastvit_kernels.measure.timer import CudaTimer, DeviceLost, Timer

HUNG_S, HUNG_FACTOR = 20.0, 2.0  # a task hangs after so many seconds, and so many of its guesses
RESERVE = 15.0  # seconds of a time budget kept for summary and plots
CUT_SHORT = 3  # exit status of a command that its time has cut short
MOST_RESTARTS = 2


class TimeOver(BaseException):
    """The time budget has ended. Not an Exception: no provider's failure may swallow it."""


class Clock:
    """Seconds of a time budget, from `started` on; without a budget they never end."""

    def __init__(
        self,
        budget: float | None,
        now: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ):
        self.budget, self._now = budget, now
        self.started = now() if started is None else started

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.budget - (self._now() - self.started)

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Raise TimeOver in the main thread when the budget ends inside; SIGTERM interrupts too."""

        def over(*_: Any) -> None:
            raise TimeOver

        former = signal.signal(signal.SIGALRM, over)
        if self.budget is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self.left, 0.01))
        try:
            with term_interrupts():
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)


@contextmanager
def watched(seconds: float, expired: Callable[[], Any]) -> Iterator[None]:
    """Call `expired` from a thread if the body takes longer: SIGALRM waits for C code to end."""
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


def run_tasks(
    tasks: Sequence[Task],
    bench: Bench,
    results: Results,
    clock: Clock,
    restart: Callable[[], Any] = lambda: None,
) -> int:
    """Measure what has no row yet. Returns how many tasks the time did not allow.

    A task that hangs gets a row that says so, and `restart`, from another thread, has to replace
    the process.

    Raises: DeviceLost, with a row that says so, if only a new process can go on.
    """
    skipped = 0
    bench.note = results.note
    for number, task in enumerate(tasks, 1):
        wanted = set(results.missing(task.keys))
        if wanted and task.seconds > clock.left:
            skipped += 1
        elif wanted:
            bench.say(f"[{number}/{len(tasks)}] {task.title}")
            _run_task(task, wanted, bench, results, limit_of(task, clock), restart)
    return skipped


def _run_task(
    task: Task,
    wanted: set[Key],
    bench: Bench,
    results: Results,
    limit: float,
    restart: Callable[[], Any],
) -> None:
    again = {key for key in task.keys if task.renews and not results.has_given_up(key)}
    names = list(dict.fromkeys(key[1] for key in task.keys if key in wanted | again))
    bench.current = ""

    def give_up(status: str, note: str) -> None:
        """Rows for the provider that ended the process, so that a resumed run leaves it out;
        without one the whole case is given up, or the next process would end here too."""
        left, culprit = set(results.missing(task.keys)) & wanted, bench.current
        lost = {key for key in task.keys if key[1] == culprit and (key in left or task.renews)}
        results.give_up(sorted(lost or left), status, note)

    def hung() -> None:
        give_up(TIMEOUT, f"hung: not finished after {limit:.0f} s")
        restart()

    try:
        with results.trying(sorted(wanted)), watched(limit, hung):
            for row in task.run(names, bench):
                # The baseline may have a row of an earlier task.
                if row.key in wanted or (task.renews and row.status == OK):
                    results.append(row)
                bench.say(row.describe())
    except DeviceLost as error:
        give_up(ERROR, f"{LOST}: {error}")
        raise


# --- the command


@dataclass
class Machine:
    """What a run needs of the machine; the tests bring a stand-in."""

    device: torch.device
    make_timer: Callable[[], Timer]
    restart: Callable[[list[str]], Any]


def _restart(words: list[str]) -> None:
    """This process again, from the start: the only cure for a lost CUDA context."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "bench", *words])


def this_machine(arguments: argparse.Namespace) -> Machine | None:
    """The GPU of `--device`; None without one, or if the CPU was asked for."""
    device = options.chosen_device(arguments)
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return Machine(device, CudaTimer, _restart)


def wanted_by(arguments: argparse.Namespace, ops: Sequence[str]) -> Wanted:
    """What the command's words ask for, of these ops.

    Raises: CommandError if `--model`, `--batch`, `--img-size` and the rest do not fit together.
    """
    names = ("model", "batch", "img_size")
    given = {n: x for n in names if (x := getattr(arguments, n, None)) is not None}
    dtypes, modes = arguments.dtype or (), arguments.mode or ()
    if given and "model" not in given:
        raise CommandError("--batch and --img-size need --model: the plan's models have their own")
    unknown = sorted(set(dtypes) - {"amp", "bf16"}) + sorted(set(modes) - {"train", "infer"})
    if given and unknown:
        raise CommandError(
            f"--model is measured with --dtype amp or bf16 and --mode train or infer, got "
            f"{', '.join(unknown)}"
        )
    asked = arguments.provider or (), arguments.shape or (), dtypes, modes
    return Wanted(ops, *asked, **given)


def run(
    arguments: argparse.Namespace,
    wanted: Wanted,
    words: Sequence[str],
    machine: Machine,
    console: Any,
    started: float | None = None,
) -> int:
    """Measure: roofs, then tasks as far as the time goes; report in any case.

    Args:
        started: when this process began, for imports are part of a time budget.
    """
    clock = Clock(arguments.time_budget, started=started)
    if clock.budget is not None:
        clock.budget = max(1.0, clock.budget - RESERVE)
    command = arguments.command
    if wanted.model:
        list(named_cases(wanted))  # a mistake is said before anything is measured
    results = Results(arguments.out, arguments.resume)
    ending, cut_short, measured = 0, False, set(results.rows)

    def said(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def restart(restarts: int = 0) -> Any:
        if not restarts:
            said("a case hangs: its row says so, and a new process goes on.")
        again = [*words, "--resume", "--restarts", str(restarts)]
        if clock.budget is not None:
            again += ["--time-budget", f"{max(1.0, clock.left + RESERVE):.0f}"]
        return machine.restart(again)

    bench = Bench(machine.device, machine.make_timer(), Roofs(0.0, {}), said)
    try:
        with clock.alarm(), bench.timer.stream(), warnings.catch_warnings():
            # Why a forced SDPA backend cannot run is in its row; torch says it in many lines.
            warnings.simplefilter("ignore", UserWarning)
            if command == "targets":
                found = plan.targets(wanted.shapes)
            else:
                found = tasks(wanted, machine.device)
            for text in wanted.said:
                said(text)
            _roofs(bench, results)
            if left_out := run_tasks(found, bench, results, clock, restart):
                cut_short = True
                said(f"{left_out} cases were left out: too little time. --resume continues.")
    except TimeOver:
        cut_short = True
        said("the time is over; --resume continues.")
    except KeyboardInterrupt:
        said("interrupted; every finished row is in the CSV, and --resume continues.")
        ending = 130
    except DeviceLost as error:
        results.close()
        got_on = any(r.status == OK for key, r in results.rows.items() if key not in measured)
        lost = 1 if got_on else arguments.restarts + 1
        if lost <= MOST_RESTARTS:
            said(f"{LOST}: {error}. A new process goes on.")
            return restart(lost) or 1
        said(f"{LOST} by {lost} processes that measured nothing: {error}")
        ending = 1
    results.close()
    del bench
    report.finish(results, wanted.said, console, command)
    if command == "targets" and not ending and cut_short:
        return CUT_SHORT
    new = [r for key, r in results.rows.items() if arguments.resume or key not in measured]
    return ending or int(bool(bad_rows(new)))


def _roofs(bench: Bench, results: Results) -> None:
    """Measure those without a row; one that loses the device has a row, and is not tried again."""
    for row in planned_roofs():
        if row.key in results.rows:
            continue
        try:
            row = measure_roof(row, bench.device, bench.timer)
        except DeviceLost as error:
            results.append(replace(row, status=ERROR, note=f"{LOST}: {error}"))
            raise
        results.append(row)
        bench.say(row.describe())
    bench.roofs = Roofs.of(results.rows.values())


def run_without_gpu(arguments: argparse.Namespace, console: Any) -> int:
    console.print(
        "torch sees no GPU: only host cost is measured here. `fastvit-kernels check` runs the "
        "kernels in\nTriton's interpreter and says whether they are right."
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = list(measure_host(torch.device("cpu")))
    torch.set_num_threads(threads)
    header, lines = report.host_table(rows)
    print(aligned([header, *lines]))
    if arguments.out is not None:
        results = Results(arguments.out, arguments.resume)
        for row in rows:
            results.append(row)
        results.close()
    return 0
