"""patch_embed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..op import Arg, Example, Op, Pick, Shape, Sizes, sized
from .arguments import OPERAND


def _patch_sizes(v: Sizes, prefix: int = 1) -> dict[str, Any]:
    grid = (v.img_size[0] // v.patch_size, v.img_size[1] // v.patch_size)
    return dict(
        B=v.B, channels=3, grid=grid, patch=(v.patch_size, v.patch_size), C=v.C, prefix=prefix,
    )  # fmt: skip


def _patch_shapes(s: Any) -> dict[str, Shape]:
    (rows, columns), (height, width) = s.grid, s.patch
    found: dict[str, Shape] = dict(
        images=(s.B, s.channels, rows * height, columns * width),
        weight=(s.C, s.channels, height, width), bias=(s.C,),
        pos_embed=(*getattr(s, "lead", (1,)), getattr(s, "pos", s.prefix + rows * columns), s.C),
    )  # fmt: skip
    if s.prefix:
        found["prefix_tokens"] = (*getattr(s, "lead", (1,)), s.prefix, s.C)
    return found


def _patch_fuzz(pick: Pick) -> Mapping[str, Any]:
    B, C, channels = pick(1, 2, 0, 1, 2, 3, 5), pick.up_to(130), pick(1, 3, 4)
    height, width = (pick(1, 2, 3, 4, 5, 7, 8, 14, 16) for _ in range(2))
    most = max(1, min(600, 20_000 // (height * width * channels)) // max(1, B))
    rows = pick.integer(1, min(24, most))
    columns = pick.integer(1, max(1, min(25, most // rows)))
    prefix = pick(0, pick.integer(0, 5))
    return dict(
        B=B, channels=channels, grid=(rows, columns), patch=(height, width), C=C, prefix=prefix,
        lead=pick((), (1,)), pos=rows * columns + pick(0, prefix), given=("prefix_tokens",),
    )  # fmt: skip


def _patch_configs(large: bool) -> list[Example]:
    def example(B: int, size: Shape, patch: int, C: int) -> Example:
        return sized(_patch_sizes(Sizes(B, 0, C, 0, 0, (size[0], size[1]), patch)))

    if not large:
        return [example(2, (24, 16), 8, 40)]
    return [
        example(5, (224, 192), 16, 192), example(5, (224, 192), 16, 768),
        example(3, (56, 42), 14, 200),
    ]  # fmt: skip


PATCH_EMBED = Op(
    patch_embed, patch_embed_ref,
    args={
        "images": Arg(required=True, operand=True, trained=False),
        "weight": Arg("matrix", required=True, operand=True, accepts=("wider",)),
        "bias": OPERAND, "prefix_tokens": Arg(), "pos_embed": Arg(),
    },
    shapes=_patch_shapes,
    tiny=dict(B=2, channels=3, grid=(2, 1), patch=(4, 4), C=8, prefix=1),
    at=_patch_sizes,
    fuzz=_patch_fuzz, configs=_patch_configs,
    check=lambda v: [Example(_patch_sizes(v, prefix=2))],
)  # fmt: skip
