"""Residual blocks, step by step: branches with their norms, LayerScale, DropPath and residuals.

What a block does is data, `BlockRoles`: a table's row says it of a host class, or a search finds
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.common.samples import DropPathMode, keep_samples, num_kept
from ...runtime.plain import is_hooked
from ..plans import Run
from .attention import Attention, AttentionRoles, takes, tokens_of
from .branch import (
    Branch,
    apply,
    fold,
    kept_of,
    pre_norm_branch,
    resolved_branch,
    skips,
    takes_samples,
)
from .fused import (
    Child,
    DropPath,
    Fused,
    Given,
    Inline,
    Norm,
    Place,
    Resolved,
    Row,
    bypassed,
    example,
    hooked,
    inputs,
    is_fused_norm,
    left_dropouts,
    normed,
    part,
    row,
    width_of,
)
from .grids import windows_of
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


def extras(roles: BlockRoles) -> tuple[str, ...]:
    """The arguments besides the first that a block takes."""
    return tuple(dict.fromkeys(given for s in roles.steps for _, given in s.context))


ALONE: Any = (("x",), ())


def pre_norm(
    norm1: str, attention: str, tail1: tuple[str, ...], norm2: str, mlp: str | MlpRoles,
    tail2: tuple[str, ...], *, mixin: type[Fused] | None = None, given: tuple[str, ...] = (),
    arguments: Any = ALONE, item: int | None = None, result: tuple[int, int] | None = None,
    through: tuple[str, ...] = (), **attributes: Any,
) -> Row:  # fmt: skip
    """The row of x = x + tail1(attention(norm1(x)));  x = x + tail2(mlp(norm2(x)))

    Args:
        mlp: the child, or its roles where it is no module of its own.
        given: the block's arguments that it hands on to its attention.
        arguments, item: how the block calls its attention.
        result: of a block that gives a tuple: its length, and the place of the tensor.
        through: children that are neither, and hold parts of them.
    """
    inline = None if isinstance(mlp, str) else mlp
    context = tuple((name, name) for name in given)
    first = Step(1, 0, 0, norm1, attention, tail1, arguments, item, context=context)
    second = Step(2, 1, 1, norm2, "" if inline else str(mlp), tail2, inline=inline)
    roles = BlockRoles((first, second), through, result)
    attributes = {"roles": roles, "extras": given, **attributes}
    return row(mixin or Block, **attributes)


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
    """A block by its roles, in the host's order."""

    fused_level = "block"
    fused_memory: str = "default"  # "low": the backward rebuilds what the norms gave
    fused_drop_path: DropPathMode = "mask"  # "skip": branches leave out what they drop
    fused_roles: ClassVar[BlockRoles]
    # Whether the first branch does both, too; where it sees windows it may not.
    fused_first_rebuilds: ClassVar[bool] = True
    fused_first_skips: ClassVar[bool] = True
    fused_alike: ClassVar[bool] = False  # what bodies get besides their input is alike for samples

    @classmethod
    def fused_named(cls) -> Iterator[str]:
        yield from cls.fused_roles.through
        for step in cls.fused_roles.steps:
            yield from (step.norm, step.body, *step.tail)

    def fused_body(self: Any, step: Step) -> Any:
        return part(self, step.body) if step.inline is None else inline(self, step.inline)

    def fused_tail(self: Any, step: Step) -> tuple[Any, ...]:
        items = (part(self, n) for n in step.tail)
        return tuple(None if type(m) is float and m == 1 else m for m in items)

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
        roles = self.fused_roles
        if self.training and roles.evaluation:
            return "in training its forward does something else"
        for body in self.fused_inlined():
            if isinstance(body, InlineAttention) and (apart := body.fused_apart()):
                return apart
        paths = []
        if self.fused_searched:  # in evaluation such a host may not call a DropPath
            tails = [n for step in roles.steps for n in step.tail]
            paths = [n for n in tails if isinstance(part(self, n), DropPath)]
        return hooked(self, *roles.through, *paths)

    def fused_left(self: Any) -> Iterator[Child]:
        if self.fused_inlined():
            yield from super().fused_left()
        for step in self.fused_roles.steps:
            if step.inline is not None and not self.fused_searched:
                dropouts = getattr(step.inline, "drop", ""), step.inline.after
                yield from left_dropouts(self, *filter(None, dropouts))
            yield from left_dropouts(self, *(n for n in step.tail if "." not in n))

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        ends = [self.fused_tail(s)[-1] for s in self.fused_roles.steps if s.tail]
        alone = sum(isinstance(end, Norm) and not bypassed(end) for end in ends)
        if alone:
            yield "sums behind a norm", 3 * alone * width_of(self)

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
            if getattr(body, "fused_level", "") == "attention":
                given = dict(step.context)
                # One kind of mask shows that the block hands it on.
                most = 2 if isinstance(body, Attention) and tokens_of(body) else None
                calls = [
                    ((x,), {given[n]: v for n, v in kwargs.items() if n in given})
                    for (x, *_), kwargs in islice(body.fused_examples(generator), most)
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

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        """None where an attention inside does not take what the call gives it."""
        roles = self.fused_roles
        seen = x.movedim(1, -1) if roles.channels else x
        if roles.sampled and self.training:  # what a sample has of its own stays whole
            for value in extras.values():
                tensors = value if isinstance(value, (tuple, list)) else (value,)
                if any(isinstance(t, Tensor) and t.ndim > 2 for t in tensors):
                    return None
        for step in roles.steps:
            body = self.fused_body(step)
            if step is roles.steps[0] and not self.fused_searched and is_hooked(body):
                return None  # it wants the host's own call, whose arguments differ by version
            if getattr(body, "fused_level", "") != "attention":
                continue
            if not (self.fused_searched or bypassed(body)):
                continue  # it is called, with what the caller gave
            given = {n: extras[own] for n, own in step.context if extras.get(own) is not None}
            if not given.keys() <= set(body.fused_extras):
                return None
            if isinstance(body, Attention) and not (step.window or takes(body, seen)):
                return None
            checked = body.fused_checked(seen, given)
            if checked is None:
                return None
            own = dict(step.context)
            extras = {n: v for n, v in extras.items() if n not in own.values()}
            extras |= {own[n]: v for n, v in checked[1].items()}
        return x, extras

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unread = self.fused_roles.unread
        if unread:
            names = self.fused_arguments.names
            kwargs = {**dict(zip(names[1:], args[1:])), **kwargs}  # noqa: B905
            kwargs = {n: v for n, v in kwargs.items() if n not in unread}
            args = args[:1] + args[len(names) :]
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
        return (calls, {}) if calls and None not in calls else None

    def fused_context(self: Any, step: Step, x: Tensor, extras: dict[str, Any]) -> dict[str, Any]:
        """What the body of a step gets besides its input, of the arguments of a call on x."""
        context = {n: extras[given] for n, given in step.context if given in extras}
        return context | {"window": part(self, step.window)} if step.window else context

    def fused_call(self: Any, step: Step, context: dict[str, Any]) -> Any:
        """The body as the host calls it."""
        body = part(self, step.body)
        if bypassed(body) and hasattr(body, "fused_branch"):
            return partial(body.fused_alone, **context)
        size = context.pop("window", 0)
        if step.arguments == ALONE and step.item is None and not (context or size):
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
        if self.fused_drop_path == "skip" or type(self).fused_context is not Block.fused_context:
            return None
        branches: list[tuple[Branch, tuple[tuple[str, str], ...]]] = []
        for before, step in zip((Step(0, 0), *roles.steps), roles.steps):  # noqa: B905
            if not (step.source == step.residual == before.output) or step.window:
                return None
            tail, norm, body = self.fused_tail(step), part(self, step.norm), self.fused_body(step)
            branch = resolved_branch(self, place, norm, body, tail)
            if branch is None:
                return None
            branches.append((branch, step.context))

        def run(modules: list[Any], x: Any, extras: dict[str, Any]) -> Any:
            if isinstance(x, list):
                return modules[0].fused_forward(x, **extras)
            for branch, context in branches:
                given = {n: extras[name] for n, name in context if name in extras} if extras else {}
                x = branch(modules, x, given)
            return x if roles.result is None else as_result(x, roles.result)

        return run

    def fused_step(self: Any, step: Step, values: dict[int, Tensor], extras: Any) -> Tensor:
        source, norm = values[step.source], part(self, step.norm)
        context = self.fused_context(step, source, extras)
        if step.residual < 0:
            return self.fused_call(step, context)(source)
        residual, tail = values[step.residual], self.fused_tail(step)
        body = self.fused_body(step)
        call = None if step.inline is not None else self.fused_call(step, dict(context))
        if self.fused_roles.sampled and self.training:
            ratio = part(self, self.fused_roles.sampled)
            return self.fused_on_some(ratio, source, residual, norm, body, tail, call, context)
        samples = None
        if self.fused_may_skip(step):
            samples = kept_of(source, norm, body, tail, {} if self.fused_alike else context)
        return pre_norm_branch(
            source, norm, body, *tail, call=call, residual=residual,
            rebuild=self.fused_rebuilds(step), samples=samples, **context,
        )  # fmt: skip

    def fused_rebuilds(self: Any, step: Step) -> bool:
        """Whether the backward of this step may rebuild what its norm gave."""
        first = step is self.fused_roles.steps[0] and not self.fused_first_rebuilds
        return self.fused_memory == "low" and not (step.window or first)

    def fused_may_skip(self: Any, step: Step) -> bool:
        """Whether this step may leave out the samples that its DropPath drops."""
        first = step is self.fused_roles.steps[0] and not self.fused_first_skips
        return self.fused_drop_path == "skip" and not first

    def fused_rebuilt(self: Any) -> Iterator[str]:
        """The norms whose output no fused branch keeps for its backward."""
        for step in filter(self.fused_rebuilds, self.fused_roles.steps):
            if is_fused_norm(part(self, step.norm)) and bypassed(self.fused_body(step)):
                yield step.norm

    def fused_skips(self: Any) -> Iterator[tuple[str, Any]]:
        """The norms of branches that leave out what their DropPath drops, with that DropPath; None
        where the host itself leaves samples out."""
        for step in self.fused_roles.steps:
            norm, body, tail = part(self, step.norm), self.fused_body(step), self.fused_tail(step)
            if step.residual < 0 or not takes_samples(norm, body, tail):
                continue
            path = skips(norm, body, tail) if self.fused_may_skip(step) else None
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
        folded = fold(tail, some) if bypass and not body.fused_draws() else None
        if folded is None or folded[1] is not None:
            y = (body if call is None else call)(y)
            for item in tail:
                y = apply(item, y)
        else:
            y = body.fused_branch(y, {"layer_scale": folded[0]}, **context)
        return torch.index_add(residual, 0, index, y.to(residual.dtype), alpha=B / kept)
