"""What a run shows and leaves: the check batch, the confusion matrix, summary, weights and PNGs."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from ...models.vit import VisionTransformer
from ...runtime import files
from ...runtime.backend import INTERPRETED, backend
from ...swap.compare import model_errors
from ...verify.accuracy import Error
from ...verify.plain_vit import agreement, worst_error
from ...verify.runner import quiet_interpreter
from ..console import ERROR_COLUMNS, device_name, error_cells, make_table, versions
from . import figures
from .checkpoint import ATTENTION, CONFUSION, CURVES, SUMMARY, WEIGHTS, WRITTEN
from .model import host_of, merged
from .run import Run
from .streaming import Streamed


def check_batch(run: Run, console: Any) -> list[Error]:
    """One batch through our kernels and through plain PyTorch; prints and returns the errors."""
    images = run.source.normalization(run.source.sample)
    where = "in Triton's interpreter" if INTERPRETED else f"on {device_name(run.device)}"
    started = time.perf_counter()
    run.model.eval()
    waiting = console.status(f"one batch through the kernels {where}")
    with backend("triton"), quiet_interpreter(), waiting:
        if isinstance(run.model, VisionTransformer):
            errors = agreement(run.model, images, run.autocast)
        else:
            errors = model_errors(host_of(run.model), images, autocast=run.autocast)
            errors[0] = replace(errors[0], name="logits")
    seconds = time.perf_counter() - started

    logits, *gradients = errors
    console.print(
        f"Agreement with PyTorch: {len(images)} images through our kernels {where}, "
        f"{run.settings.precision}, {seconds:.1f} s; errors against float64:"
    )
    table = make_table("", figures=ERROR_COLUMNS)
    table.add_row("logits", *error_cells(logits))
    table.add_row(f"worst of {len(gradients)} gradients", *error_cells(worst_error(gradients)))
    console.print(table)
    if failed := [e for e in errors if not e.passed]:
        console.print(f"[red]{len(failed)} of {len(errors)} tensors break the 2x rule:[/red]")
        console.print("\n".join(f"  {e}" for e in failed))
    else:
        console.print(
            f"Logits and all {len(gradients)} gradients agree: every error is within twice "
            "PyTorch's own plus rounding."
        )
    return errors


def describe(run: Run, console: Any) -> None:
    s, model = run.settings, run.model
    console.print(
        f"Data: {s.data}, {run.source.train_count} training and {run.source.held_out_count} "
        f"held-out images, {len(run.classes)} classes, {s.img_size} x {s.img_size} x {s.in_chans}"
    )
    if isinstance(run.source, Streamed):
        console.print(f"Images are streamed by {run.source.workers} worker processes.")
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    line = f"Model: {s.model or 'small ViT for digits'}, {count:,} parameters"
    if trained < count:
        line += f", {trained:,} of them trained"
    if isinstance(model, VisionTransformer):
        attn: Any = model.blocks[0].attn
        tokens = model.patch_embed.num_patches + model.num_prefix_tokens
        line += f", T={tokens} C={model.embed_dim} H={attn.num_heads} D={attn.head_dim}"
        line += f", {len(model.blocks)} layers"
    console.print(line)
    where = f"{device_name(run.device)}, threads: {torch.get_num_threads()}, {s.precision}"
    console.print(f"Device: {where}. Run folder: {run.folder}")
    if run.processes.launched:
        how = "FSDP2" if run.sharded else "DDP"
        console.print(f"Processes: {run.processes.world}, {how}; a batch is shared among them.")


def write_report(run: Run, errors: list[Error], console: Any) -> None:
    """Accuracy, confusion matrix, speed; weights, summary and PNGs into the run folder.

    Every process evaluates; the first one prints and writes.
    """
    loss, predicted = run.evaluate(run.learners[0])
    model = run.whole_model()
    if model is None:
        return
    source, last, read = run.source, run.history[-1], predicted >= 0
    count, classes = int(read.sum()), len(run.classes)
    pairs = source.held_out_labels[read] * classes + predicted[read]  # rows are the true classes
    confusion = torch.bincount(pairs.cpu(), minlength=classes**2).view(classes, classes)
    right = int(confusion.diagonal().sum())
    accuracy = right / count
    images_per_s = statistics.median(row["images_per_s"] for row in run.history)
    seconds = sum(row["seconds"] for row in run.history)
    console.print(
        f"Held-out accuracy: [bold]{100 * accuracy:.2f} %[/bold] ({count - right} of {count} "
        f"wrong), loss {loss:.3f}. Training: {images_per_s:,.0f} images/s (median of "
        f"{len(run.history)} epochs), {seconds:.0f} s."
    )
    if run.settings.compare:
        other = statistics.median(row["reference_images_per_s"] for row in run.history)
        console.print(
            f"Plain PyTorch beside it: {100 * last['reference_held_out_accuracy']:.2f} %, loss "
            f"{last['reference_held_out_loss']:.3f}, {other:,.0f} images/s."
        )
    if source.broken:
        console.print(f"Left out: {len(source.broken)} images that cannot be read.")
    weights = merged(model, run.settings).state_dict()
    files.write_atomically(run.folder / WEIGHTS, lambda file: torch.save(weights, file))
    summary = {
        "held_out_accuracy": accuracy,
        "held_out_loss": loss,
        "images_per_s": images_per_s,
        "training_seconds": seconds,
        "classes": run.classes,
        "confusion": confusion.tolist(),
        "settings": asdict(run.settings),
        "normalization": asdict(source.normalization),
        "agreement": [{**asdict(e), "passed": e.passed} for e in errors],
        "last_epoch": last,
        "device": device_name(run.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    files.write_text(run.folder / SUMMARY, json.dumps(summary, indent=1))

    name = f"{run.settings.model or 'ViT'} on {run.settings.data}"
    smoothing = run.settings.label_smoothing
    loss_title = f"Loss (labels smoothed by {smoothing:g} in training)" if smoothing else "Loss"
    figures.draw_curves(run.history, run.folder / CURVES, name, loss_title)
    title = f"{name}: {100 * accuracy:.2f} % of {count} held-out images"
    figures.draw_confusion(confusion, run.classes, run.folder / CONFUSION, title)
    shown, image = source.held_out_sample()
    seen = figures.sample_attention(model, image[0], source.normalization)
    true, got = (run.classes[int(of[shown])] for of in (source.held_out_labels, predicted))
    title = f"{name}: held-out image {shown}, class {true}, predicted {got}"
    figures.draw_attention(*seen, run.folder / ATTENTION, title)
    written = [name for name in WRITTEN if (run.folder / name).exists()]
    console.print(f"Written to {run.folder}: {', '.join(written)}")
