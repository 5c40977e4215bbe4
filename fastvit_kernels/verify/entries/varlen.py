"""varlen_attention."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ...ops.attention.varlen import varlen_attention, varlen_attention_ref
from ..op import Example, Op, Sizes, in_memory, sized
from .arguments import FIRST, ignoring


def packed_sizes(lengths: tuple[int, ...], H: int, D: int) -> dict[str, Any]:
    return dict(lengths=lengths, H=H, D=D, slack=0)


def _settings(s: Any) -> dict[str, Any]:
    starts = [0, *itertools.accumulate(s.lengths)]
    return dict(
        cu_seqlens=torch.tensor(starts, dtype=torch.int32), max_seqlen=max(1, *s.lengths, s.slack)
    )


def _at(v: Sizes) -> dict[str, Any]:
    """The images of a batch, packed."""
    return packed_sizes((v.T,) * v.B, v.H, v.C // v.H)


def _configs(large: bool) -> list[Example]:
    windows, images = (64, 48, 64, 1, 0, 32) * 8, (197, 577, 1025, 1, 0, 260)
    packs = [(windows, D) for D in (32, 64, 80)] + [(images, D) for D in (64, 72, 80, 128)]
    if not large:
        packs = [((5, 0, 35), 16), ((40,), 72), ((35, 1), 128)]
    heads_first = in_memory(0, 2, 1, 3)
    return [sized(packed_sizes(p, 5 if large else 1, D), strided=heads_first) for p, D in packs]


VARLEN_ATTENTION = Op(
    varlen_attention, ignoring("dropout_p", varlen_attention_ref), eager=varlen_attention_ref,
    args={"qkv": FIRST},
    settings=_settings,
    shapes=lambda s: dict(qkv=(sum(s.lengths), 3, s.H, s.D)),
    at=_at,
    check=lambda v: [Example(_at(v)), Example(packed_sizes((v.T, 1, 0, 2 * v.T), 2, 72), "D=72")],
    configs=_configs,
)  # fmt: skip
