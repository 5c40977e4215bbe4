"""What patch_embed checks of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...runtime.arguments import check_dense, check_device, check_shape, check_tensor
from ...runtime.dtypes import DTYPE_NAMES

OP = "patch_embed"


def check_call(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix_tokens: Tensor | None,
    pos_embed: Tensor | None,
    keep: Tensor | None,
) -> str | None:
    """Raise on bad arguments; return what the kernels cannot do, if anything."""
    check_dense(OP, "images", images)
    check_tensor(OP, "images", images)
    check_dense(OP, "weight", weight)
    check_tensor(OP, "weight", weight, ndim=5 if weight.ndim == 5 else 4)
    check_device(OP, "weight", weight, images)
    if images.ndim != weight.ndim:
        raise ValueError(
            f"{OP}: images must have {weight.ndim} axes, got shape {tuple(images.shape)}"
        )
    C, channels, *patch = weight.shape
    if images.shape[1] != channels:
        raise ValueError(
            f"{OP}: images must have the {channels} channels of weight, got {images.shape[1]}"
        )
    if not weight.numel():
        raise ValueError(f"{OP}: weight must not be empty, got shape {tuple(weight.shape)}")
    size = images.shape[2:]
    if any(n % p or not n for n, p in zip(size, patch, strict=True)):
        axes = "height and width" if len(patch) == 2 else "frames, height and width"
        raise ValueError(
            f"{OP}: {axes} of images must be positive multiples of the patch {tuple(patch)}, "
            f"got {tuple(size)}"
        )
    check_shape(OP, "bias", bias, (C,), like=images)
    num_patches = math.prod([n // p for n, p in zip(size, patch, strict=True)])
    num_prefix = 0
    if prefix_tokens is not None:
        _check_tokens("prefix_tokens", prefix_tokens, C, images)
        num_prefix = prefix_tokens.shape[-2]
    if pos_embed is not None:
        _check_tokens("pos_embed", pos_embed, C, images)
        if pos_embed.shape[-2] not in (num_patches, num_patches + num_prefix):
            raise ValueError(
                f"{OP}: pos_embed must have {num_patches} rows (patches) or "
                f"{num_patches + num_prefix} (prefix tokens and patches), "
                f"got shape {tuple(pos_embed.shape)}"
            )
    if keep is not None:
        _check_keep(keep, images, num_patches)
    tensors = (images, weight, bias, prefix_tokens, pos_embed)
    dtypes = [x.dtype for x in tensors if x is not None and x.dtype not in DTYPE_NAMES]
    return f"there is no kernel for {dtypes[0]}" if dtypes else None


def _check_tokens(name: str, x: Tensor, C: int, images: Tensor) -> None:
    """Check that x is (rows, C) or (1, rows, C), on the device of images."""
    check_tensor(OP, name, x)
    if x.ndim not in (2, 3) or x.shape[-1] != C or x.shape[:-2] not in ((), (1,)):
        raise ValueError(
            f"{OP}: {name} must have shape (1, rows, {C}) or (rows, {C}), got {tuple(x.shape)}"
        )
    check_device(OP, name, x, images)


def _check_keep(keep: Tensor, images: Tensor, num_patches: int) -> None:
    """Check that keep is (B, K) of integers, 1 <= K <= patches, on the device of images."""
    check_dense(OP, "keep", keep)
    if keep.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{OP}: keep must be int32 or int64, got {keep.dtype}")
    B = images.shape[0]
    if keep.ndim != 2 or keep.shape[0] != B or not 1 <= keep.shape[1] <= num_patches:
        raise ValueError(
            f"{OP}: keep must have shape ({B}, K), 1 <= K <= {num_patches} patches, "
            f"got {tuple(keep.shape)}"
        )
    check_device(OP, "keep", keep, images)


def check_kept(keep: Tensor, num_patches: int) -> None:
    """Raise ValueError unless each row of keep lists patches of the image, each once. It waits for
    the values."""
    low, high = (int(x) for x in keep.aminmax())
    if low < 0 or high >= num_patches:
        raise ValueError(
            f"{OP}: keep must list patches from 0 to {num_patches - 1}, got {low} to {high}"
        )
    ordered = keep.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"{OP}: keep must list a patch of an image once")
