"""Hosts that no table knows: the fused forwards of attentions, MLPs and residual blocks whose parts
are found by structure.

`fused_roles` says which part of the host is what. The swapped class is made for one host class and
one set of roles, and its name spells both out, so that a pickle is read without a search.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.attention.functions import attention
from ...ops.attention.sdpa import scaled_dot_product_attention
from ...ops.common.activation import ACTIVATIONS
from ...ops.linear import linear
from ...ops.mlp import mlp
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import add_branch, is_hooked, is_plain
from .. import hosts
from ..prove import ROOTS, TOLERANCE
from .attend import attend_packed, attend_weights, packable, registered, together
from .branch import pre_norm_branch
from .fused import (
    Child,
    DropPath,
    Fused,
    Given,
    Inline,
    LayerNorm,
    LayerScale,
    bypassed,
    example,
    inert,
    left_dropouts,
    part,
    project,
    project_out,
    why_not_plain,
    width_of,
)


class Roles(Fused):
    """A module with roles. It runs its host's forward while anybody watches what is inside: its
    parts are bypassed in more ways than a table could list."""

    fused_roles: ClassVar[Any]

    def fused_part(self, role: str) -> Any:
        return part(self, getattr(self.fused_roles, role))

    def fused_blocked(self: Any) -> str | None:
        for name, module in self.named_modules():
            if name and is_hooked(module):
                return f"{name} is hooked"
        return None

    def fused_left(self: Any) -> Iterator[Child]:
        for name, module in self.named_modules():
            product = any(module is m for m in self.fused_products())
            if product and weight_and_bias(module) is None:
                yield name, module, why_not_plain(module)


def entered(
    norm: Any, x: Tensor, residual: Tensor | None, reader: Any
) -> tuple[Tensor, Tensor | None]:
    """norm(x) for a norm at a branch's entry, and the residual."""
    if norm is None:
        return x, residual
    if not (bypassed(norm) and isinstance(norm, LayerNorm)):
        return norm(x), residual
    low = autocast_dtype(x) if is_plain(reader) else None
    y, same = norm.fused_and_input(x, low)
    return y, same if residual is x else residual


class AttentionRoles(NamedTuple):
    """The parts of an attention by name; "" for none."""

    projections: tuple[str, ...]  # one Linear for q, k and v, or three
    heads: int
    out: str = ""
    layout: str = "3HD"  # of the columns of a packed projection
    scale: str | float | None = None  # a setting of the module, a number, or None for D**-0.5
    causal: bool = False
    dropout: str = ""  # of the probabilities: a setting or an nn.Dropout
    norm: str = ""  # before the projections
    q_norm: str = ""  # of each head's queries
    k_norm: str = ""
    inner_norm: str = ""  # between attention and the output projection
    after: str = ""  # a dropout behind the output projection
    grid: bool = False  # x is (B, height, width, C)
    wide_norms: bool = False  # q_norm and k_norm read (B, T, H D), not (B, H, T, D)
    weights: bool = False  # the result has the probabilities, too
    rounded: bool = False  # its softmax is in fp32, whatever the dtype
    rope: str = ""  # the argument with the angles
    rotate: str = ""  # the method or function of the host that rotates q and k by them
    spread: str = ""  # how it takes them: together, "*" one by one, "*0" with unsqueeze_dim=0
    prefix: int = 0  # tokens that it leaves out
    result: tuple[int, int] | None = None  # a tuple: its length, and the place of the tensor


def as_result(y: Tensor, form: tuple[int, int] | None) -> Any:
    """y, or a tuple of this length with y at its place and None elsewhere."""
    if form is None:
        return y
    return tuple(y if place == form[1] else None for place in range(form[0]))


