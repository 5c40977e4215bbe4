"""varlen_attention."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ...ops.attention.varlen import varlen_attention, varlen_attention_ref
from ..op import Example, Op, Sizes
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


VARLEN_ATTENTION = Op(
    varlen_attention, ignoring("dropout_p", varlen_attention_ref), eager=varlen_attention_ref,
    args={"qkv": FIRST},
    settings=_settings,
    shapes=lambda s: dict(qkv=(sum(s.lengths), 3, s.H, s.D)),
    at=_at,
    check=lambda v: [Example(_at(v)), Example(packed_sizes((v.T, 1, 0, 2 * v.T), 2, 72), "D=72")],
)  # fmt: skip
