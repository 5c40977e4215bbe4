"""varlen_attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ...ops.attention.varlen import varlen_attention, varlen_attention_ref
from ..op import Example, Op, Pick, Sizes, in_memory, sized
from .arguments import FIRST, SCORES, ignoring


def _settings(s: Any) -> dict[str, Any]:
    starts = [0, *itertools.accumulate(s.lengths)]
    return dict(
        cu_seqlens=torch.tensor(starts, dtype=torch.int32), max_seqlen=max(1, *s.lengths, s.slack)
    )


def _sizes(lengths: tuple[int, ...], H: int, D: int) -> dict[str, Any]:
    return dict(lengths=lengths, H=H, D=D, slack=0)


def _at(v: Sizes) -> dict[str, Any]:
    """The images of a batch, packed."""
    return _sizes((v.T,) * v.B, v.H, v.C // v.H)


def _fuzz(pick: Pick) -> Mapping[str, Any]:
    most = pick(*[9] * 4, *[40] * 4, 130) if pick.low else 40
    count = pick(1, 2, 3, 5)
    lengths = tuple(pick(0, 1, pick.up_to(most), pick.up_to(most)) for _ in range(count))
    D = pick(8, 32, 64, 72, 80, 8 * pick.integer(1, 32)) if max(lengths) <= 40 else pick(8, 32, 72)
    return dict(lengths=lengths, H=pick(1, 2), D=D, slack=pick(0, 0, 70))


def _configs(large: bool) -> list[Example]:
    if large:
        windows, images = (64, 48, 64, 1, 0, 32) * 8, (197, 577, 1025, 1, 0, 260)
        lengths = [(windows, D) for D in (32, 64, 80)] + [(images, D) for D in (64, 72, 80, 128)]
    else:
        lengths = [((5, 0, 35), 16), ((40,), 72), ((35, 1), 128)]
    return [
        sized(_sizes(part, 1 if not large else 5, D), strided=in_memory(0, 2, 1, 3))
        for part, D in lengths
    ]


VARLEN_ATTENTION = Op(
    varlen_attention, ignoring("dropout_p", varlen_attention_ref), eager=varlen_attention_ref,
    args={"qkv": FIRST},
    options=SCORES,
    settings=_settings,
    shapes=lambda s: dict(qkv=(sum(s.lengths), 3, s.H, s.D)),
    tiny=_sizes((3, 0, 2), 2, 8),
    at=_at, fuzz=_fuzz, fuzz_share=2,
    check=lambda v: [
        Example(_at(v)),
        Example(_sizes((v.T, 1, 0, 2 * v.T), 2, 72), "D=72"),
    ],
    configs=_configs,
)  # fmt: skip
