"""Blocks in the manner of the repositories of DINO, iBOT and DINOv2, from their descriptions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DropPath(nn.Module):
    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.drop_prob or not self.training:
            return x
        keep = 1 - self.drop_prob
        kept = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * kept.div_(keep)


class FloorDropPath(nn.Module):
    """The older one: floor(keep + uniform)."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        kept = (keep + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)).floor_()
        return x.div(keep) * kept


class UnscaledDropPath(FloorDropPath):
    """What is kept stays as it is."""

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        drawn = torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
        return x * (1 - self.drop_prob + drawn).floor_()


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-5, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Attention(nn.Module):
    def __init__(self, dim, num_heads, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, is_causal=False):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        p = self.attn_drop if self.training else 0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=is_causal)
        return self.proj_drop(self.proj(x.transpose(1, 2).contiguous().view(B, T, C)))


class MemEffAttention(Attention):
    def forward(self, x, attn_bias=None):
        if attn_bias is not None:
            raise AssertionError("only with xformers")
        return super().forward(x)


class WeightsAttention(nn.Module):
    """DINO's and iBOT's: the probabilities come back beside the output."""

    def __init__(self, dim, num_heads, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = self.attn_drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        x = (weights @ v).transpose(1, 2).reshape(B, T, C)
        return self.proj_drop(self.proj(x)), weights


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x):
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


class NormedSwiGLU(nn.Module):
    """EVA-02's: a LayerNorm inside."""

    def __init__(self, dim, hidden, drop=0.0):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.ffn_ln, self.w3 = nn.LayerNorm(hidden), nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.w3(self.ffn_ln(F.silu(self.w1(x)) * self.w2(x))))


class Block(nn.Module):
    """DINOv2's: nested functions; above a ratio of 0.1, branches run on some samples only."""

    def __init__(self, dim=32, num_heads=2, drop_path=0.0, attention=Attention, ffn=Mlp, drop=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, 1e-6)
        self.attn = attention(dim, num_heads, drop, drop)
        self.ls1 = LayerScale(dim, 0.5)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, 1e-6)
        self.mlp = ffn(dim, 4 * dim, drop)
        self.ls2 = LayerScale(dim, 0.5)
        self.sample_drop_ratio = drop_path

    def forward(self, x):
        def attend(x):
            return self.ls1(self.attn(self.norm1(x)))

        def feed(x):
            return self.ls2(self.mlp(self.norm2(x)))

        if self.training and self.sample_drop_ratio > 0.1:
            return self.on_some(self.on_some(x, attend), feed)
        if self.training and self.sample_drop_ratio > 0:
            x = x + self.drop_path1(attend(x))
            return x + self.drop_path1(feed(x))
        x = x + attend(x)
        return x + feed(x)

    def on_some(self, x, branch):
        kept = max(int(len(x) * (1 - self.sample_drop_ratio)), 1)
        index = torch.randperm(len(x))[:kept]
        y = branch(x[index]).flatten(1)
        return torch.index_add(x.flatten(1), 0, index, y, alpha=len(x) / kept).view_as(x)


class WeightsBlock(nn.Module):
    """DINO's and iBOT's: LayerScale as parameters, the probabilities on request."""

    def __init__(self, dim=32, num_heads=2, drop_path=0.2, init_values=0.5, drop=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WeightsAttention(dim, num_heads, drop, drop)
        self.drop_path = FloorDropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim, drop)
        self.gamma_1 = nn.Parameter(init_values * torch.ones(dim)) if init_values else None
        self.gamma_2 = nn.Parameter(init_values * torch.ones(dim)) if init_values else None

    def forward(self, x, return_attention=False):
        y, attn = self.attn(self.norm1(x))
        if return_attention:
            return attn
        if self.gamma_1 is None:
            x = x + self.drop_path(y)
            return x + self.drop_path(self.mlp(self.norm2(x)))
        x = x + self.drop_path(self.gamma_1 * y)
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class RoundedBlock(Block):
    """Keeps another number of samples."""

    def on_some(self, x, branch):
        kept = max(round(len(x) * (1 - self.sample_drop_ratio)), 1)
        index = torch.randperm(len(x))[:kept]
        y = branch(x[index]).flatten(1)
        return torch.index_add(x.flatten(1), 0, index, y, alpha=len(x) / kept).view_as(x)
