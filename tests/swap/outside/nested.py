"""A block in the manner of DINOv2's repository that takes lists: their tokens as one sequence, a
block-diagonal mask, and stochastic depth that leaves samples out. There xFormers has the mask; here
it is a tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import dino


class Attention(dino.Attention):
    def forward(self, x, attn_bias=None):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_bias)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))


class Block(dino.Block):
    def __init__(self, dim=32, num_heads=2, drop_path=0.0):
        super().__init__(dim, num_heads, drop_path, Attention)

    def forward(self, x_or_list):
        if not isinstance(x_or_list, list):
            return super().forward(x_or_list)
        xs = self.nested(x_or_list, lambda x, m: self.ls1(self.attn(self.norm1(x), attn_bias=m)))
        return self.nested(xs, lambda x, m: self.ls2(self.mlp(self.norm2(x))))

    def nested(self, xs, branch):
        ratio = self.sample_drop_ratio if self.training else 0.0
        kept = [torch.arange(len(x)) for x in xs]
        if ratio > 0:
            kept = [torch.randperm(len(x))[: max(int(len(x) * (1 - ratio)), 1)] for x in xs]
        some = [x[index] for x, index in zip(xs, kept, strict=True)]
        of = torch.cat(
            [
                (100 * place + torch.arange(len(x))).repeat_interleave(x.shape[1])
                for place, x in enumerate(some)
            ]
        )
        joined = torch.cat([x.flatten(0, 1) for x in some]).unsqueeze(0)
        y = (
            branch(joined, (of[:, None] == of))
            .squeeze(0)
            .split([x.shape[:2].numel() for x in some])
        )
        found = zip(xs, kept, y, strict=True)
        return [
            torch.index_add(x, 0, i, part.view(len(i), *x.shape[1:]), alpha=len(x) / len(i))
            for x, i, part in found
        ]
