"""python -m tests.fuse.random_hosts --seed S --count N [--blocks]: random ViTs, each as its host.

A model is drawn from the spellings of its parts: patches, blocks of attention and MLP with norms,
scales and drops, a head; some parts are changed as a stranger would (see `changes`). Dtype, mode,
frozen parts, autocast and the batch of a second call are drawn, too.

With --blocks they are blocks of timm and transformers, their settings drawn from the signatures
of their own constructors.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.changes import CHANGES
from tests.fuse.hosts import Host
from tests.fuse.kit import C, D, H, Kit, five, join, rotate_half, rotate_pairs, sdpa, seeded, split
from tests.fuse.lookalikes import run_all
from tests.fuse.looks_layers import branch, flat, keep, positions, rms, with_cls

Step = Callable[..., Any]

NORMS: dict[str, Step] = {
    "layer norm": lambda kit, x: kit.n(x),
    "functional norm": lambda kit, x: F.layer_norm(x, (C,), kit.n.weight, kit.n.bias, 1e-3),
    "rms": lambda kit, x: kit.rms(x),
    "written rms": lambda kit, x: rms(x) * kit.rms.weight,
    "rms, 1 + w": lambda kit, x: rms(x) * (1 + kit.rms.weight),
    "no norm": lambda kit, x: x,
}


HEADS: dict[str, Step] = {
    "packed": lambda kit, x: five(kit, x).permute(2, 0, 3, 1, 4).unbind(0),
    "chunks": lambda kit, x: tuple(map(split, kit.qkv(x).chunk(3, -1))),
    "unbound": lambda kit, x: tuple(t.transpose(1, 2) for t in five(kit, x).unbind(2)),
    "separate": lambda kit, x: (split(kit.q(x)), split(kit.k(x)), split(kit.v(x))),
    "k without bias": lambda kit, x: (split(kit.q(x)), split(kit.bare(x)), split(kit.v(x))),
    "k and v together": lambda kit, x: (split(kit.q(x)), *map(split, kit.fc1(x).chunk(2, -1))),
    "v is k": lambda kit, x: (split(kit.q(x)), split(kit.k(x)), split(kit.k(x))),
    "by heads": lambda kit, x: (
        kit.qkv(x).view(*x.shape[:2], H, 3, D).permute(3, 0, 2, 1, 4).unbind(0)
    ),
}


def rope(half: Callable[[Tensor], Tensor], prefix: int) -> Step:
    def turn(kit: Kit, t: Tensor) -> Tensor:
        rest = t[:, :, prefix:]
        n = rest.shape[2]
        rest = rest * kit.cos[:n] + half(rest) * kit.sin[:n]
        return torch.cat((t[:, :, :prefix], rest), 2) if prefix else rest

    return lambda kit, q, k: (turn(kit, q), turn(kit, k))


TURNS: dict[str, Step] = {
    "as they are": lambda kit, q, k: (q, k),
    "qk norm": lambda kit, q, k: (kit.qn(q), kit.kn(k)),
    "q norm": lambda kit, q, k: (kit.qn(q), k),
    "halves": rope(rotate_half, 0),
    "pairs": rope(rotate_pairs, 0),
    "halves, prefix": rope(rotate_half, 1),
    "pairs, prefix": rope(rotate_pairs, 1),
    "norm, halves": lambda kit, q, k: rope(rotate_half, 1)(kit, kit.qn(q), kit.kn(k)),
    "only q turned": lambda kit, q, k: (rope(rotate_half, 0)(kit, q, q)[0], k),
    "l2": lambda kit, q, k: (F.normalize(q, dim=-1), F.normalize(k, dim=-1)),
}


def bias(kit: Kit, q: Tensor) -> Tensor:
    return kit.table[:, : q.shape[2], : q.shape[2]]


def written(kit: Kit, q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, mask: Any = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) * D**-0.5
    scores = scores if mask is None else scores + mask
    return F.dropout(scores.softmax(-1), p, kit.training) @ v


def causal(kit: Kit, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1)) * 0.3
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


ATTENTIONS: dict[str, Step] = {
    "sdpa": lambda kit, q, k, v: sdpa(q, k, v),
    "sdpa scaled": lambda kit, q, k, v: sdpa(q, k, v, scale=0.2),
    "sdpa causal": lambda kit, q, k, v: sdpa(q, k, v, is_causal=True),
    "sdpa biased": lambda kit, q, k, v: sdpa(q, k, v, attn_mask=bias(kit, q)),
    "written": written,
    "written, dropped": lambda kit, q, k, v: written(kit, q, k, v, 0.2),
    "written, biased": lambda kit, q, k, v: written(kit, q, k, v, 0.0, bias(kit, q)),
    "written, causal": causal,
    "temperature": lambda kit, q, k, v: (q @ k.mT * kit.per_head).softmax(-1) @ v,
    "in float32": lambda kit, q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float32).to(v.dtype) @ v,
    "einsum": lambda kit, q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
    "linear attention": lambda kit, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
}
JOINS: dict[str, Step] = {
    "reshape": lambda kit, o: kit.o(join(o)),
    "flatten": lambda kit, o: kit.o(o.transpose(1, 2).flatten(2)),
    "contiguous": lambda kit, o: kit.o(o.permute(0, 2, 1, 3).contiguous().view(o.shape[0], -1, C)),
    "normed": lambda kit, o: kit.o(kit.n(join(o))),
    "not projected": lambda kit, o: join(o),
}
MLPS: dict[str, Step] = {
    "gelu": branch,
    "tanh": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x), approximate="tanh")),
    "relu": lambda kit, x: kit.fc2(F.relu(kit.fc1(x))),
    "quick": lambda kit, x: (lambda z: kit.fc2(z * torch.sigmoid(1.702 * z)))(kit.fc1(x)),
    "dropped": lambda kit, x: F.dropout(kit.fc2(F.gelu(kit.fc1(x))), 0.1, kit.training),
    "swiglu": lambda kit, x: (lambda a, b: kit.fc2(F.silu(a) * b))(*kit.both(x).chunk(2, -1)),
    "two gates": lambda kit, x: kit.fc2(F.silu(kit.gate(x)) * kit.fc1(x)),
    "clamped": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x)).clamp(-0.2, 0.2)),
    "one layer": lambda kit, x: F.gelu(kit.bare(x)),
}


def dropped(kit: Kit, y: Tensor) -> Tensor:
    mask = keep(y, 0.8)
    return y * mask.div_(0.8) if kit.training else y


SUMS: dict[str, Step] = {
    "residual": lambda kit, x, y: x + y,
    "scaled": lambda kit, x, y: x + kit.ls * y,
    "scaled after": lambda kit, x, y: x + y * kit.cls,
    "dropped": lambda kit, x, y: x + dropped(kit, y),
    "scaled, dropped": lambda kit, x, y: x + dropped(kit, kit.ls * y),
    "in place": lambda kit, x, y: x.clone().add_(y),
    "half": lambda kit, x, y: x + 0.5 * y,
    "post-norm": lambda kit, x, y: kit.n(x + y),
    "no residual": lambda kit, x, y: y,
}


def placed(kit: Kit, y: Tensor) -> Tensor:
    return y + positions(kit, y.shape[1])


STEMS: dict[str, Step] = {
    "cls, positions": lambda kit, x: placed(kit, with_cls(kit, flat(kit.conv(x)))),
    "positions": lambda kit, x: placed(kit, flat(kit.conv(x))),
    "patches": lambda kit, x: flat(kit.conv(x)),
    "positions, cls": lambda kit, x: with_cls(kit, placed(kit, flat(kit.conv(x)))),
}
ENDS: dict[str, Step] = {
    "first token": lambda kit, x: kit.q(kit.n(x)[:, 0]),
    "mean": lambda kit, x: kit.q(kit.n(x.mean(1))),
    "all": lambda kit, x: kit.n(x),
    "all and first": lambda kit, x: (x, kit.n(x)[:, 0]),
    "nothing": lambda kit, x: x,
}
# changes that leave little of a model to compare
LEFT_OUT = {"asserted", "cond", "vmap", "inference_mode", "half overflows", "fp8 and back"}
KINDS: dict[str, dict[str, Any]] = {
    "float32": dict(dtype=torch.float32),
    "no_grad": dict(context=torch.no_grad),
    "two batches": dict(calls=2, again=lambda: (seeded(3, 3, 8, 12),)),
    "twice": dict(calls=2),
}
PLACES = ("stem", "normed", "queries", "values", "heads", "branch", "hidden", "sum", "input")


class Drawn:
    """A random forward: what each part is, and what is changed where."""

    def __init__(self, rng: random.Random):
        self.rng, self.names = rng, []
        self.depth = rng.choice((1, 1, 2, 3))
        self.stem, self.end = self.draw(STEMS), self.draw(ENDS)
        self.blocks = [self.block() for _ in range(self.depth)]
        self.changes: dict[tuple[str, int], Step] = {}
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            name = rng.choice([c for c in CHANGES if c not in LEFT_OUT])
            where = (rng.choice(PLACES), rng.randrange(self.depth))
            self.changes[where] = CHANGES[name]
            self.names.append(f"{name} at {where[0]}")

    def draw(self, steps: dict[str, Step]) -> Step:
        name = self.rng.choice(list(steps))
        self.names.append(name)
        return steps[name]

    def block(self) -> dict[str, Step]:
        parts = dict(norm=NORMS, heads=HEADS, turn=TURNS, attend=ATTENTIONS, join=JOINS, mlp=MLPS)
        found = {name: self.draw(steps) for name, steps in parts.items()}
        return found | {"sum": self.draw(SUMS), "second sum": self.draw(SUMS)}

    def __call__(self, kit: Kit, image: Tensor) -> Any:
        x = self.at("stem", 0, kit, self.stem(kit, image))
        for i, part in enumerate(self.blocks):
            x = self.at("input", i, kit, x)
            q, k, v = part["heads"](kit, self.at("normed", i, kit, part["norm"](kit, x)))
            q, k = part["turn"](kit, self.at("queries", i, kit, q), k)
            o = part["attend"](kit, q, k, self.at("values", i, kit, v))
            y = part["join"](kit, self.at("heads", i, kit, o))
            x = self.at("sum", i, kit, part["sum"](kit, x, self.at("branch", i, kit, y)))
            y = part["mlp"](kit, self.at("hidden", i, kit, part["norm"](kit, x)))
            x = part["second sum"](kit, x, y)
        return self.end(kit, x)

    def at(self, place: str, i: int, kit: Kit, t: Tensor) -> Tensor:
        change = self.changes.get((place, i))
        return t if change is None else change(kit, t)


def frozen(rng: random.Random) -> Callable[[Kit], None]:
    """Some parameters are frozen, or none."""
    share, seed = rng.choice((0.0, 0.0, 0.0, 0.3, 1.0)), rng.random()

    def prepare(kit: Kit) -> None:
        own = random.Random(seed)
        for p in kit.parameters():
            p.requires_grad_(own.random() >= share)

    return prepare


def random_host(seed: int, number: int) -> Host:
    rng = random.Random(f"{seed} {number}")
    drawn = Drawn(rng)
    how: dict[str, Any] = dict(
        train=rng.random() < 0.7, needs_grad=rng.random() < 0.6, prepare=frozen(rng)
    )
    kind = rng.choice(("float64",) * 5 + tuple(KINDS))
    how |= KINDS.get(kind, {})
    name = f"random {seed}.{number} ({kind}, {'train' if how['train'] else 'eval'}): "
    return Host(name + ", ".join(drawn.names), drawn, lambda: (seeded(2, 3, 8, 12),), **how)


# Blocks of libraries --------------------------------------------------------------------------

# module and class -> what must be given; a configuration's class makes the second kind
TIMM = {
    "timm.models.vision_transformer Block": dict(dim=C, num_heads=H),
    "timm.models.vision_transformer ResPostBlock": dict(dim=C, num_heads=H),
    "timm.models.vision_transformer ParallelScalingBlock": dict(dim=C, num_heads=H),
    "timm.models.vision_transformer ParallelThingsBlock": dict(dim=C, num_heads=H),
    "timm.models.eva EvaBlock": dict(dim=C, num_heads=H),
    "timm.models.eva EvaBlockPostNorm": dict(dim=C, num_heads=H),
    "timm.models.beit Block": dict(dim=C, num_heads=H, init_values=0.1),
    "timm.models.cait LayerScaleBlock": dict(dim=C, num_heads=H),
    "timm.layers Attention": dict(dim=C, num_heads=H),
    "timm.layers AttentionPoolLatent": dict(in_features=C, num_heads=H),
    "timm.layers Mlp": dict(in_features=C, hidden_features=64),
    "timm.layers GluMlp": dict(in_features=C, hidden_features=64, out_features=C),
    "timm.layers SwiGLU": dict(in_features=C, hidden_features=64),
}
TRANSFORMERS = {
    "ViT": "vit.modeling_vit ViTLayer",
    "DeiT": "deit.modeling_deit DeiTLayer",
    "Dinov2": "dinov2.modeling_dinov2 Dinov2Layer",
    "Beit": "beit.modeling_beit BeitLayer",
    "IJepa": "ijepa.modeling_ijepa IJepaLayer",
    "ViTMSN": "vit_msn.modeling_vit_msn ViTMSNLayer",
    "SiglipVision": "siglip.modeling_siglip SiglipEncoderLayer",
    "Aimv2Vision": "aimv2.modeling_aimv2 Aimv2EncoderLayer",
    "Yolos": "yolos.modeling_yolos YolosLayer",
}
RANGES: dict[str, tuple[Any, ...]] = {
    "mlp_ratio": (1.0, 2.0, 4.0),
    "init_values": (None, 0.1, 1.0),
    "drop_path": (0.0, 0.3),
    "proj_drop": (0.0, 0.2),
    "drop": (0.0, 0.2),
    "act_layer": (torch.nn.GELU, torch.nn.SiLU, torch.nn.ReLU, torch.nn.Tanh),
    "pool_type": ("token", "avg"),
    "latent_len": (1, 3),
    "hidden_act": ("gelu", "silu", "quick_gelu", "gelu_new", "relu", "tanh"),
    "layer_norm_eps": (1e-6, 1e-3),
    "layerscale_value": (0.1, 1.0),
    "drop_path_rate": (0.0, 0.3),
    "hidden_dropout_prob": (0.0, 0.2),
    "layer_scale_init_value": (0.0, 0.1),
    "_attn_implementation": ("eager", "sdpa"),
}
NOT_DRAWN = ("device", "dtype", "gradient_checkpointing", "return_dict", "use_cache")


def settings_of(rng: random.Random, make: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Half of what a constructor's signature lets one choose, chosen."""
    found = dict(given)
    for name, p in inspect.signature(make).parameters.items():
        known = RANGES.get(name, (False, True) if isinstance(p.default, bool) else ())
        if known and name not in (*found, *NOT_DRAWN) and rng.random() < 0.5:
            found[name] = rng.choice(known)
    return found


