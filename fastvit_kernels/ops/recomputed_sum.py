"""The sum that a LayerNorm or RMSNorm reads, made again in the backward instead of kept.

    y, first = layer_norm_and_input(first, ...)
    x = linear(branch(y), weight, bias, residual=first)
    with recomputed_sum(x) as recompute_fn:
        y, x = layer_norm_and_input(x, ...)

The second norm saves no x: its backward runs the linear's forward kernel again, on what that layer
and the first norm keep for their own backward, which gives x's bits. That is one product more, and
its epilogue, for x's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..runtime.arguments import autocast_dtype
from ..runtime.compat import node_class, version
from .common.deferred import deferred
from .linear import LinearFunction, linear_fwd
from .norm.functions import NormAndInputFunction
from .recomputed_norm import Kept, is_hooked, place_of

_Norm, _Linear = node_class(NormAndInputFunction), node_class(LinearFunction)


def _norm_before(layer: Any) -> Any:
    """The node of the norm that handed the linear its residual, where the two can make the sum
    again: None where one of them does not keep enough, or the norm's own input is made again."""
    if layer.__class__ is not _Linear:
        return None
    if not layer.spec.is_repeatable:
        return None
    place = 2 if layer.spec.input_dtypes[2] is None else 3  # among arguments that are tensors
    norm, output = layer.next_functions[place]
    if norm.__class__ is not _Norm or output != 1:
        return None
    before = norm.next_functions[0][0]
    return None if getattr(before, "is_rebuilt", False) else norm


class _Recomputed:
    """x once more: the first read makes it, and leaves it for the norm's backward."""

    def __init__(self, x: Tensor, layer: Any, norm: Any):
        self.layer, self.norm = layer, norm
        self.made: Tensor | None = None
        self.device, self.autocast = x.device.type, autocast_dtype(x)

    def read(self) -> Tensor:
        if self.made is None:
            self.made = self._make()
        return self.made

    def take(self) -> Tensor:
        x, self.made = self.read(), None
        return x

    def _make(self) -> Tensor:
        residual = self.norm.saved_tensors[0]
        x, weight, bias, _, *scales = self.layer.saved_tensors
        autocast = torch.autocast(self.device, self.autocast, self.autocast is not None)
        with torch.no_grad(), autocast:  # the library's form of the product may hang on autocast
            x, out_dtype = deferred.read(x), self.layer.spec.output.dtype
            return linear_fwd(x, weight, bias, residual, *scales, "", out_dtype, False)[0]


@contextmanager
def recomputed_sum(x: Tensor) -> Iterator[Callable[[], Tensor] | None]:
    """Inside, what would be saved of x is made again in the backward.

    Yields: what gives x there, for `recomputed_norm`; None where x is saved as ever: where it is no
    sum of a `linear` no wider than its output and of what a `layer_norm_and_input` handed on,
    inside other hooks on saved tensors, and in torch.compile, whose partitioner decides.
    """
    layer: Any = None
    norm = None
    if not torch.compiler.is_compiling() and not is_hooked():
        layer = x.grad_fn  # which no compiler follows
        norm = _norm_before(layer)
    if norm is None:
        yield None
        return
    recomputed, place, made = _Recomputed(x, layer, norm), place_of(x), version(x)
    shape, dtype = x.shape, x.dtype
    layer.is_rebuilt = True

    def pack(saved: Tensor) -> Any:
        is_x = place_of(saved) == place and saved.shape == shape and saved.dtype == dtype
        is_x = is_x and saved.is_contiguous() and version(saved) == made  # x.mT may have x's shape
        return recomputed if is_x else Kept(saved, version(saved))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.take()):
        yield recomputed.read
