"""Ways in which people write a block by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Inline(nn.Module):
    """All in one class; heads first, then q, k and v, in the packed projection."""

    def __init__(self, dim=32, heads=2, order="H3D", post_norm=False, dropout=0.0):
        super().__init__()
        self.heads, self.order, self.post_norm = heads, order, post_norm
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        B, T, C = x.shape
        D = C // self.heads
        qkv = self.to_qkv(x)
        if self.order == "H3D":
            q, k, v = qkv.view(B, T, self.heads, 3, D).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = qkv.view(B, T, self.heads, D, 3).permute(4, 0, 2, 1, 3)
        weights = torch.softmax(q @ k.mT / D**0.5, dim=-1)
        return self.drop(self.out((weights @ v).transpose(1, 2).reshape(B, T, C)))

    def feed(self, x):
        return self.drop(self.down(F.gelu(self.up(x), approximate="tanh")))

    def forward(self, x):
        if self.post_norm:
            x = self.ln1(x + self.attend(x))
            return self.ln2(x + self.feed(x))
        x = x + self.attend(self.ln1(x))
        return x + self.feed(self.ln2(x))


class Apart(nn.Module):
    """An attention, and the projection of what it gives in a module around it."""

    class Heads(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

        def forward(self, x):
            layers = (self.query, self.key, self.value)
            q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in layers)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.inner, self.out = self.Heads(dim, heads), nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(self.inner(x))


class WideNorms(nn.Module):
    """InternViT-6B's: one packed projection, and norms of q and k over all heads."""

    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = (t.transpose(1, 2).flatten(2) for t in qkv)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RmsNorm(nn.Module):
    """Llama's, DINOv3's and Gemma's manner: in the dtype that comes, or in fp32 with one rounding
    before the weight or behind it."""

    def __init__(self, dim=32, manner="plain", eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.manner, self.eps = manner, eps

    def forward(self, x):
        wide = x if self.manner == "plain" else x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.manner == "shifted":
            return (y * (1 + self.weight)).type_as(x)
        return (y * self.weight).type_as(x) if self.manner == "late" else y.type_as(x) * self.weight


class Separate(nn.Module):
    """Three projections without a scale of D**-0.5, heads unstated but by their width."""

    def __init__(self, dim=32, head_dim=16):
        super().__init__()
        self.head_dim = head_dim
        self.k, self.v, self.q, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)) for m in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.o(out.flatten(2))


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return x + self.fn(x)


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden, activation=F.silu):
        super().__init__()
        self.fc1, self.fc2, self.activation = (
            nn.Linear(dim, hidden),
            nn.Linear(hidden, dim),
            activation,
        )

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))


def wrapped(dim=32):
    """Residual(PreNorm(...)) twice, in a Sequential."""
    return nn.Sequential(
        Residual(PreNorm(dim, Separate(dim))), Residual(PreNorm(dim, FeedForward(dim, 64)))
    )


class Sandwich(nn.Module):
    """A norm before and behind each branch, a gated MLP, the residual last."""

    def __init__(self, dim=32):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.attention = Separate(dim)
        self.gate, self.up, self.down = (
            nn.Linear(dim, 48),
            nn.Linear(dim, 48),
            nn.Linear(48, dim),
        )

    def feed(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))

    def forward(self, x):
        a, b, c, d = self.norms
        x = b(self.attention(a(x))) + x
        return d(self.feed(c(x))) + x


class ValueFirst(Sandwich):
    """The gate stands behind what it lets pass."""

    def feed(self, x):
        return self.down(self.up(x) * F.gelu(self.gate(x)))


class Causal(nn.Module):
    """Attention to what came before, by torch's word for it or by a mask of its own."""

    def __init__(self, own_mask=False, dim=32, heads=2):
        super().__init__()
        self.heads, self.own_mask = heads, own_mask
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.own_mask:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Parallel(nn.Module):
    """Attention and MLP of one norm, both added to the input."""

    def __init__(self, dim=32):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), Separate(dim)
        self.mlp = FeedForward(dim, 64, F.gelu)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class InPlace(Parallel):
    """One branch behind the other, and a sum that overwrites what the second gave."""

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        y = self.mlp(self.norm(x))
        y += x
        return y


SLOPE = 1.0  # read by Sloped's forward


class Sloped(FeedForward):
    def __init__(self):
        super().__init__(32, 64, F.gelu)

    def forward(self, x):
        def steep(y):
            return y * SLOPE

        return self.fc2(self.activation(steep(self.fc1(x))))


def sloped(slope):
    return lambda x: F.gelu(x * slope)


class Halved(SimpleNamespace):
    @property
    def slope(self):
        return 0.5


class Configured(FeedForward):
    """What it does stands in an object, in a list, in a dict and in a function with what is bound
    to it."""

    def __init__(self, activation=None):
        super().__init__(32, 64, activation or partial(F.gelu, approximate="tanh"))
        self.config, self.factors, self.named = SimpleNamespace(slope=1.0), [1.0], {"slope": 1.0}

    def forward(self, x):
        y = self.activation(self.fc1(x) * self.config.slope)
        return self.fc2(y) * self.factors[0] * self.named["slope"]


class Masked(nn.Module):
    """Attention with a mask of the keys, of the scores, or both, as the host reads them."""

    def __init__(self, dim=32, heads=2, reading="keep"):
        super().__init__()
        self.heads, self.reading = heads, reading
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None and self.reading == "drop keys":
            mask = ~mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class MaskedBlock(nn.Module):
    def __init__(self, dim=32, reading="keep"):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = Masked(dim, reading=reading), FeedForward(dim, 64)

    def forward(self, x, attention_mask=None):
        x = x + self.attention(self.norm1(x), mask=attention_mask)
        return x + self.mlp(self.norm2(x))
