"""The two operators of a gated MLP: its hidden layer forward, everything backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...runtime.arguments import contiguous, empty, empty_gradients
from ...runtime.operator import operator
from ..common import gemm
from ..common.epilogue import (
    count_rows,
    input_gradient_operands,
    rows_shape,
    scaled_rows,
    weight_gradients,
)
from ..common.reduction import column_sum
from .kernels import gate_bwd, gate_fwd


def _empty_hidden(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor | None, gate_weight: Tensor | None,
    gate_bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    activation: str, gate_last: bool, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, C = fc1_weight.shape
    M, F = x.numel() // C, rows if gate_weight is not None else rows // 2
    return (
        x.new_empty((*x.shape[:-1], F)),
        x.new_empty((M, rows)),
        x.new_empty((0 if gate_weight is None else M, F)),
        x.new_empty((0,) if norm_weight is None else (2, M), dtype=torch.float32),
    )


def _flops_hidden(x, fc1_weight, fc1_bias, gate_weight, *_, **__):
    rows = fc1_weight[0] + (gate_weight[0] if gate_weight else 0)
    return 2 * math.prod(x) * rows


@operator(fake=_empty_hidden, flops=_flops_hidden)
def gated_hidden_fwd(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor | None, gate_weight: Tensor | None,
    gate_bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    activation: str, gate_last: bool, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """hidden (..., F), z, value, stats, in x's dtype but the last, which is fp32.

    Packed weights: z is (M, 2F), as they lie, and value empty. Separate: z is the gate's (M, F),
    value (M, F). stats (2, M) of an inner LayerNorm: mean, rstd; else empty.
    """
    if x.numel() == 0:
        return _empty_hidden(
            x, fc1_weight, fc1_bias, gate_weight, gate_bias, norm_weight, norm_bias,
            activation, gate_last, norm_eps,
        )  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    z, value = gemm.product_with_bias(rows, fc1_weight, fc1_bias), None
    if gate_weight is not None:
        z, value = gemm.product_with_bias(rows, gate_weight, gate_bias), z
    hidden, stats = gate_fwd(z, value, activation, gate_last, norm_weight, norm_bias, norm_eps)
    hidden = hidden.view(*x.shape[:-1], hidden.shape[1])
    if value is None:
        value = empty((0, hidden.shape[-1]), z.dtype, z.device)
    return hidden, z, value, stats


def _width(z: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> int:
    """F, of what was saved."""
    if value is not None:
        return value.shape[1]
    return z.shape[1] // 2 if z is not None else 0 if hidden is None else hidden.shape[-1]


def _empty_bwd(
    dy: Tensor, x: Tensor | None, fc1_weight: Tensor | None, fc2_weight: Tensor | None,
    fc2_bias: Tensor | None, gate_weight: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None,
    z: Tensor | None, value: Tensor | None, hidden: Tensor | None, stats: Tensor | None,
    activation: str, gate_last: bool, norm_eps: float, dtype: torch.dtype,
    dx_dtype: torch.dtype | None, dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None, dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None, dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None, dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None, dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    N, F = dy.shape[-1], _width(z, value, hidden)
    C = 0 if x is None else x.shape[-1]
    rows = F if value is not None else 2 * F
    return empty_gradients(
        dy.device,
        ((*rows_shape(dy, row_scale), 0 if fc1_weight is None else fc1_weight.shape[1]), dx_dtype),
        ((rows, C), dfc1_weight_dtype),
        ((rows,), dfc1_bias_dtype),
        ((N, F), dfc2_weight_dtype),
        ((N,), dfc2_bias_dtype),
        ((F, C), dgate_weight_dtype),
        ((F,), dgate_bias_dtype),
        ((F,), dnorm_weight_dtype),
        ((F,), dnorm_bias_dtype),
        ((N,), dlayer_scale_dtype),
    )


def _flops_bwd(
    dy, x, fc1_weight, fc2_weight, fc2_bias, gate_weight, norm_weight, norm_bias, layer_scale,
    row_scale, z, value, hidden, stats, activation, gate_last, norm_eps, dtype,
    dx_dtype, dfc1_weight_dtype, dfc1_bias_dtype, dfc2_weight_dtype, dfc2_bias_dtype,
    dgate_weight_dtype, *_, **__,
):  # fmt: skip
    M, N = count_rows(dy, row_scale), dy[-1]
    F = value[1] if value else z[1] // 2 if z else hidden[-1] if hidden else 0
    rows = F if value else 2 * F
    wide = N * F * (bool(z) + bool(dfc2_weight_dtype))
    wide += 2 * F * fc1_weight[1] if dx_dtype else 0
    wide += rows * x[-1] if dfc1_weight_dtype else 0
    wide += F * x[-1] if dgate_weight_dtype else 0
    return 2 * M * wide


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, in the product itself where the dtypes allow."""
    if out.dtype == a.dtype and (out.is_cuda or out.dtype == torch.float32):
        torch.addmm(out, a, b, out=out)
    else:
        out.add_(gemm.matmul(a, b, out_dtype=torch.float32))


