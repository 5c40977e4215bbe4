"""residual + tail(body(norm(x))), of which a pre-norm block has two.

Where the children let it, the norm hands its input on and the body's last matmul ends in an
epilogue that applies the tail (LayerScale, DropPath) and the residual.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.packing import Crops
from ...ops.common.samples import keep_samples, num_kept
from ...ops.recomputed_norm import recomputed_norm
from ...ops.recomputed_sum import recomputed_sum
from ...runtime.arguments import autocast_dtype
from . import fused
from .fused import NOTHING, DropPath, LayerScale, Place, can_inline, is_fused_norm, is_noop, part

Tail = nn.Module | Tensor | None


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
    inline: Any = None  # AttentionRoles or MlpRoles of a body that is no module of its own
    context: tuple[tuple[str, str], ...] = ()  # arguments of the body that are the block's own
    window: str = ""  # the setting with the size of the windows that the body sees
    held: tuple[tuple[str, str], ...] = ()  # masks of the body that are tensors of the block's own


def fold(
    tail: Iterable[Any], x: Tensor, samples: Tensor | None = None, packing: Crops | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(layer_scale, row_scale) that stand for a foldable tail; samples stand for its DropPath. With
    a packing row_scale is of each token, x (total, C)."""
    gamma, rows = None, samples
    for item in tail:
        if isinstance(item, DropPath) and samples is None:
            dtype = autocast_dtype(x) or x.dtype  # what it reads in the host: the body's output
            dtype = dtype if gamma is None else torch.promote_types(dtype, gamma.dtype)
            draw = partial(item.fused_row_scale, dtype=dtype)
            rows = draw(x) if packing is None else packing.factors(draw, x)
        elif isinstance(item, (LayerScale, Tensor)):
            gamma = item if isinstance(item, Tensor) else type(item).fused_scale(item)
    return gamma, rows


def is_foldable(tail: Iterable[Tail]) -> bool:
    for item in tail:
        ours = isinstance(item, (LayerScale, DropPath)) and can_inline(item)
        if not (item.ndim == 1 if isinstance(item, Tensor) else ours or is_noop(item)):
            return False
    return True


def _of_each_sample(value: Any, x: Tensor) -> bool:
    """Whether an argument of the body has something for each sample of x (B, T, ...), or may."""
    if isinstance(value, (tuple, list)):
        return any(_of_each_sample(v, x) for v in value)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] == 1:
        return False
    if value.ndim == 2:  # (B, T); tables of angles are (T, D)
        return value.shape == (x.shape[0], x.shape[1:-1].numel())
    return True


