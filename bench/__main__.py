"""`python -m bench`: measure ops and whole models side by side, draw, compare.

    python -m bench contact --seconds 540 --out DIR     a borrowed GPU: right, fast, tuned
    python -m bench targets --out DIR                   the rows of the goals
    python -m bench all --time-budget 540 --out DIR     everything, most telling rows first
    python -m bench attention --shape T197 --dtype bf16
    python -m bench vit --mode train --provider swapped
    python -m bench vit --model timm:vit_small_patch14_dinov2 --batch 64
    python -m bench plot DIR                            redraw from DIR/results.csv
    python -m bench compare A B                         ratios, regressions first
    python -m bench traffic                             launches and bytes of a block, counted
    python -m bench docs                                docs/benchmarks.md from bench/results

The exit status is 1 where a provider breaks the 2x rule, one of ours fails, or, in compare, a row
has become slower; 2 for a mistake in the command, 130 for an interrupt.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import contact, facts, plot, report, targets, warm
from bench.compare import THRESHOLD, newly_failed, ratios, table
from bench.harness import MODES, Bench
from bench.host import measure_host
from bench.plan import OPS, WHOLE, Task, Wanted, named_cases, tasks
from bench.roofs import measure_roofs, roofs_of
from bench.rows import RESULTS, Results, Row, conditions, read_rows
from bench.session import (
    CHECK,
    CHECK_SHARE,
    Clock,
    TimeOver,
    bad_rows,
    describe,
    run_check,
    run_tasks,
)
from bench.stages import CUT_SHORT
from bench.target_tasks import target_tasks
from bench.target_tasks import targets as targets_here
from bench.timer import CudaTimer, DeviceLost, Roofs, Timer
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, aligned, make_console, require
from fastvit_kernels.runtime.dtypes import DTYPES

RESERVE = 15.0  # seconds of a time budget kept for summary and plots
NO_GPU_CHECK = 70.0  # seconds for the check where Triton's interpreter runs it
SUMMARY = "summary.md"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    contact.add_arguments(
        commands.add_parser(
            "contact", help="check, time and tune in a given time", description=contact.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )  # fmt: skip
    for name in ("targets", "all", *OPS, *WHOLE):
        measuring = commands.add_parser(name, help=f"measure {name}")
        _add_measuring(measuring)
        if name == "vit":
            options.add_model(measuring, None, "in place of the plan's models")
            options.add_batch(measuring)
            options.add_img_size(measuring)
    drawing = commands.add_parser("plot", help="redraw everything from a CSV")
    drawing.add_argument("folder", type=Path)
    comparing = commands.add_parser("compare", help="ratios of two results, regressions first")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    comparing.add_argument(
        "--threshold", type=float, default=THRESHOLD,
        help=f"slower by more than this share is a regression (default {THRESHOLD})",
    )  # fmt: skip
    commands.add_parser("facts", help="GPU, driver, versions, sources")
    warm.add_arguments(
        commands.add_parser("warm", help="first launches of the targets, to compile")
    )
    commands.add_parser("traffic", help="count launches and bytes of a training step; no GPU")
    commands.add_parser("docs", help="generate docs/benchmarks.md from bench/results")
    return parser


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", action="append", choices=(*MODES, "train", "infer"))
    for mode in ("train", "infer"):
        parser.add_argument(
            f"--{mode}", dest="mode", action="append_const", const=mode,
            help=f"the same as --mode {mode}",
        )  # fmt: skip
    options.add_dtype(
        parser, ("amp", *DTYPES), action="append",
        help="amp: fp32 parameters under bf16 autocast; else of all tensors",
    )  # fmt: skip
    parser.add_argument("--provider", action="append", help="may be given several times")
    parser.add_argument("--shape", action="append", help="part of a shape's id, such as T197")
    options.add_device(parser)
    options.add_budget(parser, "measure no further case after these")
    options.add_out(parser, "folder of the results (default bench-out)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")


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


def run(arguments: argparse.Namespace, words: list[str], machine: Machine, console: Any) -> int:
    """Measure: roofs, check, then tasks as far as the time goes; report in any case."""
    clock = Clock(arguments.time_budget)
    if clock.budget is not None:
        clock.budget = max(1.0, clock.budget - RESERVE)
    wanted = Wanted(
        ops=(*WHOLE, *OPS) if arguments.command in ("all", "targets") else (arguments.command,),
        providers=arguments.provider or (), shapes=arguments.shape or (),
        dtypes=arguments.dtype or (), modes=arguments.mode or (), **_model_wanted(arguments),
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


def _model_wanted(arguments: argparse.Namespace) -> dict[str, Any]:
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


def _again(words: list[str], clock: Clock) -> list[str]:
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
    (results.folder / SUMMARY).write_text(report.summary(rows, said), encoding="utf-8")
    if command == "targets":  # no pictures: `plot` draws them where time is not short
        print(aligned([targets.HEADER, *targets.lines(rows)]))
        return
    _draw(rows, results.folder, console)
    lines = report.short_lines(rows)
    if lines:
        shown = require("rich.table", "rich").Table(box=None, padding=(0, 1, 0, 0))
        for i, title in enumerate(report.SHORT_HEADER):
            shown.add_column(title, justify="left" if i in (0, 5) else "right", overflow="fold")
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
    console.print(f"{conditions(rows)}\n{results.folder}: {len(rows)} rows", soft_wrap=True)


def _draw(rows: Sequence[Row], folder: Path, console: Any) -> None:
    try:
        drawn = plot.draw_all(rows, roofs_of(rows), folder)
    except CommandError as error:
        console.print(f"no pictures: {error}")
        return
    console.print("drawn: " + (", ".join(str(p) for p in drawn) or "nothing, for want of rows"))


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


def run_plot(arguments: argparse.Namespace, console: Any) -> int:
    rows = _read(arguments.folder)
    folder = arguments.folder if arguments.folder.is_dir() else arguments.folder.parent
    (folder / SUMMARY).write_text(report.summary(rows), encoding="utf-8")
    _draw(rows, folder, console)
    return 0


def run_compare(arguments: argparse.Namespace, console: Any) -> int:
    a, b = _read(arguments.a), _read(arguments.b)
    found, threshold = ratios(a, b), arguments.threshold
    shown = require("rich.table", "rich").Table(box=None, padding=(0, 1, 0, 0))
    for title in ("row", "A, ms", "B, ms", "B / A", "spread", ""):
        shown.add_column(title, overflow="fold")
    for line in table(found, threshold):
        shown.add_row(*line)
    console.print(f"A: {conditions(a)}\nB: {conditions(b)}", soft_wrap=True)
    console.print(shown)
    lost = newly_failed(a, b)
    for row in lost:
        console.print(describe(row), markup=False, soft_wrap=True)
    slower = sum(r.is_regression(threshold) for r in found)
    console.print(
        f"{len(found)} rows in both; {slower} slower by more than {100 * threshold:.0f}%; "
        f"{len(lost)} that were measured in A and failed in B"
    )
    return 1 if slower or lost else 0


def _read(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error


def main(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["all", *words]
    arguments = build_parser().parse_args(words)
    try:
        console = make_console()
        if arguments.command == "plot":
            return run_plot(arguments, console)
        if arguments.command == "compare":
            return run_compare(arguments, console)
        if arguments.command == "traffic":
            from bench.traffic import table as traffic_table  # needs triton and timm

            print(traffic_table())
            return 0
        if arguments.command == "docs":
            report.write_docs()
            return 0
        if arguments.command == "facts":
            return facts.run()
        machine = machine or this_machine(arguments)
        if arguments.command == "contact":
            return contact.run(arguments, machine is not None)
        given = _model_wanted(arguments)
        if machine is None and given:
            raise CommandError(f"torch sees no GPU to measure {given['model']} on")
        if machine is None and arguments.command in ("targets", "warm"):
            raise CommandError("torch sees no GPU, so nothing was run and nothing was written")
        if arguments.command == "warm":
            work = [warm.job_of(*pair) for pair in enumerate(targets_here())]
            return warm.run(work, arguments.jobs, arguments.time_budget or math.inf)
        if machine is None:
            return run_without_gpu(arguments, run_check, console)
        arguments.out = arguments.out or Path("bench-out")
        return run(arguments, words, machine, console)
    except CommandError as error:
        print(f"bench {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
