"""x + tail(body(norm(x))), of which a pre-norm block has two.

Where the children let it, the norm hands its input on and the body's last matmul ends in an
epilogue that applies the tail (LayerScale, DropPath) and the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.common.samples import DropPathMode, keep_samples
from ...ops.rebuilt_norm import rebuilt_norm
from ...ops.rebuilt_sum import rebuilt_sum
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_hooked
from ..plans import Run
from .fused import (
    Child,
    DropPath,
    Fused,
    Given,
    Inline,
    LayerScale,
    Place,
    bypassed,
    inert,
    is_fused_norm,
    left_dropouts,
    normed,
)

Tail = nn.Module | Tensor | None


def _foldable(item: Tail) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 1
    return inert(item) or (bypassed(item) and isinstance(item, (LayerScale, DropPath)))


def fold(
    tail: tuple[Tail, ...], x: Tensor, samples: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None] | None:
    """(layer_scale, row_scale) that stand for the tail, or None where it must be called; samples
    stand for its DropPath where they are given."""
    if not all(_foldable(item) for item in tail):
        return None
    dtype = autocast_dtype(x) or x.dtype  # what the tail reads in the host: the body's output
    gamma = rows = None
    for item in tail:
        if isinstance(item, LayerScale):
            item = item.fused_scale()
        if isinstance(item, Tensor):
            gamma = item
            dtype = torch.promote_types(dtype, gamma.dtype)
        elif isinstance(item, DropPath) and samples is None:
            rows = item.fused_row_scale(x, dtype)
    return gamma, rows if samples is None else samples


def takes_samples(norm: Any, body: Any, tail: Iterable[Tail]) -> bool:
    """Whether `pre_norm_branch` computes the samples that it is told alone, without copies."""
    return is_fused_norm(norm) and bypassed(body) and all(map(_foldable, tail))


def skips(norm: Any, body: Any, tail: Iterable[Tail]) -> DropPath | None:
    """The DropPath of a branch that can leave out what it drops, None where none can."""
    items = tuple(tail)
    paths = [m for m in items if isinstance(m, DropPath) and m.fused_rate()]
    return paths[0] if len(paths) == 1 and takes_samples(norm, body, items) else None


def _of_each_sample(value: Any, x: Tensor) -> bool:
    """Whether an argument of the body has something for each sample of x (B, T, ...), or may."""
    if isinstance(value, (tuple, list)):
        return any(_of_each_sample(v, x) for v in value)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] == 1:
        return False
    if value.ndim == 2:  # (B, T); tables of angles are (T, D)
        return value.shape == (x.shape[0], x.shape[1:-1].numel())
    return True


def kept_of(
    x: Tensor, norm: Any, body: Any, tail: Iterable[Tail], context: dict[str, Any]
) -> Tensor | None:
    """What `keep_samples` draws for a branch on x, None where it computes all samples."""
    path: Any = skips(norm, body, tail)
    if path is None or not path.training or x.shape[0] == 0:
        return None
    if any(_of_each_sample(value, x) for value in context.values()):
        return None
    return keep_samples(x.shape[0], path.fused_rate(), x.device)


def apply(item: Tail, y: Tensor) -> Tensor:
    if item is None:
        return y
    return y * item if isinstance(item, Tensor) else item(y)


def add_body(
    x: Tensor, y: Tensor, body: Any, tail: tuple[Tail, ...],
    call: Callable[[Tensor], Tensor], bypass: bool, context: dict[str, Any],
    samples: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x + tail(body(y)); y has the samples that `samples` keeps, where it is given."""
    folds = samples is not None or (bypass and not body.fused_draws())
    epilogue = fold(tail, x, samples) if folds else None
    if epilogue is None:
        y, last = call(y), tail[-1] if tail else None
        adds = is_fused_norm(last)
        for item in tail[:-1] if adds else tail:
            y = apply(item, y)
        return last.fused_added(y, x) if adds else x + y  # pyright: ignore
    gamma, rows = epilogue
    if gamma is not None:  # the host's product with an fp32 LayerScale is fp32
        x = x.to(torch.promote_types(x.dtype, gamma.dtype))
    epilogue = {"residual": x, "layer_scale": gamma, "row_scale": rows}
    return body.fused_branch(y, epilogue, **context)


