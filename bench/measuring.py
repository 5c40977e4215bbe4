"""Measures what a command asks for: roofs, the check, then tasks as far as the time goes."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report, targets
from bench.drawn import draw
from bench.harness import Bench
from bench.host import measure_host
from bench.plan import OPS, WHOLE, Task, Wanted, named_cases, tasks
from bench.roofs import measure_roofs, roofs_of
from bench.rows import RESULTS, Results, Row, conditions
from bench.session import (
    CHECK,
    CHECK_SHARE,
    Clock,
    TimeOver,
    bad_rows,
    run_check,
    run_tasks,
)
from bench.stages import CUT_SHORT
from bench.target_tasks import target_tasks
from bench.timer import CudaTimer, DeviceLost, Roofs, Timer
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned, require
from fastvit_kernels.commands.training.checkpoint import write_text

RESERVE = 15.0  # seconds of a time budget kept for summary and plots
NO_GPU_CHECK = 70.0  # seconds for the check where Triton's interpreter runs it


@dataclass
class Machine:
    """What a run needs of the machine; the tests bring a stand-in."""

    device: torch.device
    make_timer: Callable[[], Timer]
    restart: Callable[[list[str]], Any]
    check: Callable[[Path, float | None], Row] = run_check


def _restart(words: list[str]) -> None:
    """This process again, from the start: the only cure for a lost CUDA context."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "bench", *words])


def this_machine(arguments: argparse.Namespace) -> Machine | None:
    """The GPU of `--device`, None where there is none or the CPU was asked for."""
    device = options.chosen_device(arguments)
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return Machine(device, CudaTimer, _restart)


def run(arguments: argparse.Namespace, words: Sequence[str], machine: Machine, console: Any) -> int:
    """Measure: roofs, check, then tasks as far as the time goes; report in any case."""
    clock = Clock(arguments.time_budget)
    if clock.budget is not None:
        clock.budget = max(1.0, clock.budget - RESERVE)
    wanted = Wanted(
        ops=(*WHOLE, *OPS) if arguments.command in ("all", "targets") else (arguments.command,),
        providers=arguments.provider or (), shapes=arguments.shape or (),
        dtypes=arguments.dtype or (), modes=arguments.mode or (), **model_wanted(arguments),
    )  # fmt: skip
    if wanted.model:
        list(named_cases(wanted))  # a mistake is said before anything is measured
    results = _open(arguments)
    ending, left_out, is_over, measured = 0, 0, False, set(results.rows)
    with _progress(console) as progress:
        say = progress.console.print

        def said(text: str) -> None:
            say(text, markup=False, highlight=False, soft_wrap=True)

        bench = Bench(machine.device, machine.make_timer(), Roofs(0.0, {}), said)
        try:
            with clock.alarm(), warnings.catch_warnings():
                # Why a forced SDPA backend cannot run is in its row; torch says it in many lines.
                warnings.simplefilter("ignore", UserWarning)
                found = _tasks(arguments, wanted, machine.device)
                for text in wanted.said:
                    said(text)
                _roofs(bench, results)
                if arguments.command == "all" and not any(k[0] == CHECK for k in results.rows):
                    share = None if clock.budget is None else CHECK_SHARE * clock.left
                    row = machine.check(arguments.out, share)
                    results.append(row)
                    said(f"check: {row.status}: {row.note}")
                bar = progress.add_task("", total=len(found))

                def started(task: Task) -> None:
                    progress.update(bar, completed=found.index(task), description=task.title)

                def restart() -> None:
                    said("a case hangs: its row says so, and a new process goes on.")
                    machine.restart(_again(words, clock))

                left_out = run_tasks(found, bench, results, clock, started, restart)
                progress.update(bar, completed=len(found))
                if left_out:
                    said(f"{left_out} cases were left out: too little time. --resume continues.")
        except TimeOver:
            is_over = True
            said("the time is over; --resume continues.")
        except KeyboardInterrupt:
            said("interrupted; every finished row is in the CSV, and --resume continues.")
            ending = 130
        except DeviceLost as error:
            said(f"the GPU was lost: {error}. A new process goes on.")
            results.close()
            return machine.restart(_again(words, clock)) or 1
    results.close()
    del bench
    _finish(results, wanted, console, arguments.command)
    rows = list(results.rows.values())
    new = [r for r in rows if arguments.resume or r.key not in measured]
    if arguments.command == "targets" and not ending and (left_out or is_over):
        return CUT_SHORT
    return ending or (1 if bad_rows(new) else 0)


