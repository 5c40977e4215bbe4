"""The parts that hosts of tests/fuse are written with, small and of sizes that collide.

B images of T tokens of C = H D: hosts of `tokens` have (2, 9, 32), those of `square` (4, 4, 32), so
that an axis taken for another is no error of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, D = 4, 8
C = H * D


class Kit(nn.Module):
    """Every layer a host may want; `forward` is the host."""

    def __init__(self, forward: Callable[..., Any]):
        super().__init__()
        self.host = forward
        self.qkv = nn.Linear(C, 3 * C)
        self.q, self.k, self.v, self.o = (nn.Linear(C, C) for _ in range(4))
        self.bare = nn.Linear(C, C, bias=False)
        self.fc1, self.gate, self.fc2 = nn.Linear(C, 64), nn.Linear(C, 64), nn.Linear(64, C)
        self.both = nn.Linear(C, 128)
        self.n = randomized(nn.LayerNorm(C))
        self.qn, self.kn = randomized(nn.LayerNorm(D)), randomized(nn.LayerNorm(D))
        self.rms = randomized(nn.RMSNorm(C, eps=1e-6))
        self.ls = nn.Parameter(torch.randn(C))
        self.per_head = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.conv = nn.Conv2d(3, C, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, C))
        self.reg = nn.Parameter(torch.randn(1, 2, C))
        self.table = nn.Parameter(torch.randn(H, 9, 9))
        angles = torch.randn(32, D)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("peak", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.count = 0

    def forward(self, *inputs: Any) -> Any:
        return self.host(self, *inputs)


def randomized(norm: Any) -> Any:
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    return norm


def seeded(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


def tokens() -> tuple[Tensor]:
    return (seeded(2, 9, C),)


def square() -> tuple[Tensor]:
    return (seeded(4, 4, C),)


def images() -> tuple[Tensor]:
    return (seeded(2, 3, 8, 12),)


# How a model splits and joins heads -----------------------------------------------------------


def split(t: Tensor) -> Tensor:
    """(B, T, C) -> (B, H, T, D)."""
    return t.view(*t.shape[:2], H, -1).transpose(1, 2)


def join(t: Tensor) -> Tensor:
    return t.transpose(1, 2).reshape(t.shape[0], t.shape[2], -1)


def packed(kit: Kit, x: Tensor) -> tuple[Tensor, ...]:
    B, T, _ = x.shape
    return kit.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def separate(kit: Kit, x: Tensor) -> tuple[Tensor, ...]:
    return split(kit.q(x)), split(kit.k(x)), split(kit.v(x))


def five(kit: Kit, x: Tensor) -> Tensor:
    """One product as (B, T, 3, H, D)."""
    return kit.qkv(x).reshape(*x.shape[:2], 3, H, D)


def of_packed(how: Callable[..., Any]) -> Callable[..., Any]:
    """A host of what `how` makes of (kit, q, k, v)."""
    return lambda kit, x: how(kit, *packed(kit, x))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


sdpa = F.scaled_dot_product_attention
