"""Blocks as people write them in repositories of their own, each in our words, at sizes of `kit`.

    @block()                          all of its FLOPs in our ops
    @block(0.88, "reason")            the share, and the phrase of the report for the rest
    @block(inputs=pair)               what it is called with, `tokens` by default

`BLOCKS` has them by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.kit import (
    C,
    D,
    H,
    Kit,
    images,
    join,
    packed,
    rotate_half,
    sdpa,
    seeded,
    separate,
    split,
    tokens,
)
from tests.fuse.looks_layers import branch, flat, rms

INF = math.inf


@dataclass(frozen=True)
class Block:
    forward: Callable[..., Any]
    share: float
    reason: str
    inputs: Callable[[], tuple[Any, ...]]


BLOCKS: dict[str, Block] = {}


def pair() -> tuple[Any, ...]:
    """Tokens, and a context of other length."""
    return seeded(2, 9, C), seeded(2, 5, C).flip(1)


def conditioned() -> tuple[Any, ...]:
    """Tokens, and one vector a sample."""
    return seeded(2, 9, C), seeded(2, C).flip(1)


def square_tokens() -> tuple[Any, ...]:
    return (seeded(2, 16, C),)


def block(
    share: float = 1.0, reason: str = "", inputs: Callable[[], tuple[Any, ...]] = tokens
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        BLOCKS[forward.__name__] = Block(forward, share, reason, inputs)
        return forward

    return register


def self_attention(kit: Kit, x: Tensor) -> Tensor:
    return kit.o(join(sdpa(*packed(kit, x))))


def plain(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


# Conditioning ---------------------------------------------------------------------------------


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


@block(inputs=conditioned)
def adaln_zero(kit, x, c):
    shift, scale, gate, gate2 = kit.both(F.silu(c)).chunk(4, dim=1)
    x = x + gate[:, None] * self_attention(kit, modulated(plain(x), shift, scale))
    return x + gate2[:, None] * branch(kit, modulated(plain(x), scale, shift))


@block(inputs=conditioned)
def adaln_of_rms_with_tanh_gates(kit, x, c):
    scale, gate = kit.gate(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
    y = self_attention(kit, kit.rms(x) * (1 + scale))
    return x + gate.tanh() * kit.rms(y)


@block(inputs=conditioned)
def skip_by_concatenation(kit, x, c):
    early = x + self_attention(kit, kit.n(x))
    late = early + c[:, None]
    x = kit.fc2(torch.cat((late, early), dim=-1))
    return x + branch(kit, kit.n(x))


@block(inputs=lambda: (seeded(2, 9, C), torch.tensor([3, 1])))
def labels_that_are_dropped(kit, x, label):
    """Classifier-free guidance: a label becomes the class of none."""
    if kit.training:
        label = torch.where(torch.rand(len(label)) < 0.5, 63, label)
    return x + branch(kit, kit.n(x + F.embedding(label, kit.fc1.weight)[:, None]))


@block(inputs=pair)
def two_streams_joined(kit, x, y):
    """Images and text attend to each other, each by weights of its own."""
    own, other = separate(kit, kit.n(x)), packed(kit, kit.rms(y))
    q, k, v = (torch.cat(each, 2) for each in zip(own, other, strict=True))
    both = join(sdpa(q, k, v))
    return x + kit.o(both[:, :9]), y + kit.bare(both[:, 9:])


@block(inputs=conditioned)
def one_stream_in_parallel(kit, x, c):
    """Attention and MLP of one product, joined by another."""
    h = kit.n(x) * (1 + c[:, None])
    qkv, hidden = kit.both(h).split((3 * C, C), -1)
    q, k, v = qkv.reshape(2, 9, 3, H, D).permute(2, 0, 3, 1, 4)
    together = torch.cat((join(sdpa(q, k, v)), F.gelu(hidden, approximate="tanh")), 2)
    return x + c[:, None] * kit.fc2(together)


# A second tensor ------------------------------------------------------------------------------


def cross(kit: Kit, x: Tensor, y: Tensor, **how: Any) -> Tensor:
    return kit.o(join(sdpa(split(kit.q(x)), split(kit.k(y)), split(kit.v(y)), **how)))


@block(inputs=pair)
def cross_attention_written(kit, x, y):
    q = split(kit.q(kit.n(x))) * D**-0.5
    k, v = kit.fc1(y).view(2, 5, 2, H, D).permute(2, 0, 3, 1, 4)
    return x + kit.o(join((q @ k.transpose(-2, -1)).softmax(-1) @ v))


@block(inputs=lambda: (*pair(), torch.arange(5)[None] < torch.tensor([[3], [5]])))
def cross_attention_of_padded_text(kit, x, y, valid):
    return x + cross(kit, kit.n(x), y, attn_mask=valid[:, None, None].expand(-1, H, 9, -1))


@block()
def latents_that_read(kit, x):
    """Perceiver: latents attend to tokens and to themselves."""
    z = kit.reg.expand(len(x), -1, -1)
    all_of_it = torch.cat((kit.n(x), kit.n(z)), dim=1)
    z = z + cross(kit, kit.n(z), all_of_it)
    return z + branch(kit, kit.n(z))


@block()
def queries_with_positions(kit, x):
    """DETR: positions go to queries and keys, not to values; norms behind the sum."""
    pos = kit.both.weight[:9]
    q, k, v = split(kit.q(x + pos)), split(kit.k(x + pos)), split(kit.v(x))
    x = kit.n(x + kit.o(join(sdpa(q, k, v))))
    return kit.n(x + kit.fc2(F.relu(kit.fc1(x))))


@block(0.927, inputs=pair)
def queries_of_masks(kit, x, y):
    """Mask2Former: where the last mask is off is hidden, but for rows it hides whole."""
    hidden = (x @ y.mT).sigmoid().detach() < 0.5
    hidden = hidden & ~hidden.all(-1, keepdim=True)
    x = kit.n(x + cross(kit, x, y, attn_mask=~hidden[:, None]))
    return x, x @ kit.bare(y).mT


# What is done to heads ------------------------------------------------------------------------


@block()
def attention_under_a_gate(kit, x):
    o = join(sdpa(*packed(kit, kit.n(x))))
    return x + kit.o(o * torch.sigmoid(kit.bare(x)))


@block(0.877, "the softmax passes sub before the product with v")
def differential_attention(kit, x):
    q, k, v = packed(kit, x)
    q, k = (t.reshape(2, H, 9, 2, D // 2).transpose(2, 3) for t in (q, k))
    maps = (q @ k.mT * (D // 2) ** -0.5).softmax(-1)
    maps = maps[:, :, 0] - 0.8 * kit.per_head.mean() * maps[:, :, 1]
    return x + kit.o(join(kit.qn(maps @ v)) * 0.2)


@block(0.826, "the softmax passes einsum before the product with v")
def talking_heads(kit, x):
    q, k, v = packed(kit, x)
    scores = torch.einsum("bhij,hg->bgij", q @ k.mT, kit.table[:, 0, :H])
    weights = torch.einsum("bhij,hg->bgij", scores.softmax(-1), kit.table[:, 1, :H])
    return x + kit.o(join(weights @ v))


@block()
def cosine_attention(kit, x):
    q, k, v = packed(kit, kit.n(x))
    scale = kit.per_head.log().clamp(max=math.log(100.0)).exp()
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * scale
    return x + kit.o(join(scores.softmax(-1) @ v))


@block()
def one_key_for_all_heads(kit, x):
    k, v = (t[:, None].expand(-1, H, -1, -1) for t in kit.both(x)[..., : 2 * D].chunk(2, -1))
    return x + kit.o(join(sdpa(split(kit.q(x)), k, v)))


@block()
def grouped_keys(kit, x):
    k, v = (t.view(2, 9, 2, D).transpose(1, 2) for t in kit.bare(x).chunk(2, -1))
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return x + kit.o(join(sdpa(split(kit.q(x)), k, v)))


@block()
def keys_of_a_narrow_latent(kit, x):
    """Keys and values come up from one projection down."""
    latent = F.layer_norm(kit.k(x)[..., :16], (16,))
    k, v = F.linear(latent, kit.both.weight[:64, :16]).chunk(2, -1)
    return x + kit.o(join(sdpa(split(kit.q(x)), split(k), split(v))))


@block(0.877, "softmax is read elsewhere too")
def maps_that_are_returned(kit, x):
    q, k, v = packed(kit, x)
    weights = (q @ k.mT * D**-0.5).softmax(-1)
    return x + kit.o(join(weights @ v)), weights.mean(1)


# What is done to scores -----------------------------------------------------------------------


def scores_of(change: Callable[[Kit, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, kit.n(x))
        return x + kit.o(join(change(kit, q @ k.transpose(-2, -1) * D**-0.5, x) @ v))

    return forward


@block(0.877, "tanh between the scores and their softmax")
def scores_under_a_soft_cap(kit, x):
    return scores_of(lambda kit, s, x: (5 * torch.tanh(s / 5)).softmax(-1))(kit, x)


@block(0.877, "no softmax before this matmul, but slice")
def scores_with_a_sink(kit, x):
    """One logit that takes weight and gives no value."""

    def sink(kit, s, x):
        more = torch.cat((s, kit.per_head.expand(len(s), -1, 9, -1)), -1)
        return more.softmax(-1)[..., :-1]

    return scores_of(sink)(kit, x)


@block(0.877, "mul is read elsewhere too")
def the_largest_scores(kit, x):
    def largest(kit, s, x):
        least = s.topk(4, dim=-1).values[..., -1:]
        return s.masked_fill(s < least, -INF).softmax(-1)

    return scores_of(largest)(kit, x)


@block(0.877, "no softmax before this matmul, but sigmoid")
def sigmoids_for_a_softmax(kit, x):
    return scores_of(lambda kit, s, x: (s - math.log(9)).sigmoid())(kit, x)


@block()
def a_slope_for_each_head(kit, x):
    """ALiBi over a grid of 3 x 3."""
    at = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).to(x.dtype)
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=x.dtype)
    bias = -slopes[:, None, None] * torch.cdist(at, at)
    return scores_of(lambda kit, s, x: (s + bias).softmax(-1))(kit, x)


@block()
def a_bias_by_relative_positions(kit, x):
    at = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    step = at[:, None] - at[None] + 2
    bias = kit.both.weight[:25, :H][(step[..., 0] * 5 + step[..., 1]).view(-1)]
    bias = bias.view(9, 9, H).permute(2, 0, 1).contiguous()
    return scores_of(lambda kit, s, x: (s + bias[None]).softmax(-1))(kit, x)


@block()
def a_bias_that_an_mlp_makes(kit, x):
    """Log-spaced offsets through a small MLP, as in Swin V2."""
    at = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).to(x.dtype)
    step = at[:, None] - at[None]
    step = step.sign() * torch.log2(step.abs() + 1)
    hidden = F.relu(F.linear(step, kit.fc1.weight[:, :2], kit.fc1.bias))
    bias = 16 * F.linear(hidden, kit.fc2.weight[:H]).sigmoid()
    return scores_of(lambda kit, s, x: (s + bias.permute(2, 0, 1)).softmax(-1))(kit, x)


@block(0.933)
def a_bias_of_rows_and_columns(kit, x):
    """SAM: queries times tables of rows and of columns."""
    q, k, v = packed(kit, x)
    r = q.reshape(-1, 3, 3, D)
    rows = torch.einsum("bhwc,hkc->bhwk", r, kit.table[:3, :3, :D])
    columns = torch.einsum("bhwc,wkc->bhwk", r, kit.table[:3, 3:6, :D])
    bias = (rows[..., None] + columns[..., None, :]).reshape(2, H, 9, 9)
    return x + kit.o(join(sdpa(q, k, v, attn_mask=bias)))


@block(0.877, "scores under a mask are set to a finite number")
def a_diagonal_that_is_hidden(kit, x):
    eye = torch.eye(9, dtype=torch.bool)
    lowest = torch.finfo(x.dtype).min
    return scores_of(lambda kit, s, x: s.masked_fill(eye, lowest).softmax(-1))(kit, x)


# Which tokens attend --------------------------------------------------------------------------


@block(inputs=square_tokens)
def shifted_windows(kit, x):
    y = x.view(2, 4, 4, C).roll((-1, -1), (1, 2))
    w = y.view(2, 2, 2, 2, 2, C).transpose(2, 3).reshape(8, 4, C)
    part = torch.arange(4).clamp(min=2).clamp(max=3)
    part = (part[:, None] * 4 + part).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    mask = (part[:, None] != part[..., None]).to(x.dtype) * -100.0
    q, k, v = kit.qkv(w).view(8, 4, 3, H, D).permute(2, 0, 3, 1, 4)
    s = (q * D**-0.5) @ k.mT + kit.table[:, :4, :4]
    s = (s.view(2, 4, H, 4, 4) + mask[None, :, None]).view(8, H, 4, 4)
    w = kit.o(join(s.softmax(-1) @ v)).view(2, 2, 2, 2, 2, C).transpose(2, 3)
    return x + w.reshape(2, 4, 4, C).roll((1, 1), (1, 2)).view(2, 16, C)


@block(inputs=lambda: (seeded(2, 3, 4, C),))
def divided_space_and_time(kit, x):
    """Of B, frames, tokens of a frame, C."""
    B, T, N, _ = x.shape
    t = x.permute(0, 2, 1, 3).reshape(B * N, T, C)
    x = x + self_attention(kit, kit.n(t)).view(B, N, T, C).permute(0, 2, 1, 3)
    s = x.reshape(B * T, N, C)
    return x + self_attention(kit, kit.n(s)).view(B, T, N, C)


@block(inputs=lambda: (seeded(2, C, 4, 4),))
def neighbours(kit, x):
    """Each pixel attends to the 3 x 3 around it."""
    t = flat(x)
    k = F.unfold(kit.k(t).mT.view(2, C, 4, 4), 3, padding=1).view(2, H, D, 9, 16)
    v = F.unfold(kit.v(t).mT.view(2, C, 4, 4), 3, padding=1).view(2, H, D, 9, 16)
    q = split(kit.q(t))[..., None, :]
    w = (q @ k.permute(0, 1, 4, 2, 3) * D**-0.5).softmax(-1)
    return t + kit.o(join((w @ v.permute(0, 1, 4, 3, 2))[..., 0, :]))


@block(inputs=square_tokens)
def keys_of_a_smaller_image(kit, x):
    small = F.conv2d(
        x.mT.view(2, C, 4, 4), kit.fc1.weight.view(C, C, 1, 2).expand(-1, -1, 2, -1), stride=2
    )
    y = kit.n(flat(small))
    return x + cross(kit, kit.n(x), y)


@block(inputs=square_tokens)
def pooled_queries(kit, x):
    """Hiera: a window's queries become one, the sum goes on with the pooled input."""
    q, k, v = packed(kit, kit.n(x))
    q = q.reshape(2, H, 4, 4, D).amax(2)
    return kit.q(x).view(2, 4, 4, C).amax(1) + kit.o(join(sdpa(q, k, v)))


