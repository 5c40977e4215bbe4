"""Residual blocks of hosts that no table knows, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ....ops.common.samples import DropPathMode, keep_samples, num_kept
from ...plans import Run
from ..branch import Branch, apply, fold, pre_norm_branch, resolved_branch, skips, takes_samples
from ..fused import (
    Child,
    DropPath,
    Inline,
    Place,
    Resolved,
    bypassed,
    example,
    hooked,
    inputs,
    is_fused_norm,
    left_dropouts,
    normed,
    part,
    width_of,
)
from ..windows import windows_of
from .attention import Attention, AttentionRoles, attention_facts, takes, tokens_of
from .masks import fits
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
    window: str = ""  # the setting with the size of the windows that the body sees


class BlockRoles(NamedTuple):
    """What a residual block does, step by step. Value 0 is its input, the last one its result."""

    steps: tuple[Step, ...]
    through: tuple[str, ...] = ()  # parts between the block and its steps, which are not called
    result: tuple[int, int] | None = None
    evaluation: bool = False  # in training the host does something else
    rounded: bool = False  # a part of it rounds to fp32
    lists: bool = False  # it takes lists of inputs, one after the other
    channels: bool = False  # x is (B, C, height, width)
    sampled: str = ""  # the setting with the share of samples that a branch leaves out in training
    unread: tuple[str, ...] = ()  # arguments that nothing reads


class Unread:
    """Stands for an argument that nothing may read, in an example of a call."""

    def __bool__(self) -> bool:
        raise TypeError("it reads this argument")

    def __eq__(self, other: object) -> bool:
        raise TypeError("it reads this argument")

    __hash__ = None  # type: ignore[assignment]


class _Inline(Inline):
    """The roles of a branch in the block that has its parts."""

    def __init__(self, owner: nn.Module, roles: Any):
        self.owner, self.fused_roles = owner, roles

    def __call__(self: Any, x: Tensor) -> Tensor:
        return self.fused_branch(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def fused_undecided(self: Any, place: Place) -> Resolved:
        roles = self.fused_roles
        return lambda modules, x, epilogue, context: inline(modules[0], roles).fused_branch(
            x, epilogue, **context
        )


class InlineAttention(_Inline, Attention):
    pass


class InlineMlp(_Inline, Mlp):
    pass


def inline(owner: nn.Module, roles: Any) -> Any:
    """The branch with these roles."""
    return (InlineMlp if isinstance(roles, MlpRoles) else InlineAttention)(owner, roles)


class Block(Roles):
    """Branches with their norms, LayerScale, DropPath and residuals, in the host's order."""

    fused_level = "block"
    fused_axes = (3, 4)
    fused_memory: str = "default"  # "low": the backward rebuilds what the norms gave
    fused_drop_path: DropPathMode = "mask"  # "skip": branches leave out what they drop
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

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        for step in self.fused_roles.steps:
            if step.window and step.body:
                yield part(self, step.body), part(self, step.window) ** 2

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
        for body in self.fused_inlined():
            if isinstance(body, InlineAttention) and (apart := body.fused_apart()):
                return apart
        # In evaluation the host may not call a DropPath.
        tails = [n for step in self.fused_roles.steps for n in step.tail]
        paths = [n for n in tails if isinstance(part(self, n), DropPath)]
        return hooked(self, *self.fused_roles.through, *paths)

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
        for (x, *rest), given in self.fused_calls(generator):
            given = given | {n: Unread() for n in self.fused_roles.unread}
            if self.fused_roles.channels:
                x = x.detach().movedim(-1, 1).contiguous().requires_grad_()
            yield (x, *rest), given

    def fused_calls(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        width, roles = width_of(self), self.fused_roles
        for step in roles.steps:
            body = self.fused_body(step)
            if step.window:
                size = part(self, step.window)
                for shape in ((2, size + 1, 2 * size - 1), (1, size, size + 1)):
                    yield (example(generator, *shape, width),), {}
                return
            if isinstance(getattr(body, "fused_roles", None), AttentionRoles):
                given = dict(step.context)
                # One kind of mask shows that the block hands it on.
                most = 2 if tokens_of(body) else None
                calls = [
                    (args, {given[n]: v for n, v in kwargs.items() if n in given})
                    for args, kwargs in islice(body.fused_examples(generator), most)
                ]
                if roles.sampled:  # batches of which a share is no whole number of samples
                    for batch, ((x,), more) in zip((7, 5, 8, 3), calls, strict=False):
                        yield (example(generator, batch, *x.shape[1:]),), more
                yield from calls
                if roles.lists:
                    for one, two in ((0, 2), (-1, 1)):
                        (a, e), (b, f) = calls[one % len(calls)], calls[two % len(calls)]
                        both = {n: [e.get(n), f.get(n)] for n in e | f}
                        yield ([a[0], b[0]],), both
                return
        for x in inputs(self, generator):
            yield (x,), {}

    def fused_fits(self: Any, given: Any) -> bool:
        """Whether the masks of a call are of kinds that the attentions have a proof for, and the
        angles there that they need."""
        x, extras = given
        x = x.movedim(1, -1) if self.fused_roles.channels else x
        if self.fused_roles.sampled and self.training:  # what a sample has of its own stays whole
            for value in extras.values():
                tensors = value if isinstance(value, (tuple, list)) else (value,)
                if any(isinstance(t, Tensor) and t.ndim > 2 for t in tensors):
                    return False
        for step in self.fused_roles.steps:
            body = self.fused_body(step)
            roles = getattr(body, "fused_roles", None)
            if not isinstance(roles, AttentionRoles):
                continue
            if not (step.window or takes(body, x)):
                return False
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
        every = {**dict(zip(self.fused_arguments.names[1:], args[1:])), **kwargs}  # noqa: B905
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
        size = context.pop("window", 0)
        if step.arguments == (("x",), ()) and step.item is None and not (context or size):
            return body

        def call(y: Tensor) -> Tensor:
            windows = windows_of(y, size) if size else None
            x = y if windows is None else windows.cut(y).unflatten(1, windows.size)
            args, kwargs = step.arguments
            args = [x if a == "x" else a for a in args]
            kwargs = {n: x if a == "x" else a for n, a in kwargs} | context
            result = body(*args, **kwargs)
            result = result if step.item is None else result[step.item]
            return result if windows is None else windows.joined(result.flatten(1, 2))

        return call

    def fused_forward(self: Any, x: Any, **extras: Any) -> Any:
        calls = x if isinstance(x, list) else [(x, extras)]
        channels, steps = self.fused_roles.channels, self.fused_roles.steps
        values = [{0: one.permute(0, 2, 3, 1) if channels else one} for one, _ in calls]
        for step in steps:
            for known, (_, more) in zip(values, calls, strict=True):
                known[step.output] = self.fused_step(step, known, more)
        ends = [known[steps[-1].output] for known in values]
        ends = [y.permute(0, 3, 1, 2) for y in ends] if channels else ends
        if isinstance(x, list):
            return [as_result(y, self.fused_roles.result) for y in ends]
        return as_result(ends[0], self.fused_roles.result)

    def fused_resolved(self: Any, place: Place) -> Run | None:
        roles = self.fused_roles
        if roles.channels or (roles.sampled and self.training) or self.fused_memory == "low":
            return None
        if self.fused_drop_path == "skip":
            return None
        branches: list[tuple[Branch, tuple[tuple[str, str], ...]]] = []
        for before, step in zip((Step(0, 0), *roles.steps), roles.steps):  # noqa: B905
            if not (step.source == step.residual == before.output) or step.window:
                return None
            tail = tuple(part(self, n) for n in step.tail)
            norm, body = part(self, step.norm), self.fused_body(step)
            branch = resolved_branch(self, place, norm, body, tail)
            if branch is None:
                return None
            branches.append((branch, step.context))

        def run(modules: list[Any], x: Any, extras: dict[str, Any]) -> Any:
            if isinstance(x, list):
                return modules[0].fused_forward(x, **extras)
            for branch, context in branches:
                given = {n: extras[name] for n, name in context if name in extras}
                x = branch(modules, x, given)
            return as_result(x, roles.result)

        return run

    def fused_step(self: Any, step: Step, values: dict[int, Tensor], extras: Any) -> Tensor:
        context = {n: extras[given] for n, given in step.context if given in extras}
        if step.window:
            context["window"] = part(self, step.window)
        source, norm = values[step.source], part(self, step.norm)
        if step.residual < 0:
            return self.fused_call(step, context)(source)
        residual, tail = values[step.residual], [part(self, n) for n in step.tail]
        body = self.fused_body(step)
        call = None if step.inline is not None else self.fused_call(step, dict(context))
        if self.fused_roles.sampled and self.training:
            ratio = part(self, self.fused_roles.sampled)
            return self.fused_on_some(ratio, source, residual, norm, body, tail, call, context)
        return pre_norm_branch(
            source, norm, body, *tail, call=call, residual=residual,
            rebuild=self.fused_memory == "low" and not step.window,
            drop_path=self.fused_drop_path, **context,
        )  # fmt: skip

    def fused_rebuilt(self: Any) -> Iterator[str]:
        """The norms whose output no fused branch keeps for its backward."""
        for step in self.fused_roles.steps if self.fused_memory == "low" else ():
            fused = is_fused_norm(part(self, step.norm)) and bypassed(self.fused_body(step))
            if fused and not step.window:
                yield step.norm

    def fused_skips(self: Any) -> Iterator[tuple[str, Any]]:
        """The norms of branches that leave out what their DropPath drops, with that DropPath; None
        where the host itself leaves samples out."""
        for step in self.fused_roles.steps:
            norm, body = part(self, step.norm), self.fused_body(step)
            tail = [part(self, n) for n in step.tail]
            if step.residual < 0 or not takes_samples(norm, body, tail):
                continue
            path = skips(norm, body, tail) if self.fused_drop_path == "skip" else None
            if path is not None or self.fused_roles.sampled:
                yield step.norm, path

    def fused_on_some(
        self: Any, ratio: float, source: Tensor, residual: Tensor, norm: Any, body: Any, tail: Any,
        call: Any, context: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """residual + tail(body(norm(source))) of all samples but this share, and those scaled: the
        stochastic depth of DINOv2 and DINOv3."""
        B = len(residual)
        samples, kept = keep_samples(B, ratio, residual.device), num_kept(B, ratio)
        if takes_samples(norm, body, tail) and not any(isinstance(m, DropPath) for m in tail):
            return pre_norm_branch(
                source, norm, body, *tail, call=call, residual=residual, samples=samples,
                rebuild=self.fused_memory == "low", **context,
            ).to(residual.dtype)  # fmt: skip
        index = samples[:kept]
        some = source[index]
        bypass = bypassed(body)
        y, _ = normed(norm, some, bypass and body.fused_reads_low())
        folded = fold(tuple(tail), some) if bypass and not body.fused_draws() else None
        if folded is None or folded[1] is not None:
            y = (body if call is None else call)(y)
            for item in tail:
                y = apply(item, y)
        else:
            y = body.fused_branch(y, {"layer_scale": folded[0]}, **context)
        return torch.index_add(residual, 0, index, y.to(residual.dtype), alpha=B / kept)
