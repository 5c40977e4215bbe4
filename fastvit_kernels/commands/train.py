"""Train a ViT on real images with our kernels, and show that it agrees with PyTorch.

Without options: scikit-learn's handwritten digits, a small ViT, into runs/digits. Everything that
is written is documented in docs/train.md. Interrupt it with Ctrl-C and go on with --resume.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..runtime.backend import INTERPRETED, Backend, backend, reason_for_torch
from ..runtime.triton import HAS_TRITON, triton
from ..verify.accuracy import Error
from ..verify.plain_vit import agreement, worst_error
from ..verify.runner import quiet_interpreter
from . import checkpoint, data, figures
from .console import CommandError, make_console, require
from .data import Dataset
from .options import chosen_device
from .settings import Settings, add_arguments, flag_of, given_options, make_settings
from .training import CHECKPOINT, METRICS, Run

__all__ = ["add_arguments", "run"]

WEIGHTS, SUMMARY = "weights.pth", "summary.json"
CURVES, CONFUSION, ATTENTION = "curves.png", "confusion.png", "attention.png"
WRITTEN = (CHECKPOINT, METRICS, WEIGHTS, SUMMARY, CURVES, CONFUSION, ATTENTION)
AGREEMENT_BATCH = 2  # images; the interpreter takes milliseconds for a tile


def load_data(settings: Settings, progress: Callable[[int, int], None]) -> Dataset:
    if settings.data == "digits":
        return data.load_digits(settings.img_size, settings.held_out, settings.seed)
    folder = Path(settings.data_dir or "")
    if not folder.is_dir():
        raise CommandError(f"--data-dir {folder} is not a folder")
    if settings.data == "mnist":
        return data.load_idx(folder, settings.img_size)
    return data.load_folder(
        folder, settings.img_size, settings.in_chans, settings.held_out, settings.seed, progress
    )


def _free_folder(name: str) -> Path:
    """runs/<name>, or the first of runs/<name>-2, -3, ... that holds no run."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _latest_folder(name: str) -> Path:
    def number(folder: Path) -> int:
        return int(folder.name.removeprefix(name).lstrip("-") or 1)

    pattern = re.compile(rf"{name}(-\d+)?")
    found = [p.parent for p in Path("runs").glob(f"*/{CHECKPOINT}")]
    found = [folder for folder in found if pattern.fullmatch(folder.name)]
    if not found:
        raise CommandError(f"there is no run of --data {name} in runs/; name its folder with --out")
    return max(found, key=number)


def _resumed_settings(folder: Path, content: dict[str, Any], given: dict[str, Any]) -> Settings:
    settings = Settings(**content["settings"])
    if "data_dir" in given:
        given = {**given, "data_dir": str(Path(given["data_dir"]).resolve())}
    for name, value in given.items():
        if value != getattr(settings, name):
            raise CommandError(
                f"{flag_of(name)} {value} differs from the {getattr(settings, name)} of "
                f"the run in {folder}; --resume keeps a run's settings, --out starts another run"
            )
    return settings


