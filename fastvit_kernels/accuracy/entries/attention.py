"""The attentions: packed, projected, turned, of sequences of any length, and torch's."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.attention.functions import attention, attention_ref
from ...ops.attention.projected import qkv_attention, qkv_attention_ref
from ...ops.attention.rotary import rope_attention, rope_attention_ref
from ...ops.attention.sdpa import scaled_dot_product_attention
from ...ops.attention.varlen import varlen_attention, varlen_attention_ref
from ..op import Arg, Example, Op, Shape, Sizes
from .arguments import FIRST, MATRIX, OPERAND, ignoring
from .rope import ROPE, TABLES, rope_at, rope_shapes


def _attention_shapes(s: Any) -> dict[str, Shape]:
    shapes: dict[str, Shape] = dict(qkv=(s.B, s.T, 3, s.H, s.D))
    mask = getattr(s, "mask", None)
    return shapes if mask is None else {**shapes, "attn_mask": mask}


def _attention_check(v: Sizes) -> list[Example]:
    rest = dict(B=v.B, T=v.T, H=v.H)
    one = dict(B=1, H=2, D=64)
    return [
        *(Example({**rest, "D": D}, f"D={D}") for D in (32, 64, 72, 128)),
        Example({**one, "T": 1}, "T=1"),
        Example({**one, "T": 260}, "T=260"),  # past the one-pass backward
        Example({**rest, "D": 32, "mask": (v.H, v.T, v.T)}, "learnt bias"),
        Example({**rest, "D": 32, "mask": (v.B, 1, v.T, v.T)}, "mask of windows"),
    ]


ATTENTION = Op(
    attention,
    ignoring("dropout_p", attention_ref),
    eager=attention_ref,
    args={"qkv": FIRST, "attn_mask": Arg("mask", usual=False)},
    shapes=_attention_shapes,
    at=lambda v: dict(B=v.B, T=v.T, H=v.H, D=v.C // v.H, mask=None),
    check=_attention_check,
)


def _projected_shapes(s: Any) -> dict[str, Shape]:
    return dict(x=(s.B, s.T, s.C), weight=(3 * s.H * s.D, s.C), bias=(3 * s.H * s.D,))


QKV_ATTENTION = Op(
    qkv_attention,
    ignoring("dropout_p", qkv_attention_ref),
    eager=qkv_attention_ref,
    args={"x": FIRST, "weight": MATRIX, "bias": OPERAND},
    settings=lambda s: dict(num_heads=s.H),
    shapes=_projected_shapes,
    at=(_qkv_at := lambda v: dict(B=v.B, T=v.T, H=v.H, D=v.C // v.H, C=v.C)),
    check=lambda v: [Example(_qkv_at(v))],
)


ROPE_ATTENTION = Op(
    rope_attention,
    ignoring("dropout_p", rope_attention_ref),
    args={
        "x": FIRST,
        "weight": MATRIX,
        "bias": OPERAND,
        **{name: arg for name, arg in ROPE.args.items() if name not in ("q", "k")},
    },
    settings=lambda s: dict(num_heads=s.H, prefix_tokens=s.prefix, norm=s.norm),
    shapes=lambda s: rope_shapes(s) | _projected_shapes(s),
    at=lambda v: dict(**rope_at(v), C=v.C),
    check=lambda v: [
        Example({**rope_at(v), "C": v.C}, frozen=TABLES),
        Example({**rope_at(v), "C": v.C, "norm": "layer_norm"}, "LayerNorm", frozen=TABLES),
        Example({**rope_at(v), "C": v.C, "lead": (1, v.H)}, "learnt tables by head"),
    ],
)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    # torch's CPU kernel for 16 bits refuses rows that overlap
    query, key, value = (x.contiguous() for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, *args, **options)


def _sdpa_shapes(s: Any) -> dict[str, Shape]:
    keys = (s.B, s.H, s.S, s.D)
    shapes = dict(query=(s.B, s.H, s.T, s.D), key=keys, value=keys)
    return shapes if s.mask is None else {**shapes, "attn_mask": s.mask}


def _sdpa_check(v: Sizes) -> list[Example]:
    sizes = dict(B=v.B, H=v.H, T=v.T, S=v.T, D=v.C // v.H)
    return [
        Example({**sizes, "S": v.T + 5, "mask": None}, "S=T+5"),
        Example({**sizes, "mask": (v.B, 1, v.T, v.T)}, "boolean mask", boolean=True),
        Example({**sizes, "mask": (v.H, v.T, v.T)}, "additive mask"),
    ]


SDPA = Op(
    scaled_dot_product_attention,
    ignoring("dropout_p", _sdpa),
    eager=F.scaled_dot_product_attention,
    args={
        "query": FIRST,
        "key": FIRST,
        "value": FIRST,
        "attn_mask": Arg("mask", usual=False),
    },
    settings=lambda s: dict(is_causal=getattr(s, "is_causal", False)),
    shapes=_sdpa_shapes,
    at=lambda v: dict(B=v.B, H=v.H, T=v.T, S=v.T, D=v.C // v.H, mask=None),
    check=_sdpa_check,
)


def packed_sizes(lengths: tuple[int, ...], H: int, D: int) -> dict[str, Any]:
    return dict(lengths=lengths, H=H, D=D, slack=0)


def _varlen_settings(s: Any) -> dict[str, Any]:
    starts = [0, *itertools.accumulate(s.lengths)]
    return dict(
        cu_seqlens=torch.tensor(starts, dtype=torch.int32), max_seqlen=max(1, *s.lengths, s.slack)
    )


def _varlen_at(v: Sizes) -> dict[str, Any]:
    """The images of a batch, packed."""
    return packed_sizes((v.T,) * v.B, v.H, v.C // v.H)


VARLEN_ATTENTION = Op(
    varlen_attention,
    ignoring("dropout_p", varlen_attention_ref),
    eager=varlen_attention_ref,
    args={"qkv": FIRST},
    settings=_varlen_settings,
    shapes=lambda s: dict(qkv=(sum(s.lengths), 3, s.H, s.D)),
    at=_varlen_at,
    check=lambda v: [
        Example(_varlen_at(v)),
        Example(packed_sizes((v.T, 1, 0, 2 * v.T), 2, 72), "D=72"),
    ],
)