def packaged_block(rng: random.Random) -> tuple[str, Callable[[], Any]]:
    """A block's name with its settings, and what builds it; one that its package accepts."""
    name = rng.choice([*TIMM, *TRANSFORMERS])
    if name in TIMM:
        module, kind = name.split()
        make = getattr(importlib.import_module(module), kind)
        settings = settings_of(rng, make, TIMM[name])
        return f"{name} {settings}", lambda: make(**settings)
    module, kind = TRANSFORMERS[name].split()
    make = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    configure = getattr(importlib.import_module("transformers"), f"{name}Config")
    sizes = dict(hidden_size=C, num_attention_heads=H, intermediate_size=64)
    how = rng.choice(RANGES["_attn_implementation"])
    settings = settings_of(rng, configure, sizes)
    return f"{kind} {how} {settings}", lambda: make(configure(**settings, attn_implementation=how))


def packaged_host(seed: int, number: int) -> Host:
    rng = random.Random(f"library {seed} {number}")
    while True:
        name, build = packaged_block(rng)
        how = dict(train=rng.random() < 0.7, prepare=frozen(rng))
        host = Host(f"library {seed}.{number}: {name}", lambda: None, module=build, **how)  # type: ignore[arg-type]
        try:
            host.build()(*(x.to(host.dtype) for x in host.inputs()))
        except Exception:  # settings that do not go together
            continue
        return host


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--blocks", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = packaged_host if given.blocks else random_host
    return min(1, run_all(draw(given.seed, i) for i in range(given.count)))


if __name__ == "__main__":
    raise SystemExit(main())
