"""Blocks as people write them in repositories of their own, each in our words, at sizes of `kit`.

    @block()                          all of its FLOPs in our ops
    @block(0.88, "reason")            the share, and the phrase of the report for the rest
    @block(inputs=pair)               what it is called with, `one` by default

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
    rotate_pairs,
    sdpa,
    seeded,
    separate,
    softmax_attention,
    split,
)
from tests.fuse.looks_layers import branch, flat, keep, rms

INF = math.inf


@dataclass(frozen=True)
class Block:
    forward: Callable[..., Any]
    share: float
    reason: str
    inputs: Callable[[], tuple[Any, ...]]


BLOCKS: dict[str, Block] = {}


def one() -> tuple[Any, ...]:
    return (seeded(2, 9, C),)


def pair() -> tuple[Any, ...]:
    """Tokens, and a context of other length."""
    return seeded(2, 9, C), seeded(2, 5, C).flip(1)


def conditioned() -> tuple[Any, ...]:
    """Tokens, and one vector a sample."""
    return seeded(2, 9, C), seeded(2, C).flip(1)


def grid() -> tuple[Any, ...]:
    return (seeded(2, C, 4, 4),)


def square_tokens() -> tuple[Any, ...]:
    return (seeded(2, 16, C),)


def frames() -> tuple[Any, ...]:
    """B, frames, tokens of a frame, C."""
    return (seeded(2, 3, 4, C),)


def clips() -> tuple[Any, ...]:
    return (seeded(2, 3, 4, 8, 8),)


def points() -> tuple[Any, ...]:
    return seeded(2, 12, C), seeded(2, 12, 3).flip(1)


def block(
    share: float = 1.0, reason: str = "", inputs: Callable[[], tuple[Any, ...]] = one
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
def adaln_single(kit, x, c):
    """One product of the time for all blocks, a table of each block's own."""
    shift, scale, gate = (kit.both.weight[:3][None] + kit.qkv(c).view(-1, 3, C)).chunk(3, dim=1)
    return x + gate * self_attention(kit, kit.n(x) * (1 + scale) + shift)


