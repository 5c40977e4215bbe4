"""Softmax attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention_ref(qkv: Tensor, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """The specification of `attention`: torch's own, on the three views of qkv."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=scale)
    return out.transpose(1, 2)


def attention(qkv: Tensor, *, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """Thin."""
    return attention_ref(qkv, scale, dropout_p)


def scaled_dot_product_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
):
    """Thin."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


def qkv_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Thin."""
    qkv = F.linear(x, weight, bias).unflatten(-1, (3, num_heads, -1))
    return attention(qkv, scale=scale, dropout_p=dropout_p)