def _open_run(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[Path, Settings, dict[str, Any] | None]:
    """The run folder, its settings, and the checkpoint where the run goes on."""
    given = given_options(arguments)
    name = given.get("data", "digits")
    if arguments.resume:
        folder = Path(arguments.out) if arguments.out else _latest_folder(name)
        content = checkpoint.load(folder / CHECKPOINT)
        return folder, _resumed_settings(folder, content, given), content
    settings = make_settings(given, device)
    folder = Path(arguments.out) if arguments.out else _free_folder(name)
    taken = [n for n in WRITTEN if (folder / n).exists()]
    if taken:
        raise CommandError(
            f"{folder} holds a run already ({taken[0]}); go on with it with --resume --out "
            f"{folder}, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--out {folder} is not a folder")
    return folder, settings, None


def kernels_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, None where they can."""
    with backend("auto"):
        return reason_for_torch(torch.empty(1, device=device))


def _check_batch(run: Run, console: Any) -> list[Error]:
    """One batch through our kernels and through plain PyTorch; prints and returns the errors."""
    images = run.normalization(run.train_split.images[:AGREEMENT_BATCH])
    where = "in Triton's interpreter" if INTERPRETED else f"on {_device_name(run.device)}"
    started = time.perf_counter()
    run.model.eval()
    waiting = console.status(f"one batch through the kernels {where}")
    with backend("triton"), quiet_interpreter(), waiting:
        errors = agreement(run.model, images, run.autocast)
    seconds = time.perf_counter() - started

    gradients = [e for e in errors if e.name != "logits"]
    worst = worst_error(gradients)
    table = require("rich.table", "rich").Table(
        box=require("rich.box", "rich").SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    console.print(
        f"Agreement with PyTorch: {len(images)} images through our kernels {where}, "
        f"{run.settings.precision}, {seconds:.1f} s; errors against float64:"
    )
    table.add_column("")
    for column in ("max error", "PyTorch's", "limit", "RMS error", "PyTorch's", "limit"):
        table.add_column(column, justify="right")
    shown = [("logits", errors[0]), (f"worst of {len(gradients)} gradients", worst)]
    for label, e in shown:
        values = (e.max, e.torch_max, e.limit_max, e.rms, e.torch_rms, e.limit_rms)
        table.add_row(label, *(f"{value:.1e}" for value in values))
    console.print(table)
    failed = [e for e in errors if not e.passed]
    if failed:
        lines = "\n".join(f"  {e}" for e in failed)
        console.print(
            f"[red]{len(failed)} of {len(errors)} tensors break the 2x rule:[/red]\n{lines}"
        )
    else:
        console.print(
            f"Logits and all {len(gradients)} gradients agree: every error is within twice "
            "PyTorch's own plus rounding."
        )
    return errors


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"


def _describe(run: Run, console: Any) -> None:
    s, model = run.settings, run.model
    count = sum(p.numel() for p in model.parameters())
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    attn: Any = model.blocks[0].attn
    console.print(
        f"Data: {s.data}, {len(run.train_split)} training and {len(run.held_out)} held-out images, "
        f"{len(run.classes)} classes, {s.img_size} x {s.img_size} x {s.in_chans}"
    )
    console.print(
        f"Model: {s.model or 'small ViT for digits'}, {count:,} parameters, T={tokens} "
        f"C={model.embed_dim} H={attn.num_heads} D={attn.head_dim}, "
        f"{len(model.blocks)} layers"
    )
    console.print(f"Device: {_device_name(run.device)}, {s.precision}. Run folder: {run.folder}")


def _choose_backend(settings: Settings, device: torch.device, console: Any) -> Backend:
    """The backend of the training steps, and one line that says so where it may surprise."""
    reason = kernels_reason(device)
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
    progress = require("rich.progress", "rich")
    settings, done = run.settings, len(run.history)
    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(),
        progress.TextColumn("{task.completed}/{task.total} steps"),
        progress.TimeElapsedColumn(), progress.TextColumn("elapsed,"),
        progress.TimeRemainingColumn(), progress.TextColumn("left"),
    )  # fmt: skip
    steps = run.steps_per_epoch * len(run.learners)
    every = max(1, settings.epochs // 10)
    with progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=settings.epochs * steps, completed=done * steps)
        for epoch in range(done + 1, settings.epochs + 1):
            bar.update(task, description=f"epoch {epoch}/{settings.epochs}")
            row = run.epoch(epoch, lambda: bar.advance(task))
            run.save()
            if epoch % every == 0 or epoch in (1, settings.epochs):
                console.print(_epoch_line(row, settings))


def _epoch_line(row: dict[str, float], settings: Settings) -> str:
    line = (
        f"epoch {row['epoch']:>3}/{settings.epochs}: loss {row['train_loss']:.3f}, held-out "
        f"{row['held_out_loss']:.3f} and {100 * row['held_out_accuracy']:.2f} %, "
        f"{row['images_per_s']:,.0f} images/s"
    )
    if "reference_train_loss" in row:
        line += (
            f"; PyTorch {row['reference_train_loss']:.3f}, {row['reference_held_out_loss']:.3f} "
            f"and {100 * row['reference_held_out_accuracy']:.2f} %, "
            f"{row['reference_images_per_s']:,.0f} images/s"
        )
    return line


def confusion_matrix(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """(num_classes, num_classes) counts; rows are the true classes."""
    index = (labels * num_classes + predicted).cpu()
    return torch.bincount(index, minlength=num_classes**2).view(num_classes, num_classes)


def _print_confusion(confusion: Tensor, classes: list[str], console: Any) -> None:
    if len(classes) > 12:
        console.print(f"Confusion matrix of {len(classes)} classes: {CONFUSION}")
        return
    table = require("rich.table", "rich").Table(
        box=require("rich.box", "rich").SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    console.print("Held-out images by true class (rows) and predicted class (columns):")
    table.add_column("true")
    for name in classes:
        table.add_column(name, justify="right")
    for row, name in enumerate(classes):
        cells = [str(n) if n else "." for n in confusion[row].tolist()]
        cells[row] = f"[bold]{cells[row]}[/bold]"
        table.add_row(name, *cells)
    console.print(table)


def _report(run: Run, errors: list[Error], console: Any) -> None:
    """Accuracy, confusion matrix, speed; weights, summary and PNGs into the run folder."""
    last = run.history[-1]
    loss, predicted = run.evaluate(run.learners[0])
    confusion = confusion_matrix(run.held_out.labels, predicted, len(run.classes))
    accuracy = confusion.diagonal().sum().item() / len(run.held_out)
    images_per_s = statistics.median(row["images_per_s"] for row in run.history)
    seconds = sum(row["seconds"] for row in run.history)

    _print_confusion(confusion, run.classes, console)
    wrong = len(run.held_out) - int(confusion.diagonal().sum())
    console.print(
        f"Held-out accuracy: [bold]{100 * accuracy:.2f} %[/bold] ({wrong} of {len(run.held_out)} "
        f"wrong), loss {loss:.3f}. Training: {images_per_s:,.0f} images/s (median of "
        f"{len(run.history)} epochs), {seconds:.0f} s."
    )
    if run.settings.compare:
        other = statistics.median(row["reference_images_per_s"] for row in run.history)
        console.print(
            f"Plain PyTorch beside it: {100 * last['reference_held_out_accuracy']:.2f} %, loss "
            f"{last['reference_held_out_loss']:.3f}, {other:,.0f} images/s."
        )
    checkpoint.write_atomically(
        run.folder / WEIGHTS, lambda file: torch.save(run.model.state_dict(), file)
    )
    summary = {
        "held_out_accuracy": accuracy,
        "held_out_loss": loss,
        "images_per_s": images_per_s,
        "training_seconds": seconds,
        "classes": run.classes,
        "confusion": confusion.tolist(),
        "settings": asdict(run.settings),
        "normalization": asdict(run.normalization),
        "agreement": [{**asdict(e), "passed": e.passed} for e in errors],
        "last_epoch": last,
        "device": _device_name(run.device),
        "versions": {
            "fastvit_kernels": __version__, "torch": torch.__version__,
            "triton": getattr(triton, "__version__", None) if HAS_TRITON else None,
            "python": platform.python_version(),
        },
    }  # fmt: skip
    checkpoint.write_text(run.folder / SUMMARY, json.dumps(summary, indent=1))

    name = f"{run.settings.model or 'ViT'} on {run.settings.data}"
    smoothing = run.settings.label_smoothing
    loss_title = f"Loss (labels smoothed by {smoothing:g} in training)" if smoothing else "Loss"
    figures.draw_curves(run.history, run.folder / CURVES, name, loss_title)
    title = f"{name}: {100 * accuracy:.2f} % of {len(run.held_out)} held-out images"
    figures.draw_confusion(confusion, run.classes, run.folder / CONFUSION, title)
    image = run.held_out.images[:1]
    layers, from_cls = figures.sample_attention(run.model, run.normalization(image))
    true, got = run.classes[int(run.held_out.labels[0])], run.classes[int(predicted[0])]
    title = f"{name}: held-out image 0, class {true}, predicted {got}"
    pixels = figures.seen_pixels(run.model, image[0].cpu())
    figures.draw_attention_layers(pixels, layers, from_cls, run.folder / ATTENTION, title)
    console.print(f"Written to {run.folder}: {', '.join(WRITTEN)}")


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where the check batch breaks the 2x rule, or 130 when interrupted."""
    console = make_console()
    require("matplotlib.figure", "matplotlib")
    device = chosen_device(arguments)
    folder, settings, content = _open_run(arguments, device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    with console.status("reading images") as status:
        dataset = load_data(
            settings, lambda done, total: status.update(f"reading images: {done} of {total}")
        )
    training = Run(settings, dataset, device, folder)
    if content is not None:
        training.restore(content)
        training.write_metrics()
        console.print(f"Resumed after epoch {len(training.history)} of {settings.epochs}.")
    _describe(training, console)
    steps_backend = _choose_backend(settings, device, console)

    errors: list[Error] = []
    if arguments.check and kernels_reason(device) is None:
        errors = _check_batch(training, console)
        if not all(e.passed for e in errors):
            console.print("Nothing was trained. --no-check trains without this check.")
            return 1
    if content is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            training.save()
        except OSError as error:
            raise CommandError(f"--out {folder} cannot be written: {error}") from error
    try:
        with backend(steps_backend):
            _train(training, console)
            _report(training, errors, console)
    except KeyboardInterrupt:
        done = len(checkpoint.load(folder / CHECKPOINT)["history"])
        console.print(
            f"\nInterrupted. {folder / CHECKPOINT} holds the run after epoch {done} of "
            f"{settings.epochs}; go on with\n  fastvit-kernels train --resume --out {folder}"
        )
        return 130
    return 0
