"""Residual blocks of hosts that no table knows, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ....runtime.plain import is_hooked
from ..branch import pre_norm_branch
from ..fused import Child, Inline, bypassed, example, left_dropouts, part, width_of
from .attention import Attention, AttentionRoles, attention_facts, fits
from .mlp import Mlp, MlpRoles
from .roles import Roles, as_result


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

    def fused_fits(self: Any, given: Any) -> bool:
        """Whether the masks of a call are of kinds that the attentions have a proof for, and the
        angles there that they need."""
        x, extras = given
        for step in self.fused_roles.steps:
            roles = getattr(part(self, step.body), "fused_roles", None)
            if not isinstance(roles, AttentionRoles):
                continue
            own = dict(step.context)
            if roles.needs_rope and extras.get(own.get(roles.rope)) is None:
                return False
            if not fits(roles, extras.get(own.get(roles.mask)), x):
                return False
        return True

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self.fused_given_all(args, kwargs)
        if given is None or isinstance(given[0], list):
            return given
        return given if self.fused_fits(given) else None

    def fused_given_all(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if not calls or None in calls or not all(map(self.fused_fits, calls)):
            return None
        return calls, {}

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
