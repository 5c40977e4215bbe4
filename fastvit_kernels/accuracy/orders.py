"""PyTorch's sums in another order: the same specification, rounded differently.

Inside `AnotherOrder`, operators that add up (products, sums, means, softmax, norms, convolutions,
attention, and their backwards) find the axis of their sum permuted; results that have this axis are
put back. Formula and precision stay, the rounding differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.compat import TorchDispatchMode

# An axis that an operator sums over: its place in the arguments, and in the results that have it.
# The first argument says how long it is; others may broadcast along it.
Axis = tuple[dict[int | str, int], dict[int, int]]
_AXES: dict[str, tuple[Axis, ...]] = {
    "aten::mm": (({0: 1, 1: 0}, {}),),
    "aten::addmm": (({1: 1, 2: 0}, {}),),
    "aten::bmm": (({0: 2, 1: 1}, {}),),
    "aten::baddbmm": (({1: 2, 2: 1}, {}),),
    "aten::convolution": (({0: 1, 1: 1}, {}),),  # input channels
    "aten::convolution_backward": (  # output channels, images
        ({0: 1, 2: 0}, {1: 0, 2: 0}),
        ({0: 0, 1: 0}, {0: 0}),
    ),
    "aten::native_layer_norm": (({0: -1, 2: -1, 3: -1}, {0: -1}),),
    "aten::native_layer_norm_backward": (  # columns, rows
        ({0: -1, 1: -1, 5: -1, 6: -1}, {0: -1, 1: -1, 2: -1}),
        ({3: 0, 4: 0, 0: 0, 1: 0}, {0: 0}),
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (  # keys
        ({1: 2, 2: 2, "attn_mask": -1}, {}),
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        ({2: 2, 3: 2, "attn_mask": -1}, {1: 2, 2: 2}),
    ),
}


def _axes(name: str, args: tuple[Any, ...]) -> tuple[Axis, ...]:
    """What may be permuted in this call: nothing where the operator knows the axis's places."""
    if name in ("aten::sum", "aten::mean"):
        return tuple(({0: axis}, {}) for axis in range(args[0].ndim))
    if name in ("aten::sum.dim_IntList", "aten::mean.dim"):
        return tuple(({0: axis}, {}) for axis in args[1] or range(args[0].ndim))
    if name in ("aten::_softmax", "aten::_safe_softmax"):
        return (({0: args[1]}, {0: args[1]}),)
    if name == "aten::_softmax_backward_data":
        return (({0: args[2], 1: args[2]}, {0: args[2]}),)
    groups = {"aten::convolution": 8, "aten::convolution_backward": 9}.get(name)
    if groups is not None and args[groups] != 1:
        return ()
    return () if any(x is True for x in args) else _AXES.get(name, ())  # causal, transposed


class AnotherOrder(TorchDispatchMode):
    """Context in which sums, forward and backward, run in an order drawn from the seed."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {**dict(enumerate(args)), **(kwargs or {})}
        undo: list[tuple[int, int, Tensor]] = []
        for places, results in _axes(func.name(), args):
            first, axis = next(iter(places.items()))
            if given[first].ndim == 0:
                continue
            order = torch.randperm(given[first].shape[axis], generator=self.generator)
            for place, axis in places.items():
                given[place] = _reordered(given.get(place), axis, order)
            undo += [(place, axis, order.argsort()) for place, axis in results.items()]
        outputs = func(*(given[i] for i in range(len(args))), **{k: given[k] for k in kwargs or {}})
        if not undo:
            return outputs
        found = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        for place, axis, order in undo:
            found[place] = _reordered(found[place], axis, order)
        return tuple(found) if isinstance(outputs, (tuple, list)) else found[0]


def _reordered(x: Tensor | None, axis: int, order: Tensor) -> Tensor | None:
    if x is None or x.shape[axis] != len(order):
        return x
    return x.index_select(axis, order.to(x.device))
