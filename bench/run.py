"""Runs what a command asks for: roofs, then tasks as far as the time goes.

A row is on disk before the next begins. A task that hangs or loses the device ends the process; the
case that was at work is in the file TRYING, and a resumed run leaves it out.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench import plan, report
from bench.measure import Bench, Roofs, measure_roof, planned_roofs
from bench.plan import CUT_SHORT, Task, Wanted, tasks
from bench.rows import OK, Results, bad_rows
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, term_interrupts
from fastvit_kernels.measure.timer import CudaTimer, DeviceLost, Timer

HUNG_S, HUNG_FACTOR = 60.0, 3.0  # a task hangs after so many seconds, and so many of its guesses
RESERVE = 15.0  # seconds of a time budget kept for summary and plots


class TimeOver(BaseException):
    """The time budget has ended. Not an Exception: no provider's failure may swallow it."""


class Clock:
    """Seconds of a time budget, from `started` on; without a budget they never end."""

    def __init__(self, budget: float | None, started: float | None = None):
        self.budget = budget
        self.started = time.monotonic() if started is None else started

    @property
    def left(self) -> float:
        if self.budget is None:
            return float("inf")
        return self.budget - (time.monotonic() - self.started)

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
def watched(seconds: float) -> Iterator[None]:
    """End the process, with a traceback, if the body takes longer: C code lets no signal in."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_tasks(tasks: Sequence[Task], bench: Bench, results: Results, clock: Clock) -> int:
    """Measure what has no row yet. Returns how many tasks the time did not allow.

    Raises: DeviceLost if only a new process can go on.
    """
    skipped = 0
    bench.note = results.note
    for number, task in enumerate(tasks, 1):
        wanted = set(results.missing(task.keys))
        if wanted and task.seconds > clock.left:
            skipped += 1
        elif wanted:
            bench.say(f"[{number}/{len(tasks)}] {task.title}")
            again = {key for key in task.keys if task.renews and not results.has_given_up(key)}
            names = list(dict.fromkeys(key[1] for key in task.keys if key in wanted | again))
            bench.current = ""
            limit = min(HUNG_S + HUNG_FACTOR * task.seconds, max(clock.left, 0.0) + HUNG_S)
            with results.trying(sorted(wanted)), watched(limit):
                for row in task.run(names, bench):
                    # The baseline may have a row of an earlier task.
                    if row.key in wanted or (task.renews and row.status == OK):
                        results.append(row)
                    bench.say(row.describe())
    return skipped


@dataclass
class Machine:
    """What a run needs of the machine; the tests bring a stand-in."""

    device: torch.device
    make_timer: Callable[[], Timer]


def this_machine(arguments: argparse.Namespace) -> Machine | None:
    """The GPU of `--device`; None without one, or if the CPU was asked for."""
    device = options.chosen_device(arguments)
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return Machine(device, CudaTimer)


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
    machine: Machine,
    started: float | None = None,
) -> int:
    """Measure: roofs, then tasks as far as the time goes; report in any case.

    Args:
        started: when this process began, for imports are part of a time budget.
    """
    clock = Clock(arguments.time_budget, started)
    if clock.budget is not None:
        clock.budget = max(1.0, clock.budget - RESERVE)
    targets = arguments.command == "targets"
    found = plan.targets(wanted.shapes) if targets else tasks(wanted)
    results = Results(arguments.out, arguments.resume)
    ending, measured = 0, set(results.rows)

    def said(text: str) -> None:
        print(text, flush=True)

    bench = Bench(machine.device, machine.make_timer(), Roofs(0.0, {}), said)
    try:
        with clock.alarm(), bench.timer.stream(), warnings.catch_warnings():
            # Why a forced SDPA backend cannot run is in its row; torch says it in many lines.
            warnings.simplefilter("ignore", UserWarning)
            for text in wanted.said:
                said(text)
            _roofs(bench, results)
            if left_out := run_tasks(found, bench, results, clock):
                ending = CUT_SHORT * targets
                said(f"{left_out} cases were left out: too little time. --resume continues.")
    except TimeOver:
        ending = CUT_SHORT * targets
        results.tried()
        said("the time is over; --resume continues.")
    except KeyboardInterrupt:
        results.tried()
        said("interrupted; every finished row is in the CSV, and --resume continues.")
        ending = 130
    except DeviceLost as error:  # TRYING stays
        said(f"the GPU was lost: {error}. --resume goes on without this case.")
        ending = 1
    results.close()
    report.finish(results, wanted.said, arguments.command)
    new = [r for key, r in results.rows.items() if arguments.resume or key not in measured]
    return ending or int(bool(bad_rows(new)))


def _roofs(bench: Bench, results: Results) -> None:
    """Measure those without a row."""
    for row in planned_roofs():
        if row.key not in results.rows:
            row = measure_roof(row, bench.device, bench.timer)
            results.append(row)
            bench.say(row.describe())
    bench.roofs = Roofs.of(results.rows.values())
