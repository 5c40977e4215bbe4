"""The two operators of a gated MLP: its hidden layer forward, everything backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import contiguous, empty, empty_gradients
from ...runtime.operator import operator
from ..common import epilogue, gemm
from ..common.deferred import deferred
from ..common.reduction import column_sum
from .kernels import gate_bwd, gate_fwd


def _empty_hidden(
    x: Tensor, fc1_weight: Tensor, gate_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, C = fc1_weight.shape
    M, F = x.numel() // C, rows if gate_weight is not None else rows // 2
    return (
        x.new_empty((*x.shape[:-1], F)),
        x.new_empty((M, rows)),
        *empty_gradients(
            x.device,
            ((M, F), None if gate_weight is None else x.dtype),
            ((2, M), None if norm_weight is None else torch.float32),
        ),
    )


def _flops_hidden(x, fc1_weight, gate_weight):
    rows = fc1_weight[0] + (gate_weight[0] if gate_weight else 0)
    return 2 * math.prod(x) * rows


@operator(fake=_empty_hidden, flops=_flops_hidden)
def gated_hidden_fwd(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: str,
    gate_last: bool,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (..., F), z, value, stats, in x's dtype but the last, which is fp32.

    Packed weights: z is (M, 2F), as they lie, and value None. Separate: z is the gate's (M, F),
    value (M, F). stats (2, M) of an inner LayerNorm: mean, rstd; else None.
    """
    if x.numel() == 0:
        return _empty_hidden(x, fc1_weight, gate_weight, norm_weight)
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    value: Any = None
    z = gemm.product_with_bias(rows, fc1_weight, fc1_bias)
    if gate_weight is not None:
        z, value = gemm.product_with_bias(rows, gate_weight, gate_bias), z
    stats: Any
    hidden, stats = gate_fwd(
        z, value, activation, gate_last, norm_weight, norm_bias, norm_eps, shape[:-1]
    )
    return hidden, z, value, stats


