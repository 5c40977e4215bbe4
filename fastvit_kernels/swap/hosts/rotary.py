"""Attention whose queries and keys are normed, turned or both first: the hosts' RoPE and qk-norm.

Where a projection of ours gives q, k and v, all of it is `rope_attention`; beside a mask or after
a projection that must be called, `rope` and attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...ops.attention.rotary import rope_attention
from ...ops.linear.functions import linear
from ...ops.rope import rope
from ...runtime.plain import is_raw
from .attend import attend, attend_packed, attend_weights, packable, unpack
from .fused import inert, is_fused_norm


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


def turn_of(cos: Any, sin: Any, shape: tuple[int, ...], interleaved: bool = False) -> Turn | None:
    """The tables for queries of this shape, (B, H, T, D); None where `rope` does not take them."""
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
    if all(norm is None or inert(norm) for norm in (q_norm, k_norm)):
        return NO_NORMS
    if not (is_fused_norm(q_norm) and is_fused_norm(k_norm)):
        return None
    (q_weight, q_bias, eps), (k_weight, k_bias, other) = (
        norm.fused_parameters() for norm in (q_norm, k_norm)
    )
    if q_norm.fused_kind != k_norm.fused_kind or eps != other or D % 2:
        return None
    return HeadNorms(q_norm.fused_kind, q_weight, q_bias, k_weight, k_bias, eps)


def _arguments(turn: Turn | None, norms: HeadNorms, like: Tensor, tokens: int) -> dict[str, Any]:
    """Keywords of `rope` and `rope_attention`."""
    if turn is None:  # all tokens are prefix: none turns
        none = like.detach().new_empty((0, 2))
        turn = Turn(none, none)
    return dict(
        cos=turn.cos, sin=turn.sin, interleaved=turn.interleaved,
        prefix_tokens=tokens - turn.cos.shape[-2], norm=norms.norm,
        q_norm_weight=norms.q_weight, q_norm_bias=norms.q_bias,
        k_norm_weight=norms.k_weight, k_norm_bias=norms.k_bias, eps=norms.eps,
    )  # fmt: skip


def turned(q: Tensor, k: Tensor, turn: Turn | None, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    """q, k (B, H, T, D), normed and turned."""
    if turn is None and norms.norm is None:
        return q, k
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = rope(q, k, **_arguments(turn, norms, q, q.shape[1]))
    return q.transpose(1, 2), k.transpose(1, 2)


def attend_turned(
    x: Tensor, packed: tuple[Tensor, Tensor | None], num_heads: int, turn: Turn | None,
    norms: HeadNorms, *, mask: Tensor | None = None, dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """x (B, T, C) -> (B, T, H, D)

    Args:
        packed: weight (3HD, C) and bias of the projection to q, k and v.
    """
    weight, bias = packed
    D = weight.shape[0] // (3 * num_heads)
    if mask is None and turn is None and norms.norm is None:
        return attend_weights(x, weight, bias, num_heads, dropout_p=dropout_p, scale=scale)
    if mask is None and packable(D, dropout_p):
        return rope_attention(
            x, weight, bias, num_heads=num_heads, scale=scale, dropout_p=dropout_p,
            **_arguments(turn, norms, x, x.shape[1]),
        )  # fmt: skip
    return attend_qkv(
        linear(x, weight, bias), num_heads, turn, norms, mask=mask, dropout_p=dropout_p,
        scale=scale,
    )  # fmt: skip


def attend_qkv(
    qkv: Tensor, num_heads: int, turn: Turn | None, norms: HeadNorms, *,
    mask: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """qkv (B, T, 3HD) -> (B, T, H, D)"""
    if turn is None and norms.norm is None:
        return attend_packed(qkv, num_heads, mask=mask, dropout_p=dropout_p, scale=scale)
    q, k, v = unpack(qkv, num_heads)
    q, k = turned(q, k, turn, norms)
    return attend(q, k, v, mask=mask, dropout_p=dropout_p, scale=scale)
