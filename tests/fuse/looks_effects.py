"""What a forward does besides returning, settings that change, and the state it is called in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from tests.fuse.changes import BLOCKS, bf16
from tests.fuse.hosts import Host, table
from tests.fuse.kit import C, D, Kit, join, packed, sdpa, seeded, softmax_attention
from tests.fuse.looks_layers import branch

SETTINGS = {"scale": 1.0}
ENVIRONMENT = "FASTVIT_TEST_SCALE"


def settings_back(kit: Kit) -> None:
    """Both runs of a host begin with the same settings."""
    SETTINGS["scale"] = 1.0
    os.environ[ENVIRONMENT] = "1"
    kit.cfg = SimpleNamespace(attn=SimpleNamespace(causal=False, s=1.0, p=0.0, act="gelu"))


def change(what: str) -> Callable[[Kit], None]:
    """Made between two calls."""

    def between(kit: Kit) -> None:
        if what == "global":
            SETTINGS["scale"] = 2.0
        elif what == "environment":
            os.environ[ENVIRONMENT] = "2"
        else:
            setattr(kit.cfg.attn, what, {"causal": True, "s": 2.0, "p": 0.4, "act": "silu"}[what])

    return between


def attended(kit: Kit, x: Tensor, **how: Any) -> Tensor:
    return x + kit.o(join(sdpa(*packed(kit, kit.n(x)), **how)))


CHANGING: dict[str, tuple[str, Callable[..., Any]]] = {
    "is_causal of a config": (
        "causal",
        lambda kit, x: attended(kit, x, is_causal=kit.cfg.attn.causal),
    ),
    "sdpa's scale of a config": ("s", lambda kit, x: attended(kit, x, scale=kit.cfg.attn.s)),
    "dropout of a config": ("p", lambda kit, x: attended(kit, x, dropout_p=kit.cfg.attn.p)),
    "activation of a config": (
        "act",
        lambda kit, x: kit.fc2(getattr(F, kit.cfg.attn.act)(kit.fc1(x))),
    ),
    "a global": ("global", lambda kit, x: kit.fc2(F.gelu(kit.fc1(x) * SETTINGS["scale"]))),
    "the environment": (
        "environment",
        lambda kit, x: x + float(os.environ[ENVIRONMENT]) * kit.o(x),
    ),
}
# What a person does to a module between two calls.
EDITS: dict[str, Callable[[Kit], Any]] = {
    "weight doubled": lambda kit: kit.fc1.weight.data.mul_(2),
    "weight replaced": lambda kit: setattr(kit.fc1, "weight", nn.Parameter(kit.fc1.weight * 2)),
    "bias taken": lambda kit: setattr(kit.fc1, "bias", None),
    "layer replaced": lambda kit: setattr(kit, "fc1", nn.Linear(C, 64).to(kit.ls.dtype)),
    "layer without bias": lambda kit: setattr(
        kit, "fc1", nn.Linear(C, 64, bias=False).to(kit.ls.dtype)
    ),
    "frozen": lambda kit: kit.fc1.requires_grad_(False),
    "all frozen": lambda kit: kit.requires_grad_(False),
    "eval": lambda kit: kit.eval(),
    "float32": lambda kit: kit.float(),
    "eps": lambda kit: setattr(kit.n, "eps", 0.3),
    "forward replaced": lambda kit: setattr(
        kit.fc1, "forward", lambda x: F.linear(x, kit.gate.weight)
    ),
    "forward hook": lambda kit: kit.fc1.register_forward_hook(lambda m, a, out: out * 2),
    "pre hook": lambda kit: kit.fc1.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "backward hook": lambda kit: kit.fc1.register_full_backward_hook(lambda m, gi, go: None),
    "weight hook": lambda kit: kit.fc1.weight.register_hook(lambda g: g * 2),
    "state loaded": lambda kit: kit.load_state_dict(Kit(kit.host).state_dict()),
    "scale of zeros": lambda kit: kit.ls.data.zero_().sum().item(),
}


def whole(kit: Kit, x: Tensor) -> Tensor:
    x = attended(kit, x)
    return x + kit.ls * kit.fc2(F.gelu(kit.fc1(kit.n(x))))


# Hooks that are there from the start, on parts that rules would swallow -------------------------


class Masked(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * (weight > 0)


HOOKS: dict[str, Callable[[Kit], Any]] = {
    "noting": lambda kit: kit.fc1.register_forward_hook(
        lambda m, a, out: setattr(kit, "seen", out.detach())
    ),
    "doubling": EDITS["forward hook"],
    "clamping": lambda kit: kit.qkv.register_forward_pre_hook(
        lambda m, a: (a[0].clamp(-0.1, 0.1),)
    ),
    "gradient": lambda kit: kit.fc1.register_full_backward_hook(
        lambda m, gi, go: tuple(g * 2 for g in gi)
    ),
    "on_weight": EDITS["weight hook"],
    "accumulated": lambda kit: kit.fc1.weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.mul_(2)
    ),
    "normed": lambda kit: parametrizations.weight_norm(kit.fc1),
    "spectral": lambda kit: parametrizations.spectral_norm(kit.fc1),
    "pruned": lambda kit: register_parametrization(kit.fc1, "weight", Masked()),
}


# Effects ---------------------------------------------------------------------------------------


def clamped(kit: Kit, x: Tensor) -> Tensor:
    """A bound that small inputs do not reach and large ones do."""
    q, k, v = (t.clamp(-8.0, 8.0) for t in packed(kit, x))
    return kit.o(join(softmax_attention(q, k, v)))


def overflow(kit: Kit, x: Tensor) -> Tensor:
    """As transformers' DETR keeps half precision from overflowing."""
    y = kit.n(x + kit.fc2(F.relu(kit.fc1(x)))) * 4e4
    if torch.isinf(y).any() or torch.isnan(y).any():
        limit = torch.finfo(y.dtype).max - 1000
        y = torch.clamp(y, min=-limit, max=limit)
    return y


