"""Checkpoints of every ViT family, read into our VisionTransformer.

file -> tensors by name -> timm's names and layouts -> positions of the model's grid -> checked
-> copied
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.positions import resize_grid
from ..models.vit import VisionTransformer
from ..runtime.arguments import check_int
from .files import read_file
from .names import add, to_timm


@dataclass(frozen=True)
class WeightsReport:
    """What `load_weights` did, with recognised keys under the model's own names.

    Attributes:
        family: "timm", "torchvision", "transformers" or "jax".
        loaded: parameters that were loaded.
        missing: parameters that the source lacks; they keep their values.
        unexpected: keys of the source that the model lacks.
        resized: parameter -> (shape in the source, shape in the model).
    """

    family: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} parameters, names of the {self.family} family"]
        for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            lines.append(f"{what} ({len(names)}): {shown}" if names else f"{what}: none")
        changes = [f"{name} {old} -> {new}" for name, (old, new) in self.resized.items()]
        lines.append(f"resized: {', '.join(changes) or 'none'}")
        return "\n".join(lines)


def _fold_linear_patches(tensors: dict[str, Tensor], model: VisionTransformer) -> None:
    """A patch embedding saved as a Linear (C, pixels) -> (C, in_chans, height, width)."""
    name = "patch_embed.proj.weight"
    weight, (C, in_chans, height, width) = tensors[name], model.patch_embed.proj.weight.shape
    if weight.ndim != 2 or weight.shape != (C, in_chans * height * width):
        return
    if in_chans > 1 and height * width > 1:
        raise ValueError(
            f"load_weights: {name} is a matrix {tuple(weight.shape)}, whose columns may be ordered "
            f"(channel, row, column) or (row, column, channel). Give it as "
            f"{(C, in_chans, height, width)}: weight.reshape{(C, in_chans, height, width)}, or "
            f"weight.reshape{(C, height, width, in_chans)}.permute(0, 3, 1, 2)"
        )
    tensors[name] = weight.reshape(C, in_chans, height, width)


def _square(count: int) -> tuple[int, int] | None:
    side = math.isqrt(max(count, 0))
    return (side, side) if side > 0 and side * side == count else None


def _fit_positions(
    tensors: dict[str, Tensor], model: VisionTransformer, grid_size: tuple[int, int] | None
) -> None:
    """Resize pos_embed to the model's grid and its number of prefix positions.

    A class position that the model lacks is added to the class token; prefix positions that the
    source lacks become zeros. Neither changes the function of the image.
    """
    if model.pos_embed is None:
        return
    pos_embed, (rows, cols) = tensors["pos_embed"], model.patch_embed.grid_size
    if pos_embed.ndim == 4 and pos_embed.shape[0] == 1:  # (1, rows, cols, C)
        grid_size, pos_embed = (pos_embed.shape[1], pos_embed.shape[2]), pos_embed.flatten(1, 2)
    if pos_embed.ndim != 3 or (pos_embed.shape[0], pos_embed.shape[2]) != (1, model.embed_dim):
        return  # the shape check names it
    wanted = 0 if model.no_embed_class else model.num_prefix_tokens
    tokens = pos_embed.shape[1]
    if grid_size is None and tokens == model.pos_embed.shape[1]:
        return  # a grid of another shape with equally many patches looks the same
    for prefix in (wanted, 0, 1):
        count = tokens - prefix
        old = grid_size or ((rows, cols) if count == rows * cols else _square(count))
        if old is not None and math.prod(old) == count:
            break
    else:
        raise ValueError(
            f"load_weights: pos_embed {tuple(pos_embed.shape)} must hold {wanted} prefix positions "
            f"and a square grid, or the grid given as grid_size, got grid_size={grid_size}"
        )
    positions, patches = pos_embed[:, :prefix], pos_embed[:, prefix:]
    if old != (rows, cols):
        patches = resize_grid(patches, old, (rows, cols))
    if prefix > wanted:  # one position, of the class token, in a model with no_embed_class
        if "cls_token" not in tensors or tensors["cls_token"].shape != positions.shape:
            raise ValueError(
                f"load_weights: pos_embed has {prefix} prefix position and the model has "
                f"{wanted}; without a cls_token of its shape there is nothing to add it to"
            )
        tensors["cls_token"] = tensors["cls_token"] + positions
        positions = positions[:, :0]
    elif prefix < wanted:
        if prefix > 0:
            raise ValueError(
                f"load_weights: pos_embed has {prefix} prefix positions, the model {wanted}; "
                "create the model with no_embed_class=True"
            )
        positions = pos_embed.new_zeros(1, wanted, pos_embed.shape[2])
    tensors["pos_embed"] = torch.cat([positions, patches], dim=1)


def _fit_biases(tensors: dict[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """The bias of qkv as the model has it: whole, or in parts that leave out the keys'."""
    for name in [n for n in tensors if n.endswith(("attn.qkv.bias", "attn.q_bias"))]:
        attn, _, leaf = name.rpartition("attn.")
        whole, q_bias, v_bias, mask = (
            f"{attn}attn.{n}" for n in ("qkv.bias", "q_bias", "v_bias", "qkv.bias_mask")
        )
        if leaf == "qkv.bias" and q_bias in targets and tensors[name].ndim == 1:
            q, k, v = tensors.pop(name).tensor_split(3)
            if mask not in tensors and k.any():  # DINOv3's own files mask what the keys' part holds
                raise ValueError(
                    f"load_weights: {name} must be 0 for the keys in a model with key_bias=False, "
                    f"got up to {k.abs().max():.3g}; create the model with key_bias=True"
                )
            add(tensors, q_bias, q)
            add(tensors, v_bias, v)
        elif leaf == "q_bias" and whole in targets and v_bias in tensors:
            q, v = (tensors.pop(n).flatten() for n in (q_bias, v_bias))
            add(tensors, whole, torch.cat((q, torch.zeros_like(q), v)))


