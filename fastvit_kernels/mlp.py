"""MLP of a ViT block."""

from __future__ import annotations

from torch import Tensor

from fastvit_kernels.linear import linear, linear_ref


def mlp_ref(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "gelu",
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """The specification of `mlp`."""
    hidden = linear_ref(x, fc1_weight, fc1_bias, activation)
    return linear_ref(hidden, fc2_weight, fc2_bias, None, residual, layer_scale, row_scale)


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str = "gelu",
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Thin."""
    hidden = linear(x, fc1_weight, fc1_bias, activation=activation)
    return linear(
        hidden, fc2_weight, fc2_bias,
        residual=residual, layer_scale=layer_scale, row_scale=row_scale,
    )  # fmt: skip
