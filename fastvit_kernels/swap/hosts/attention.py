"""Attentions of hosts that no table knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.attention.functions import attention
from ...ops.attention.sdpa import scaled_dot_product_attention
from ...ops.linear.functions import linear
from ...runtime.compat import attention_of
from ...runtime.plain import add_branch, is_plain
from ..prove import ROOTS
from . import rotary
from .attend import as_one, packable, registered, together
from .fused import (
    NOTHING,
    Epilogue,
    Given,
    Place,
    Resolved,
    example,
    inert,
    part,
    project_out,
    width_of,
)
from .grids import windows_of
from .masks import READINGS, example_of_mask, fits, reading_of
from .parts import resolved_attention
from .positions import bias_of, turned, with_decomposed
from .roles import Roles, as_result, entered, is_ours, resolved_entry, weight_and_bias
from .rotary import Turn, attend_turned, turn_of


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
    spread: str = ""  # how it takes them: together, "*" one by one, "*0" with unsqueeze_dim=0;
    # "each": one by one, for q and k apart and without the tokens of the prefix
    prefix: int = 0  # tokens that it leaves out
    kernel: str = ""  # what that computes, in words of `ways_of_rope`: the kernel may stand for it
    needs_rope: bool = False  # it takes no call without angles
    mask: str = ""  # the argument with a mask
    masks: tuple[tuple[str, str], ...] = ()  # the kinds that were proven, and how each is read
    raw: bool = False  # it reads the weights of its projections, and calls none
    biases: tuple[tuple[str, ...], ...] = ()  # then: of each projection, end to end; "" for zeros
    table: str = ""  # a bias of the scores: rows of this parameter
    index: str = ""  # by this buffer (T, T)
    along: tuple[str, ...] = ()  # decomposed relative positions: along height, along width
    turn: str = ""  # a child that turns q and k, all but `prefix` tokens
    tokens: int = 0  # as many as the child that turns them takes
    result: tuple[int, int] | None = None  # a tuple: its length, and the place of the tensor


def ways_of_rope() -> Iterator[str]:
    """What a host's rotation may be: the pairs, which table comes first, and whether all tokens
    before those of the tables are prefix, or a fixed number."""
    for pairs in ("half", "interleaved"):
        for first in ("cos before sin", "sin before cos"):
            for prefix in ("any prefix", "this prefix"):
                yield f"{pairs}, {first}, {prefix}"


def turn_by(roles: Any, angles: Any, x: Tensor, D: int) -> Turn | None:
    """The tables for x (B, T, C), where the kernel may turn by them."""
    if not roles.kernel or not isinstance(angles, (tuple, list)) or len(angles) != 2:
        return None
    one, two = angles
    if not isinstance(one, Tensor) or one.ndim != 2:
        return None  # more axes are the host's to read
    B, T = x.shape[:2]
    if "this prefix" in roles.kernel and one.shape[0] != T - roles.prefix:
        return None
    cos, sin = (two, one) if "sin before cos" in roles.kernel else (one, two)
    return turn_of(cos, sin, (B, roles.heads, T, D), "interleaved" in roles.kernel)


def attention_facts(module: Any) -> Any:
    """The attention function that a module of transformers has chosen."""
    config = getattr(module, "config", None)
    chosen = attention_of(config)
    return None if chosen is None else (chosen, registered(chosen))


def tokens_of(module: Any) -> tuple[int, ...]:
    """(T,) or (height, width), where the positions of an attention are for no other; else ()."""
    roles = module.fused_roles
    if roles.along:
        return tuple((len(part(module, n)) + 1) // 2 for n in roles.along)
    if roles.table:
        return (len(part(module, roles.index)),)
    return (roles.tokens,) if roles.tokens else ()


def takes(module: Any, x: Tensor) -> bool:
    """Whether x has as many tokens as the positions of an attention are for."""
    tokens = tokens_of(module)
    return not tokens or tuple(x.shape[1:-1]) == tokens


class Attention(Roles):
    """norm -> projections -> q_norm, k_norm -> attention -> inner_norm -> out -> dropout."""

    fused_level = "attention"
    fused_roles: ClassVar[AttentionRoles]

    def fused_products(self: Any) -> Iterator[nn.Module]:
        for name in (*self.fused_roles.projections, self.fused_roles.out):
            if name:
                yield part(self, name)

    def fused_blocked(self: Any) -> str | None:
        roles = self.fused_roles
        if roles.raw and not all(is_plain(part(self, n)) for n in roles.projections):
            return "it reads the weights of Linears that are no plain ones, and calls none"
        return self.fused_apart() or super().fused_blocked()

    def fused_apart(self: Any) -> str | None:
        """A host that calls its dropout follows the dropout's mode, one that reads its p its own
        mode: where they differ nobody knows which."""
        drop = self.fused_part("dropout")
        differ = isinstance(drop, nn.Dropout) and drop.p > 0 and drop.training != self.training
        return "its dropout of attention is in another mode" if differ else None

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 3 + self.fused_roles.grid and takes(self, x)

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
        return not inside and all(is_ours(part(self, n)) for n in self.fused_roles.projections)

    def fused_dropout_p(self: Any) -> float:
        drop = self.fused_part("dropout")
        p = getattr(drop, "p", drop)
        return float(p) if p and self.training else 0.0

    def fused_scale(self: Any) -> float | None:
        scale = self.fused_roles.scale
        return part(self, scale) if isinstance(scale, str) else scale

    def fused_weights(self: Any, place: int) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of a projection; None where it has to be called."""
        roles = self.fused_roles
        module = part(self, roles.projections[place])
        if not roles.raw:
            return weight_and_bias(module)
        names = roles.biases[place] if roles.biases else ()
        if not any(names):
            return module.weight, None
        size = module.weight.shape[0] // len(names)
        made = [part(self, n) if n else module.weight.new_zeros(size) for n in names]
        return module.weight, made[0] if len(made) == 1 else torch.cat(made)

    def fused_project(self: Any, place: int, x: Tensor) -> Tensor:
        weights = self.fused_weights(place)
        if weights is None:
            return part(self, self.fused_roles.projections[place])(x)
        return linear(x, *weights)

    def fused_packed(self: Any) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one projection to q, k and v; None where they must stay apart, or be
        called."""
        roles = self.fused_roles
        if len(roles.projections) == 1:
            return self.fused_weights(0)
        modules = [part(self, n) for n in roles.projections]
        if not roles.raw:
            return together(modules)
        biases = [self.fused_weights(place)[1] for place in range(3)]
        return as_one([m.weight for m in modules], biases)

    def fused_heads(self: Any, x: Tensor, angles: Any = None, mask: Tensor | None = None) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        roles = self.fused_roles
        H, scale, p = roles.heads, self.fused_scale(), self.fused_dropout_p()
        if mask is not None:
            reading = reading_of(roles, mask, x)
            assert reading is not None  # fits
            mask = READINGS[reading](mask)
        if roles.table:
            own = bias_of(self.fused_part("table"), self.fused_part("index"))
            mask = own if mask is None else own + mask
        turn = turn_by(roles, angles, x, self.fused_width() // H)
        apart = roles.wide_norms or roles.causal or roles.along or roles.turn
        norms = None if apart else self.fused_norms()
        if angles is not None and turn is None:
            norms = None  # the host's function turns q and k
        packed = None if norms is None or roles.layout != "3HD" else self.fused_packed()
        if norms is not None and packed is not None:
            return attend_turned(x, packed, H, turn, norms, mask=mask, dropout_p=p, scale=scale)
        if len(roles.projections) == 1:
            qkv = self.fused_project(0, x)
            axes = {"3HD": (3, H, -1), "H3D": (H, 3, -1), "HD3": (H, qkv.shape[-1] // (3 * H), 3)}
            qkv = qkv.unflatten(-1, axes[roles.layout])
            qkv = qkv.movedim(roles.layout.index("3") - 3, -3)  # (B, T, 3, H, D)
            plain = turn is None and norms is not None and norms.norm is None
            if plain and packable(qkv.shape[-1], p) and qkv.stride(-1) == 1:
                return attention(qkv, attn_mask=mask, scale=scale, dropout_p=p)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (self.fused_project(place, x) for place in range(3))
            if roles.wide_norms:
                q, k = self.fused_normed(q, k)
            q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        if not roles.wide_norms:
            q, k = self.fused_normed(q, k)
        if turn is not None:
            q, k = rotary.turned(q, k, turn, rotary.NO_NORMS)
        elif angles is not None:
            q, k = self.fused_rotated(q, k, angles)
        if roles.turn:
            rotate = self.fused_part("turn")
            q, k = (turned(rotate, t, roles.prefix, v) for t in (q, k))
        D = v.shape[-1]
        if roles.along:
            along: Any = tuple(part(self, n) for n in roles.along)
            q, k, v = with_decomposed(
                q, k, v, D**-0.5 if scale is None else scale, along, tokens_of(self)
            )
            scale = 1.0
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=roles.causal, scale=scale
        )
        return out.transpose(1, 2)[..., :D]

    def fused_rotated(self: Any, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """q, k (B, H, T, D), by the host's own function, as it is now."""
        name = self.fused_roles.rotate
        others = self.fused_host.forward.__globals__
        rotate: Any = getattr(self, name) if hasattr(self, name) else others[name]
        if not self.fused_roles.spread:
            return rotate(q, k, angles)
        if self.fused_roles.spread == "each":
            prefix = self.fused_roles.prefix
            q, k = (turned(lambda t: rotate(t, *angles), t, prefix, t) for t in (q, k))
            return q, k
        keywords = {"unsqueeze_dim": 0} if self.fused_roles.spread == "*0" else {}
        return rotate(q, k, *angles, **keywords)

    def fused_norms(self: Any) -> rotary.HeadNorms | None:
        q_norm, k_norm = self.fused_part("q_norm"), self.fused_part("k_norm")
        return rotary.head_norms(q_norm, k_norm, self.fused_width() // self.fused_roles.heads)

    def fused_normed(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = self.fused_part("q_norm"), self.fused_part("k_norm")
        return q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)

    def fused_branch(
        self: Any, x: Tensor, epilogue: Epilogue = NOTHING, window: int = 0, **extras: Any
    ) -> Tensor:
        roles, grid = self.fused_roles, x.shape[1:3]
        windows = windows_of(x, window) if window else None
        x = x if windows is None else windows.cut(x)
        first = part(self, roles.projections[0])
        y, epilogue = entered(self.fused_part("norm"), x, epilogue, first)
        y = y.flatten(1, 2) if y.ndim == 4 else y
        y = self.fused_heads(y, extras.get(roles.rope), extras.get(roles.mask)).flatten(2)
        if roles.inner_norm:
            y = self.fused_part("inner_norm")(y)
        if windows is not None:  # here, so that nobody projects what was only padded
            y = windows.joined(y)
        elif roles.grid:
            y = y.unflatten(1, grid)
        out, after = self.fused_part("out"), self.fused_part("after")
        if out is None:
            return add_branch(y, **epilogue)
        return project_out(out, after, y, epilogue)

    def fused_branch_resolved(self: Any, place: Place) -> Resolved:
        roles = self.fused_roles
        more = (
            roles.out == "" or roles.inner_norm or roles.grid or roles.wide_norms or roles.causal
            or roles.raw or roles.table or roles.along or roles.turn or roles.layout != "3HD"
        )  # fmt: skip
        if more or self.fused_norms() is not rotary.NO_NORMS or self.fused_draws():
            return self.fused_undecided(place)
        projections, drop = [part(self, n) for n in roles.projections], self.fused_part("dropout")
        inner = resolved_attention(
            self, place, projections, self.fused_part("out"), bool(getattr(drop, "p", drop)),
            self.fused_width() // roles.heads, roles.heads,
        )  # fmt: skip
        return resolved_entry(self, place, self.fused_part("norm"), projections[0], inner)

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        if self.fused_roles.weights and self not in ROOTS:
            return None  # only a block that drops the probabilities may ask for less
        return super().fused_given(args, kwargs)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        roles = self.fused_roles
        if roles.needs_rope and roles.rope not in extras:
            return None
        return (x, extras) if fits(roles, extras.get(roles.mask), x) else None

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
        if tokens := tokens_of(self):  # perhaps many
            shapes = [(2, *tokens, width), (1, *tokens, width)]
        for place, shape in enumerate(shapes):
            x = example(generator, *shape)
            given = {}
            if roles.rope:
                if "any prefix" in roles.kernel:
                    given = {roles.rope: self.fused_angles(generator, shape[1] - roles.prefix - 1)}
                    yield (x,), given
                given = {roles.rope: self.fused_angles(generator, shape[1] - roles.prefix)}
                yield (x,), given
            if not (roles.needs_rope or (place and tokens and roles.masks)):
                given = {}
                yield (x,), given
            for kind, reading in roles.masks if place or not tokens else ():
                mask = example_of_mask(kind, "keys" in reading, x, generator, roles.heads)
                yield (x,), given | {roles.mask: mask}

    def fused_angles(self: Any, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
        D = self.fused_width() // self.fused_roles.heads
        return tuple(example(generator, tokens, D).detach() for _ in range(2))  # type: ignore[return-value]

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        roles = self.fused_roles
        if (roles.rope and not roles.kernel) or roles.turn:
            yield "RoPE", 2 * 9 * self.fused_width()
