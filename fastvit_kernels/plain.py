"""When a fused op may read a submodule's weights instead of calling it, and what happens if not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize


def is_plain(linear: nn.Module) -> bool:
    """Whether `linear` is an nn.Linear as torch made it: no subclass, hook or parametrization.

    A LoRA or quantised layer has a `weight` too, but means something else by it; a hook wants to
    be called. Such a layer runs its own forward.
    """
    return type(linear) is nn.Linear and not (
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or parametrize.is_parametrized(linear)
        or "forward" in linear.__dict__
    )


def add_branch(
    y: Tensor, residual: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None
) -> Tensor:
    """residual + row_scale * layer_scale * y, for a branch that did not end in a fused epilogue.

    Shapes: y and residual (B, ..., C), layer_scale (C,), row_scale (B,).
    """
    if layer_scale is not None:
        y = y * layer_scale
    if row_scale is not None:
        y = y * row_scale.view(-1, *[1] * (y.ndim - 1))
    return y if residual is None else residual + y