@operator(fake=_empty_bwd, flops=_flops_bwd)
def gated_mlp_bwd(
    dy: Tensor, x: Tensor | None, fc1_weight: Tensor | None, fc2_weight: Tensor | None,
    fc2_bias: Tensor | None, gate_weight: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None,
    z: Tensor | None, value: Tensor | None, hidden: Tensor | None, stats: Tensor | None,
    activation: str, gate_last: bool, norm_eps: float, dtype: torch.dtype,
    dx_dtype: torch.dtype | None, dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None, dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None, dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None, dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None, dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Gradients of x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gate_weight, gate_bias,
    norm_weight, norm_bias, layer_scale, in this order.

    Each in its dtype, empty where that is None. The operands are in `dtype`, the forward's compute
    dtype; each may be None where no wanted gradient reads it, hidden also where z can rebuild it.
    g (N,) fp32 has the column sums of dy, which is then in `dtype`.
    """
    grads = _empty_bwd(
        dy, x, fc1_weight, fc2_weight, fc2_bias, gate_weight, norm_weight, norm_bias, layer_scale,
        row_scale, z, value, hidden, stats, activation, gate_last, norm_eps, dtype,
        dx_dtype, dfc1_weight_dtype, dfc1_bias_dtype, dfc2_weight_dtype, dfc2_bias_dtype,
        dgate_weight_dtype, dgate_bias_dtype, dnorm_weight_dtype, dnorm_bias_dtype,
        dlayer_scale_dtype,
    )  # fmt: skip
    if dy.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    (
        dx, dfc1_weight, dfc1_bias, dfc2_weight, dfc2_bias, dgate_weight, dgate_bias,
        dnorm_weight, dnorm_bias, dlayer_scale,
    ) = grads  # fmt: skip
    M, F = math.prod(rows_shape(dy, row_scale)), _width(z, value, hidden)
    needs_g = dfc2_bias_dtype is not None or (
        dlayer_scale_dtype is not None and fc2_bias is not None
    )
    d, sums = scaled_rows(dy, row_scale, dtype, needs_g and g is None)
    sums = sums if g is None else g.view(1, -1)
    # A hook on saved tensors may have brought them back in other strides.
    z, value, stats = contiguous(z), contiguous(value), contiguous(stats)
    hidden_rows = None if hidden is None else hidden.contiguous().view(M, F)
    rebuilt = None
    if hidden_rows is None and (dfc2_weight_dtype is not None or dlayer_scale_dtype is not None):
        hidden_rows = rebuilt = empty((M, F), dtype, dy.device)
    needs_db = dfc1_bias_dtype is not None or dgate_bias_dtype is not None
    if needs_db or any((
        dx_dtype, dfc1_weight_dtype, dgate_weight_dtype, dnorm_weight_dtype, dnorm_bias_dtype
    )):  # fmt: skip
        assert z is not None and fc2_weight is not None
        dhidden = gemm.matmul(*input_gradient_operands(d, fc2_weight, layer_scale))
        dz, partial, columns = gate_bwd(
            dhidden, z, value, rebuilt, activation, gate_last, norm_weight, norm_bias, stats,
            needs_db,
        )  # fmt: skip
        dx_rows = dx.view(M, -1) if dx_dtype is not None else dx
        x_rows = None if x is None else x.reshape(M, x.shape[-1])
        if value is None:
            halves = [(0, 2 * F, fc1_weight, dfc1_weight, dfc1_bias)]
        else:
            halves = [
                (columns.value, F, fc1_weight, dfc1_weight, dfc1_bias),
                (columns.gate, F, gate_weight, dgate_weight, dgate_bias),
            ]
        for i, (first, rows, weight, dweight, dbias) in enumerate(halves):
            dhalf = dz[:, first : first + rows]
            if dbias.numel():
                column_sum(partial[:, first : first + rows], dbias)
            if dweight.numel() and x_rows is not None:
                gemm.matmul(dhalf.t(), x_rows, out=dweight)
            if dx_dtype is None or weight is None:
                continue
            if i == 0:
                gemm.matmul(dhalf, weight, out=dx_rows)
            else:
                _add_product(dx_rows, dhalf, weight)
        for first, dparam in ((0, dnorm_weight), (F, dnorm_bias)):
            if dparam.numel():
                column_sum(partial[:, columns.stride + first :][:, :F], dparam)
    elif rebuilt is not None and z is not None:
        hidden_rows = gate_fwd(
            z, value, activation, gate_last, norm_weight, norm_bias, norm_eps
        )[0]  # fmt: skip
    weight_gradients(
        d, sums, hidden_rows, fc2_weight, fc2_bias, layer_scale,
        dfc2_weight, dfc2_bias, dlayer_scale,
    )  # fmt: skip
    return grads
