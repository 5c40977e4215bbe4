"""Linear layer with a fused epilogue."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit_kernels.activation import ACTIVATIONS, check_activation
from fastvit_kernels.arguments import check_device, check_shape, check_tensor, compute_dtype


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """The specification of `linear`."""
    y = F.linear(x, weight, bias)
    out_dtype = y.dtype if residual is None else torch.promote_types(y.dtype, residual.dtype)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    if layer_scale is not None:
        y = y * layer_scale
    if row_scale is not None:
        y = y * row_scale.view(-1, *[1] * (y.ndim - 1))
    if residual is not None:
        y = residual + y
    return y.to(out_dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Thin."""
    check_tensor("linear", "x", x)
    check_tensor("linear", "weight", weight, ndim=2)
    check_shape("linear", "bias", bias, (weight.shape[0],), like=x)
    check_activation("linear", activation)
    check_device("linear", "weight", weight, x)
    compute_dtype("linear", x=x, weight=weight, bias=bias)
    return linear_ref(x, weight, bias, activation, residual, layer_scale, row_scale)
