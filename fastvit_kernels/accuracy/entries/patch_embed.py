"""patch_embed."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..op import Arg, Example, Op, Shape, Sizes, Whole
from .arguments import MATRIX, OPERAND

# Besides what every call has, sizes may say `kept`, how many patches of an image are listed.
# A grid and a patch of three axes are a video's.


def patch_sizes(v: Sizes, prefix: int = 1) -> dict[str, Any]:
    grid = (v.img_size[0] // v.patch_size, v.img_size[1] // v.patch_size)
    return dict(
        B=v.B,
        channels=3,
        grid=grid,
        patch=(v.patch_size, v.patch_size),
        C=v.C,
        prefix=prefix,
    )


def _patch_shapes(s: Any) -> dict[str, Shape]:
    size = (n * p for n, p in zip(s.grid, s.patch, strict=True))
    rows = getattr(s, "pos", s.prefix + math.prod(s.grid))
    found: dict[str, Shape] = dict(
        images=(s.B, s.channels, *size),
        weight=(s.C, s.channels, *s.patch),
        bias=(s.C,),
        pos_embed=(*getattr(s, "lead", (1,)), rows, s.C),
    )
    if s.prefix:
        found["prefix_tokens"] = (*getattr(s, "lead", (1,)), s.prefix, s.C)
    if getattr(s, "kept", 0):
        found["keep"] = (s.B, s.kept)
    return found


def _patch_integers(s: Any) -> dict[str, Whole]:
    keep = Whole(getattr(s, "index", torch.int64), math.prod(s.grid))
    return {"keep": keep}


def _patch_check(v: Sizes) -> list[Example]:
    sizes = patch_sizes(v, prefix=2)
    kept = max(1, math.prod(sizes["grid"]) // 4)
    return [
        Example(sizes),
        Example(sizes | dict(kept=kept), "kept patches"),
        Example(
            sizes | dict(grid=(2, *sizes["grid"]), patch=(2, *sizes["patch"]), kept=kept), "video"
        ),
    ]


PATCH_EMBED = Op(
    patch_embed,
    patch_embed_ref,
    args={
        "images": Arg(required=True, operand=True, trained=False),
        "weight": MATRIX,
        "bias": OPERAND,
        "prefix_tokens": Arg(),
        "pos_embed": Arg(),
        "keep": Arg(grad=False, trained=False, usual=False),
    },
    shapes=_patch_shapes,
    integers=_patch_integers,
    at=patch_sizes,
    check=_patch_check,
)