class Branch:
    """The branch of a step, with all decided that its parts decide as they are now.

    Where it does not end in an epilogue, the host's calls are made behind the norm. In training, a
    block that is `sampled`, and one that skips what its DropPath drops, compute some samples alone.
    Under memory="low" a fused body keeps the norm's input for its backward, not its output; nor
    does the norm keep that, where it is a sum that can be made again. Holds no module.

    Args:
        informed: the block's `fused_context` says more than the call.
    """

    def __init__(self, block: Any, place: Place, step: Step, informed: bool):
        host, norm = type(block), part(block, step.norm)
        body, tail = host.fused_body(block, step), host.fused_tail(block, step)
        kind: Any = type(body)
        self.step, self.informed, self.fused_norm = step, informed, is_fused_norm(norm)
        bypass, foldable = can_inline(body), is_foldable(tail)
        self.folds = bypass and foldable and not kind.fused_draws(body)
        self.low = bypass and kind.fused_accepts_autocast_input(body)
        self.rebuild = bypass and self.fused_norm and host.fused_rebuilds(block, step)
        self.norm = 0 if norm is None else place(norm)  # 0, of the block itself: none
        self.compute: Any = kind.fused_planned(body, place) if bypass else None
        # Of the tail, what is at work: a child by its place, a parameter of the block by its name.
        self.tail: list[tuple[int, str]] = []
        for item, name in zip(tail, step.tail):  # noqa: B905
            at_rest = self.folds and isinstance(item, DropPath) and not item.fused_drops()
            if not (is_noop(item) or at_rest):
                self.tail.append((-1, name) if isinstance(item, Tensor) else (place(item), ""))
        # len: torch 2.11 traces no bool of a tuple
        self.adds = len(tail) > 0 and is_fused_norm(tail[-1])
        self.sampled = block.fused_roles.sampled if block.training else ""
        paths: list[Any] = [item for item in tail if isinstance(item, DropPath)]
        alone = bypass and foldable and self.fused_norm  # it computes some samples without copies
        self.samples_alone = alone and not (self.sampled and paths)
        paths = [path for path in paths if path.fused_rate()]
        skips = alone and len(paths) == 1 and block.fused_drop_path == "skip"
        skips = skips and (block.fused_first_skips or step.output > 1)
        self.path = place(paths[0]) if skips else 0
        self.skips = skips and paths[0].training

    def __call__(
        self, modules: list[Any], x: Tensor, residual: Tensor, extras: dict[str, Any]
    ) -> Tensor:
        context = NOTHING
        if extras or self.informed:
            context = modules[0].fused_context(self.step, x, extras)
        samples, packing = None, extras.get("packing")
        if packing is not None and (self.sampled or self.skips):
            return self.on_images(modules, x, residual, packing, context)
        if self.sampled or self.skips:
            samples = self.kept(modules, x, context)
        if samples is not None and not self.samples_alone:
            return self.on_some(modules, x, residual, samples, context)
        y, same, dtype, recompute_fn = x, x, residual.dtype, None
        norm = modules[self.norm]
        if self.fused_norm:
            low = autocast_dtype(x) if self.low else None
            if self.rebuild:
                with recomputed_sum(x) as recompute_fn:
                    y, same = type(norm).fused_and_input(norm, x, low, samples)
            else:
                y, same = type(norm).fused_and_input(norm, x, low, samples)
        elif self.norm:
            y = norm(x)
        residual = same if residual is x else residual
        finish, gamma, rows = self.called, None, samples
        if self.folds or samples is not None:
            finish = self.compute
            if self.tail:
                gamma, rows = fold(self.items(modules), residual, samples, packing)
            if gamma is not None:  # the host's product with an fp32 LayerScale is fp32
                residual = residual.to(torch.promote_types(residual.dtype, gamma.dtype))
        epilogue = {"residual": residual, "layer_scale": gamma, "row_scale": rows}
        if self.rebuild:
            weight, bias, eps = norm.fused_parameters()
            with recomputed_norm(y, x, weight, bias, eps, recompute_fn, norm.fused_level, samples):
                y = finish(modules, y, epilogue, context)
        else:
            y = finish(modules, y, epilogue, context)
        return y.to(dtype) if self.sampled else y

    def items(self, modules: list[Any]) -> list[Any]:
        found = []
        for at, name in self.tail:
            found.append(part(modules[0], name) if name else modules[at])
        return found

    def kept(self, modules: list[Any], x: Tensor, context: dict[str, Any]) -> Tensor | None:
        """What `keep_samples` draws, None where the branch computes all samples."""
        if len(x) == 0:
            return None
        if self.sampled:
            return keep_samples(len(x), part(modules[0], self.sampled), x.device)
        given = () if modules[0].fused_alike else context.values()
        if any(_of_each_sample(value, x) for value in given):
            return None
        return keep_samples(len(x), modules[self.path].fused_rate(), x.device)

    def on_images(
        self,
        modules: list[Any],
        x: Tensor,
        residual: Tensor,
        packing: Crops,
        context: dict[str, Any],
    ) -> Tensor:
        """The same of packed images: those that are kept are a sequence of their own."""
        rate = self.sampled or modules[self.path].fused_rate()
        rate = part(modules[0], rate) if isinstance(rate, str) else rate
        tokens, factors, kept = packing.drawn(rate, x)
        y, _ = fused.normed(modules[self.norm] if self.norm else None, x[tokens], self.low)
        gammas = [m for m in self.items(modules) if not isinstance(m, DropPath)]
        epilogue = {"layer_scale": fold(gammas, x)[0], "row_scale": factors}
        y = self.compute(modules, y, epilogue, {**context, "packing": kept})
        return residual.index_add(0, tokens, y.to(residual.dtype))

    def called(
        self, modules: list[Any], y: Tensor, epilogue: fused.Epilogue, context: dict[str, Any]
    ) -> Tensor:
        """The host's calls, and the sum where there is a residual."""
        residual, items = epilogue.get("residual"), self.items(modules)
        if self.compute is not None and "windows" not in context:
            y = self.compute(modules, y, NOTHING, context)
        else:  # a dropout draws by window
            y = modules[0].fused_call(self.step, dict(context))(y)
        adds = self.adds and residual is not None
        for item in items[:-1] if adds else items:
            y = y * item if isinstance(item, Tensor) else fused.normed(item, y, False)[0]
        if residual is None:
            return y
        return items[-1].fused_added(y, residual) if adds else residual + y

    def on_some(
        self,
        modules: list[Any],
        x: Tensor,
        residual: Tensor,
        samples: Tensor,
        context: dict[str, Any],
    ) -> Tensor:
        """residual + tail(body(norm(x))) of copies of the samples that are kept, and those scaled:
        the stochastic depth of DINOv2 and DINOv3."""
        kept = num_kept(len(x), part(modules[0], self.sampled))
        index = samples[:kept]
        some = x[index]
        y, _ = fused.normed(modules[self.norm] if self.norm else None, some, self.low)
        items = self.items(modules)
        if self.folds and not any(isinstance(item, DropPath) for item in items):
            y = self.compute(modules, y, {"layer_scale": fold(items, some)[0]}, context)
        else:
            y = self.called(modules, y, NOTHING, context)
        return torch.index_add(residual, 0, index, y.to(residual.dtype), alpha=len(x) / kept)
