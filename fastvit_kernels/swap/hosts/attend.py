"""The three ways into attention that the hosts' modules take; each gives (B, T, H, D).

Head dims and dropouts that the packed ops refuse go through scaled_dot_product_attention, which
has torch's path for them. Queries and keys may be normed, turned or both first (RoPE, qk-norm):
where a projection of ours gives q, k and v, all of it is `rope_attention`; beside a mask or after a
projection that must be called, `rope` and attention.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.packing import Crops, packable
from ...ops.attention.functions import attention
from ...ops.attention.projected import qkv_attention
from ...ops.attention.rotary import rope_attention
from ...ops.attention.sdpa import scaled_dot_product_attention
from ...ops.attention.varlen import varlen_attention
from ...ops.linear.functions import linear
from ...ops.rope import rope
from ...runtime.plain import is_raw
from .fused import is_fused_norm, is_noop
from .read_once import is_readable, read_once

LEAST = torch.finfo(torch.float32).min  # what hosts add to the scores of a hidden key, or less


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3, H, D) -> q, k, v, views (B, H, T, D)"""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def by_keys(mask: Tensor | None) -> Tensor | None:
    """The mask as (B, 1, 1, T), boolean, where it hides keys alike from all heads and queries: the
    kernels then read a byte a key. Any other mask as it is. Whether it does is read once for all
    layers that share it, by a host that reads it anyway as it makes the mask."""
    if mask is None or mask.ndim != 4 or not is_readable(mask) or not mask.numel():
        return mask
    if not read_once(mask, _hides_keys):
        return mask
    row = mask[:, :1, :1]
    return row if mask.dtype is torch.bool else row == 0


