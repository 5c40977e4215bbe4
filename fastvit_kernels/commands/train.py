"""Train a ViT on real images with our kernels, and show that it agrees with PyTorch.

Without options: scikit-learn's handwritten digits, a small ViT, into runs/digits. Everything that
is written is documented in docs/train.md. Interrupt it with Ctrl-C and go on with --resume.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.backend import Backend, backend
from ..verify.accuracy import Error
from . import options
from .console import CommandError, make_console, refusing, require
from .training.checkpoint import open_run
from .training.processes import Processes, ended_together, join
from .training.report import check_batch, describe, write_report
from .training.run import Run
from .training.settings import READ, Settings, add_flags, add_reading, given_options
from .training.streaming import open_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_reading(parser)
    add_flags(parser, {f.name for f in fields(Settings)} - READ)
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first compare our kernels with PyTorch on one batch (default on)",
    )
    options.add(parser, "--out", help="run folder (default runs/<data>, or runs/<data>-2, ...)")
    add("--resume", action="store_true", help="go on with the run in --out, bit for bit")
    add("--fsdp", action="store_true", help="under torchrun: FSDP2 in place of DDP")


def _choose_backend(settings: Settings, device: torch.device, console: Any) -> Backend:
    """The backend of the training steps, and one line that says so where it may surprise."""
    reason = options.kernels_reason(device, settings.precision)
    if settings.backend == "triton" and reason is not None:
        raise CommandError(f"--backend triton: the kernels cannot run here, {reason}")
    if device.type == "cpu" and settings.backend == "auto":
        console.print(
            "No GPU: the kernels run in Triton's interpreter for the check batch, and the training "
            "steps take the same model's PyTorch path (--backend triton forces the kernels)."
            if reason is None
            else f"The kernels cannot run here ({reason}): training takes the PyTorch path."
        )
        return "torch"
    return settings.backend


def _train(run: Run, console: Any) -> None:
    """The epochs that remain, with a progress bar; a checkpoint after each."""
    rich: Any = require("rich.progress", "rich")
    settings, done = run.settings, len(run.history)
    steps = run.steps_per_epoch * len(run.learners)
    every = max(1, settings.epochs // 10)
    quiet = not console.is_terminal
    with rich.Progress(console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=settings.epochs * steps, completed=done * steps)

        def advance(epoch: int) -> None:
            speed, waiting = run.pace
            text = f"epoch {epoch}/{settings.epochs}, {speed:,.0f} images/s"
            text += _waiting(None if settings.in_memory else waiting)
            bar.update(task, advance=1, description=text)

        for epoch in range(done + 1, settings.epochs + 1):
            row = run.epoch(epoch, partial(advance, epoch))
            run.save()
            if epoch % every == 0 or epoch in (1, settings.epochs):
                line = f"epoch {epoch:>3}/{settings.epochs}: {_figures(row)}"
                line += _waiting(row.get("data_wait"))
                line += f"; PyTorch {_figures(row, 'reference_')}" if settings.compare else ""
                console.print(line)


def _figures(row: dict[str, float], who: str = "") -> str:
    loss, held_out = row[f"{who}train_loss"], row[f"{who}held_out_loss"]
    right, speed = row[f"{who}held_out_accuracy"], row[f"{who}images_per_s"]
    return (
        f"loss {loss:.3f}, held-out {held_out:.3f} and {100 * right:.2f} %, {speed:,.0f} images/s"
    )


def _waiting(share: float | None) -> str:
    return "" if share is None else f", waiting for data {100 * share:.0f} %"


def _checked(run: Run, arguments: argparse.Namespace, console: Any) -> list[Error] | None:
    """The errors of the check batch, [] where there is none, None where one breaks the 2x rule."""
    precision = run.settings.precision
    if not arguments.check or options.kernels_reason(run.device, precision) is not None:
        return []
    errors = check_batch(run, console)
    if all(e.passed for e in errors):
        return errors
    console.print("Nothing was trained. --no-check trains without this check.")
    return None


def _open(
    arguments: argparse.Namespace, processes: Processes, device: torch.device
) -> tuple[Path, Settings]:
    """`open_run` of a run that these processes can do."""
    folder, settings = open_run(given_options(arguments), arguments.out, arguments.resume, device)
    if processes.launched and settings.compare:
        raise CommandError("--compare trains beside plain PyTorch in one process, without torchrun")
    if settings.batch_size < processes.world:
        raise CommandError(
            f"--batch {settings.batch_size} is shared among the processes: {processes.world} of "
            "them need as many images or more"
        )
    return folder, settings


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where the check batch breaks the 2x rule or another process of the run
    has ended, or 130 when interrupted."""
    processes, device = join(arguments)
    console = make_console(quiet=not processes.first)
    require("matplotlib.figure", "matplotlib")
    status = _run(arguments, processes, device, console)
    if processes.launched:
        dist.destroy_process_group()
    return status


def _run(
    arguments: argparse.Namespace, processes: Processes, device: torch.device, console: Any
) -> int:
    folder, settings = processes.agree(lambda: _open(arguments, processes, device))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    source = open_images(settings, arguments, device, console)
    say = None if arguments.resume else partial(console.print, markup=False)
    training = Run(source, folder, processes, say)
    errors = processes.agree(lambda: _checked(training, arguments, console))
    if errors is None:
        return 1
    if processes.launched:
        training.distribute(arguments.fsdp)
    if arguments.resume:
        training.restore()
        console.print(f"Resumed after epoch {len(training.history)} of {settings.epochs}.")
    describe(training, console)
    steps_backend = _choose_backend(settings, device, console)
    if not arguments.resume:
        with refusing(f"--out {folder} cannot be written", OSError):
            processes.agree(lambda: folder.mkdir(parents=True, exist_ok=True))
        with refusing("nothing was trained", OSError):
            training.save()

    def stopped(why: str) -> None:
        console.out(f"\n{why}. {training.how_far()}")

    with ended_together(processes, lambda why: stopped(f"The run stops: {why}")):
        try:
            with backend(steps_backend):
                _train(training, console)
                write_report(training, errors, console)
        except KeyboardInterrupt:
            stopped("Interrupted")
            return 130
        except OSError as error:  # such as a full disk
            if not processes.first:
                raise SystemExit(2) from error
            raise CommandError(f"{error}. {training.how_far()}") from error
    return 0
