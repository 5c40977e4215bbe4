"""PNGs of a run: curves, confusion matrix, attention maps. Drawn without a display or pyplot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...models.attention_maps import attention_maps
from ...models.vit import VisionTransformer
from ...runtime.files import write_atomically
from ..console import CommandError, refusing, require


def _figure(width: float, height: float) -> Any:
    """A matplotlib Figure of its own, in inches; no global state of pyplot is touched."""
    return require("matplotlib.figure", "matplotlib").Figure((width, height), layout="constrained")


def _save(figure: Any, path: Path, dpi: int = 120) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def draw_curves(
    history: Sequence[Mapping[str, float]], path: Path, title: str, loss_title: str = "Loss"
) -> None:
    """Loss and accuracy by epoch, the reference's beside ours where it was trained."""
    figure = _figure(10, 4)
    figure.suptitle(title)
    runs = [("", "our model", "tab:blue", "-")]
    if "reference_train_loss" in history[0]:  # dashed: where both agree, both still show
        runs.append(("reference_", "plain PyTorch", "tab:orange", "--"))
    epochs = [row["epoch"] for row in history]
    marker = "o" if len(epochs) < 5 else None
    panels = (("loss", 1, "cross-entropy (nats)"), ("accuracy", 100, "accuracy (%)"))
    for axes, (what, scale, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for prefix, name, color, dashes in runs:
            for split, width, alpha in (("train", 1.0, 0.55), ("held_out", 2.0, 1.0)):
                values = [scale * row[f"{prefix}{split}_{what}"] for row in history]
                style = dict(color=color, lw=width, ls=dashes, alpha=alpha, marker=marker)
                axes.plot(epochs, values, label=f"{name}, {split.replace('_', '-')}", **style)
        axes.set(xlabel="epoch", ylabel=label, title=loss_title if what == "loss" else "Accuracy")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
    figure.axes[1].set_ylim(None, 101)
    _save(figure, path)


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path, title: str) -> None:
    """(classes, classes) counts; rows are the true classes, columns the predicted ones."""
    count = len(classes)
    side = min(3 + 0.45 * count, 20)
    figure = _figure(side + 1, side)
    axes = figure.subplots()
    share = confusion.double() / confusion.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(100 * share.numpy(), cmap="Blues", vmin=0, vmax=100)
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    if count <= 50:
        turned = any(len(name) > 3 for name in classes)
        axes.set_xticks(range(count), classes, rotation=90 if turned else 0)
        axes.set_yticks(range(count), classes)
    if count <= 25:
        for row, column in confusion.nonzero().tolist():
            color = "white" if share[row, column] > 0.5 else "black"
            text = str(int(confusion[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    figure.colorbar(image, ax=axes, label="share of the true class (%)", shrink=0.8)
    _save(figure, path)


def patch_attention(maps: Tensor, num_prefix: int, from_cls: bool, grid: Sequence[int]) -> Tensor:
    """Attention to the patches of `grid` as images: (H, T, T), whose rows are queries, -> (H, rows,
    columns). Of the class token, token 0, else the mean over all patches; class and register tokens
    before the patches are not shown as keys."""
    rows = maps[:, 0] if from_cls else maps[:, num_prefix:].mean(1)
    return rows[:, num_prefix:].unflatten(-1, tuple(grid))


def draw_attention(
    image: Tensor, layers: Sequence[Tensor], from_cls: bool, path: Path, title: str
) -> None:
    """The image, (1 or 3, height, width) uint8, then each head's attention over it, by
    `patch_attention`, one scale for all: a row a layer, or the heads of one layer in rows of five
    panels."""
    several, height, width = len(layers) > 1, *image.shape[1:]
    peak = max(float(layer.max()) for layer in layers)
    cells = [cell for layer in layers for cell in (None, *layer)]
    columns = len(cells) // len(layers) if several else min(len(cells), 5)
    rows, side = -(-len(cells) // columns), 1.5 if several else 2.4
    figure = _figure(side * columns + 1.1, 1.05 * side * rows + 0.8)
    whose = "of the class token" if from_cls else "mean over all patches"
    figure.suptitle(f"{title}\nattention to each patch, {whose}", fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    shown = None
    for index, axes in enumerate(grid):
        axes.set(xticks=[], yticks=[])
        head = cells[index] if index < len(cells) else None
        if head is not None:  # over the image in grey, both on the image's own pixel axes
            axes.imshow(image.float().mean(0).numpy(), cmap="gray", vmin=0, vmax=255)
            large = F.interpolate(head[None, None].float(), (height, width), mode="nearest")[0, 0]
            shown = axes.imshow(large.numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=peak)
        elif index == 0:
            pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
            axes.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=255)
        else:
            axes.axis("off")
        if index < (columns if several else len(cells)):
            axes.set_title(f"head {index - 1}" if index else "image", fontsize=9)
        if several and index % columns == 1:
            axes.set_ylabel(f"layer {index // columns}", fontsize=9)
    figure.colorbar(
        shown, ax=list(grid), label="attention probability", shrink=min(0.9, 4 / len(layers))
    )
    _save(figure, path)


def sample_attention(
    model: Any, image: Tensor, normalization: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Tensor], bool]:
    """What `draw_attention` shows of one square image, (channels, height, width) uint8: its pixels
    without the remainder that fills no patch, every layer's (H, rows, columns), and whether they
    are the class token's. Another library's patches make up a square, and what comes before them
    begins with the class token."""
    with refusing("attention maps", ValueError):
        maps = attention_maps(model, normalization(image[None]))
    tokens = maps[0].shape[-1]
    if isinstance(model, VisionTransformer):
        grid, from_cls = model.patch_embed.grid_size, model.cls_token is not None
        height, width = (n * p for n, p in zip(grid, model.patch_embed.patch_size, strict=True))
        image = image[:, :height, :width]
    else:
        grid, from_cls = (math.isqrt(tokens),) * 2, math.isqrt(tokens) ** 2 < tokens
    if any(m.shape[0] != 1 or m.shape[-1] != tokens for m in maps):
        raise CommandError(
            f"{type(model).__name__}: only layers that attend over the whole image are drawn"
        )
    prefix = tokens - math.prod(grid)
    layers = [patch_attention(m[0].cpu(), prefix, from_cls, grid) for m in maps]
    return image.cpu(), layers, from_cls
