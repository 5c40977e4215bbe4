"""patch_embed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..op import Arg, Example, Op, Pick, Shape, Sizes, Whole, sized
from .arguments import OPERAND

# Besides what every call has, sizes may say `kept`, how many patches of an image are listed, and
# `uint8`. A grid and a patch of three axes are a video's.


def _patch_sizes(v: Sizes, prefix: int = 1) -> dict[str, Any]:
    grid = (v.img_size[0] // v.patch_size, v.img_size[1] // v.patch_size)
    return dict(
        B=v.B, channels=3, grid=grid, patch=(v.patch_size, v.patch_size), C=v.C, prefix=prefix,
    )  # fmt: skip


def _patch_shapes(s: Any) -> dict[str, Shape]:
    size = (n * p for n, p in zip(s.grid, s.patch, strict=True))
    rows = getattr(s, "pos", s.prefix + math.prod(s.grid))
    found: dict[str, Shape] = dict(
        images=(s.B, s.channels, *size),
        weight=(s.C, s.channels, *s.patch), bias=(s.C,),
        pos_embed=(*getattr(s, "lead", (1,)), rows, s.C),
    )  # fmt: skip
    if s.prefix:
        found["prefix_tokens"] = (*getattr(s, "lead", (1,)), s.prefix, s.C)
    if getattr(s, "kept", 0):
        found["keep"] = (s.B, s.kept)
    return found


def _patch_integers(s: Any) -> dict[str, Whole]:
    keep = Whole(getattr(s, "index", torch.int64), math.prod(s.grid), distinct=True)
    images = {"images": Whole(torch.uint8, 256)} if getattr(s, "uint8", False) else {}
    return {"keep": keep, **images}


def _patch_settings(s: Any) -> dict[str, Any]:
    """Another mean and std for each channel."""
    if not getattr(s, "uint8", False):
        return {}
    return dict(
        mean=tuple(0.3 + 0.1 * i for i in range(s.channels)),
        std=tuple(0.3 - 0.03 * i for i in range(s.channels)),
    )


def _patch_fuzz(pick: Pick) -> Mapping[str, Any]:
    B, C, channels = pick(1, 2, 0, 1, 2, 3, 5), pick.up_to(130), pick(1, 3, 4)
    height, width = (pick(1, 2, 3, 4, 5, 7, 8, 14, 16) for _ in range(2))
    depth = pick(0, 0, 1, 2, 3)  # frames of a patch, 0 for an image
    most = 20_000 // (height * width * channels * max(1, depth))
    most = max(1, min(600, most) // max(1, B))
    rows = pick.integer(1, min(24, most))
    columns = pick.integer(1, max(1, min(25, most // rows)))
    frames = pick.integer(1, max(1, min(4, most // (rows * columns))))
    grid, patch = (rows, columns), (height, width)
    if depth:
        grid, patch = (frames, *grid), (depth, *patch)
    prefix, num_patches = pick(0, pick.integer(0, 5)), math.prod(grid)
    return dict(
        B=B, channels=channels, grid=grid, patch=patch, C=C, prefix=prefix,
        lead=pick((), (1,)), pos=num_patches + pick(0, prefix), given=("prefix_tokens",),
        kept=pick(0, pick.integer(1, num_patches)), index=pick(torch.int64, torch.int32),
        uint8=pick(False, False, True),
    )  # fmt: skip


def _patch_configs(large: bool) -> list[Example]:
    def example(B: int, size: Shape, patch: int, C: int, **more: Any) -> Example:
        return sized(_patch_sizes(Sizes(B, 0, C, 0, 0, (size[0], size[1]), patch)) | more)

    if not large:
        return [example(2, (24, 16), 8, 40)]
    return [
        example(5, (224, 192), 16, 192), example(5, (224, 192), 16, 768),
        example(3, (56, 42), 14, 200), example(5, (224, 192), 16, 768, uint8=True, kept=42),
    ]  # fmt: skip


def _patch_check(v: Sizes) -> list[Example]:
    sizes = _patch_sizes(v, prefix=2)
    kept = max(1, math.prod(sizes["grid"]) // 4)
    return [
        Example(sizes),
        Example(sizes | dict(uint8=True), "uint8"),
        Example(sizes | dict(kept=kept), "kept patches"),
        Example(
            sizes | dict(grid=(2, *sizes["grid"]), patch=(2, *sizes["patch"]), kept=kept), "video"
        ),
    ]


PATCH_EMBED = Op(
    patch_embed, patch_embed_ref,
    args={
        "images": Arg(required=True, operand=True, trained=False),
        "weight": Arg("matrix", required=True, operand=True, accepts=("wider",)),
        "bias": OPERAND, "prefix_tokens": Arg(), "pos_embed": Arg(),
        "keep": Arg(grad=False, trained=False, usual=False),
    },
    shapes=_patch_shapes,
    tiny=dict(B=2, channels=3, grid=(2, 1), patch=(4, 4), C=8, prefix=1),
    at=_patch_sizes, settings=_patch_settings, integers=_patch_integers,
    fuzz=_patch_fuzz, configs=_patch_configs, check=_patch_check,
)  # fmt: skip
