"""Blocks in the manner of BEiT, EVA-02 and segment-anything, written from their descriptions, and
look-alikes that change a line of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .by_hand import FeedForward
from .dino import RoundedBlock


class BeitAttention(nn.Module):
    """The weights of qkv are read, its bias has none for k; a learnt bias by an index of pairs, and
    perhaps one that the layers share."""

    def __init__(self, dim=32, heads=2, tokens=6, own=True, separate=False):
        super().__init__()
        self.heads, self.scale, self.separate = heads, (dim // heads) ** -0.5, separate
        if separate:
            self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        else:
            self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(dim)) for _ in range(2))
        self.table = nn.Parameter(torch.zeros(20, heads)) if own else None
        generator = torch.Generator().manual_seed(4)
        index = torch.randint(0, 20, (tokens, tokens), generator=generator)
        self.register_buffer("index", index if own else None)
        self.proj = nn.Linear(dim, dim)

    def project(self, x):
        if self.separate:
            weights = ((self.q, self.q_bias), (self.k, None), (self.v, self.v_bias))
            q, k, v = (F.linear(x, m.weight, b) for m, b in weights)
            return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=bias)
        return qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def bias(self):
        T = self.index.shape[0]
        return self.table[self.index.view(-1)].view(T, T, -1).permute(2, 0, 1)

    def turned(self, q, k):
        return q, k

    def forward(self, x, rel_pos_bias=None):
        q, k, v = self.project(x)
        q, k = self.turned(q, k)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if self.table is not None:
            scores = scores + self.bias().unsqueeze(0)
        if rel_pos_bias is not None:
            scores = scores + rel_pos_bias
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class WindowAttention(nn.Module):
    """MONAI's Swin: windows (B windows, T, C); a mask of the shift (windows, T, T) or None."""

    def __init__(self, dim=32, heads=2, tokens=8):
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros(20, heads))
        generator = torch.Generator().manual_seed(4)
        index = torch.randint(0, 20, (tokens, tokens), generator=generator)
        self.register_buffer("relative_position_index", index)
        self.qkv, self.attn_drop = nn.Linear(dim, 3 * dim), nn.Dropout(0.0)
        self.proj, self.proj_drop = nn.Linear(dim, dim), nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] * self.scale @ qkv[1].transpose(-2, -1)
        index = self.relative_position_index.clone()[:T, :T].reshape(-1)
        bias = self.relative_position_bias_table[index].reshape(T, T, -1).permute(2, 0, 1)
        scores = scores + bias.contiguous().unsqueeze(0)
        if mask is not None:
            scores = scores.view(B // len(mask), len(mask), self.num_heads, T, T)
            scores = (scores + mask.unsqueeze(1).unsqueeze(0)).view(-1, self.num_heads, T, T)
        probabilities = self.attn_drop(self.softmax(scores))
        return self.proj_drop(self.proj((probabilities @ qkv[2]).transpose(1, 2).reshape(B, T, C)))


class Turn(nn.Module):
    """RoPE as a child with tables of its own, for this many tokens."""

    def __init__(self, tokens=5, head_dim=16):
        super().__init__()
        angles = torch.randn(tokens, head_dim, generator=torch.Generator().manual_seed(6))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, t):
        a, b = t[..., ::2], t[..., 1::2]
        return t * self.cos + torch.stack((-b, a), dim=-1).flatten(-2) * self.sin


class EvaAttention(BeitAttention):
    """Three projections, q and k turned but for the class token."""

    def __init__(self):
        super().__init__(own=False, separate=True)
        self.rope = Turn()

    def turned(self, q, k):
        return [torch.cat((t[:, :, :1], self.rope(t[:, :, 1:])), dim=-2) for t in (q, k)]


class BeitBlock(nn.Module):
    def __init__(self, attention=BeitAttention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn, self.mlp = attention(), FeedForward(32, 64, F.gelu)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.ones(32)) for _ in range(2))

    def forward(self, x, rel_pos_bias=None, resolution=None):
        x = x + self.gamma_1 * self.attn(self.norm1(x), rel_pos_bias=rel_pos_bias)
        return x + self.gamma_2 * self.mlp(self.norm2(x))


