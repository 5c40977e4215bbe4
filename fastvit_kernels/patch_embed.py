"""Patch embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def patch_embed_ref(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
) -> Tensor:
    """The specification of `patch_embed`: conv, cat, add."""
    x = F.conv2d(images, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    num_patches = x.shape[1]
    if pos_embed is not None and pos_embed.shape[-2] == num_patches:
        x, pos_embed = x + pos_embed, None
    if prefix_tokens is not None:
        prefix_tokens = prefix_tokens.expand(x.shape[0], -1, -1)
        x = torch.cat([prefix_tokens.to(torch.promote_types(x.dtype, prefix_tokens.dtype)), x], 1)
    return x if pos_embed is None else x + pos_embed


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
) -> Tensor:
    """Thin."""
    return patch_embed_ref(images, weight, bias, prefix_tokens, pos_embed)
