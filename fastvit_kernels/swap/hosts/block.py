"""Residual blocks by their roles: branches with norms, LayerScale, DropPath and residuals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...models.packing import Crops
from ...ops.common.samples import DropPathMode
from ...runtime.plain import is_hooked, is_plain
from .. import plans
from ..activations import activation_name
from ..facts import leaves
from ..plans import Run
from ..prove import Unread
from . import fused
from .attention import Attention, Calls, tokens_of
from .branch import Branch, Step
from .fused import Fused, Inline, Place, can_inline, example, part, row, width_of
from .grids import Windows
from .mlp import Mlp, MlpRoles
from .roles import as_result


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
    added: bool = False  # it makes numbers of a boolean mask


def pre_norm(
    norm1: str,
    attention: str,
    tail1: str,
    norm2: str,
    mlp: str | MlpRoles,
    tail2: str,
    *,
    mixin: type[Fused] | None = None,
    given: tuple[str, ...] = (),
    arguments: Any = (("x",), ()),
    item: int | None = None,
    result: tuple[int, int] | None = None,
    through: tuple[str, ...] = (),
    window: str = "",
    **attributes: Any,
) -> Any:
    """The row of x = x + tail1(attention(norm1(x)));  x = x + tail2(mlp(norm2(x)))

    Args:
        mlp: the child, or its roles where it is no module of its own.
        given: the block's arguments that it hands on to its attention.
        arguments, item: how the block calls its attention.
        result: of a block that gives a tuple: its length, and the place of the tensor.
        through: children that are neither, and hold parts of them.
        window: the setting with the size of the windows that its attention sees.
    """
    inline = None if isinstance(mlp, str) else mlp
    first = Step(
        1,
        0,
        0,
        norm1,
        attention,
        tuple(tail1.split()),
        arguments,
        item,
        window=window,
        context=tuple((name, name) for name in given),
    )
    body = "" if inline else str(mlp)
    second = Step(2, 1, 1, norm2, body, tuple(tail2.split()), inline=inline)
    roles = BlockRoles((first, second), through, result)
    return row(mixin or Block, roles=roles, **attributes)


# What a class whose blocks run packed has of Block.
_OF_SEQUENCES = ("fused_resolved", "fused_own", "fused_branches", "fused_tail", "fused_body")


class InlineAttention(fused.Inline, Attention):
    pass


class InlineMlp(fused.Inline, Mlp):
    pass


def inline(owner: nn.Module, roles: Any) -> Any:
    """The branch with these roles."""
    return (InlineMlp if isinstance(roles, MlpRoles) else InlineAttention)(owner, roles)


def packing_of(calls: Calls) -> Crops:
    """Of calls that a block takes as one sequence."""
    sizes = [(x.shape[0], x.shape[1]) for x, _ in calls]
    return Crops(sizes, calls[0][0].device, [extras for _, extras in calls])


def unlike(calls: Calls) -> str | None:
    """Why calls of a block cannot be of one sequence, whatever the block."""
    if any(x.ndim != 3 for x, _ in calls):
        return "its blocks take no tokens (B, T, C)"
    kinds = {(x.dtype, x.device, x.shape[2]) for x, _ in calls}
    given = {tuple((n, v is None) for n, v in extras.items()) for _, extras in calls}
    alike = len(kinds) == len(given) == 1
    return None if alike else "its blocks get other kinds of arguments for some sizes"


def runs_packed(block: Any, calls: Calls) -> bool:
    """Whether a list of calls runs as one sequence."""
    several = len(calls) > 1 and block.fused_roles.result is None
    if not several or torch.compiler.is_compiling() or unlike(calls) is not None:
        return False
    return block.fused_unpacked() is None and block.fused_unlike(calls) is None


class Block(Fused):
    """A block by its roles, in the host's order."""

    fused_level = "block"
    fused_memory: str = "default"  # "low": the backward rebuilds what the norms gave
    fused_drop_path: DropPathMode = "mask"  # "skip": branches leave out what they drop
    fused_roles: ClassVar[BlockRoles]
    # Whether the first branch does both, too; where it sees windows it may not.
    fused_first_rebuilds: ClassVar[bool] = True
    fused_first_skips: ClassVar[bool] = True
    fused_alike: ClassVar[bool] = False  # what bodies get besides their input is alike for samples
    fused_own: Any = None  # (x, extras) -> what the first body gets besides, of the block's making

    def fused_idle(self, args: tuple[Any, ...]) -> bool:
        as_host = self.fused_memory == "default" and self.fused_drop_path == "mask"
        return as_host and Fused.fused_idle(self, args)

    def fused_body(self: Any, step: Step) -> Any:
        return part(self, step.body) if step.inline is None else inline(self, step.inline)

    def fused_tail(self: Any, step: Step) -> tuple[Any, ...]:
        items = (part(self, n) for n in step.tail)
        return tuple(None if type(m) is float and m == 1 else m for m in items)

    def fused_side(self: Any, step: Step) -> int:
        """Of the windows that a step's body sees, squares; 0 where it sees all."""
        side = part(self, step.window) or 0
        return side[0] if isinstance(side, tuple) else side

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        for step in self.fused_roles.steps:
            if size := self.fused_side(step):
                yield part(self, step.body), size**2

    @property
    def fused_pieces(self) -> tuple[str, ...]:  # type: ignore[override]
        names = [n for s in self.fused_roles.steps for n in (s.norm, s.body, *s.tail)]
        found = dict.fromkeys(n for n in names if n and isinstance(part(self, n), nn.Module))
        return tuple(n for n in found if type(part(self, n)) is not nn.Dropout)

    def fused_blocked(self: Any) -> str | None:
        roles = self.fused_roles
        if self.training and roles.evaluation:
            return "in training its forward does something else"
        for step in roles.steps:
            body = None if step.inline is None else inline(self, step.inline)
            if isinstance(body, InlineAttention) and (apart := body.fused_apart()):
                return apart
        paths = []
        if type(self).fused_searched:  # in evaluation such a host may not call a DropPath
            tails = [n for step in roles.steps for n in step.tail]
            paths = [n for n in tails if isinstance(part(self, n), fused.DropPath)]
        return fused.hooked(self, *roles.through, *paths)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        ends = [self.fused_tail(s)[-1] for s in self.fused_roles.steps if s.tail]
        alone = sum(isinstance(end, fused.Norm) and not can_inline(end) for end in ends)
        if alone:
            yield "sums behind a norm", 3 * alone * width_of(self)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        roles = self.fused_roles
        unread, calls = {n: Unread() for n in roles.unread}, self.fused_calls(generator)
        if roles.sampled:  # batches of which a share is no whole number of samples
            batches = zip((7, 5, 8, 3), calls, strict=False)
            calls = [
                (example(generator, n, *x.shape[1:]), more) for n, (x, more) in batches
            ] + calls
        every = []
        for x, given in calls:
            if roles.channels:
                x = x.detach().movedim(-1, 1).contiguous().requires_grad_()
            every.append(((x,), given | unread))
        # One list among the calls in training, one among those in evaluation.
        for one, two, place in ((0, 2, 1), (-1, 1, len(every) + 1)) if roles.lists else ():
            (x, e), (y, f) = calls[one % len(calls)], calls[two % len(calls)]
            given = {n: [e.get(n), f.get(n)] for n in e | f}
            every.insert(place, (([x, y],), given | unread))
        yield from every

    def fused_calls(self: Any, generator: torch.Generator) -> list[tuple[Tensor, dict[str, Any]]]:
        for step in self.fused_roles.steps:
            body = self.fused_body(step)
            if size := self.fused_side(step):
                shapes = (2, size + 1, 2 * size - 1), (1, size, size + 1)
                return [(example(generator, *shape, width_of(self)), {}) for shape in shapes]
            if step.held:
                T, ordered = len(part(self, step.held[0][1])), getattr(body, "batch_first", True)
                shapes = ((B, T) if ordered else (T, B) for B in (2, 3))
                return [(example(generator, *shape, width_of(self)), {}) for shape in shapes]
            if getattr(body, "fused_level", "") == "attention":
                given = dict(step.context)
                # One kind of mask shows that the block hands it on.
                most = 2 if isinstance(body, Attention) and tokens_of(body) else None
                return [
                    (x, {given[n]: v for n, v in kwargs.items() if n in given})
                    for (x, *_), kwargs in islice(body.fused_examples(generator), most)
                ]
        return [(example(generator, *shape), {}) for shape in self.fused_shapes()]

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        """None where an attention inside does not take what the call gives it."""
        kind, roles = type(self), self.fused_roles
        seen = x.movedim(1, -1) if roles.channels else x
        given = leaves(tuple(extras.values()), Tensor) if roles.sampled and self.training else ()
        if any(t.ndim > 2 for t in given):  # what a sample has of its own stays whole
            return None
        if roles.added and any(t.dtype is torch.bool for t in leaves(extras, Tensor)):
            return None
        for step in roles.steps:
            body = kind.fused_body(self, step)
            if step is roles.steps[0] and not kind.fused_searched and is_hooked(body):
                return None  # it wants the host's own call, whose arguments differ by version
            of_body: Any = type(body)
            if not isinstance(body, (Fused, Inline)) or of_body.fused_level != "attention":
                continue
            if not (kind.fused_searched or can_inline(body)):
                continue  # it is called, with what the caller gave
            given = {n: extras[own] for n, own in step.context if extras.get(own) is not None}
            if not given.keys() <= set(of_body.fused_extra_kwargs):
                return None
            size = kind.fused_side(self, step)
            shown = ((size, size), (size * size,)) if size else (tuple(seen.shape[1:-1]),)
            fixed = isinstance(body, Attention) and not isinstance(body.fused_roles.tokens, str)
            if fixed and tokens_of(body) not in ((), *shown):
                return None
            held = self.fused_held(step, seen) if step.held else {}
            checked = of_body.fused_checked(body, seen, given | held)
            if checked is None:
                return None
            own = dict(step.context)
            extras = {n: v for n, v in extras.items() if n not in own.values()}
            extras |= {own[n]: v for n, v in checked[1].items() if n in own}
        return x, extras

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self.fused_roles.lists and args and isinstance(args[0], list)):
            return Fused.fused_given(self, args, kwargs)
        every = {**dict(zip(self.fused_arguments.names[1:], args[1:])), **kwargs}  # noqa: B905
        others = {n: v for n, v in every.items() if n in self.fused_extra_kwargs and v is not None}
        if any(type(v) is not list or len(v) != len(args[0]) for v in others.values()):
            return None
        rest = {n: v for n, v in every.items() if n not in others}
        calls = [
            Fused.fused_given(self, (x,), rest | {n: v[i] for n, v in others.items()})
            for i, x in enumerate(args[0])
        ]
        return (calls, {}) if calls and None not in calls else None

    def fused_held(self: Any, step: Step, x: Tensor) -> dict[str, Tensor]:
        """The masks of its own that a step's body gets, as the host casts them."""
        masks = {}
        for name, own in step.held:
            if (mask := part(self, own)) is not None:
                masks[name] = mask.to(x) if mask.is_floating_point() else mask.to(x.device)
        return masks

    def fused_context(self: Any, step: Step, x: Tensor, extras: dict[str, Any]) -> dict[str, Any]:
        """What the body of a step gets besides its input, of the arguments of a call on x."""
        context = {n: extras[given] for n, given in step.context if given in extras}
        context |= self.fused_held(step, x) if step.held else {}
        if (packing := extras.get("packing")) is not None:  # what each size is given
            every = [(n, tuple(g.get(own) for g in packing.given)) for n, own in step.context]
            return {"packing": packing, **dict(every)}
        if size := type(self).fused_side(self, step):
            context["windows"] = Windows((x.shape[1], x.shape[2]), (size, size), (0, 0))
        if step.output == 1 and self.fused_own is not None:
            context |= self.fused_own(x, extras)
        return context

    def fused_call(self: Any, step: Step, context: dict[str, Any]) -> Any:
        """The body as the host calls it."""
        body, windows = part(self, step.body), context.pop("windows", None)

        def call(x: Tensor) -> Tensor:
            tokens = x.ndim == 3
            if windows is not None:
                x = windows.cut(x)
                x = x.unflatten(1, windows.size) if step.window else x
            args, kwargs = step.arguments
            kwargs = {n: x if a == "x" else a for n, a in kwargs} | context
            result = body(*[x if a == "x" else a for a in args], **kwargs)
            result = result if step.item is None else result[step.item]
            return result if windows is None else windows.joined(result, tokens)

        return call

    def fused_resolved(self: Any, place: Place) -> Run:
        roles, steps = self.fused_roles, type(self).fused_branches(self, place)

        def run(modules: list[Any], x: Any, extras: dict[str, Any]) -> Any:
            if isinstance(x, list) and runs_packed(modules[0], x):
                packing = packing_of(x)
                y = run(modules, packing.join([one for one, _ in x]), {"packing": packing})
                return packing.split(y)
            calls = x if isinstance(x, list) else [(x, extras)]
            every = []
            for one, _ in calls:
                every.append({0: one.permute(0, 2, 3, 1) if roles.channels else one})
            for step, branch in steps:
                for values, (_, given) in zip(every, calls):  # noqa: B905
                    source = values[step.source]
                    if branch is not None:
                        y = branch(modules, source, values[step.residual], given)
                    else:
                        context = modules[0].fused_context(step, source, given)
                        y = modules[0].fused_call(step, context)(source)
                    values[step.output] = y
            results = []
            for values in every:
                y = values[step.output]
                y = y.permute(0, 3, 1, 2) if roles.channels else y
                results.append(y if roles.result is None else as_result(y, roles.result))
            return results if isinstance(x, list) else results[0]

        return run

    def fused_unpacked(self: Any) -> str | None:
        """Why it cannot run images of several sizes as one sequence, as things are."""
        found = plans.plan_of(self)
        known = {} if found is None else found[0].found
        if "unpacked" not in known:
            known["unpacked"] = self.fused_unpacked_now()
        return known["unpacked"]

    def fused_unpacked_now(self: Any) -> str | None:
        kind, roles = type(self), self.fused_roles
        changed = any(getattr(kind, n) is not getattr(Block, n) for n in _OF_SEQUENCES)
        if changed or roles.channels:
            return f"{kind.__name__} computes in another way"
        bypassed = {self, *(part(self, name) for name in roles.through)}
        for m in self.modules():
            if m is not self and can_inline(m):
                # and what only holds its parts, which it reads by their paths
                inside = (c for c in m.modules() if c._modules and not c._parameters)
                bypassed |= {m, *inside}
        for m in self.modules():  # what reads a token alone, and attention
            watched = m is not self and is_hooked(m)
            known = m in bypassed or is_plain(m) or type(m) in (nn.Dropout, nn.Identity)
            known = known or activation_name(m)
            if watched or not known:
                return f"a {type(m).__name__} inside must be called"
        for step, branch in self.fused_branches(fused.listed(self)[1]):
            body, tail = self.fused_body(step), self.fused_tail(step)
            drops = any(isinstance(m, fused.DropPath) and m.fused_drops() for m in tail)
            if branch is None or step.window or step.held or (drops and branch.sampled):
                return "a branch of it must be called"
            if (drops or branch.sampled) and not branch.folds:
                return "a branch of it must be called"
            if isinstance(body, Attention):
                if (reason := body.fused_unpacked()) is not None:
                    return reason
            elif type(body).fused_planned is not Mlp.fused_planned:
                return f"{type(body).__name__} computes in another way"
        return None

    def fused_unlike(self: Any, calls: Calls) -> str | None:
        """Why these calls, x (B, T, C) and the other arguments, cannot run so."""
        for step in self.fused_roles.steps:
            if isinstance(body := self.fused_body(step), Attention):
                every = [(x, {n: e.get(own) for n, own in step.context}) for x, e in calls]
                if (reason := body.fused_unlike(every)) is not None:
                    return reason
        return None

    def fused_rebuilds(self: Any, step: Step) -> bool:
        """Whether the backward of this step may rebuild what its norm gave."""
        first = step.output == 1 and not type(self).fused_first_rebuilds
        return self.fused_memory == "low" and not (step.window or first)

    def fused_branches(self: Any, place: Place) -> list[tuple[Step, Branch | None]]:
        """The steps, with the branch of each that has a residual."""
        found = []
        for s in self.fused_roles.steps:
            informed = type(self).fused_own is not None or bool(s.window or s.held)
            found.append((s, Branch(self, place, s, informed) if s.residual >= 0 else None))
        return found