def pre_norm_branch(
    x: Tensor, norm: Any, body: Any, *tail: Tail, residual: Tensor | None = None,
    call: Callable[[Tensor], Tensor] | None = None, rebuild: bool = False,
    drop_path: DropPathMode = "mask", samples: Tensor | None = None, **context: Any,
) -> Tensor:  # fmt: skip
    """residual + tail(body(norm(x))), where the residual is x by default.

    Args:
        x: (B, ..., C).
        norm, body: children of the block; a norm may be None.
        tail: LayerScale, DropPath and dropout children in the host's order; a Tensor is a gamma.
        call: how the host calls the body; `body` by default.
        rebuild: a fused body keeps the norm's input for its backward, not its output; nor does the
            norm keep that, where it is a sum that can be made again.
        drop_path: "skip": computes nothing for the samples that DropPath drops, where it can.
        samples: those that the branch keeps, where they are drawn already.
        context: what the body's `fused_branch` needs besides.
    """
    if drop_path == "skip":
        samples = kept_of(x, norm, body, tail, context)
    bypass = bypassed(body)
    kept: AbstractContextManager[None] = nullcontext()
    rebuild = rebuild and bypass and is_fused_norm(norm)
    with rebuilt_sum(x) if rebuild else nullcontext() as again:
        y, same = normed(norm, x, bypass and body.fused_reads_low(), samples)
    residual = same if residual is None or residual is x else residual
    if rebuild:
        weight, bias, eps = norm.fused_parameters()
        kept = rebuilt_norm(y, x, weight, bias, eps, again, norm.fused_kind, samples)
    # Dynamo of torch 2.11 does not take the truth of a function.
    called: Callable[[Tensor], Tensor] = body if call is None else call
    with kept:
        return add_body(residual, y, body, tail, called, bypass, context, samples)


Branch = Callable[[list[Any], Tensor, dict[str, Any]], Tensor]


def resolved_branch(
    owner: nn.Module, place: Place, norm: Any, body: Any, tail: tuple[Tail, ...]
) -> Branch | None:
    """x + tail(body(norm(x))) with all decided; None where a part of it is called."""
    if not (bypassed(body) and all(map(_foldable, tail))):
        return None
    if body.fused_draws() or not (norm is None or is_fused_norm(norm)):
        return None
    at_norm, low = None if norm is None else place(norm), body.fused_reads_low()
    compute = body.fused_branch_resolved(place)
    scales: list[tuple[int, str]] = []
    paths: list[int] = []
    item: Any
    for item in tail:
        gamma = item.fused_scale() if isinstance(item, LayerScale) else item
        if isinstance(gamma, Tensor):
            holder: Any = item if isinstance(item, LayerScale) else owner
            named = [n for n, p in holder._parameters.items() if p is gamma]
            if not named or scales or paths:
                return None
            scales.append((place(holder), named[0]))
        elif isinstance(item, DropPath) and item.training and item.fused_way()[0]:  # type: ignore
            if paths:
                return None
            paths.append(place(item))

    def run(modules: list[Any], x: Tensor, context: dict[str, Any]) -> Tensor:
        y, same = x, x
        if at_norm is not None:
            dtype = autocast_dtype(x) if low else None
            y, same = modules[at_norm].fused_and_input(x, dtype)
        gamma = rows = None
        for at, name in scales:
            gamma = modules[at]._parameters[name]
        for at in paths:
            dtype = autocast_dtype(x) or x.dtype  # what the tail reads in the host
            dtype = dtype if gamma is None else torch.promote_types(dtype, gamma.dtype)
            rows = modules[at].fused_row_scale(same, dtype)
        if gamma is not None and gamma.dtype is not same.dtype:
            same = same.to(torch.promote_types(same.dtype, gamma.dtype))
        epilogue = {"residual": same, "layer_scale": gamma, "row_scale": rows}
        return compute(modules, y, epilogue, context)

    return run