def relative(n, table):
    place = torch.arange(n)
    return table[place[:, None] - place[None, :] + len(table) // 2]


class GridAttention(nn.Module):
    """On a grid, with decomposed relative positions for this size of it."""

    def __init__(self, dim=32, heads=2, size=None):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.along_h, self.along_w = (
            nn.Parameter(torch.zeros(2 * n - 1, dim // heads)) if size else None
            for n in size or (0, 0)
        )

    def positions(self, q, height, width):
        q = q.view(len(q), height, width, -1)
        by_row = torch.einsum("bhwc,hkc->bhwk", q, relative(height, self.along_h))
        by_column = torch.einsum("bhwc,wkc->bhwk", q, relative(width, self.along_w))
        return (by_row[..., :, None] + by_column[..., None, :]).flatten(3).flatten(1, 2)

    def forward(self, x):
        B, height, width, _ = x.shape
        qkv = self.qkv(x).reshape(B, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.flatten(1, 2).unbind(0)
        scores = (q * self.scale) @ k.mT
        if self.along_h is not None:
            scores = scores + self.positions(q, height, width)
        y = (scores.softmax(-1) @ v).view(B, self.heads, height, width, -1)
        return self.proj(y.permute(0, 2, 3, 1, 4).flatten(3))


class GridBlock(nn.Module):
    """Attention in windows, or in the whole grid where there are none."""

    def __init__(self, window=0, size=None, channels=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn, self.mlp = GridAttention(size=size), FeedForward(32, 64, F.gelu)
        self.window, self.channels = window, channels

    def into_windows(self, x):
        B, H, W, C = x.shape
        x = F.pad(x, (0, 0, 0, -W % self.window, 0, -H % self.window))
        self.padded = x.shape
        x = x.view(B, -1, self.window, x.shape[2] // self.window, self.window, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window, self.window, C)

    def out_of_windows(self, x, H, W):
        B, h, w, C = self.padded
        x = x.view(B, h // self.window, w // self.window, self.window, self.window, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, h, w, C)[:, :H, :W].contiguous()

    def forward(self, x):
        x = x.permute(0, 2, 3, 1) if self.channels else x
        y = self.norm1(x)
        if self.window:
            y = self.out_of_windows(self.attn(self.into_windows(y)), *y.shape[1:3])
        else:
            y = self.attn(y)
        x = x + y
        x = x + self.mlp(self.norm2(x))
        return x.permute(0, 3, 1, 2) if self.channels else x


class OtherIndex(BeitAttention):
    def bias(self):
        return super().bias().mT


class LateBias(BeitAttention):
    """Added behind the softmax."""

    def forward(self, x, rel_pos_bias=None):
        q, k, v = self.project(x)
        weights = (q @ k.mT * self.scale).softmax(-1) + self.bias()
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class OneTurned(EvaAttention):
    def turned(self, q, k):
        return q, super().turned(q, k)[1]


class Exchanged(GridAttention):
    """What belongs to rows is added to columns."""

    def positions(self, q, height, width):
        bias = super().positions(q, height, width)
        return bias.unflatten(2, (height, width)).mT.flatten(2)


class Shifted(GridBlock):
    """Swin's: windows of a grid that was rolled."""

    def into_windows(self, x):
        return super().into_windows(x.roll((-1, -1), (1, 2)))

    def out_of_windows(self, x, H, W):
        return super().out_of_windows(x, H, W).roll((1, 1), (1, 2))


class Reading(BeitBlock):
    """Reads its third argument."""

    def forward(self, x, rel_pos_bias=None, resolution=None):
        y = super().forward(x, rel_pos_bias)
        return y if resolution is None else y * 2


class ScaledSum(RoundedBlock):
    """In evaluation its sum is a sum of something else."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        x = torch.add(x, self.ls1(self.attn(self.norm1(x))), alpha=0.5)
        return x + self.ls2(self.mlp(self.norm2(x)))
