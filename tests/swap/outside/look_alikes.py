"""What looks like an attention or a block and computes something else."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from .by_hand import FeedForward


class Attention(nn.Module):
    """An honest one; the others change a line of it."""

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def heads_of(self, x):
        B, T, C = x.shape
        return self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)

    def scores(self, q, k):
        return q @ k.mT * self.scale

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        q, k, v = self.heads_of(x)
        return self.proj((self.weights(self.scores(q, k)) @ v).transpose(1, 2).flatten(2))


class ReAttention(Attention):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, 2))

    def weights(self, scores):
        return torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.mix)


class TalkingHeads(Attention):
    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Linear(2, 2), nn.Linear(2, 2)

    def weights(self, scores):
        weights = self.before(scores.movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return self.behind(weights.movedim(1, -1)).movedim(-1, 1)


class Cosine(Attention):
    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale


class Temperature(Attention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def scores(self, q, k):
        return q @ k.mT * self.temperature.exp()


class OtherAxis(Attention):
    def weights(self, scores):
        return scores.softmax(-2)


class OverHeads(Attention):
    def weights(self, scores):
        return scores.softmax(1)


class Channels(Attention):
    """XCiT's: D by D scores."""

    def forward(self, x):
        q, k, v = self.heads_of(x)
        weights = (q.mT @ k * self.scale).softmax(-1)
        return self.proj((v @ weights).transpose(1, 2).flatten(2))


class Hidden(Attention):
    """Gives its values beside its output."""

    def forward(self, x):
        q, k, v = self.heads_of(x)
        y = self.weights(self.scores(q, k)) @ v
        return self.proj(y.transpose(1, 2).flatten(2)), v


class HalvedScores(Attention):
    def weights(self, scores):
        return scores.softmax(-1) * 0.5


class Shifted(Attention):
    """Attention to all tokens but oneself."""

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -1e4)


class AlwaysDrops(Attention):
    """V-JEPA's: its dropout asks for no mode."""

    def __init__(self):
        super().__init__()
        self.rate = 0.5

    def forward(self, x):
        q, k, v = self.heads_of(x)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate)
        return self.proj(y.transpose(1, 2).flatten(2))


class DropsInside(AlwaysDrops):
    """The same in a block of one class."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        x = x + super().forward(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Remembering(Attention):
    """What it gives depends on the call before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        y = super().forward(x) + self.last
        self.last = y.detach().mean()
        return y


class Block(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn, self.mlp = attention(), FeedForward(32, 64, F.gelu)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Derived(Block):
    """DINOv2's: it calls the forward that it overrides."""

    def forward(self, x):
        return super().forward(x)


class Given(Block):
    """It is given positions and a mask, and may read the mask."""

    reads = False

    def forward(self, x, positions, mask=None):
        x = x + self.attn(self.norm1(x))
        if self.reads and mask is not None:
            x = x.masked_fill(mask[..., None], 0.0)
        return x + self.mlp(self.norm2(x))


class HalvedBranch(Block):
    def forward(self, x):
        x = x + 0.5 * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SecondResidual(Block):
    def forward(self, x):
        return super().forward(x) + x


class WideOnly(Block):
    """Another forward at widths that nobody would try in a hurry."""

    def forward(self, x):
        return super().forward(x) * (1 if x.shape[-1] < 32 else 2)


class Sometimes(Block):
    """Skips a branch by Python's own random numbers."""

    def forward(self, x):
        if random.random() < 0.01:
            return x
        return super().forward(x)


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class Twice(torch.Tensor):
    """A weight that says itself what a Linear by it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        return (y * 2).as_subclass(torch.Tensor) if func is nn.functional.linear else y
