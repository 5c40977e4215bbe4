"""x + tail(body(norm(x))), of which a pre-norm block has two.

Where the children let it, the norm hands its input on and the body's last matmul ends in an
epilogue that applies the tail (LayerScale, DropPath) and the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.common.samples import keep_samples
from ...ops.rebuilt_norm import rebuilt_norm
from ...ops.rebuilt_sum import rebuilt_sum
from ...runtime.arguments import autocast_dtype
from .fused import (
    DropPath,
    LayerScale,
    Place,
    bypassed,
    inert,
    is_fused_norm,
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
    samples: Tensor | None = None, **context: Any,
) -> Tensor:  # fmt: skip
    """residual + tail(body(norm(x))), where the residual is x by default.

    Args:
        x: (B, ..., C).
        norm, body: children of the block; a norm may be None.
        tail: LayerScale, DropPath and dropout children in the host's order; a Tensor is a gamma.
        call: how the host calls the body; `body` by default.
        rebuild: a fused body keeps the norm's input for its backward, not its output; nor does the
            norm keep that, where it is a sum that can be made again.
        samples: those that the branch keeps, where it computes nothing for the others.
        context: what the body's `fused_branch` needs besides.
    """
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