@block(inputs=conditioned)
def adaln_of_rms_with_tanh_gates(kit, x, c):
    scale, gate = kit.gate(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
    y = self_attention(kit, kit.rms(x) * (1 + scale))
    return x + gate.tanh() * kit.rms(y)


@block(inputs=lambda: (seeded(2, 9, C), seeded(2, 9, C).flip(1)))
def adaln_by_token(kit, x, c):
    shift, scale = kit.gate(c).chunk(2, -1)
    return x + branch(kit, plain(x) * (1 + scale) + shift)


@block(inputs=conditioned)
def film(kit, x, c):
    gamma, beta = kit.fc1(c).view(-1, 2, 1, C).unbind(1)
    return x + branch(kit, kit.n(x)) * (1 + gamma) + beta


@block(inputs=conditioned)
def skip_by_concatenation(kit, x, c):
    early = x + self_attention(kit, kit.n(x))
    late = early + c[:, None]
    x = kit.fc2(torch.cat((late, early), dim=-1))
    return x + branch(kit, kit.n(x))


@block(inputs=conditioned)
def a_token_for_the_time(kit, x, c):
    x = torch.cat((c[:, None], x), 1)
    x = x + self_attention(kit, kit.n(x))
    return kit.n(x)[:, 1:]


@block(inputs=lambda: (seeded(2, 9, C), torch.tensor([3, 1])))
def labels_that_are_dropped(kit, x, label):
    """Classifier-free guidance: a label becomes the class of none."""
    if kit.training:
        label = torch.where(torch.rand(len(label)) < 0.5, 63, label)
    return x + branch(kit, kit.n(x + F.embedding(label, kit.fc1.weight)[:, None]))


@block(inputs=lambda: (seeded(2, 9, C), torch.tensor([0.1, 0.7])))
def sinusoids_of_the_time(kit, x, t):
    half = torch.exp(-math.log(1e4) * torch.arange(C // 2) / (C // 2)).to(x.dtype)
    angles = t[:, None] * half[None]
    c = kit.fc2(F.silu(kit.fc1(torch.cat((angles.cos(), angles.sin()), -1))))
    return x + self_attention(kit, kit.n(x) + c[:, None])


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
def cross_attention(kit, x, y):
    x = x + cross(kit, kit.n(x), y)
    return x + branch(kit, kit.n(x))


@block(inputs=pair)
def cross_attention_written(kit, x, y):
    q = split(kit.q(kit.n(x))) * D**-0.5
    k, v = kit.fc1(y).view(2, 5, 2, H, D).permute(2, 0, 3, 1, 4)
    return x + kit.o(join((q @ k.transpose(-2, -1)).softmax(-1) @ v))


@block(inputs=lambda: (*pair(), torch.arange(5)[None] < torch.tensor([[3], [5]])))
def cross_attention_of_padded_text(kit, x, y, valid):
    return x + cross(kit, kit.n(x), y, attn_mask=valid[:, None, None].expand(-1, H, 9, -1))


@block(inputs=lambda: (*pair(), torch.arange(5)[None] < torch.tensor([[3], [5]])))
def padding_as_a_large_number(kit, x, y, valid):
    bias = (1.0 - valid.to(x.dtype)) * torch.finfo(torch.float32).min
    scores = split(kit.q(x)) @ split(kit.k(y)).mT / math.sqrt(D) + bias[:, None, None]
    return x + kit.o(join(scores.softmax(-1) @ split(kit.v(y))))


@block(inputs=pair)
def text_and_an_image_prompt(kit, x, y):
    q = split(kit.q(x))
    text = sdpa(q, split(kit.k(y)), split(kit.v(y)))
    image = sdpa(q, *(split(t) for t in kit.fc1(y.flip(1)).chunk(2, -1)))
    return x + kit.o(join(text + 0.6 * image))


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


@block(inputs=pair)
def memory_of_past_frames(kit, x, y):
    k = torch.cat((split(kit.k(y)), split(kit.k(x))), 2)
    v = torch.cat((split(kit.v(y)), split(kit.v(x))), 2)
    return x + kit.o(join(sdpa(split(kit.q(x)), k, v)))


@block(inputs=pair)
def template_and_search(kit, x, y):
    """A tracker: one attention over both, then each goes its way."""
    z = torch.cat((y, x), 1)
    z = z + self_attention(kit, kit.n(z))
    return kit.fc2(F.gelu(kit.fc1(z[:, 5:]))), z[:, :5].mean(1)


@block(inputs=pair)
def adapters_beside_frozen_layers(kit, x, y):
    with torch.no_grad():
        frozen = self_attention(kit, kit.n(x))
    return x + frozen + 0.1 * branch(kit, frozen + x) + y.mean(1, keepdim=True)


# What is done to heads ------------------------------------------------------------------------


@block()
def attention_under_a_gate(kit, x):
    o = join(sdpa(*packed(kit, kit.n(x))))
    return x + kit.o(o * torch.sigmoid(kit.bare(x)))


@block()
def gates_by_head(kit, x):
    gates = kit.q(x)[..., :H].sigmoid().transpose(1, 2)[..., None]
    return x + kit.o(join(sdpa(*packed(kit, x)) * gates))


@block(0.877, "the softmax passes sub before the product with v")
def differential_attention(kit, x):
    q, k, v = packed(kit, x)
    q, k = (t.reshape(2, H, 9, 2, D // 2).transpose(2, 3) for t in (q, k))
    maps = (q @ k.mT * (D // 2) ** -0.5).softmax(-1)
    maps = maps[:, :, 0] - 0.8 * kit.per_head.mean() * maps[:, :, 1]
    return x + kit.o(join(kit.qn(maps @ v)) * 0.2)


@block()
def differential_attention_of_two_calls(kit, x):
    q, k, v = separate(kit, x)
    first = sdpa(q, k, v)
    second = sdpa(q.flip(1), k.flip(1), v)
    return x + kit.o(join(first - kit.per_head * second))


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
def cosine_attention_of_sdpa(kit, x):
    q, k, v = packed(kit, x)
    q, k = F.normalize(q, dim=-1) * kit.per_head, F.normalize(k, dim=-1)
    return x + kit.o(join(sdpa(q, k, v, scale=1.0)))


@block()
def norms_of_queries_and_keys(kit, x):
    q, k, v = packed(kit, x)
    return x + kit.o(join(sdpa(kit.qn(q), kit.kn(k), v)))


@block()
def one_key_for_all_heads(kit, x):
    k, v = kit.both(x)[..., : 2 * D].chunk(2, -1)
    return x + kit.o(
        join(sdpa(split(kit.q(x)), *(t[:, None].expand(-1, H, -1, -1) for t in (k, v))))
    )


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


@block()
def values_of_the_first_block(kit, x):
    q, k, v = packed(kit, kit.n(x))
    first = v
    x = x + kit.o(join(sdpa(q, k, v)))
    q, k, v = packed(kit, kit.n(x))
    return x + kit.o(join(sdpa(q, k, 0.5 * v + 0.5 * first)))


@block(0.877, "softmax is read elsewhere too")
def maps_that_are_returned(kit, x):
    q, k, v = packed(kit, x)
    weights = (q @ k.mT * D**-0.5).softmax(-1)
    return x + kit.o(join(weights @ v)), weights.mean(1)


@block()
def dropouts_everywhere(kit, x):
    q, k, v = packed(kit, kit.n(x))
    x = x + F.dropout(kit.o(join(sdpa(q, k, v))), 0.2, kit.training)
    h = F.dropout(F.gelu(kit.fc1(kit.n(x))), 0.2, kit.training)
    return x + F.dropout(kit.fc2(h), 0.2, kit.training)


# What is done to scores -----------------------------------------------------------------------


def scores_of(change: Callable[[Kit, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, kit.n(x))
        return x + kit.o(join(change(kit, q @ k.transpose(-2, -1) * D**-0.5, x) @ v))

    return forward


@block(0.877, "tanh between the scores and their softmax")
def scores_under_a_soft_cap(kit, x):
    return scores_of(lambda kit, s, x: (5 * torch.tanh(s / 5)).softmax(-1))(kit, x)


@block(0.877, "clamp between the scores and their softmax")
def scores_that_are_clamped(kit, x):
    return scores_of(lambda kit, s, x: s.clamp(-3, 3).softmax(-1))(kit, x)


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


@block(0.877, "no softmax before this matmul, but div")
def squared_relu_for_a_softmax(kit, x):
    return scores_of(lambda kit, s, x: s.relu().square() / 9)(kit, x)


@block()
def a_bias_that_is_added_in_place(kit, x):
    def biased(kit, s, x):
        s += kit.table
        return s.softmax(-1)

    return scores_of(biased)(kit, x)


@block()
def queries_scaled_in_place(kit, x):
    y = kit.qkv(kit.n(x)).view(2, 9, 3, H, D).permute(2, 0, 3, 1, 4)
    q, k, v = y[0], y[1], y[2]
    q *= D**-0.5
    return x + kit.o(join((q @ k.transpose(-2, -1)).softmax(-1) @ v))


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


@block()
def causal_in_time(kit, x):
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    return scores_of(lambda kit, s, x: s.masked_fill(hidden, -INF).softmax(-1))(kit, x)


@block()
def causal_by_frames(kit, x):
    """Tokens see their own frame of three and those before, chosen by where."""
    frame = torch.arange(9) // 3
    seen = frame[:, None] >= frame[None]
    return scores_of(lambda kit, s, x: torch.where(seen, s, -INF).softmax(-1))(kit, x)


@block(0.877, "scores under a mask are set to a finite number")
def a_diagonal_that_is_hidden(kit, x):
    eye = torch.eye(9, dtype=torch.bool)
    lowest = torch.finfo(x.dtype).min
    return scores_of(lambda kit, s, x: s.masked_fill(eye, lowest).softmax(-1))(kit, x)


# Which tokens attend --------------------------------------------------------------------------


@block()
def registers(kit, x):
    x = torch.cat((kit.cls.expand(2, -1, -1), kit.reg.expand(2, -1, -1), x), 1)
    x = x + kit.ls * self_attention(kit, kit.n(x))
    return x[:, 0], x[:, 3:]


@block(inputs=square_tokens)
def windows(kit, x):
    w = x.view(2, 2, 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(8, 4, C)
    w = self_attention(kit, kit.n(w))
    w = w.view(2, 2, 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(2, 16, C)
    return x + w


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


@block(inputs=square_tokens)
def a_grid_of_far_tokens(kit, x):
    """MaxViT: every second token attends to its like."""
    g = x.view(2, 2, 2, 2, 2, C).permute(0, 2, 4, 1, 3, 5).reshape(8, 4, C)
    g = self_attention(kit, g).view(2, 2, 2, 2, 2, C).permute(0, 3, 1, 4, 2, 5)
    return x + g.reshape(2, 16, C)


@block(inputs=lambda: (seeded(2, 4, 4, C),))
def rows_then_columns(kit, x):
    rows = self_attention(kit, kit.n(x).flatten(0, 1)).view_as(x)
    x = x + rows
    columns = self_attention(kit, kit.n(x).transpose(1, 2).flatten(0, 1))
    return x + columns.view_as(x).transpose(1, 2)


@block(inputs=frames)
def divided_space_and_time(kit, x):
    B, T, N, _ = x.shape
    t = x.permute(0, 2, 1, 3).reshape(B * N, T, C)
    x = x + self_attention(kit, kit.n(t)).view(B, N, T, C).permute(0, 2, 1, 3)
    s = x.reshape(B * T, N, C)
    return x + self_attention(kit, kit.n(s)).view(B, T, N, C)


@block(inputs=frames)
def frames_then_their_sum(kit, x):
    """Factorised: frames by themselves, then one token a frame."""
    s = kit.n(x).flatten(0, 1)
    s = (s + self_attention(kit, s)).mean(1).view(2, 3, C)
    return s + branch(kit, kit.n(s + self_attention(kit, s)))


@block(inputs=grid)
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


@block(inputs=square_tokens)
def agents(kit, x):
    """A few pooled queries read for all, then all read from them."""
    q, k, v = packed(kit, x)
    a = F.adaptive_avg_pool2d(q.transpose(2, 3).reshape(-1, D, 4, 4), 2).view(2, H, D, 4).mT
    read = (a * D**-0.5 @ k.mT).softmax(-1) @ v
    return x + kit.o(join((q * D**-0.5 @ a.mT).softmax(-1) @ read))


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
def dropped_tokens(kit, x):
    """A random half of the tokens is kept."""
    order = torch.rand(x.shape[:2]).argsort(1)[:, :4]
    x = x.gather(1, order[..., None].expand(-1, -1, C))
    return x + self_attention(kit, kit.n(x))


@block()
def masked_tokens_put_back(kit, x):
    order = torch.rand(x.shape[:2]).argsort(1)
    back, kept = order.argsort(1), order[:, :4]
    seen = x.gather(1, kept[..., None].expand(-1, -1, C))
    seen = seen + self_attention(kit, kit.n(seen))
    full = torch.cat((seen, kit.cls.expand(2, 5, -1)), 1)
    full = full.gather(1, back[..., None].expand(-1, -1, C))
    return full + branch(kit, kit.n(full)), order


@block()
def pruned_by_the_class_token(kit, x):
    q, k, _ = packed(kit, x)
    best = (q[:, :, :1] * k).sum(-1).mean(1).topk(4, dim=1).indices
    x = x + self_attention(kit, kit.n(x))
    x = x.gather(1, best[..., None].expand(-1, -1, C))
    return x + branch(kit, kit.n(x))


@block(0.992)
def merged_pairs(kit, x):
    """ToMe: the most alike of even and odd tokens become their mean."""
    x = x + self_attention(kit, kit.n(x))
    a, b = F.normalize(x[:, :8:2], dim=-1), F.normalize(x[:, 1:8:2], dim=-1)
    to = (a @ b.mT).argmax(-1)[..., None].expand(-1, -1, C)
    odd = x[:, 1:8:2].scatter_reduce(1, to, x[:, :8:2], "mean")
    x = torch.cat((odd, x[:, 8:]), 1)
    return x + branch(kit, kit.n(x))


@block(inputs=points)
def points_in_an_order(kit, x, at):
    """Point clouds: sorted along a curve, groups of four attend, then back."""
    order = at[..., 0].argsort(1)
    y = x.gather(1, order[..., None].expand_as(x)).view(6, 4, C)
    y = self_attention(kit, kit.n(y)).view(2, 12, C)
    return x + y.gather(1, order.argsort(1)[..., None].expand_as(y))


@block(inputs=points)
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


@block()
def rotations_as_complex_numbers(kit, x):
    table = torch.polar(torch.ones(9, 4, dtype=x.dtype), kit.cos[:9, :4])
    q, k, v = (t.reshape(2, 9, H, D) for t in kit.qkv(x).chunk(3, -1))
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.view(2, 9, H, 4, 2)) * table[:, None]).flatten(3)
        for t in (q, k)
    )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return x + kit.o(join(sdpa(q, k, v)))


@block()
def rotations_behind_a_prefix(kit, x):
    q, k, v = packed(kit, x)
    q, k = kit.qn(q), kit.kn(k)
    q, k = (
        torch.cat(
            (t[:, :, :1], t[:, :, 1:] * kit.cos[:8] + rotate_pairs(t[:, :, 1:]) * kit.sin[:8]), 2
        )
        for t in (q, k)
    )
    return x + kit.o(join(sdpa(q, k, v)))


# MLPs -----------------------------------------------------------------------------------------


@block()
def swiglu(kit, x):
    a, b = kit.both(kit.rms(x)).chunk(2, -1)
    return x + kit.fc2(F.silu(a) * b)


@block()
def geglu_with_a_norm_inside(kit, x):
    h = F.gelu(kit.gate(x)) * kit.fc1(x)
    return x + kit.fc2(F.layer_norm(h, (64,), kit.both.weight[:2].view(-1), None))


@block()
def relu_squared(kit, x):
    return x + kit.fc2(F.relu(kit.fc1(kit.n(x))).square())


@block()
def star_relu(kit, x):
    return x + kit.fc2(kit.per_head.mean() * F.relu(kit.fc1(x)) ** 2 - 0.4)


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
def two_experts_weighed(kit, x):
    w = kit.q(x)[..., :2].softmax(-1)
    a, b = branch(kit, x), kit.fc2(F.silu(kit.gate(x)))
    return x + w[..., :1] * a + w[..., 1:] * b


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


@block()
def mixing_by_fourier(kit, x):
    x = kit.n(x + torch.fft.fft2(x).real)
    return kit.n(x + branch(kit, x))


@block(inputs=square_tokens)
def mixing_by_pooling(kit, x):
    y = kit.n(x).mT.view(2, C, 4, 4)
    x = x + kit.ls * flat(F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
    return x + kit.ls * branch(kit, kit.n(x))


# Residuals ------------------------------------------------------------------------------------


@block()
def attention_and_mlp_in_parallel(kit, x):
    h = kit.n(x)
    return x + self_attention(kit, h) + branch(kit, h)


@block()
def norms_before_and_behind(kit, x):
    x = x + kit.rms(self_attention(kit, kit.n(x)))
    return x + kit.rms(branch(kit, kit.n(x)))


@block()
def layer_scale_and_drop_path(kit, x):
    x = x + keep(x).div_(0.7) * (kit.ls * self_attention(kit, kit.n(x)))
    return x + kit.ls * branch(kit, kit.n(x)) * keep(x).div_(0.7)


@block()
def a_residual_that_grows(kit, x):
    """DeepNorm: the input is scaled, the norm is behind."""
    x = kit.n(1.7 * x + self_attention(kit, x))
    return kit.n(1.7 * x + branch(kit, x))


@block()
def a_scalar_from_nought(kit, x):
    x = x + kit.per_head[0, 0, 0] * self_attention(kit, x)
    return x + kit.per_head[1, 0, 0] * branch(kit, x)


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
def patches_and_a_class(kit, x):
    t = torch.cat((kit.cls.expand(2, -1, -1), flat(kit.conv(x))), 1) + kit.both.weight[:7]
    return kit.q(kit.n(t + self_attention(kit, kit.n(t)))[:, 0])


@block(inputs=images)
def patches_by_hand(kit, x):
    """Pixels are folded into columns before a linear layer."""
    p = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(2, 6, 48)
    t = kit.n(F.linear(plain(p), kit.conv.weight.flatten(1), kit.conv.bias))
    return t + branch(kit, t)


@block(inputs=clips)
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
def a_head_at_each_depth(kit, x):
    """Early exit: every block gives logits, the last a mean of them by confidence."""
    every = []
    for _ in range(3):
        x = x + self_attention(kit, kit.n(x))
        every.append(kit.q(kit.n(x.mean(1))))
    sure = torch.stack([y.softmax(-1).amax(-1) for y in every]).softmax(0)
    return every, (torch.stack(every) * sure[..., None]).sum(0)


@block()
def a_class_that_reads(kit, x):
    """CaiT: the class token alone asks."""
    y = kit.n(torch.cat((kit.cls.expand(2, -1, -1), x), 1))
    q, k, v = split(kit.q(y[:, :1])), split(kit.k(y)), split(kit.v(y))
    return kit.cls + kit.ls * kit.o(join((q * D**-0.5 @ k.mT).softmax(-1) @ v))


@block()
def a_query_that_pools(kit, x):
    y = kit.o(join(sdpa(split(kit.q(kit.cls.expand(2, -1, -1))), *separate(kit, x)[1:])))
    return (y + branch(kit, kit.n(y)))[:, 0]


@block(0.993)
def a_weighed_mean(kit, x):
    """CCT: each token's weight is a linear layer of it."""
    y = kit.n(x + branch(kit, x))
    w = F.linear(y, kit.ls[None]).softmax(1)
    return kit.q((w.mT @ y)[:, 0])


@block()
def a_second_head_for_a_teacher(kit, x):
    x = torch.cat((kit.cls.expand(2, -1, -1), kit.reg[:, :1].expand(2, -1, -1), x), 1)
    x = kit.n(x + self_attention(kit, kit.n(x)))
    a, b = kit.q(x[:, 0]), kit.k(x[:, 1])
    return (a, b) if kit.training else (a + b) / 2


@block()
def a_loss_that_is_noted(kit, x):
    x = x + self_attention(kit, kit.n(x))
    kit.aux = x.square().mean()
    kit.steps += 1
    kit.peak.mul_(0.9).add_(0.1 * x.detach().abs().amax())
    return x + branch(kit, kit.n(x))


@block()
def attention_by_two_spellings(kit, x):
    a = softmax_attention(*packed(kit, kit.n(x)))
    b = torch.einsum(
        "bhij,bjhd->bihd",
        (split(kit.q(x)) @ split(kit.k(x)).mT).softmax(-1),
        kit.v(x).view(2, 9, H, D),
    )
    return x + kit.o(join(a)) + kit.o(b.flatten(2))
