"""Attentions by their roles, which a table's row says or a search finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...models.packing import Crops
from ...ops.linear.functions import linear
from ...runtime.compat import attention_of
from ...runtime.plain import is_plain
from ..prove import ROOTS
from . import attend, fused
from .attend import NO_NORMS, HeadNorms, Turn, as_one, attend_qkv, attend_weights, turned, unpack
from .fused import Epilogue, Given, Place, example, in_role, is_noop, norm_in_pytorch, normed, part
from .grids import bias_of, turned_behind, with_decomposed
from .masks import READINGS, as_read, example_of_mask, fits, reading_of
from .roles import Body, is_ours, planned_entry, weight_and_bias

# (the plan's modules, x (B, T, C), the other arguments) -> (B, T, H, D)
Heads = Callable[[list[Any], Tensor, dict[str, Any]], Tensor]
Calls = Sequence[tuple[Tensor, dict[str, Any]]]  # x (B, T, C) and the other arguments, of each
# What a class that runs packed has of Attention.
_OF_SEQUENCES = ("fused_heads", "fused_attend", "fused_mask")
_OF_SEQUENCES += ("fused_planned", "fused_planned_heads")


class AttentionRoles(NamedTuple):
    """The parts of an attention by name; "" for none."""

    projections: tuple[str, ...]  # a Linear, or a weight, for q, k and v, or three; or either
    heads: int | str = ""  # a setting of the module, or a number
    out: str = ""
    layout: str = "3HD"  # of the columns of a packed projection
    scale: str | float | None = None  # a setting of the module, a number, or None for D**-0.5
    causal: bool | str = False  # or the argument that says so where there is no mask
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
    # "each": one by one, for q and k apart and without the tokens of the prefix; "tokens": one by
    # one, with q and k (B, T, H, D)
    prefix: int | str = 0  # tokens that it leaves out, or the setting that says how many
    kernel: str = ""  # what that computes, in words of `ways_of_rope`: the kernel may stand for it
    needs_rope: bool = False  # it takes no call without angles
    mask: str = ""  # the argument with a mask
    masks: tuple[tuple[str, str], ...] = ()  # the kinds that were proven, and how each is read
    raw: bool = False  # it reads the weights of its projections, and calls none; with biases of
    biases: tuple[tuple[str, ...], ...] = ()  # each projection, end to end: where there are these
    table: str = ""  # a bias of the scores: rows of this parameter
    index: str = ""  # by this buffer (T, T)
    along: tuple[str, ...] = ()  # decomposed relative positions: along height, along width
    turn: str = ""  # a child that turns q and k, all but `prefix` tokens
    tokens: int | str = 0  # that it takes, or the setting with those, or the sides, of a window
    result: tuple[int, int] | None = None  # a tuple: its length, and the place of the tensor
    head_dim: str = ""  # the setting with D, where `heads` says nothing
    gate: str = ""  # a Linear of x: what attention gives is multiplied by its sigmoid
    groups: str = ""  # the setting that says how many queries share a key
    through: tuple[str, ...] = ()  # parts that are not called: a hook on one wants the host's calls


def ways_of_rope() -> Iterator[str]:
    """What a host's rotation may be: the pairs, which table comes first, and whether all tokens
    before those of the tables are prefix, or a fixed number."""
    orders = ("cos before sin", "sin before cos")
    return map(", ".join, product(("half", "interleaved"), orders, ("any prefix", "this prefix")))


def attention_facts(module: Any) -> Any:
    """The attention function that a module of transformers has chosen."""
    config = getattr(module, "config", None)
    chosen = attention_of(config)
    return None if chosen is None else (chosen, attend.registered(chosen))


def tokens_of(module: Any) -> tuple[int, ...]:
    """(T,) or (height, width), where the positions of an attention are for no other; else ()."""
    roles = module.fused_roles
    along = [part(module, n, None) for n in roles.along]
    if along and along[0] is not None:
        return tuple((len(t) + 1) // 2 for t in along)
    if in_role(module, "table") is not None:
        return (len(in_role(module, "index")),)
    tokens: Any = part(module, roles.tokens) if isinstance(roles.tokens, str) else roles.tokens
    tokens = tokens if isinstance(tokens, int) else math.prod(tokens)
    return (tokens,) if tokens else ()


class Attention(Body):
    """norm -> projections -> q_norm, k_norm -> attention -> inner_norm, gate -> out -> dropout."""

    fused_level = "attention"
    fused_roles: ClassVar[AttentionRoles]

    def fused_projections(self: Any) -> tuple[Any, ...]:
        every = (type(self).fused_child(self, n) for n in self.fused_roles.projections)
        return tuple(m for m in every if m is not None)

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        if isinstance(self.fused_roles.tokens, str):
            yield self, tokens_of(self)[0]

    def fused_raw(self: Any) -> bool:
        """Whether the host reads the weights of its projections without a call."""
        roles = self.fused_roles
        named = [n for names in roles.biases for n in names if n]
        return roles.raw and all(part(self, n, None) is not None for n in named)

    def fused_blocked(self: Any) -> str | None:
        kind = type(self)
        if kind.fused_raw(self) and not all(map(is_ours, kind.fused_projections(self))):
            return "it reads the weights of Linears that are no plain ones, and calls none"
        apart = self.fused_apart() if kind.fused_searched else None
        apart = apart or fused.hooked(self, *self.fused_roles.through)
        return apart or Body.fused_blocked(self)

    def fused_apart(self: Any) -> str | None:
        """A host that calls its dropout follows the dropout's mode, one that reads its p its own
        mode: where they differ nobody knows which."""
        drop = in_role(self, "dropout")
        differ = isinstance(drop, nn.Dropout) and drop.p > 0 and drop.training != self.training
        return "its dropout of attention is in another mode" if differ else None

    def fused_takes(self: Any, x: Tensor) -> bool:
        axes = (4,) if self.fused_roles.grid else self.fused_axes
        return x.ndim in axes and tokens_of(self) in ((), tuple(x.shape[1:-1]))

    def fused_width(self: Any) -> int:
        """H D"""
        first, *others = type(self).fused_projections(self)
        width = len(first) if isinstance(first, Tensor) else first.out_features
        return width // (1 if others else 3)

    def fused_head_dim(self: Any) -> int:
        roles = self.fused_roles
        if roles.head_dim:
            return part(self, roles.head_dim)
        H = part(self, roles.heads) if isinstance(roles.heads, str) else roles.heads
        return type(self).fused_width(self) // H

    def fused_draws(self) -> bool:
        return not is_noop(in_role(self, "after"))

    def fused_accepts_autocast_input(self: Any) -> bool:
        if self.fused_roles.norm or in_role(self, "gate") is not None:
            return False  # a norm reads the dtype that comes
        return all(map(is_ours, type(self).fused_projections(self)))

    def fused_dropout_p(self: Any) -> float:
        drop = in_role(self, "dropout")
        p: Any = drop.p if isinstance(drop, nn.Module) else drop  # Dynamo may make it a symbol
        return float(p) if p and self.training else 0.0

    def fused_scale(self: Any) -> float | None:
        # timm's `fused_attn` leaves it to torch
        by_torch = getattr(self, "fused_attn", False) and not type(self).fused_searched
        scale = None if by_torch else self.fused_roles.scale
        return part(self, scale) if isinstance(scale, str) else scale

    def fused_weights(self: Any) -> list[tuple[Tensor, Tensor | None] | None]:
        """Weight and bias of each projection; None for one that has to be called."""
        roles, modules = self.fused_roles, self.fused_projections()
        if not self.fused_raw():
            return [weight_and_bias(m) for m in modules]
        found = []
        for module, names in zip(modules, roles.biases or ((),) * len(modules)):  # noqa: B905
            weight, bias = getattr(module, "weight", module), None
            if any(names):
                zeros = weight.new_zeros(len(weight) // len(names))
                ends = [part(self, n) if n else zeros for n in names]
                bias = ends[0] if len(ends) == 1 else torch.cat(ends)
            found.append((weight, bias))
        return found

    def fused_bias(self: Any) -> Tensor | None:
        """What it adds to the scores of its own, (H, T, T) or (1, H, T, T)."""
        table = in_role(self, "table")
        return None if table is None else bias_of(table, in_role(self, "index"))

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        """What is added to the scores of x (B, T, C), or says which keys are hidden."""
        roles = self.fused_roles
        mask, own = extras.get(roles.mask), self.fused_bias()
        if mask is not None and roles.masks:
            reading = reading_of(roles, mask, x)
            assert reading is not None  # fits
            mask = READINGS[reading](mask)
            mask = mask if self.fused_searched else as_read(mask, x)
        return own if mask is None else mask if own is None else own + mask

    def fused_turn(self: Any, x: Tensor, angles: Any) -> Turn | None:
        """The tables for x (B, T, C); None where the host's function turns q and k."""
        roles, shape = self.fused_roles, (x.shape[0], 1, x.shape[1], self.fused_head_dim())
        turn = attend.turn_of(angles, shape, "interleaved" in roles.kernel)
        if not roles.kernel or turn is None or turn.cos.ndim != 2:
            return None  # more axes are the host's to read
        cos, sin, interleaved = turn
        if "this prefix" in roles.kernel and len(cos) != x.shape[1] - roles.prefix:
            return None
        return Turn(sin, cos, interleaved) if "sin before cos" in roles.kernel else turn

    def fused_heads(self: Any, x: Tensor, **extras: Any) -> Tensor:
        """(B, T, C) -> (B, T, H, D); with a packing (total, C) -> (total, H, D)"""
        if (packing := extras.get("packing")) is not None:
            turn = self.fused_turns(x, packing, extras.get(self.fused_roles.rope))
            return self.fused_attend(x.unsqueeze(0), turn=turn, packing=packing).squeeze(0)
        angles = extras.get(self.fused_roles.rope)
        turn = None if angles is None else self.fused_turn(x, angles)
        mask, causal = self.fused_mask(x, extras), self.fused_roles.causal
        if isinstance(causal, str):
            causal = mask is None and bool(extras.get(causal))
        return self.fused_attend(x, mask, turn, angles, causal=causal)

    def fused_turns(
        self: Any, x: Tensor, packing: Crops, angles: tuple[Any, ...] | None
    ) -> Turn | None:
        """The tables for all tokens of x (total, C), of the angles of each size."""
        if angles is None or angles[0] is None:
            return None

        def tables(place: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
            turn = self.fused_turn(x.new_empty((*size, 0)), angles[place])
            return turn.cos, turn.sin

        key = type(self), self.fused_head_dim(), self.fused_prefix(), *map(id, angles)
        first = self.fused_turn(x.new_empty((*packing.whole.sizes[0], 0)), angles[0])
        return Turn(*packing.rows(key, tables), first.interleaved)

    def fused_unpacked(self: Any) -> str | None:
        """Why it cannot see several sequences as one, whatever the call."""
        roles, kind = self.fused_roles, type(self)
        placed = roles.causal is True or roles.grid or roles.turn or tokens_of(self)
        changed = any(getattr(kind, n) is not getattr(Attention, n) for n in _OF_SEQUENCES)
        if placed or changed or self.fused_bias() is not None:
            return "its attention knows where a token stands, or attends in another way"
        fits = attend.packable(self.fused_head_dim(), self.fused_dropout_p())
        return None if fits else f"no kernel for packed heads of {self.fused_head_dim()}"

    def fused_unlike(self: Any, calls: Calls) -> str | None:
        """Why these calls cannot."""
        roles = self.fused_roles
        if any(extras.get(roles.mask) is not None for _, extras in calls):
            return "its attention is given a mask"
        if any(extras.get(roles.causal) for _, extras in calls):
            return "its attention is causal"
        every = [(x, extras.get(roles.rope)) for x, extras in calls]
        by_host = any(e is not None and self.fused_turn(x, e) is None for x, e in every)
        return "its host turns queries and keys" if by_host else None

    def fused_attend(
        self: Any,
        x: Tensor,
        mask: Tensor | None = None,
        turn: Turn | None = None,
        angles: Any = None,
        packing: Crops | None = None,
        causal: bool = False,
    ) -> Tensor:
        """(B, T, C) -> (B, T, H, D); angles without a turn are for the host's own function."""
        roles, D = self.fused_roles, self.fused_head_dim()
        given: Any = dict(mask=mask, dropout_p=self.fused_dropout_p(), scale=self.fused_scale())
        given["packing"] = packing
        norms, by_host = self.fused_norms(), angles is not None and turn is None
        along: Any = tuple(part(self, n, None) for n in roles.along)
        along = () if None in along else along
        known = by_host or causal or len(along) > 0 or roles.turn  # Dynamo negates no tuple
        usual = norms is not None and not known
        low = not (turn is not None or by_host or roles.turn)  # only attention reads what is normed
        weights = self.fused_weights()
        packed = as_one(weights) if roles.layout == "3HD" else None
        if norms is not None and usual and packed is not None:
            return attend_weights(x, *packed, packed[0].shape[0] // (3 * D), turn, norms, **given)
        if packed is not None:
            every = linear(x, *packed).chunk(len(weights), dim=-1)
        else:
            modules = self.fused_projections()
            every = [m(x) if w is None else linear(x, *w) for m, w in zip(modules, weights)]  # noqa: B905
        if len(every) == 1:
            qkv = every[0]
            H = qkv.shape[-1] // (3 * D)
            axes = {"3HD": (3, H, D), "H3D": (H, 3, D), "HD3": (H, D, 3)}[roles.layout]
            qkv = qkv.unflatten(-1, axes).movedim(roles.layout.index("3") - 3, -3)
            if norms is not None and usual:
                return attend_qkv(qkv, turn, norms, **given)
            every = [t.flatten(-2) for t in qkv.unbind(-3)] if roles.wide_norms else ()
            q, k, v = every or unpack(qkv)
        else:
            q, k, v = every
        if len(every) > 0:
            if roles.wide_norms:
                q, k = self.fused_normed(q, k, low)
            q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
        groups = getattr(self, roles.groups, 1)
        if groups > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        if norms is None and not roles.wide_norms:
            q, k = self.fused_normed(q, k, low)
        q, k = turned(q, k, turn, norms or NO_NORMS)
        if by_host:
            q, k = (t.type_as(v) for t in self.fused_rotated(q, k, angles))
        if roles.turn:
            rotate = in_role(self, "turn")
            q, k = (turned_behind(rotate, t, roles.prefix, v) for t in (q, k))
        if along:
            scale = D**-0.5 if given["scale"] is None else given["scale"]
            q, k, v = with_decomposed(q, k, v, scale, along, tokens_of(self))
            given["scale"] = 1.0
        return attend.attend(q, k, v, is_causal=causal, **given)[..., :D]

    def fused_rotation(self: Any) -> Any:
        name, others = self.fused_roles.rotate, self.fused_host.forward.__globals__
        return getattr(self, name) if hasattr(self, name) else others[name]

    def fused_rotated(self: Any, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """q, k (B, H, T, D), by the host's own function, as it is now."""
        rotate = self.fused_rotation()
        if not self.fused_roles.spread:
            return rotate(q, k, angles)
        if self.fused_roles.spread == "each":
            prefix = self.fused_roles.prefix
            q, k = (turned_behind(lambda t: rotate(t, *angles), t, prefix, t) for t in (q, k))
            return q, k
        if self.fused_roles.spread == "tokens":
            q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), *angles)
            return q.transpose(1, 2), k.transpose(1, 2)
        keywords = {"unsqueeze_dim": 0} if self.fused_roles.spread == "*0" else {}
        return rotate(q, k, *angles, **keywords)

    def fused_norms(self: Any) -> HeadNorms | None:
        """The norms of q and k by head, as `rope` takes them; None where they are called."""
        if self.fused_roles.wide_norms:
            return None
        q_norm, k_norm = in_role(self, "q_norm"), in_role(self, "k_norm")
        return attend.head_norms(q_norm, k_norm, type(self).fused_head_dim(self))

    def fused_normed(self: Any, q: Tensor, k: Tensor, low: bool) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = in_role(self, "q_norm"), in_role(self, "k_norm")
        return normed(q_norm, q, low)[0], normed(k_norm, k, low)[0]

    def fused_planned(self: Any, place: Place) -> fused.Planned:
        after, inner = in_role(self, "after"), in_role(self, "inner_norm")
        kind, out = type(self), in_role(self, "out")
        found, heads = kind.fused_found(self, place), kind.fused_planned_heads(self, place)
        enter = planned_entry(place, in_role(self, "norm"), kind.fused_projections(self)[0])
        between = in_role(self, "gate") is not None or not is_noop(inner)
        writes = None
        if out is not None and is_plain(out) and is_noop(after):
            writes = place(out)

        def run(modules: list[Any], x: Tensor, epilogue: Epilogue, more: Any) -> Tensor:
            gate, axes, windows, grid = None, x.ndim, None, x.shape[1:3]
            if "windows" in more:
                windows, more = more["windows"], {n: v for n, v in more.items() if n != "windows"}
                x = windows.cut(x)
            if enter is not None:
                x, epilogue = enter(modules, x, epilogue)
            if x.ndim == 4:
                x = x.flatten(1, 2)
            if between and (gate := in_role(found(modules), "gate")) is not None:
                gate = fused.project(gate, x).sigmoid()
            y = heads(modules, x, more).flatten(-2)
            if between:
                me = found(modules)
                y, _ = normed(in_role(me, "inner_norm"), y, is_plain(in_role(me, "out")))
                y = y if gate is None else y * gate
            if windows is not None:  # here, so that nobody projects what was only padded
                y = windows.joined(y, tokens=axes == 3)
            elif axes == 4:
                y = y.unflatten(1, grid)
            if writes is None:
                me = found(modules)
                last, drop = in_role(me, "out"), in_role(me, "after")
                return fused.project_out(last, drop, y, epilogue)
            return linear(y, *fused.weights_of(modules[writes]), **epilogue)

        return run

    def fused_planned_heads(self: Any, place: Place) -> Heads:
        """`fused_heads`, at once by the weights of plain Linears where the call gives x alone."""
        own, usual, roles = type(self), Attention, self.fused_roles
        linears, found = own.fused_projections(self), own.fused_found(self, place)
        more = own.fused_heads is not usual.fused_heads or own.fused_bias is not usual.fused_bias
        more = more or roles.causal is True or roles.table or roles.along or roles.turn
        more, raw = more or roles.layout != "3HD", own.fused_raw(self)
        plain = raw or all(map(is_plain, linears))
        if more or not plain or own.fused_norms(self) is not NO_NORMS:
            return lambda modules, x, more: found(modules).fused_heads(x, **more)
        D, drop = own.fused_head_dim(self), in_role(self, "dropout")
        reads, scale = [] if raw else [*map(place, linears)], own.fused_scale(self)
        drops = bool(drop.p if isinstance(drop, nn.Module) else drop) and self.training

        def heads(modules: list[Any], x: Tensor, more: Any) -> Tensor:
            if more:  # a mask or angles
                return found(modules).fused_heads(x, **more)
            packed: Any = None if raw else fused.weights_of(modules[reads[0]])
            if raw:
                packed = as_one(found(modules).fused_weights())
            elif len(reads) > 1:
                packed = as_one([fused.weights_of(modules[at]) for at in reads])
            if packed is None:  # frozen apart, or of several dtypes
                return found(modules).fused_heads(x, **more)
            dropout_p = found(modules).fused_dropout_p() if drops else 0.0
            H = packed[0].shape[0] // (3 * D)  # whatever the Linears say
            return attend_weights(x, packed[0], packed[1], H, dropout_p=dropout_p, scale=scale)

        return heads

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        if self.fused_roles.weights and self not in ROOTS:
            return None  # only a block that drops the probabilities may ask for less
        return super().fused_given(args, kwargs)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        roles = self.fused_roles
        if roles.needs_rope and extras.get(roles.rope) is None:
            return None
        known = not roles.masks or fits(roles, extras.get(roles.mask), x)
        return (x, extras) if known else None

    def fused_wanted(self: Any, result: Any) -> Any:
        return result[self.fused_roles.result[1]] if self.fused_roles.weights else result

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        first = self.fused_projections()[0]
        C = first.shape[1] if isinstance(first, Tensor) else fused.width_of(first)
        if tokens := tokens_of(self):  # perhaps many
            masked = bool(self.fused_roles.mask)  # of two windows, or by any number
            several = 4 if isinstance(self.fused_roles.tokens, str) else 1 + masked
            return [(2 - masked * (several == 2), *tokens, C), (several, *tokens, C)]
        if self.fused_roles.grid:
            return [(2, 3, 4, C), (3, 2, 2, C)]
        prefix = self.fused_prefix()
        return [(3, 5 + prefix, C), (2, 4 + prefix, C)]

    def fused_prefix(self: Any) -> int:
        prefix = self.fused_roles.prefix
        return getattr(self, prefix, 1) if isinstance(prefix, str) else prefix

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        roles, tokens = self.fused_roles, tokens_of(self)
        masks = roles.masks if roles.mask in self.fused_extra_kwargs else ()
        heads = self.fused_width() // self.fused_head_dim()
        for place, shape in enumerate(self.fused_shapes()):
            x, given = example(generator, *shape), {}
            for given in self.fused_others(x, generator):
                if not (place and tokens and masks):
                    yield (x,), given
            if isinstance(roles.causal, str) and roles.causal in self.fused_extra_kwargs:
                yield (x,), {roles.causal: True}
            for kind, reading in masks if place or not tokens else ():
                mask = example_of_mask(kind, reading, x, generator, heads)
                yield (x,), given | {roles.mask: mask}

    def fused_others(self: Any, x: Tensor, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        """What examples have besides x and a mask; the last of them goes with masks."""
        roles, T = self.fused_roles, x.shape[1:-1].numel() - self.fused_prefix()
        if roles.rotate:
            self.fused_rotation()  # raises where there is none
        for tokens in ((T - 1, T) if "any prefix" in roles.kernel else (T,)) if roles.rope else ():
            tables = [example(generator, tokens, self.fused_head_dim()) for _ in "sc"]
            yield {roles.rope: tuple(t.detach() for t in tables)}
            if not self.fused_searched:
                yield {roles.rope: tuple(tables)}  # learnt
        if not roles.needs_rope:
            yield {}

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        roles, groups = self.fused_roles, getattr(self, self.fused_roles.groups, 1)
        if groups > 1:
            yield "k and v repeated", 2 * (1 + 1 / groups) * self.fused_width()
        by_host = not roles.kernel if self.fused_searched else self.fused_norms() is None
        if (roles.rope and by_host) or roles.turn:
            # q and k: halves rotated, two products, a sum, cat with the prefix
            yield "RoPE", 2 * 9 * self.fused_width()
        if self.fused_norms() is None:
            for name in ("q_norm", "k_norm"):
                yield from norm_in_pytorch(name, in_role(self, name), self.fused_width())
        yield from norm_in_pytorch("norm of attention", in_role(self, "inner_norm"))
        if in_role(self, "gate") is not None:
            yield "gate of attention", 5 * self.fused_width()  # sigmoid: 2, product: 3
