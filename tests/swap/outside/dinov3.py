"""A block in the manner of DINOv3's repository, from its description: RoPE on all but the prefix,
a bias of k that is masked, lists of inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .dino import LayerScale, SwiGLU


def rotate(x, sin, cos):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class MaskedBias(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        mask = torch.ones_like(self.bias.detach()).view(3, -1)
        mask[1] = 0
        self.register_buffer("bias_mask", mask.flatten())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * self.bias_mask.to(self.bias.dtype))


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads, linear):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def apply_rope(self, q, k, rope):
        sin, cos = rope
        prefix = q.shape[-2] - sin.shape[-2]
        return tuple(
            torch.cat([t[:, :, :prefix], rotate(t[:, :, prefix:].to(sin.dtype), sin, cos)], dim=-2)
            for t in (q, k)
        )

    def forward(self, x, attn_bias=None, rope=None):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        if rope is not None:
            q, k = self.apply_rope(q, k, rope)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C)
        return self.proj_drop(self.proj(y))


class Block(nn.Module):
    def __init__(self, dim=32, num_heads=2, linear=MaskedBias):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, 1e-5), nn.LayerNorm(dim, 1e-5)
        self.attn, self.mlp = SelfAttention(dim, num_heads, linear), SwiGLU(dim, 2 * dim)
        self.ls1, self.ls2 = LayerScale(dim, 0.5), LayerScale(dim, 0.5)

    def forward_list(self, xs, ropes):
        for x, rope in zip(xs, ropes, strict=True):
            x = x + self.ls1(self.attn(self.norm1(x), rope=rope))
            yield x + self.ls2(self.mlp(self.norm2(x)))

    def forward(self, x_or_list, rope_or_list=None):
        if not isinstance(x_or_list, list):
            return next(self.forward_list([x_or_list], [rope_or_list]))
        return list(self.forward_list(x_or_list, rope_or_list or [None] * len(x_or_list)))
