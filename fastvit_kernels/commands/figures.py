"""PNGs of a run: curves, confusion matrix, attention. Drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..models.attention_maps import attention_maps
from ..models.vit import VisionTransformer
from ..runtime.files import write_atomically
from .console import CommandError, refusing, require


def _figure(width: float, height: float) -> Any:
    """A matplotlib Figure of its own, in inches; no global state of pyplot is touched."""
    return require("matplotlib.figure", "matplotlib").Figure((width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def draw_curves(history: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Losses and held-out accuracy by epoch."""
    figure = _figure(10, 4)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    for name in ("train_loss", "held_out_loss"):
        left.plot(epochs, [row[name] for row in history], label=name.replace("_", " "))
    right.plot(epochs, [100 * row["held_out_accuracy"] for row in history])
    left.set(xlabel="epoch", ylabel="cross-entropy (nats)", title="Loss")
    right.set(xlabel="epoch", ylabel="held-out accuracy (%)", title="Accuracy")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_confusion(
    truth: Tensor, predicted: Tensor, classes: Sequence[str], path: Path, title: str
) -> None:
    """Counts by scikit-learn; rows are the true classes."""
    metrics: Any = require("sklearn.metrics", "scikit-learn")
    side = min(4 + 0.45 * len(classes), 20)
    figure = _figure(side + 1, side)
    axes = figure.subplots()
    axes.set_title(title)
    few = len(classes) <= 25
    counts = metrics.confusion_matrix(truth, predicted, labels=range(len(classes)))
    shown = metrics.ConfusionMatrixDisplay(counts, display_labels=classes if few else None)
    shown.plot(ax=axes, cmap="Blues", include_values=few, xticks_rotation="vertical")
    _save(figure, path)


class Attention(NamedTuple):
    """What each head attends to: (H, rows, columns) of every layer.

    from_cls: whether it is the class token's attention, else the mean over all patches.
    area: height and width of the pixels without the remainder that fills no patch.
    """

    layers: Sequence[Tensor]
    from_cls: bool
    area: tuple[int, int]


def head_attention(model: Any, image: Tensor) -> Attention:
    """Of a model and one image, (1, channels, height, width) as the model takes it. The patches of
    another library's model make up a square; what comes before them begins with the class token."""
    with refusing("attention maps", ValueError):
        maps = attention_maps(model, image)
    tokens, (height, width) = maps[0].shape[-1], image.shape[2:]
    if isinstance(model, VisionTransformer):
        embed = model.patch_embed
        grid, from_cls = embed.grid_size, model.cls_token is not None
        height, width = (n * p for n, p in zip(grid, embed.patch_size, strict=True))
    else:
        grid, from_cls = (math.isqrt(tokens),) * 2, math.isqrt(tokens) ** 2 < tokens
    if any(m.shape[0] != 1 or m.shape[-1] != tokens for m in maps):
        raise CommandError(
            f"{type(model).__name__}: only layers that attend over the whole image are drawn"
        )
    prefix = tokens - math.prod(grid)
    rows = [m[0, :, 0] if from_cls else m[0, :, prefix:].mean(1) for m in maps]
    layers = [row[:, prefix:].unflatten(-1, tuple(grid)).cpu() for row in rows]
    return Attention(layers, from_cls, (height, width))


def draw_attention(pixels: Tensor, attention: Attention, path: Path, title: str) -> None:
    """The image, (1 or 3, height, width) from 0 to 1, then each head's attention over it: a row a
    layer, one colour scale for all."""
    layers, from_cls, (height, width) = attention
    pixels = pixels[:, :height, :width].float().clamp(0, 1)
    peak = max(float(layer.max()) for layer in layers)
    columns = 1 + max(len(layer) for layer in layers)
    figure = _figure(1.5 * columns + 1.1, 1.6 * len(layers) + 0.8)
    whose = "of the class token" if from_cls else "mean over all patches"
    figure.suptitle(f"{title}\nattention to each patch, {whose}", fontsize=10)
    grid = figure.subplots(len(layers), columns, squeeze=False)
    shown = None
    for row, (axes, layer) in enumerate(zip(grid, layers, strict=True)):
        axes[0].imshow(pixels.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
        axes[0].set_ylabel(f"layer {row}" if len(layers) > 1 else "", fontsize=9)
        for head, (panel, map) in enumerate(zip(axes[1:], layer, strict=False)):
            panel.imshow(pixels.mean(0).numpy(), cmap="gray", vmin=0, vmax=1)
            large = F.interpolate(map[None, None].float(), (height, width))[0, 0]
            shown = panel.imshow(large.numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=peak)
            panel.set_title(f"head {head}", fontsize=9)
        for panel in axes:
            panel.set(xticks=[], yticks=[])
    figure.colorbar(shown, ax=list(grid.flat), label="attention probability", shrink=0.6)
    _save(figure, path)