def _width(z: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> int:
    """F, of what was saved."""
    if value is not None:
        return value.shape[1]
    return z.shape[1] // 2 if z is not None else 0 if hidden is None else hidden.shape[-1]


def _empty_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    row_scale: Tensor | None,
    z: Tensor | None,
    value: Tensor | None,
    hidden: Tensor | None,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None,
    dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, F = dy.shape[-1], _width(z, value, hidden)
    C, K = 0 if x is None else x.shape[-1], 0 if fc1_weight is None else fc1_weight.shape[1]
    rows = F if value is not None else 2 * F
    return empty_gradients(
        dy.device,
        ((*epilogue.rows_shape(dy, row_scale), K), dx_dtype),
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
    dy,
    x,
    fc1_weight,
    row_scale,
    z,
    value,
    hidden,
    dx_dtype,
    dfc1_weight_dtype,
    dfc2_weight_dtype,
    dgate_weight_dtype,
):
    M, N = epilogue.count_rows(dy, row_scale), dy[-1]
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


def _columns(x: Tensor, first: int, count: int) -> Tensor:
    """`count` columns of x; x itself where it has no others."""
    return x if x.shape[1] == count else x[:, first : first + count]


def _column_sum(partial: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    out = empty((count,), dtype, partial.device)
    return column_sum(_columns(partial, first, count), out)


def _fc2_gradients(
    d: Tensor,
    sums: Tensor,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    shape: tuple[int, int],
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """dweight (N, F), dbias, dlayer_scale, as `weight_gradients`; None where the dtype is."""
    if layer_scale is not None:
        grads = empty_gradients(
            d.device,
            (shape, dweight_dtype),
            (shape[:1], dbias_dtype),
            (shape[:1], dlayer_scale_dtype),
        )
        epilogue.weight_gradients(d, sums, hidden, weight, bias, layer_scale, *grads)
        dtypes = (dweight_dtype, dbias_dtype, dlayer_scale_dtype)
        return tuple(g if dtype else None for g, dtype in zip(grads, dtypes, strict=True))
    dweight = dbias = None
    if dweight_dtype is not None and hidden is not None:
        dweight = gemm.matmul(d.t(), hidden, out_dtype=dweight_dtype)
    if dbias_dtype is not None:
        dbias = column_sum(sums, empty(shape[:1], dbias_dtype, d.device))
    return dweight, dbias, None


@operator(fake=_empty_bwd, flops=_flops_bwd)
def gated_mlp_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    fc2_weight: Tensor | None,
    fc2_bias: Tensor | None,
    gate_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    z: Tensor | None,
    value: Tensor | None,
    hidden: Tensor | None,
    stats: Tensor | None,
    activation: str,
    gate_last: bool,
    dtype: torch.dtype,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None,
    dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gate_weight, gate_bias,
    norm_weight, norm_bias, layer_scale, in this order.

    Each in its dtype, None where that is None. The operands are in `dtype`, the forward's compute
    dtype; each may be None where no wanted gradient reads it, hidden also where z, kept for other
    gradients, can rebuild it. g (N,) fp32 has the column sums of dy, which is then in `dtype`.
    """
    if dy.numel() == 0:
        grads = _empty_bwd(
            dy,
            x,
            fc1_weight,
            row_scale,
            z,
            value,
            hidden,
            dx_dtype,
            dfc1_weight_dtype,
            dfc1_bias_dtype,
            dfc2_weight_dtype,
            dfc2_bias_dtype,
            dgate_weight_dtype,
            dgate_bias_dtype,
            dnorm_weight_dtype,
            dnorm_bias_dtype,
            dlayer_scale_dtype,
        )
        for grad in grads:
            grad.zero_()
        return grads
    N, device = dy.shape[-1], dy.device
    shape = epilogue.rows_shape(dy, row_scale)
    M, F = math.prod(shape), _width(z, value, hidden)
    needs_g = dfc2_bias_dtype is not None or (
        dlayer_scale_dtype is not None and fc2_bias is not None
    )
    d, sums = epilogue.scaled_rows(dy, row_scale, dtype, needs_g and g is None)
    sums = sums if g is None else g.view(1, -1)
    # A hook on saved tensors may have brought them back in other strides.
    z, value, stats = contiguous(z), contiguous(value), contiguous(stats)
    hidden_rows = None if hidden is None else hidden.contiguous().view(M, F)
    rebuilt = None
    if hidden_rows is None and (dfc2_weight_dtype is not None or dlayer_scale_dtype is not None):
        hidden_rows = rebuilt = empty((M, F), dtype, device)
    dx: Any = None
    dz: Any = None
    dweights: list[Any] = [None, None]  # of fc1 and the gate
    dbiases: list[Any] = [None, None]
    dnorms: list[Any] = [None, None]
    needs_db = dfc1_bias_dtype is not None or dgate_bias_dtype is not None
    if needs_db or any(
        (dx_dtype, dfc1_weight_dtype, dgate_weight_dtype, dnorm_weight_dtype, dnorm_bias_dtype)
    ):
        assert z is not None and fc2_weight is not None
        dhidden = gemm.matmul(*epilogue.input_gradient_operands(d, fc2_weight, layer_scale))
        dz, partial, columns = gate_bwd(
            dhidden,
            z,
            value,
            rebuilt,
            activation,
            gate_last,
            norm_weight,
            norm_bias,
            stats,
            needs_db,
        )
        del dhidden
    else:
        assert rebuilt is None
    dfc2_weight, dfc2_bias, dlayer_scale = _fc2_gradients(
        d,
        sums,
        hidden_rows,
        fc2_weight,
        fc2_bias,
        layer_scale,
        (N, F),
        dfc2_weight_dtype,
        dfc2_bias_dtype,
        dlayer_scale_dtype,
    )
    hidden_rows = rebuilt = None  # before x and dx take memory
    if dz is not None:
        if value is None:
            halves = [(0, 2 * F, fc1_weight, dfc1_weight_dtype, dfc1_bias_dtype)]
        else:
            halves = [
                (columns.value, F, fc1_weight, dfc1_weight_dtype, dfc1_bias_dtype),
                (columns.gate, F, gate_weight, dgate_weight_dtype, dgate_bias_dtype),
            ]
        for i, (first, rows, weight, dweight_dtype, dbias_dtype) in enumerate(halves):
            dhalf = _columns(dz, first, rows)
            if dbias_dtype is not None:
                dbiases[i] = _column_sum(partial, first, rows, dbias_dtype)
            if dweight_dtype is not None and x is not None:
                x = deferred.read(x)
                dweights[i] = gemm.matmul(dhalf.t(), x.reshape(M, -1), out_dtype=dweight_dtype)
            if dx_dtype is None or weight is None:
                continue
            if i == 0:
                dx = gemm.matmul(dhalf, weight, out_dtype=dx_dtype)
            else:
                _add_product(dx, dhalf, weight)
        dnorm_dtypes = (dnorm_weight_dtype, dnorm_bias_dtype)
        for i, (first, dnorm_dtype) in enumerate(zip((0, F), dnorm_dtypes, strict=True)):
            if dnorm_dtype is not None:
                dnorms[i] = _column_sum(partial, columns.stride + first, F, dnorm_dtype)
    return (
        None if dx is None else dx.view(*shape, dx.shape[1]),
        dweights[0],
        dbiases[0],
        dfc2_weight,
        dfc2_bias,
        dweights[1],
        dbiases[1],
        *dnorms,
        dlayer_scale,
    )  # pyright: ignore[reportReturnType]