@block(0.883, "no softmax before this matmul, but add")
def linear_attention(kit, x):
    q, k, v = packed(kit, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = 1 / (q @ k.sum(2).unsqueeze(-1) + 1e-6)
    return x + kit.o(join(q @ (k.mT @ v) * z))


@block(inputs=square_tokens)
def attention_of_channels(kit, x):
    """XCiT: columns attend to columns."""
    q, k, v = (t.transpose(2, 3) for t in packed(kit, x))
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * kit.per_head
    o = s.softmax(-1) @ v
    return x + kit.o(o.permute(0, 3, 1, 2).reshape(2, 16, C))


@block()
def masked_tokens_put_back(kit, x):
    order = torch.rand(x.shape[:2]).argsort(1)
    back, kept = order.argsort(1), order[:, :4]
    seen = x.gather(1, kept[..., None].expand(-1, -1, C))
    seen = seen + self_attention(kit, kit.n(seen))
    full = torch.cat((seen, kit.cls.expand(2, 5, -1)), 1)
    full = full.gather(1, back[..., None].expand(-1, -1, C))
    return full + branch(kit, kit.n(full)), order


@block(0.992)
def merged_pairs(kit, x):
    """ToMe: the most alike of even and odd tokens become their mean."""
    x = x + self_attention(kit, kit.n(x))
    a, b = F.normalize(x[:, :8:2], dim=-1), F.normalize(x[:, 1:8:2], dim=-1)
    to = (a @ b.mT).argmax(-1)[..., None].expand(-1, -1, C)
    odd = x[:, 1:8:2].scatter_reduce(1, to, x[:, :8:2], "mean")
    x = torch.cat((odd, x[:, 8:]), 1)
    return x + branch(kit, kit.n(x))


@block(inputs=lambda: (seeded(2, 12, C), seeded(2, 12, 3).flip(1)))
def vectors_of_the_nearest_points(kit, x, at):
    """Point Transformer: weights by column over the four nearest points."""
    near = torch.cdist(at, at).topk(4, largest=False).indices
    k, v = (t[torch.arange(2)[:, None, None], near] for t in (kit.k(x), kit.v(x)))
    step = F.linear(at[:, :, None] - at[torch.arange(2)[:, None, None], near], kit.o.weight[:, :3])
    w = kit.fc2(F.relu(kit.fc1(kit.q(x)[:, :, None] - k + step))).softmax(2)
    return x + (w * (v + step)).sum(2)


# Rotations ------------------------------------------------------------------------------------


@block(inputs=lambda: (seeded(2, 9, C), seeded(2, 9, 2).flip(1)))
def rotations_by_coordinates(kit, x, at):
    """Angles are a product of coordinates and learnt frequencies."""
    angle = (at @ kit.table[0, :2, :D])[:, None]
    q, k, v = packed(kit, x)
    q, k = (t * angle.cos() + rotate_half(t) * angle.sin() for t in (q, k))
    return x + kit.o(join(sdpa(q, k, v)))


@block()
def rotations_of_rows_and_columns(kit, x):
    """Half of a head turns by the row, the other half by the column."""
    at = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    rows, columns = ((kit.cos[at[:, i], :4], kit.sin[at[:, i], :4]) for i in (0, 1))

    def turned(t):
        a, b = t.chunk(2, -1)
        a = a * rows[0] + rotate_half(a) * rows[1]
        return torch.cat((a, b * columns[0] + rotate_half(b) * columns[1]), -1)

    q, k, v = packed(kit, x)
    return x + kit.o(join(sdpa(turned(q), turned(k), v)))


# MLPs -----------------------------------------------------------------------------------------


@block()
def geglu_with_a_norm_inside(kit, x):
    h = F.gelu(kit.gate(x)) * kit.fc1(x)
    return x + kit.fc2(F.layer_norm(h, (64,), kit.both.weight[:2].view(-1), None))


@block(0.877, "a convolution whose patches overlap", inputs=square_tokens)
def a_convolution_inside(kit, x):
    h = kit.fc1(kit.n(x)).mT.view(2, 64, 4, 4)
    h = h + F.conv2d(h, kit.both.weight[:18].view(64, 1, 3, 3), padding=1, groups=64)
    return x + kit.fc2(F.gelu(flat(h)))


@block(0.947, inputs=square_tokens)
def positions_by_a_convolution(kit, x):
    y = x.mT.reshape(2, C, 4, 4)
    x = x + flat(F.conv2d(y, kit.both.weight[:9].view(C, 1, 3, 3), padding=1, groups=C))
    return x + self_attention(kit, kit.n(x))


@block(0.010, "no linear layer or attention")
def experts_by_the_best_gate(kit, x):
    """Each token to one of four experts, all computed as one batched product."""
    y = kit.n(x).view(-1, C)
    gate = F.linear(y, kit.ls.expand(4, -1) * kit.per_head.view(4, 1)).softmax(-1)
    best, which = gate.max(-1)
    up = kit.both.weight.view(4, C, C)
    hidden = F.gelu(torch.einsum("nc,ecf->nef", y, up))
    every = torch.einsum("nef,efc->nec", hidden, up.mT)
    return x + (every[torch.arange(18), which] * best[:, None]).view_as(x)


@block(0.832, "linear between the scores and their softmax")
def soft_experts(kit, x):
    """Slots are mixtures of tokens, tokens mixtures of slots."""
    logits = kit.n(x) @ kit.fc1.weight[:8].mT
    slots = logits.softmax(1).mT @ x
    done = torch.cat((branch(kit, slots[:, :4]), kit.o(slots[:, 4:])), 1)
    return x + logits.softmax(-1) @ done


@block()
def mixing_of_tokens(kit, x):
    """MLP-Mixer: an MLP over tokens, then one over columns."""
    h = kit.n(x).mT
    up, down = kit.fc1.weight[:, :9], kit.fc2.weight[:9]
    x = x + F.linear(F.gelu(F.linear(h, up, kit.fc1.bias)), down).mT
    return x + branch(kit, kit.n(x))


@block()
def gating_by_place(kit, x):
    """gMLP: half of the columns is mixed over tokens and multiplies the other."""
    a, b = F.gelu(kit.fc1(kit.n(x))).chunk(2, -1)
    b = F.linear(kit.n(b).mT, kit.both.weight[:9, :9], torch.ones(9, dtype=x.dtype)).mT
    return x + kit.o(a * b)


# Residuals ------------------------------------------------------------------------------------


@block()
def norms_before_and_behind(kit, x):
    x = x + kit.rms(self_attention(kit, kit.n(x)))
    return x + kit.rms(branch(kit, kit.n(x)))


@block(0.924)
def streams_that_are_mixed(kit, x):
    """Hyper-connections: several residuals, read and written by learnt weights."""
    z = torch.stack((x, x.flip(1), x * 0.5))
    read, write = kit.table[0, 0, :3].softmax(0), kit.table[1, 0, :3].view(3, 1, 1, 1)
    y = self_attention(kit, kit.n(torch.einsum("s,sbtc->btc", read, z)))
    z = torch.einsum("sr,rbtc->sbtc", kit.table[2, :3, :3], z) + write * y
    return z.sum(0)


@block()
def on_the_sphere(kit, x):
    """nGPT: tokens of unit length, steps of a learnt size by column."""
    y = F.normalize(self_attention(kit, x), dim=-1)
    x = F.normalize(x + kit.ls.abs() * (y - x), dim=-1)
    y = F.normalize(branch(kit, x), dim=-1)
    return F.normalize(x + kit.ls.abs() * (y - x), dim=-1)


@block()
def a_norm_of_own_words(kit, x):
    x = x + self_attention(kit, rms(x) * (1 + kit.ls))
    mean = x.mean(-1, keepdim=True)
    normed = (x - mean) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    return x + branch(kit, normed * kit.n.weight + kit.n.bias)


# Stems and heads ------------------------------------------------------------------------------


@block(inputs=images)
def patches_by_hand(kit, x):
    """Pixels are folded into columns before a linear layer."""
    p = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(2, 6, 48)
    t = kit.n(F.linear(plain(p), kit.conv.weight.flatten(1), kit.conv.bias))
    return t + branch(kit, t)


@block(inputs=lambda: (seeded(2, 3, 4, 8, 8),))
def tubelets(kit, x):
    kernel = kit.conv.weight.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    t = flat(F.conv3d(x, kernel, kit.conv.bias, stride=(2, 4, 4)))
    return t + self_attention(kit, kit.n(t + kit.both.weight[:8]))


@block(0.745, "not read as tokens", inputs=lambda: (seeded(2, 3, 12, 8),))
def positions_that_are_resized(kit, x):
    t = kit.conv(x)
    pos = kit.both.weight[:16].T.reshape(1, C, 4, 4)
    pos = F.interpolate(pos, size=t.shape[-2:], mode="bicubic", align_corners=False)
    t = flat(t + pos)
    return t + self_attention(kit, kit.n(t))


@block()
def a_class_that_reads(kit, x):
    """CaiT: the class token alone asks."""
    y = kit.n(torch.cat((kit.cls.expand(2, -1, -1), x), 1))
    q, k, v = split(kit.q(y[:, :1])), split(kit.k(y)), split(kit.v(y))
    return kit.cls + kit.ls * kit.o(join((q * D**-0.5 @ k.mT).softmax(-1) @ v))


@block(0.993)
def a_weighed_mean(kit, x):
    """CCT: each token's weight is a linear layer of it."""
    y = kit.n(x + branch(kit, x))
    w = F.linear(y, kit.ls[None]).softmax(1)
    return kit.q((w.mT @ y)[:, 0])


@block()
def a_loss_that_is_noted(kit, x):
    x = x + self_attention(kit, kit.n(x))
    kit.aux = x.square().mean()
    kit.steps += 1
    kit.peak.mul_(0.9).add_(0.1 * x.detach().abs().amax())
    return x + branch(kit, kit.n(x))