def _hides_keys(mask: Tensor) -> bool:
    row = mask[:, :1, :1]
    alike = (mask == row).all()
    if mask.dtype is not torch.bool:
        hidden, shown = row <= max(LEAST, torch.finfo(mask.dtype).min), row == 0
        # Without a key that is shown, the host's softmax is over the hidden ones.
        alike = alike & (hidden | shown).all() & shown.any(-1).all()
    return bool(alike)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    is_causal: bool = False,
    packing: Crops | None = None,
) -> Tensor:
    """q, k, v, each (B, H, T, D), with an additive or boolean mask; one of windows has their number
    for its first axis, a divisor of B. With a packing B is 1, here and below."""
    if packing is not None:
        qkv = torch.stack([t.squeeze(0).transpose(0, 1) for t in (q, k, v)], dim=1)
        return within(packing, qkv, scale, dropout_p)
    if mask is not None and mask.ndim == 4 and mask.shape[0] not in (1, q.shape[0]):
        mask = mask.repeat(len(q) // len(mask), 1, 1, 1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return out.transpose(1, 2)


def within(packing: Crops, qkv: Tensor, scale: float | None, dropout_p: float) -> Tensor:
    """qkv (total, 3, H, D) -> (1, total, H, D)"""
    starts, most = packing.cu_seqlens, packing.longest
    return varlen_attention(qkv, starts, most, scale=scale, dropout_p=dropout_p).unsqueeze(0)


class Turn(NamedTuple):
    """Tables for `rope` and how it takes them; tokens before them do not turn."""

    cos: Tensor  # (T', R), (B or 1, T', R), or (B or 1, H or 1, T', R)
    sin: Tensor
    interleaved: bool = False


class HeadNorms(NamedTuple):
    """Norms of queries and keys over D, as `rope` takes them; None: no norm."""

    norm: Any = None
    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    eps: float = 1e-6


NO_NORMS = HeadNorms()


def turn_of(tables: Any, shape: tuple[int, ...], interleaved: bool = False) -> Turn | None:
    """The tables, cosines first, for queries of this shape, (B, H, T, D); None where `rope` does
    not take them."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        return None
    cos, sin = tables
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape):
        return None
    if not (is_raw(cos) and is_raw(sin)):
        return None
    B, H, T, D = shape
    *leading, tokens, R = cos.shape if cos.ndim > 1 else (0, 0)
    fits = tokens <= T and R % 2 == 0 and 0 < R <= D and len(leading) < 3
    fits = fits and all(n in (1, m) for n, m in zip(leading, (B, H)[: len(leading)], strict=True))
    return Turn(cos, sin, interleaved) if fits else None


def head_norms(q_norm: Any, k_norm: Any, D: int) -> HeadNorms | None:
    """What `rope` needs of two norms of heads of D; None where it cannot stand for them."""
    if all(norm is None or is_noop(norm) for norm in (q_norm, k_norm)):
        return NO_NORMS
    if not (is_fused_norm(q_norm) and is_fused_norm(k_norm)):
        return None
    (q_weight, q_bias, eps), (k_weight, k_bias, other) = (
        norm.fused_parameters() for norm in (q_norm, k_norm)
    )
    if q_norm.fused_level != k_norm.fused_level or eps != other or D % 2:
        return None
    return HeadNorms(q_norm.fused_level, q_weight, q_bias, k_weight, k_bias, eps)


def _arguments(turn: Turn | None, norms: HeadNorms, like: Tensor, tokens: int) -> dict[str, Any]:
    """Keywords of `rope` and `rope_attention`."""
    if turn is None:  # all tokens are prefix: none turns
        none = like.detach().new_empty((0, 2))
        turn = Turn(none, none)
    return dict(
        cos=turn.cos,
        sin=turn.sin,
        interleaved=turn.interleaved,
        prefix_tokens=tokens - turn.cos.shape[-2],
        norm=norms.norm,
        q_norm_weight=norms.q_weight,
        q_norm_bias=norms.q_bias,
        k_norm_weight=norms.k_weight,
        k_norm_bias=norms.k_bias,
        eps=norms.eps,
    )


def turned(q: Tensor, k: Tensor, turn: Turn | None, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, D), normed and turned."""
    if turn is None and norms.norm is None:
        return q, k
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = rope(q, k, **_arguments(turn, norms, q, q.shape[1]))
    return q.transpose(1, 2), k.transpose(1, 2)


def attend_qkv(
    qkv: Tensor,
    turn: Turn | None = None,
    norms: HeadNorms = NO_NORMS,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    packing: Crops | None = None,
) -> Tensor:
    """qkv (B, T, 3, H, D); mask as for `attend`."""
    plain = turn is None and norms.norm is None and qkv.stride(-1) == 1
    if plain and packing is not None:
        return within(packing, qkv.squeeze(0), scale, dropout_p)
    if plain and packable(qkv.shape[-1], dropout_p):
        return attention(qkv, attn_mask=mask, scale=scale, dropout_p=dropout_p)
    q, k, v = unpack(qkv)
    q, k = turned(q, k, turn, norms)
    return attend(q, k, v, mask=mask, dropout_p=dropout_p, scale=scale, packing=packing)


def attend_weights(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    turn: Turn | None = None,
    norms: HeadNorms = NO_NORMS,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    packing: Crops | None = None,
) -> Tensor:
    """x (B, T, C), and weight (3HD, C) and bias of the projection to q, k and v."""
    given: dict[str, Any] = dict(scale=scale, dropout_p=dropout_p)
    plain = turn is None and norms.norm is None
    apart = mask is not None or not packable(weight.shape[0] // (3 * num_heads), dropout_p)
    if apart or (plain and packing is not None):
        qkv = linear(x, weight, bias).unflatten(-1, (3, num_heads, -1))
        return attend_qkv(qkv, turn, norms, mask=mask, packing=packing, **given)
    if packing is not None:
        given |= dict(cu_seqlens=packing.cu_seqlens, max_seqlen=packing.longest)
    elif plain:
        return qkv_attention(x, weight, bias, num_heads=num_heads, **given)
    given |= _arguments(turn, norms, x, x.shape[1])
    return rope_attention(x, weight, bias, num_heads=num_heads, **given)


def _alike(parameters: Sequence[Tensor]) -> bool:
    """Whether these can share a matmul: one dtype and shape, frozen together."""
    for p in parameters:
        first = parameters[0]
        if (p.dtype, p.shape, p.requires_grad) != (first.dtype, first.shape, first.requires_grad):
            return False
    return True


def as_one(
    every: Sequence[tuple[Tensor, Tensor | None] | None],
) -> tuple[Tensor, Tensor | None] | None:
    """One weight and bias of one Linear or three; None where they must stay apart, or be called."""
    if len(every) == 1:
        return every[0]
    weights, biases, given = [], [], []
    for pair in every:
        if pair is None:
            return None
        weights.append(pair[0])
        biases.append(pair[1])
        if pair[1] is not None:
            given.append(pair[1])
    if not (_alike(weights) and _alike(given)):
        return None
    # A copy of the weights is small beside three passes over x.
    if not given:
        return torch.cat(weights), None
    if len(given) < len(biases):  # EVA02 and DINOv3 have no bias of k
        zeros = given[0].detach().new_zeros(given[0].shape)
        biases = [zeros if b is None else b for b in biases]
    return torch.cat(weights), torch.cat(biases)


def registered(name: str | None) -> Any:
    """The attention function that transformers has under a name."""
    home = sys.modules.get("transformers.modeling_utils")
    return getattr(home, "ALL_ATTENTION_FUNCTIONS", {}).get(name)