def attention_facts(module: Any) -> Any:
    """The attention function that a module of transformers has chosen."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    return None if chosen is None else (chosen, registered(chosen))


class Attention(Roles):
    """norm -> projections -> q_norm, k_norm -> attention -> inner_norm -> out -> dropout."""

    fused_level = "attention"
    fused_roles: ClassVar[AttentionRoles]

    def fused_products(self: Any) -> Iterator[nn.Module]:
        for name in (*self.fused_roles.projections, self.fused_roles.out):
            if name:
                yield part(self, name)

    def fused_facts(self: Any) -> Any:
        return attention_facts(self)

    def fused_width(self: Any) -> int:
        """H D"""
        names = self.fused_roles.projections
        return part(self, names[0]).out_features // (3 if len(names) == 1 else 1)

    def fused_draws(self) -> bool:
        return not inert(self.fused_part("after"))

    def fused_reads_low(self: Any) -> bool:
        inside = self.fused_roles.norm  # which reads the dtype that comes
        return not inside and all(is_plain(part(self, n)) for n in self.fused_roles.projections)

    def fused_dropout_p(self: Any) -> float:
        drop = self.fused_part("dropout")
        p = getattr(drop, "p", drop)
        return float(p) if p and self.training else 0.0

    def fused_scale(self: Any) -> float | None:
        scale = self.fused_roles.scale
        return part(self, scale) if isinstance(scale, str) else scale

    def fused_heads(self: Any, x: Tensor, angles: Any = None) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        roles = self.fused_roles
        H, scale, p = roles.heads, self.fused_scale(), self.fused_dropout_p()
        modules = [part(self, n) for n in roles.projections]
        simple = angles is None and not (roles.causal or roles.q_norm or roles.k_norm)
        if len(modules) == 1:
            if simple and roles.layout == "3HD":
                if (weights := weight_and_bias(modules[0])) is not None:
                    return attend_weights(x, *weights, H, dropout_p=p, scale=scale)
                return attend_packed(modules[0](x), H, dropout_p=p, scale=scale)
            qkv = project(modules[0], x)
            axes = {"3HD": (3, H, -1), "H3D": (H, 3, -1), "HD3": (H, qkv.shape[-1] // (3 * H), 3)}
            qkv = qkv.unflatten(-1, axes[roles.layout])
            qkv = qkv.movedim(roles.layout.index("3") - 3, -3)  # (B, T, 3, H, D)
            if simple and packable(qkv.shape[-1], p) and qkv.stride(-1) == 1:
                return attention(qkv, scale=scale, dropout_p=p)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            packed = simple and all(map(is_plain, modules))
            if packed and (weights := together(modules)) is not None:
                return attend_weights(x, *weights, H, dropout_p=p, scale=scale)
            q, k, v = (project(m, x) for m in modules)
            if roles.wide_norms:
                q, k = self.fused_normed(q, k)
            q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        if not roles.wide_norms:
            q, k = self.fused_normed(q, k)
        if angles is not None:
            q, k = self.fused_rotated(q, k, angles)
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=p, is_causal=roles.causal, scale=scale
        )
        return out.transpose(1, 2)

    def fused_rotated(self: Any, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """q, k (B, H, T, D), by the host's own function, as it is now."""
        name = self.fused_roles.rotate
        rotate = getattr(self, name, None)
        if rotate is None:
            rotate = self.fused_host.forward.__globals__[name]
        if not self.fused_roles.spread:
            return rotate(q, k, angles)
        keywords = {"unsqueeze_dim": 0} if self.fused_roles.spread == "*0" else {}
        return rotate(q, k, *angles, **keywords)

    def fused_normed(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = self.fused_part("q_norm"), self.fused_part("k_norm")
        return q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)

    def fused_branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None, **extras: Any,
    ) -> Tensor:  # fmt: skip
        roles, shape = self.fused_roles, x.shape
        y, residual = entered(
            self.fused_part("norm"), x, residual, part(self, roles.projections[0])
        )
        angles = extras.get(roles.rope)
        y = self.fused_heads(y.flatten(1, 2) if roles.grid else y, angles).flatten(2)
        if roles.inner_norm:
            y = self.fused_part("inner_norm")(y)
        y = y.unflatten(1, shape[1:3]) if roles.grid else y
        out, after = self.fused_part("out"), self.fused_part("after")
        if out is None:
            return add_branch(y, residual, layer_scale, row_scale)
        return project_out(out, after, y, residual, layer_scale, row_scale)

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        if self.fused_roles.weights and self not in ROOTS:
            return None  # only a block that drops the probabilities may ask for less
        return super().fused_given(args, kwargs)

    def fused_wanted(self: Any, result: Any) -> Any:
        return result[self.fused_roles.result[1]] if self.fused_roles.weights else result

    def fused_forward(self, x: Tensor, **extras: Any) -> Any:
        y = self.fused_branch(x, **extras)
        return y if self.fused_roles.weights else as_result(y, self.fused_roles.result)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        width, roles = width_of(self), self.fused_roles
        shapes = [(3, 5, width), (2, 4, width)]
        if roles.grid:
            shapes = [(2, 3, 4, width), (3, 2, 2, width)]
        for shape in shapes:
            x = example(generator, *shape)
            if roles.rope:
                yield (x,), {roles.rope: self.fused_angles(generator, shape[1] - roles.prefix)}
                if roles.rope not in self.fused_arguments.defaults:
                    continue
            yield (x,), {}

    def fused_angles(self: Any, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
        D = self.fused_width() // self.fused_roles.heads
        return tuple(example(generator, tokens, D).detach() for _ in range(2))  # type: ignore[return-value]

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        if self.fused_roles.rope:
            yield "RoPE", 2 * 9 * self.fused_width()


class LinearRoles(NamedTuple):
    """x weight^T + mask * bias: the buffer that masks the bias."""

    mask: str


class MaskedLinear(Roles):
    """An nn.Linear of which a buffer switches parts of the bias off, as DINOv3 does with k's."""

    fused_level = "linear"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[LinearRoles]

    def fused_weights(self: Any) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias * self.fused_part("mask").to(self.bias.dtype)

    def fused_forward(self, x: Tensor) -> Tensor:
        return linear(x, *self.fused_weights())


def weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """What a Linear multiplies by and adds; None where it has to be called."""
    if is_plain(module):
        return module.weight, module.bias
    return module.fused_weights() if isinstance(module, MaskedLinear) and bypassed(module) else None


class MlpRoles(NamedTuple):
    """The parts of an MLP by name; "" for none."""

    fc1: str
    fc2: str
    activation: str  # by the name that our ops give it
    norm: str = ""  # before fc1
    drop: str = ""  # before inner_norm
    inner_norm: str = ""
    after: str = ""
    gate: str = ""  # gated: the Linear of the gate, beside fc1; or "first", "second" half of fc1's
    result: tuple[int, int] | None = None


class Mlp(Roles):
    """norm -> fc1 -> activation -> dropout -> inner_norm -> fc2 -> dropout, or with a gate."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[MlpRoles]

    def fused_products(self: Any) -> Iterator[nn.Module]:
        roles = self.fused_roles
        for name in (roles.fc1, roles.fc2, roles.gate):
            if name and name not in ("first", "second"):
                yield part(self, name)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        if self.fused_roles.gate:
            yield "gate of the MLP", 5 * self.fused_part("fc2").in_features

    def fused_reads_low(self) -> bool:
        return not self.fused_roles.norm and all(map(is_plain, self.fused_products()))

    def fused_draws(self) -> bool:
        return not (inert(self.fused_part("drop")) and inert(self.fused_part("after")))

    def fused_gated(self: Any, x: Tensor) -> Tensor:
        fc1, gate = self.fused_part("fc1"), self.fused_roles.gate
        if gate in ("first", "second"):
            first, second = project(fc1, x).chunk(2, dim=-1)
            up, gated = (second, first) if gate == "first" else (first, second)
        else:
            gated, up = project(part(self, gate), x), project(fc1, x)
        return ACTIVATIONS[self.fused_roles.activation](gated) * up

    def fused_branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        roles = self.fused_roles
        fc1, fc2 = self.fused_part("fc1"), self.fused_part("fc2")
        drop, norm, after = (self.fused_part(r) for r in ("drop", "inner_norm", "after"))
        y, residual = entered(self.fused_part("norm"), x, residual, fc1)
        if roles.gate:
            hidden = self.fused_gated(y)
        elif is_plain(fc1):
            if is_plain(fc2) and inert(drop) and norm is None and inert(after):
                return mlp(
                    y, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=roles.activation,
                    residual=residual, layer_scale=layer_scale, row_scale=row_scale,
                )  # fmt: skip
            hidden = linear(y, fc1.weight, fc1.bias, activation=roles.activation)
        else:
            hidden = ACTIVATIONS[roles.activation](fc1(y))
        for m in (drop, norm):
            hidden = hidden if m is None else m(hidden)
        return project_out(fc2, after, hidden, residual, layer_scale, row_scale)

    def fused_forward(self, x: Tensor) -> Any:
        return as_result(self.fused_branch(x), self.fused_roles.result)


class NormRoles(NamedTuple):
    """A LayerNorm by its own settings; fp32: it computes in fp32 and gives x.dtype."""

    fp32: bool
    rounded: bool


class Norm(LayerNorm, Roles):
    """A subclass of nn.LayerNorm."""

    fused_roles: ClassVar[NormRoles]

    def fused_blocked(self) -> str | None:
        return None

    def fused_and_input(
        self: Any, x: Tensor, out_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        low = out_dtype or (x.dtype if self.fused_roles.fp32 else None)
        return super().fused_and_input(x, low)

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        return self.fused_and_input(x, None)[0]


class ScaleRoles(NamedTuple):
    """x * gamma"""

    gamma: str


class Scale(LayerScale, Roles):
    """A host's LayerScale. Its forward stays the host's."""

    fused_roles: ClassVar[ScaleRoles]
    fused_axes = (2, 3, 4)
    fused_verdict = Fused.fused_verdict

    def fused_scale(self) -> Tensor:
        return self.fused_part("gamma")

    def fused_forward(self, x: Tensor) -> Tensor:
        return x * self.fused_scale()

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        width = self.fused_scale().shape[-1]
        for shape in ((3, 5, width), (2, 4, width)):
            yield (example(generator, *shape),), {}


class PathRoles(NamedTuple):
    """Stochastic depth: the setting with its probability, and how its numbers are drawn."""

    rate: str
    drawn: str  # "bernoulli", or "rand" for floor(keep + uniform)
    scaled: bool = True


class Path(DropPath, Roles):
    """A host's DropPath. Its forward stays the host's."""

    fused_roles: ClassVar[PathRoles]
    fused_axes = (2, 3, 4)
    fused_verdict = Fused.fused_verdict

    def fused_row_scale(self: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        rate = self.fused_part("rate")
        if not rate or not self.training:
            return None
        keep = 1 - rate
        if self.fused_roles.drawn == "rand":
            drawn = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=dtype, device=x.device)
            drawn = torch.floor(drawn + keep).flatten()
            return drawn / keep if self.fused_roles.scaled else drawn
        drawn = x.new_empty(x.shape[0], dtype=dtype).bernoulli_(keep)
        return drawn.div_(keep) if keep > 0 and self.fused_roles.scaled else drawn

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        rows = self.fused_row_scale(x, x.dtype)
        return x if rows is None else x * rows.view(-1, *[1] * (x.ndim - 1))

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for shape in ((7, 3, 2), (5, 2, 2), (3, 2, 4), (2, 2, 2)):
            yield (example(generator, *shape),), {}


class Step(NamedTuple):
    """values[output] = values[residual] + tail(body(norm(values[source]))), by names in the block;
    "" and -1 for what is not there. `arguments` and `item` say how the host calls the body."""

    output: int
    source: int
    residual: int = -1
    norm: str = ""
    body: str = ""
    tail: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = (("x",), ())  # positional, and (name, value); "x" for the input
    item: int | None = None
    inline: AttentionRoles | MlpRoles | None = None  # a body that is no module of its own
    context: tuple[tuple[str, str], ...] = ()  # arguments of the body that are the block's own


class BlockRoles(NamedTuple):
    """What a residual block does, step by step. Value 0 is its input, the last one its result."""

    steps: tuple[Step, ...]
    through: tuple[str, ...] = ()  # parts between the block and its steps, which are not called
    result: tuple[int, int] | None = None
    evaluation: bool = False  # in training the host does something else
    rounded: bool = False  # a part of it rounds to fp32
    lists: bool = False  # it takes lists of inputs, one after the other


class _Inline(Inline):
    """The roles of a branch in the block that has its parts."""

    def __init__(self, owner: nn.Module, roles: Any):
        self.owner, self.fused_roles = owner, roles

    def __call__(self: Any, x: Tensor) -> Tensor:
        return self.fused_branch(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


class InlineAttention(_Inline):
    fused_products, fused_part, fused_width = (
        Attention.fused_products, Roles.fused_part, Attention.fused_width,
    )  # fmt: skip
    fused_draws, fused_reads_low = Attention.fused_draws, Attention.fused_reads_low
    fused_dropout_p, fused_scale = Attention.fused_dropout_p, Attention.fused_scale
    fused_heads, fused_normed = Attention.fused_heads, Attention.fused_normed
    fused_branch = Attention.fused_branch


class InlineMlp(_Inline):
    fused_products, fused_part = Mlp.fused_products, Roles.fused_part
    fused_draws, fused_reads_low = Mlp.fused_draws, Mlp.fused_reads_low
    fused_gated, fused_branch = Mlp.fused_gated, Mlp.fused_branch


def inline(owner: nn.Module, roles: Any) -> Any:
    """The branch with these roles."""
    return (InlineMlp if isinstance(roles, MlpRoles) else InlineAttention)(owner, roles)


class Block(Roles):
    """Branches with their norms, LayerScale, DropPath and residuals, in the host's order."""

    fused_level = "block"
    fused_axes = (3, 4)
    fused_roles: ClassVar[BlockRoles]

    def fused_body(self: Any, step: Step) -> Any:
        return part(self, step.body) if step.inline is None else inline(self, step.inline)

    def fused_inlined(self: Any) -> list[Any]:
        return [inline(self, s.inline) for s in self.fused_roles.steps if s.inline is not None]

    def fused_products(self) -> Iterator[nn.Module]:
        for body in self.fused_inlined():
            yield from body.fused_products()

    def fused_widths(self) -> Iterator[int]:
        for body in self.fused_inlined():
            if isinstance(body, InlineAttention):
                yield body.fused_width()

    @property
    def fused_pieces(self) -> tuple[str, ...]:  # type: ignore[override]
        names = [n for s in self.fused_roles.steps for n in (s.norm, s.body, *s.tail)]
        found = dict.fromkeys(n for n in names if n and isinstance(part(self, n), nn.Module))
        return tuple(n for n in found if type(part(self, n)) is not nn.Dropout)

    @property
    def fused_bodies(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(s.body for s in self.fused_roles.steps if s.residual >= 0 and s.body)

    def fused_blocked(self: Any) -> str | None:
        if self.training and self.fused_roles.evaluation:
            return "in training its forward does something else"
        for name in self.fused_roles.through:
            if is_hooked(part(self, name)):
                return f"{name} is hooked"
        return None

    def fused_facts(self: Any) -> Any:
        return attention_facts(self)

    def fused_left(self: Any) -> Iterator[Child]:
        if self.fused_inlined():
            yield from super().fused_left()
        for step in self.fused_roles.steps:
            for name in step.tail:
                if isinstance(part(self, name), nn.Module) and "." not in name:
                    yield from left_dropouts(self, name)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for step in self.fused_roles.steps:
            body = self.fused_body(step)
            if isinstance(getattr(body, "fused_roles", None), AttentionRoles):
                given = dict(step.context)
                calls = [
                    (args, {given[n]: v for n, v in kwargs.items() if n in given})
                    for args, kwargs in Attention.fused_examples(body, generator)
                ]
                yield from calls
                if self.fused_roles.lists:
                    for one, two in ((0, 2), (-1, 1)):
                        (a, e), (b, f) = calls[one], calls[two % len(calls)]
                        both = {n: [e.get(n), f.get(n)] for n in e | f}
                        yield ([a[0], b[0]],), both
                return
        width = width_of(self)
        for shape in ((3, 5, width), (2, 4, width)):
            yield (example(generator, *shape),), {}

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self.fused_roles.lists and args and isinstance(args[0], list)):
            return super().fused_given(args, kwargs)
        every = {**dict(zip(self.fused_arguments.names[1:], args[1:], strict=False)), **kwargs}
        others = {n: v for n, v in every.items() if n in self.fused_extras and v is not None}
        if any(type(v) is not list or len(v) != len(args[0]) for v in others.values()):
            return None
        rest = {n: v for n, v in every.items() if n not in others}
        calls = [
            Roles.fused_given(self, (x,), rest | {n: v[i] for n, v in others.items()})
            for i, x in enumerate(args[0])
        ]
        return (calls, {}) if calls and None not in calls else None

    def fused_call(self: Any, step: Step, context: dict[str, Any]) -> Any:
        """The body as the host calls it."""
        body = part(self, step.body)
        if bypassed(body) and hasattr(body, "fused_branch"):
            return partial(body.fused_branch, **context)
        if step.arguments == (("x",), ()) and step.item is None and not context:
            return body

        def call(y: Tensor) -> Tensor:
            args, kwargs = step.arguments
            args = [y if a == "x" else a for a in args]
            kwargs = {n: y if a == "x" else a for n, a in kwargs} | context
            result = body(*args, **kwargs)
            return result if step.item is None else result[step.item]

        return call

    def fused_forward(self: Any, x: Any, **extras: Any) -> Any:
        if isinstance(x, list):
            return [self.fused_forward(one, **more) for one, more in x]
        values = {0: x}
        for step in self.fused_roles.steps:
            context = {n: extras[given] for n, given in step.context if given in extras}
            source, norm = values[step.source], part(self, step.norm)
            if step.residual < 0:
                y = self.fused_call(step, context)(source)
            else:
                residual, tail = values[step.residual], [part(self, n) for n in step.tail]
                body = self.fused_body(step)
                call = None if step.inline is not None else self.fused_call(step, context)
                y = pre_norm_branch(
                    source, norm, body, *tail, call=call, residual=residual, **context
                )
            values[step.output] = y
        return as_result(values[self.fused_roles.steps[-1].output], self.fused_roles.result)


# Classes, and their names.

KINDS = (Attention, MaskedLinear, Mlp, Norm, Scale, Path, Block)
ROUNDED = 1e-5  # of a proof beside a host that rounds to fp32

_made: dict[tuple[type, type, Any], type] = {}


def _dropouts(roles: Any) -> frozenset[str]:
    """Dropouts of attention, which draw numbers of their own."""
    if isinstance(roles, BlockRoles):
        return frozenset().union(*(_dropouts(s.inline) for s in roles.steps))
    return frozenset((roles.dropout,)) if getattr(roles, "dropout", "") else frozenset()


def _extras(roles: Any) -> tuple[str, ...]:
    """The arguments besides the first that the fused forward takes."""
    if isinstance(roles, BlockRoles):
        return tuple(dict.fromkeys(given for s in roles.steps for _, given in s.context))
    return (roles.rope,) if getattr(roles, "rope", "") else ()


def recognised_class(mixin: type[Roles], host: type, roles: Any) -> Any:
    """The swapped class of a host class whose parts have these roles."""
    key = (mixin, host, roles)
    with hosts.making:
        if key not in _made:
            spelled = json.dumps([hosts.host_path(host), _spelled(roles)]).encode().hex()
            _made[key] = hosts.make(
                sys.modules[__name__], mixin, host, f"{mixin.__name__}_{spelled}",
                {
                    "fused_roles": roles,
                    "fused_extras": _extras(roles),
                    "fused_attention_dropout": _dropouts(roles),
                    "fused_tolerance": ROUNDED if getattr(roles, "rounded", False) else TOLERANCE,
                },
            )  # fmt: skip
        return _made[key]


def _spelled(value: Any) -> Any:
    """Roles as JSON has them: a NamedTuple with its name before its values."""
    if isinstance(value, tuple):
        named = [type(value).__name__] if hasattr(value, "_fields") else [""]
        return named + [_spelled(v) for v in value]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        values = tuple(map(_read, value[1:]))
        return globals()[value[0]](*values) if value[0] else values
    return value


def __getattr__(name: str) -> type:
    """A class by the name that recognised_class gave it, for a pickle in another process."""
    mixin = {c.__name__: c for c in KINDS}.get(name.partition("_")[0])
    if mixin is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, roles = json.loads(bytes.fromhex(name.partition("_")[2]))
    module, _, host = path.rpartition(".")
    return recognised_class(mixin, getattr(importlib.import_module(module), host), _read(roles))