def _check_shapes(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():  # in the order of the model, weights before biases
        if name not in tensors:
            continue
        got, wanted = tuple(tensors[name].shape), tuple(target.shape)
        if target.is_floating_point() != tensors[name].is_floating_point():
            kind = "floating point" if target.is_floating_point() else f"{target.dtype}"
            raise ValueError(f"load_weights: {name} must be {kind}, got {tensors[name].dtype}")
        if target.is_meta:
            raise ValueError(
                f"load_weights: {name} of the model must have memory, got a meta tensor; "
                'give it some with model.to_empty(device="cuda")'
            )
        if got == wanted:
            continue
        hint = ""
        if name in ("head.weight", "head.bias") and got[1:] == wanted[1:]:
            hint = (
                f"; create the model with num_classes={got[0]}, or drop the keys of the head from "
                "the source to keep the model's own"
            )
        raise ValueError(f"load_weights: {name} must have shape {wanted}, got {got}{hint}")


def _converted(name: str, source: Tensor, target: Tensor) -> Tensor:
    """source on target's device and in its dtype, all of it finite."""
    converted = source.to(device=target.device, dtype=target.dtype)
    if not converted.isfinite().all():
        bad = int((~source.isfinite()).sum())
        what = f"{bad} NaN or infinite" if bad else f"some that {target.dtype} cannot hold"
        raise ValueError(f"load_weights: {name} must hold finite numbers, got {what}")
    return converted


def _natural(names: Iterable[str]) -> tuple[str, ...]:
    """Sorted so that block 2 comes before block 10."""

    def place(name: str) -> list[tuple[int, str]]:
        return [(len(part) if part.isdecimal() else 0, part) for part in name.split(".")]

    return tuple(sorted(names, key=place))


def _check_grid_size(grid_size: Any) -> None:
    if grid_size is None:
        return
    if not isinstance(grid_size, (tuple, list)) or len(grid_size) != 2:
        raise TypeError(f"load_weights: grid_size must be (rows, cols) or None, got {grid_size!r}")
    for side in grid_size:
        check_int("load_weights", "grid_size", side)


def load_weights(
    model: VisionTransformer,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    grid_size: tuple[int, int] | None = None,
) -> WeightsReport:
    """Load a ViT checkpoint of timm, torchvision, transformers or JAX into a model.

    The source may have timm's names (its ViT's and its DINOv3's), torchvision's or
    transformers' (ViT, DeiT, DINOv2, DINOv3; before and since 5.9), or be a JAX .npz of the ViT
    paper or of big_vision. Wrappers such as "model", "state_dict" and "module." are stripped.
    Position embeddings of another grid are resized (bicubic, antialias). Nothing is written unless
    everything fits.

    Key names reveal neither eps, activation nor rotary positions: build the model with the source's
    `norm_eps` (timm and torchvision 1e-6, transformers ViT 1e-12), `act_layer` and `rope_type`. A
    `norm` before pooling and an `fc_norm` after it are different layers; neither loads into the
    other. Choose with `fc_norm`.

    Args:
        model: keeps its dtype and device.
        source: a path (.pth, .pt, .bin, .safetensors, .npz), or a mapping of names to tensors or
            arrays, all finite. Files are read without running code from them.
        grid_size: (rows, cols) of the source's position embedding, for one that is not square.
    Returns: a WeightsReport; print it or inspect it. Missing keys are no error.
    Raises: ValueError, such as "load_weights: head.weight must have shape (10, 768), got
        (1000, 768)", or for an unreadable file; TypeError; FileNotFoundError. The model then keeps
        its weights.
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            f"load_weights: model must be a fastvit_kernels.VisionTransformer, "
            f"got {type(model).__name__}"
        )
    _check_grid_size(grid_size)
    if not isinstance(source, (str, os.PathLike)):
        return _load(model, source, grid_size)
    path = Path(source)
    contents = read_file(path)
    try:
        return _load(model, contents, grid_size)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} (in {path})") from error


def _load(
    model: VisionTransformer, source: Any, grid_size: tuple[int, int] | None
) -> WeightsReport:
    if not isinstance(source, Mapping):
        raise TypeError(
            f"load_weights: source must be a path or hold a mapping of names to tensors, "
            f"got {type(source).__name__}"
        )
    family, tensors = to_timm(source, tuple(model.patch_embed.proj.weight.shape))
    if "mask_token" in tensors:  # (1, C) of transformers' DINOv2
        tensors["mask_token"] = tensors["mask_token"].reshape(1, 1, -1)
    before = {name: tuple(x.shape) for name, x in tensors.items()}
    if "patch_embed.proj.weight" in tensors:
        _fold_linear_patches(tensors, model)
    targets = model.state_dict()  # parameters and the buffers of a convolutional stem
    if "pos_embed" in tensors:
        _fit_positions(tensors, model, grid_size)
    _fit_biases(tensors, targets)
    _check_shapes(tensors, targets)

    loaded = _natural(tensors.keys() & targets.keys())
    if not loaded:
        raise ValueError(
            f"load_weights: source must hold a parameter of the model, got none; its first keys "
            f"are {list(tensors)[:4]}"
        )
    report = WeightsReport(
        family=family,
        loaded=loaded,
        missing=_natural(targets.keys() - tensors.keys()),
        unexpected=_natural(tensors.keys() - targets.keys()),
        resized={
            n: (before[n], s)
            for n in loaded
            if n in before and (s := tuple(tensors[n].shape)) != before[n]
        },
    )
    with torch.no_grad():  # convert everything before writing anything
        converted = {name: _converted(name, tensors[name], targets[name]) for name in loaded}
        for name, x in converted.items():
            targets[name].copy_(x)
    return report
