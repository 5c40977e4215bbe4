"""Runs what a command asks for: roofs, then tasks until the time is over.

A row is on disk before the next begins. A task that hangs or loses the device ends the process; the
case that was at work is in the file TRYING, and a resumed run leaves it out.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench import report
from bench.measure import Bench, measure_roof, planned_roofs, roofs_of
from bench.plan import Task, Wanted, tasks
from bench.rows import Results, bad_rows, read_results
from fastvit_kernels.commands import options
from fastvit_kernels.measure.timer import CudaTimer, DeviceLost, Timer
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.tuned_table import table_path
from tests.check.isolated import term_interrupts

CUT_SHORT = 3  # exit status of a command that its time has cut short
HUNG_S, HUNG_COMPILING_S = 60.0, 400.0  # a provider hangs after so many seconds by itself
RESERVE = 15.0  # seconds of a time budget kept for summary and plots


class TimeOver(BaseException):
    """The time budget has ended. Not an Exception: no provider's failure may swallow it."""


@contextmanager
def alarm(seconds: float | None) -> Iterator[None]:
    """Raise TimeOver in the main thread after so many seconds inside; SIGTERM interrupts too."""

    def over(*_: Any) -> None:
        raise TimeOver

    former = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 0 if seconds is None else max(seconds, 0.01))
    try:
        with term_interrupts():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def watch(compiles: bool) -> None:
    """From now on end the process, with a traceback, if the provider at work hangs: C code lets no
    signal in."""
    seconds = HUNG_COMPILING_S if compiles else HUNG_S
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def run_tasks(tasks: Sequence[Task], bench: Bench, results: Results) -> None:
    """Measure what has no row yet. Raises: DeviceLost if only a new process can go on."""
    for number, task in enumerate(tasks, 1):
        missing = results.missing(task.keys)
        if not missing:
            continue
        bench.say(f"[{number}/{len(tasks)}] {task.title}")

        def note(provider: str, compiles: bool, missing: Sequence[Any] = missing) -> None:
            results.trying([key for key in missing if key[1] == provider] or missing)
            watch(compiles)

        bench.note, bench.current = note, ""
        note("", True)  # until the first is at work
        try:
            for row in task.run(list(dict.fromkeys(key[1] for key in missing)), bench):
                if row.key in missing:  # eager may have a row of an earlier task
                    results.append(row)
                    bench.say(row.describe())
        finally:
            faulthandler.cancel_dump_traceback_later()
        results.tried()


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


def run(
    arguments: argparse.Namespace, wanted: Wanted, machine: Machine, started: float | None = None
) -> int:
    """Measure: roofs, then tasks until the time is over, counted from `started`; report."""
    left = arguments.time_budget
    if left is not None:
        spent = RESERVE if started is None else RESERVE + time.monotonic() - started
        left = max(1.0, left - spent)
    if machine.device.type == "cuda" and (path := table_path(gpu(machine.device))).exists():
        wanted.say(f"launch configs are those of {path}")
    found, results, ending = tasks(wanted), Results(arguments.out, arguments.resume), 0
    bench = Bench(machine.device, machine.make_timer(), {}, functools.partial(print, flush=True))
    try:
        with alarm(left), bench.timer.stream(), warnings.catch_warnings():
            # Why a forced SDPA backend cannot run is in its row; torch says it in many lines.
            warnings.simplefilter("ignore", UserWarning)
            for text in wanted.said:
                bench.say(text)
            _roofs(bench, results)
            run_tasks(found, bench, results)
    except TimeOver:
        ending = CUT_SHORT
        results.tried()
        bench.say("the time is over; --resume continues.")
    except KeyboardInterrupt:
        results.tried()
        bench.say("interrupted; every finished row is in the CSV, and --resume continues.")
        ending = 130
    except DeviceLost as error:  # TRYING stays
        bench.say(f"the GPU was lost: {error}. --resume goes on without this case.")
        ending = 1
    results.close()
    frame = read_results(results.path)
    report.run_plot(frame, results.folder, wanted.said)
    report.show(frame)
    return ending or int(bool(bad_rows(results.rows.values())))


def _roofs(bench: Bench, results: Results) -> None:
    """Measure those without a row."""
    for row in planned_roofs():
        if row.key not in results.rows:
            row = measure_roof(row, bench.device, bench.timer)
            results.append(row)
            bench.say(row.describe())
    bench.roofs = roofs_of(results.rows.values())