def model_wanted(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `--model`, `--batch` and `--img-size` ask for.

    Raises: CommandError where they do not fit together.
    """
    given = {n: getattr(arguments, n, None) for n in ("model", "batch", "img_size")}
    given = {n: x for n, x in given.items() if x is not None}
    if given and "model" not in given:
        raise CommandError("--batch and --img-size need --model: the plan's models have their own")
    unknown = sorted(set(arguments.dtype or ()) - {"amp", "bf16"}) if given else []
    unknown += sorted(set(arguments.mode or ()) - {"train", "infer"}) if given else []
    if unknown:
        raise CommandError(
            f"--model is measured with --dtype amp or bf16 and --mode train or infer, got "
            f"{', '.join(unknown)}"
        )
    return given


def _tasks(arguments: argparse.Namespace, wanted: Wanted, device: torch.device) -> list[Task]:
    if arguments.command == "targets":
        return list(target_tasks(wanted.shapes))
    return tasks(wanted, device)


def _again(words: Sequence[str], clock: Clock) -> list[str]:
    """The command that goes on, with the time that is left."""
    again = [*words, "--resume"]
    if clock.budget is not None:
        again += ["--time-budget", f"{max(1.0, clock.left + RESERVE):.0f}"]
    return again


def _open(arguments: argparse.Namespace) -> Results:
    if (arguments.out / RESULTS).exists() and not arguments.resume:
        raise CommandError(
            f"{arguments.out / RESULTS} exists: --resume adds to it, another --out starts anew"
        )
    try:
        return Results(arguments.out, arguments.resume)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error


def _progress(console: Any) -> Any:
    rich = require("rich.progress", "rich")
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    return rich.Progress(
        *columns, rich.TextColumn("{task.description}"), console=console,
        disable=not console.is_terminal,
    )  # fmt: skip


def _roofs(bench: Bench, results: Results) -> None:
    bench.roofs = roofs_of(list(results.rows.values()))
    if bench.roofs.copy_gbps:
        return
    for row in measure_roofs(bench.device, bench.timer):
        results.append(row)
        rate = row.gbps if row.flops is None else row.tflops
        unit = "GB/s" if row.flops is None else "TFLOP/s"
        bench.say(f"roof: {row.mode} {row.dtype}: {report.number(rate) or row.note} {unit}")
    bench.roofs = roofs_of(list(results.rows.values()))


def _finish(results: Results, wanted: Wanted, console: Any, command: str) -> None:
    """summary.md, the pictures, and the short table."""
    rows = list(results.rows.values())
    said = [f"- {text}" for text in wanted.said]
    write_text(results.folder / report.SUMMARY, report.summary(rows, said))
    if command == "targets":  # no pictures: `plot` draws them where time is not short
        print(aligned([targets.HEADER, *targets.lines(rows)]))
        return
    draw(rows, results.folder, console)
    lines = report.short_lines(rows)
    if lines:
        shown = require("rich.table", "rich").Table(box=None, padding=(0, 1, 0, 0))
        for i, title in enumerate(report.SHORT_HEADER):
            shown.add_column(title, justify="left" if i in (0, 5) else "right", overflow="fold")
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
    console.print(f"{conditions(rows)}\n{results.folder}: {len(rows)} rows", soft_wrap=True)


def run_without_gpu(
    arguments: argparse.Namespace, check: Callable[[Path, float | None], Row], console: Any
) -> int:
    """What can be said without a GPU: the host's share, and whether the kernels are right."""
    console.print("torch sees no GPU: only host cost and correctness are measured here.")
    shown = require("rich.table", "rich").Table(title="host cost, microseconds a call", box=None)
    for title in ("op", "mode", "provider", "median", "p20", "p80"):
        shown.add_column(title)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = list(measure_host(torch.device("cpu")))
    torch.set_num_threads(threads)
    for row in rows:
        us = [f"{1e3 * (x or 0):.1f}" for x in (row.ms, row.ms_p20, row.ms_p80)]
        shown.add_row(row.shape, row.mode, row.provider, *us)
    console.print(shown)
    row = check(Path.cwd(), NO_GPU_CHECK)
    if arguments.out is not None:
        results = _open(arguments)
        for measured in (*rows, row):
            results.append(measured)
        results.close()
    console.print(f"fastvit-kernels check: {row.status}: {row.note}", soft_wrap=True)
    return 1 if bad_rows([row]) else 0