def peak(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    w = (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1)
    if kit.training:
        kit.peak.mul_(0.9).add_(0.1 * w.detach().amax())
    return join(w @ v)


def listed(kit: Kit, x: Tensor) -> Tensor:
    kit.seen = []
    for _ in range(2):
        x = whole(kit, x)
        kit.seen.append(x.mean())
    return x


def in_a_dict(kit: Kit, x: Tensor) -> Any:
    h = kit.n(x)
    return {"x": whole(kit, x), "list": [h, (kit.o(h), 3, None, "name")]}


def autocast_off(kit: Kit, x: Tensor) -> Tensor:
    y = kit.o(kit.n(x))
    with torch.autocast("cpu", enabled=False):
        return y + kit.fc2(F.gelu(kit.fc1(x.float())))


def autocast_inside(kit: Kit, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = kit.fc1(x)
    return kit.fc2(F.gelu(z).to(kit.fc2.weight.dtype))


def autocast_of_softmax(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    with torch.autocast("cpu", enabled=False):
        w = (q.float() @ k.float().transpose(-2, -1) * D**-0.5).softmax(-1)
    return kit.o(join(w.to(v.dtype) @ v))


def frozen_stem(kit: Kit, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = whole(kit, x)
    return whole(kit, y)


def half_frozen(kit: Kit, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = kit.fc1(x)
    return kit.fc2(F.gelu(z))


def refused(kit: Kit, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise FloatingPointError("not finite")
    return whole(kit, x)


def gradients_inside(kit: Kit, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(whole(kit, x).sum(), x, create_graph=True)
    return g


def again(kit: Kit, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    y = checkpoint(lambda u: whole(kit, u), x, use_reentrant=False)
    return checkpoint(lambda u: F.dropout(kit.fc2(F.gelu(kit.fc1(u))), 0.3), y, use_reentrant=False)


def draws_apart(kit: Kit, x: Tensor) -> Tensor:
    a = torch.rand(2, dtype=x.dtype)
    y = whole(kit, x) + F.dropout(kit.o(x), 0.3)
    b = torch.randn_like(x)
    m = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5)
    return y * a[0] + b * m


EFFECTS = {
    "clamp, reached later": (clamped, dict(calls=2, again=lambda: (seeded(2, 9, C) * 20,))),
    "overflow": (overflow, dict(dtype=torch.float16)),
    "peak": (peak, dict(calls=3)),
    "peak, then evaluation": (peak, dict(calls=2, between=EDITS["eval"])),
    "losses in a list": (listed, dict(calls=2)),
    "in a dict": (in_a_dict, {}),
    "autocast off": (autocast_off, dict(dtype=torch.float32)),
    "autocast inside": (autocast_inside, dict(dtype=torch.float32, precision=torch.bfloat16)),
    "frozen stem": (frozen_stem, {}),
    "half frozen": (half_frozen, {}),
    "refused": (refused, dict(calls=2, again=lambda: (seeded(2, 9, C) / 0,))),
    "gradients inside": (gradients_inside, {}),
    "func.grad": (lambda kit, x: torch.func.grad(lambda u: whole(kit, u).square().sum())(x), {}),
    "vmap": (lambda kit, x: torch.func.vmap(lambda u: branch(kit, kit.n(u)))(x), {}),
    "jvp": (
        lambda kit, x: torch.func.jvp(lambda u: branch(kit, u), (x,), (torch.ones_like(x),)),
        {},
    ),
    "checkpoints": (again, {}),
    "draws apart": (draws_apart, dict(calls=2)),
    "another batch": (whole, dict(calls=3, again=lambda: (seeded(5, 9, C),))),
    "other tokens": (whole, dict(calls=2, again=lambda: (seeded(2, 6, C),))),
    "no images later": (whole, dict(calls=2, again=lambda: (seeded(0, 9, C),))),
    "a strided input": (whole, dict(calls=2, again=lambda: (seeded(9, 2, C).transpose(0, 1),))),
    "wrong width": (whole, dict(calls=2, again=lambda: (seeded(2, 9, C + 8),))),
}


UNDER_AUTOCAST = {
    "off": autocast_off,
    "inside": autocast_inside,
    "of softmax": autocast_of_softmax,
    "a product": lambda kit, x: x @ kit.q.weight.t() + kit.q.bias,
}


# The state a host is called in -------------------------------------------------------------------


@contextmanager
def no_grad_autocast():
    with torch.no_grad(), bf16():
        yield


AUTOCAST: dict[str, Any] = dict(dtype=torch.float32, context=bf16, precision=torch.bfloat16)
STATES: dict[str, dict[str, Any]] = {
    "evaluation": dict(train=False),
    "no_grad": dict(train=False, context=torch.no_grad),
    "no_grad, training": dict(context=torch.no_grad),
    "inference_mode": dict(train=False, context=torch.inference_mode, needs_grad=False),
    "autocast": AUTOCAST,
    "autocast, no_grad": AUTOCAST | dict(context=no_grad_autocast),
    "float32": dict(dtype=torch.float32),
    "bfloat16": dict(dtype=torch.bfloat16),
    "float16": dict(dtype=torch.float16),
    "input without gradient": dict(needs_grad=False),
    "all frozen": dict(prepare=EDITS["all frozen"]),
    "weights frozen": dict(
        prepare=lambda kit: [p.requires_grad_(p.ndim == 1) for p in kit.parameters()]
    ),
    "vectors frozen": dict(
        prepare=lambda kit: [p.requires_grad_(p.ndim > 1) for p in kit.parameters()]
    ),
    "saved tensors packed": dict(context=torch.autograd.graph.save_on_cpu),
    "anomaly mode": dict(context=torch.autograd.detect_anomaly),
}
RESIZED = {
    "one image": lambda x: x[:1],
    "no image": lambda x: x[:0],
    "three images": lambda x: x.repeat(2, *[1] * (x.ndim - 1))[:3],
    "strided": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "large": lambda x: x * 30,
    "with nan": lambda x: x / (x.flatten(1).cumsum(1).view(x.shape) > -1e9) + x * 0 * math.nan,
    "with inf": lambda x: x / 0,
}


def state_hosts() -> list[Host]:
    found = []
    for block, (run, inputs) in BLOCKS.items():

        def forward(kit: Kit, x: Tensor, run: Any = run) -> Tensor:
            return run(kit, x, lambda place, t: t)

        found += [
            Host(f"state - {block} - {k}", forward, inputs, **how) for k, how in STATES.items()
        ]
        for name, resized in RESIZED.items():

            def other(resized: Any = resized, inputs: Any = inputs) -> tuple[Tensor]:
                return (resized(inputs()[0]),)

            found.append(Host(f"state - {block} - {name}", forward, other))
    return found


def effect_hosts() -> list[Host]:
    found = [
        Host(f"changing - {name}", forward, calls=2, prepare=settings_back, between=change(what))
        for name, (what, forward) in CHANGING.items()
    ]
    found += [Host(f"edit - {k}", whole, calls=2, between=edit) for k, edit in EDITS.items()]
    found += [Host(f"effect - {k}", f, **how) for k, (f, how) in EFFECTS.items()]
    found += [Host(f"hook - {k}", whole, prepare=hook) for k, hook in HOOKS.items()]
    return found + table("under autocast", UNDER_AUTOCAST, **AUTOCAST)
