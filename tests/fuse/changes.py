"""Systematic look-alikes: a block of a ViT, one place in it, and what a stranger does there.

BLOCKS      name -> block(kit, x, at): what rules know, `at(place, tensor)` at each step
CHANGES     name -> change(kit, tensor): what is done to the tensor at a place
WRITES      to what was read before, by places, and to parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuse.hosts import Host
from tests.fuse.kit import (
    D,
    Kit,
    images,
    join,
    packed,
    rotate_half,
    rotate_pairs,
    sdpa,
    split,
    square,
    tokens,
)

At = Callable[[str, Tensor], Tensor]


# Blocks ---------------------------------------------------------------------------------------


def attention_packed(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    h = at("normed", kit.n(x))
    p = at("packed", kit.qkv(h))
    q, k, v = p.view(*x.shape[:2], 3, 4, D).permute(2, 0, 3, 1, 4).unbind(0)
    q, k, v = at("queries", q), at("keys", k), at("values", v)
    o = at("heads", sdpa(q, k, v))
    return x + at("output", kit.o(at("joined", join(o))))


def attention_written(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    q, k, v = packed(kit, kit.n(x))
    q, kt = at("queries", q), at("turned keys", k.transpose(-2, -1))
    scores = at("scores", q @ kt)
    scores = at("scaled", scores * D**-0.5)
    weights = at("weights", scores.softmax(-1))
    o = at("heads", weights @ at("values", v))
    return x + at("output", kit.o(join(o)))


def attention_separate(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    y = at("q result", kit.q(x))
    q, k, v = split(y), split(at("k result", kit.k(x))), split(at("v result", kit.v(x)))
    q, k = at("normed queries", kit.qn(q)), kit.kn(k)
    return at("output", kit.o(at("joined", join(sdpa(q, k, v)))))


def attention_masked(kit: Kit, x: Tensor, at: At) -> Tensor:
    q, k, v = packed(kit, x)
    mask = at("mask", kit.table[:, : x.shape[1], : x.shape[1]])
    scores = at("masked", q @ k.transpose(-2, -1) * D**-0.5 + mask)
    return at("heads", scores.softmax(-1) @ v)


def rope(kit: Kit, x: Tensor, at: At) -> Tensor:
    q, k, v = packed(kit, x)
    cos, sin = at("cos", kit.cos[: x.shape[1]]), at("sin", kit.sin[: x.shape[1]])
    q, k = at("queries", q), at("keys", k)
    q = at("turned", q * cos + at("half", rotate_half(q)) * sin)
    return kit.o(join(sdpa(q, k * cos + rotate_half(k) * sin, v)))


def rope_prefix(kit: Kit, x: Tensor, at: At) -> Tensor:
    q, k, v = packed(kit, x)
    n = x.shape[1] - 1
    cos, sin = at("cos", kit.cos[:n]), kit.sin[:n]

    def turn(t: Tensor) -> Tensor:
        rest = at("patches", t[:, :, 1:])
        turned = at("turned", rest * cos + rotate_pairs(rest) * sin)
        return at("joined", torch.cat((at("prefix", t[:, :, :1]), turned), 2)).type_as(v)

    return kit.o(join(sdpa(turn(q), turn(k), v)))


def mlp(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    hidden = at("hidden", kit.fc1(at("normed", kit.n(x))))
    y = at("output", kit.fc2(at("activated", F.gelu(hidden))))
    return at("sum", x + at("scaled", kit.ls * y))


def gated(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    both = at("both", kit.both(kit.n(x)))
    a, b = both.chunk(2, -1)
    a = at("activated", F.silu(at("gate", a)))
    return x + at("output", kit.fc2(at("product", a * at("up", b))))


def rms(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    square_mean = at("mean", at("squares", x.pow(2)).mean(-1, keepdim=True))
    r = at("rsqrt", torch.rsqrt(square_mean + 1e-6))
    return kit.o(at("weighted", at("product", x * r) * at("weight", kit.rms.weight)))


def drop_path(kit: Kit, x: Tensor, at: At) -> Tensor:
    y = kit.fc2(F.gelu(kit.fc1(x)))
    keep = at("keep", x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7))
    keep = at("divided", keep.div_(0.7))
    return at("sum", x + at("dropped", kit.ls * y * keep))


def patches(kit: Kit, image: Tensor, at: At) -> Tensor:
    y = at("grid", kit.conv(at("image", image)))
    y = at("tokens", y.flatten(2).transpose(1, 2))
    y = at("joined", torch.cat((at("prefix", kit.cls.expand(y.shape[0], -1, -1)), y), 1))
    return kit.n(at("sum", y + at("positions", kit.table[0, :1, :7, None] * kit.ls)))


def torch_mha(kit: Kit, x: Tensor, at: At) -> Tensor:
    x = at("input", x)
    normed = at("normed", kit.n(x)).transpose(0, 1)
    projections: Any = dict(in_proj_weight=kit.qkv.weight, in_proj_bias=kit.qkv.bias)
    projections |= dict(out_proj_weight=kit.o.weight, out_proj_bias=kit.o.bias)
    settings: Any = dict(num_heads=4, training=kit.training, need_weights=False)
    settings |= dict(bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0)
    y, _ = F.multi_head_attention_forward(normed, normed, normed, 32, **projections, **settings)
    return x + at("output", y.transpose(0, 1))


BLOCKS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "packed": (attention_packed, square),
    "written": (attention_written, square),
    "separate": (attention_separate, square),
    "masked": (attention_masked, square),
    "rope": (rope, square),
    "rope_prefix": (rope_prefix, tokens),
    "mlp": (mlp, tokens),
    "gated": (gated, tokens),
    "rms": (rms, tokens),
    "drop_path": (drop_path, tokens),
    "patches": (patches, images),
    "mha": (torch_mha, tokens),
}


# What a stranger does to a tensor -------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The tensor itself; its gradient turned around."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


def after(effect: Callable[[Kit, Tensor], Any]) -> Callable[..., Tensor]:
    """The tensor, once `effect` has had it."""

    def change(kit: Kit, t: Tensor) -> Tensor:
        effect(kit, t)
        return t

    return change


def under(context: Callable[[], Any], how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def change(kit: Kit, t: Tensor) -> Tensor:
        with context():
            return how(t)

    return change


def keeps_copy(kit: Kit, t: Tensor) -> Tensor:
    copy = t.clone()
    seen = copy.view_as(copy)
    copy.mul_(1.5)
    return seen


def writes_contiguous(kit: Kit, t: Tensor) -> Tensor:
    c = t.contiguous()  # the tensor itself, perhaps
    c[..., :1] = 2.0
    return t


def out_argument(kit: Kit, t: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(t.detach(), 2.0, out=t.detach())
    return t


def running_used(kit: Kit, t: Tensor) -> Tensor:
    kit.peak.add_(1)
    return t * (1 + kit.peak)


def counted(kit: Kit, t: Tensor) -> Tensor:
    kit.count += 1
    kit.steps += 1
    return t


def asserted(kit: Kit, t: Tensor) -> Tensor:
    assert t.shape[1] <= 3, "too many"
    return t


def checked(kit: Kit, t: Tensor) -> Tensor:
    if not torch.isfinite(t).all():
        raise FloatingPointError("not finite")
    return t


def looked_up(kit: Kit, t: Tensor) -> Tensor:
    if t.sum() > 0:
        return t * 2
    return t


def no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


CHANGES: dict[str, Callable[[Kit, Tensor], Tensor]] = {
    # writes
    "mul_": after(lambda kit, t: t.mul_(1.5)),
    "clamp_": after(lambda kit, t: t.clamp_(-0.2, 0.2)),
    "F.dropout in place": lambda kit, t: F.dropout(t, 0.4, True, True),
    "foreach": after(lambda kit, t: torch._foreach_mul_([t], 1.5)),
    "copy_": after(lambda kit, t: t.copy_(t.flip(0).clone())),
    "a column": after(lambda kit, t: t[..., :3].mul_(1.5)),
    "a row of a view": after(lambda kit, t: t.transpose(0, 1)[1:].mul_(1.5)),
    "through detach": after(lambda kit, t: t.detach().mul_(1.5)),
    "out=": out_argument,
    "the copy later": keeps_copy,
    "a copy": after(lambda kit, t: t.clone().mul_(1.5)),
    "what is contiguous": writes_contiguous,
    # views and gradients
    "detach": lambda kit, t: t.detach(),
    "half detached": lambda kit, t: t * 0.3 + t.detach() * 0.7,
    "reversed": lambda kit, t: Reversed.apply(t),
    "bits": lambda kit, t: t.view(torch.int64).view(t.dtype),
    "clone": lambda kit, t: t.clone(),
    "contiguous": lambda kit, t: t.contiguous(),
    "turned": lambda kit, t: t.transpose(0, 1) if t.shape[0] == t.shape[1] else t.flip(1),
    "turned in place": lambda kit, t: t.transpose(0, 1).contiguous().view(t.shape),
    "flip": lambda kit, t: t.flip(-1),
    "roll": lambda kit, t: t.roll(1, -1),
    "first row for all": lambda kit, t: t[:1].expand_as(t),
    "chunks swapped": lambda kit, t: torch.cat(t.chunk(2, -1)[::-1], -1),
    "as_strided": lambda kit, t: torch.as_strided(t.contiguous(), t.shape, t.contiguous().stride()),
    "a lazy negative": lambda kit, t: torch.complex(t * 0.5, -t).conj().imag,
    # regions
    "no_grad": under(torch.no_grad, lambda t: t * 1.0),
    "enable_grad": under(torch.enable_grad, lambda t: t * 1.0),
    "inference_mode": under(torch.inference_mode, lambda t: t.clone()),
    "autocast": under(bf16, lambda t: torch.matmul(t, t.new_ones(t.shape[-1], 1)) * 0 + t),
    "autocast off": under(no_autocast, lambda t: t * 1.0),
    # casts
    "float32 and back": lambda kit, t: t.float().to(t.dtype),
    "bfloat16 and back": lambda kit, t: t.bfloat16().to(t.dtype),
    "half overflows": lambda kit, t: (t * 7e4).half().to(t.dtype),
    "int and back": lambda kit, t: t.to(torch.int32).to(t.dtype) + t * 0.1,
    "bool and back": lambda kit, t: t.bool().to(t.dtype) * t,
    "fp8 and back": lambda kit, t: t.to(torch.float8_e4m3fn).to(t.dtype),
    "type_as": lambda kit, t: t.type_as(t.float()).type_as(kit.ls),
    # values
    "clamp": lambda kit, t: t.clamp(-0.2, 0.2),
    "clamp far": lambda kit, t: t.clamp(-1e4, 1e4),
    "negated": lambda kit, t: -t,
    "abs": lambda kit, t: t.abs(),
    "times 1": lambda kit, t: t * 1,
    "times 2": lambda kit, t: 2 * t,
    "2 over": lambda kit, t: 0.1 / (t.abs() + 0.1),
    "plus 0": lambda kit, t: t + 0.0,
    "plus 1": lambda kit, t: t + 1,
    "times a parameter": lambda kit, t: t * kit.ls[0],
    "times each row": lambda kit, t: (
        t * t.detach().flatten(1).mean(1).view(-1, *[1] * (t.ndim - 1))
    ),
    "nan_to_num": lambda kit, t: t.nan_to_num(0.0),
    "where": lambda kit, t: torch.where(t > 0, t, 0.1 * t),
    "masked_fill": lambda kit, t: t.masked_fill(t > 1.0, 0.3),
    "top-k": lambda kit, t: t.masked_fill(
        t < t.topk(min(6, t.shape[-1]), -1).values[..., -1:], -1.0
    ),
    "own mean away": lambda kit, t: t - t.mean(-1, keepdim=True),
    # draws
    "dropout": lambda kit, t: F.dropout(t, 0.3, kit.training),
    "dropout of all": lambda kit, t: F.dropout(t, 1.0),
    "dropout idle": lambda kit, t: F.dropout(t, 0.5, False),
    "dropout of 0": lambda kit, t: F.dropout(t, 0.0),
    "noise": lambda kit, t: t + torch.randn_like(t) * 0.1,
    "a draw aside": after(lambda kit, t: torch.rand(3)),
    # effects
    "hook": after(lambda kit, t: t.requires_grad and t.register_hook(lambda g: g * 2)),
    "noted": after(lambda kit, t: setattr(kit, "seen", t)),
    "running, used": running_used,
    "counted": counted,
    "asserted": asserted,
    "checked": checked,
    "decided by values": looked_up,
    "graph break": after(lambda kit, t: torch._dynamo.graph_break()),
    # wrappers
    "checkpoint": lambda kit, t: torch.utils.checkpoint.checkpoint(
        lambda u: u * 1.5, t, use_reentrant=False
    ),
    "cond": lambda kit, t: torch.cond(t.sum() > 0, lambda u: u * 1.5, lambda u: u.sin(), (t,)),
    "vmap": lambda kit, t: torch.func.vmap(lambda u: u * 2)(t),
}


def places_of(block: str) -> list[str]:
    """The places of a block, in order."""
    run, inputs = BLOCKS[block]
    found: dict[str, None] = {}

    def at(place: str, t: Tensor) -> Tensor:
        found[place] = None
        return t

    with torch.no_grad():
        run(Kit(nn.Identity()), *inputs(), at)
    return list(found)


def changed(block: str, place: str, change: str) -> Host:
    run, inputs = BLOCKS[block]

    def forward(kit: Kit, x: Tensor) -> Tensor:
        return run(kit, x, lambda at, t: CHANGES[change](kit, t) if at == place else t)

    return Host(f"{block} - {place} - {change}", forward, inputs, calls=2 if change in TWICE else 1)


TWICE = {"running, used", "counted", "noted", "checked"}


def all_changes() -> Iterator[Host]:
    for block in BLOCKS:
        for place in places_of(block):
            yield from (changed(block, place, change) for change in CHANGES)


# Writes to what was read before ---------------------------------------------------------------


def written_later(block: str, early: str, late: str, how: str) -> Host:
    """What the block had at `early` is written to at `late`."""
    run, inputs = BLOCKS[block]

    def forward(kit: Kit, x: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def at(place: str, t: Tensor) -> Tensor:
            if place == late and kept:
                LATE_WRITES[how](kept[0])
            if place == early and not kept:
                kept.append(t)
            return t

        return run(kit, x, at)

    context = torch.no_grad if how != "through data" else torch.enable_grad
    return Host(f"{block} - {early} written at {late} - {how}", forward, inputs, context=context)


LATE_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda t: t.mul_(1.5),
    "a part": lambda t: t[..., 1:].add_(1.0),
    "through data": lambda t: t.data.mul_(1.5),
}


def parameter_written(block: str, name: str, place: str) -> Host:
    """A parameter or buffer that the block reads is written to at a place."""
    run, inputs = BLOCKS[block]

    def forward(kit: Kit, x: Tensor) -> Tensor:
        def at(here: str, t: Tensor) -> Tensor:
            if here == place:
                with torch.no_grad():
                    kit.get_parameter(name).mul_(1.5)
            return t

        return run(kit, x, at)

    return Host(f"{block} - {name} written at {place}", forward, inputs, context=torch.no_grad)


READS = {
    "packed": ("qkv.weight", "n.weight", "n.bias", "o.weight"),
    "written": ("qkv.bias", "qkv.weight"),
    "separate": ("q.weight", "k.bias", "v.weight", "qn.weight", "o.bias"),
    "masked": ("table", "qkv.bias"),
    "rope": ("qkv.weight",),
    "mlp": ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "ls"),
    "gated": ("both.weight", "fc2.weight"),
    "rms": ("rms.weight",),
    "drop_path": ("ls", "fc2.bias"),
    "patches": ("conv.weight", "conv.bias", "cls"),
    "mha": ("qkv.weight", "o.weight"),
}


def all_writes() -> Iterator[Host]:
    for block in BLOCKS:
        places = places_of(block)
        for i, early in enumerate(places):
            for late in places[i + 1 :]:
                yield from (written_later(block, early, late, how) for how in LATE_WRITES)
        for name in READS.get(block, ()):
            yield from (parameter_written(block, name, place) for place in places)