class PreNormBlock(Fused):
    """x = x + tail1(attention(norm1(x)));  x = x + tail2(mlp(norm2(x))), by a host's names.

    `fused_names` has the children in that order: norm1, attention, its tail, norm2, mlp, its tail.
    """

    fused_level = "block"
    fused_memory: str = "default"  # "low": the backward rebuilds what the norms gave
    fused_drop_path: DropPathMode = "mask"  # "skip": branches leave out what they drop
    fused_names: ClassVar[tuple[str, str, tuple[str, ...], str, str, tuple[str, ...]]]
    # Whether the attention's branch does both, too; where it sees windows it may not.
    fused_first_rebuilds: ClassVar[bool] = True
    fused_first_skips: ClassVar[bool] = True
    fused_alike: ClassVar[bool] = False  # what it gets besides its input is alike for all samples

    @classmethod
    def fused_known(cls) -> frozenset[str]:
        """Those of `fused_names`, and `fused_children` besides."""
        norm1, attention, tail1, norm2, mlp, tail2 = cls.fused_names
        return cls.fused_children | {norm1, attention, *tail1, norm2, mlp, *tail2}

    @property
    def fused_pieces(self) -> tuple[str, ...]:  # type: ignore[override]
        norm1, attention, tail1, norm2, mlp, tail2 = self.fused_names
        tails = [t for t in dict.fromkeys((*tail1, *tail2)) if self.fused_is_piece(t)]
        every = norm1, attention, norm2, mlp, *tails
        return tuple(n for n in every if not isinstance(self.fused_child(n), Inline))

    def fused_is_piece(self, name: str) -> bool:
        child = getattr(self, name, None)
        return isinstance(child, nn.Module) and type(child) is not nn.Dropout

    @property
    def fused_bodies(self) -> tuple[str, ...]:  # type: ignore[override]
        bodies = self.fused_names[1], self.fused_names[4]
        return tuple(n for n in self.fused_pieces if n in bodies)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        attention = getattr(self, self.fused_names[1])
        # A hook on attention wants the host's own call, whose arguments differ between versions.
        if is_hooked(attention):
            return None
        if not isinstance(attention, Fused) or attention.fused_blocked() is not None:
            return x, extras  # attention is called, with what the caller gave
        return attention.fused_checked(x, extras)

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_dropouts(self, *{*self.fused_names[2], *self.fused_names[5]})

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        """attention(y), by the child's own forward."""
        return getattr(self, self.fused_names[1])(y, **extras)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        attention = getattr(self, self.fused_names[1])
        if isinstance(attention, Fused):
            for (x, *_), kwargs in attention.fused_examples(generator):
                yield (x,), {k: v for k, v in kwargs.items() if k in self.fused_extras}
        else:
            yield from super().fused_examples(generator)

    def fused_child(self: Any, name: str) -> Any:
        """What a name of `fused_names` stands for."""
        return getattr(self, name)

    def fused_branches(self: Any) -> list[tuple[str, Any, Any, list[Any]]]:
        """Of both branches: the name of the norm, the norm, the body, its tail."""
        norm1, attention, tail1, norm2, mlp, tail2 = self.fused_names
        child = self.fused_child
        return [
            (norm, child(norm), child(body), [child(name) for name in tail])
            for norm, body, tail in ((norm1, attention, tail1), (norm2, mlp, tail2))
        ]

    def fused_context(self: Any, x: Tensor, **extras: Any) -> dict[str, Any]:
        """What attention gets besides its input, of the arguments of a call."""
        return extras

    def fused_forward(self: Any, x: Tensor, **extras: Any) -> Any:
        (_, norm1, attention, tail1), (_, norm2, mlp, tail2) = self.fused_branches()
        low, skip = self.fused_memory == "low", self.fused_drop_path
        given = self.fused_context(x, **extras)
        samples = None
        if skip == "skip" and self.fused_first_skips:
            samples = kept_of(x, norm1, attention, tail1, {} if self.fused_alike else given)
        x = pre_norm_branch(
            x, norm1, attention, *tail1, call=lambda y: self.fused_call_attention(y, given),
            rebuild=low and self.fused_first_rebuilds, samples=samples, **given,
        )  # fmt: skip
        return pre_norm_branch(x, norm2, mlp, *tail2, rebuild=low, drop_path=skip)

    def fused_resolved(self: Any, place: Place) -> Run | None:
        own = type(self)
        if own.fused_forward is not PreNormBlock.fused_forward or self.fused_memory == "low":
            return None
        if self.fused_drop_path == "skip" or own.fused_context is not PreNormBlock.fused_context:
            return None
        (_, norm1, attention, tail1), (_, norm2, mlp, tail2) = self.fused_branches()
        first = resolved_branch(self, place, norm1, attention, tuple(tail1))
        second = resolved_branch(self, place, norm2, mlp, tuple(tail2))
        if first is None or second is None:
            return None

        def run(modules: list[Any], x: Tensor, extras: dict[str, Any]) -> Tensor:
            return second(modules, first(modules, x, extras), {})

        return run

    def fused_rebuilt(self: Any) -> Iterator[str]:
        """The norms whose output no fused branch keeps for its backward."""
        low, first = self.fused_memory == "low", self.fused_names[0]
        for name, norm, body, _ in self.fused_branches():
            fused = is_fused_norm(norm) and bypassed(body)
            if low and fused and (name != first or self.fused_first_rebuilds):
                yield name

    def fused_skips(self: Any) -> Iterator[tuple[str, Any]]:
        """The norms of branches that leave out what their DropPath drops, with that DropPath."""
        skip, first = self.fused_drop_path == "skip", self.fused_names[0]
        for name, norm, body, tail in self.fused_branches():
            path = skips(norm, body, tail)
            if skip and path is not None and (name != first or self.fused_first_skips):
                yield name, path
