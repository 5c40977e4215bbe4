"""The operators of `linear`: its forward, its backward, and the backward by the library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import as_rows, contiguous, empty, empty_gradients
from ...runtime.backend import gpu
from ...runtime.operator import operator
from ..common import epilogue, gemm
from ..common.deferred import deferred
from ..common.gemm import tile_launch, tile_plan
from ..common.gemm_configs import fwd_config
from ..common.reduction import column_sum
from ..common.samples import is_sample_subset
from .kernels import _linear_fwd_kernel


def _empty_fwd(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    save_z: bool,
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    y_shape = residual.shape if is_sample_subset(row_scale) and residual is not None else shape
    y = torch.empty(y_shape, dtype=out_dtype, device=x.device)
    (z,) = empty_gradients(x.device, (shape, x.dtype if save_z and activation else None))
    return y, z


def _flops_fwd(x, weight):
    return 2 * math.prod(x) * weight[0]


@operator(fake=_empty_fwd, flops=_flops_fwd)
def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    save_z: bool,
) -> tuple[Tensor, Tensor]:
    """y (..., N) in out_dtype, and z (..., N) in x.dtype where there is an activation to save for.

    x and weight share one dtype; activation "" is none. z is None where there is none to save.
    Where row_scale keeps some samples, x and z have their rows, the residual and y those of all.
    """
    scaled = layer_scale is not None or row_scale is not None
    save_z = save_z and activation != ""
    no_z: Any = None
    shape = (*x.shape[:-1], weight.shape[0])
    kept = row_scale is not None and row_scale.dtype is torch.int64
    y_shape = residual.shape if kept and residual is not None else shape
    if x.numel() == 0:
        y = x.new_empty(y_shape, dtype=out_dtype)
        return y, x.new_empty(shape) if save_z else no_z
    if not (activation or scaled or residual is not None):
        return gemm.product_with_bias(x, weight, bias), no_z
    N, K = weight.shape
    M = x.numel() // K
    config = fwd_config(gpu(x.device), M, N, K, x.dtype)
    rows, plan = x, None
    if config.route != "library":
        rows = x.reshape(M, K)
        has_more = scaled or residual is not None
        plan = tile_plan(config, rows, weight, transposed=True, plain=has_more)
    if plan is None:
        plain = not (activation or scaled) and residual is not None and residual.dtype == x.dtype
        last_bias = None  # one of another dtype joins in the epilogue, where that need not save z
        if bias is not None and bias.dtype != x.dtype and not (activation or plain):
            bias, last_bias = None, bias
        z = gemm.product_with_bias(x, weight, bias)
        if plain and residual is not None:
            return z.add_(residual), no_z
        y = x.new_empty(y_shape, dtype=out_dtype)
        epilogue.apply_epilogue(y, z, activation, layer_scale, row_scale, residual, last_bias)
        return y, z if save_z else no_z
    y = x.new_empty(y_shape, dtype=out_dtype)
    z = x.new_empty(shape) if save_z else no_z
    if scaled and bias is not None:
        bias = bias.to(x.dtype)  # beside both scales, one in fp32 spills on sm_90 (triton 3.6)
    pointers, sizes, flags = epilogue.epilogue_arguments(M, layer_scale, row_scale, residual)
    if plan.config.route == "gluon":
        from ..common.gemm_warp_specialized import launch_warp_specialized

        launch_warp_specialized(plan, y, z, None, rows, weight, None, contiguous(bias), activation)
        return y, z
    tile_launch(
        plan,
        _linear_fwd_kernel,
        y,
        z,
        rows,
        weight,
        contiguous(bias),
        *pointers,
        M,
        N,
        K,
        sizes[0],
        *rows.stride(),
        *weight.stride(),
        *sizes[1:],
        ACTIVATION=activation,
        SAVE_Z=save_z,
        HAS_BIAS=bias is not None,
        **flags,
    )
    epilogue.copy_dropped(y, pointers, sizes, flags)
    return y, z


def _empty_bwd(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor | None,
    dx_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, K = dy.shape[-1], 0 if weight is None else weight.shape[1]
    return empty_gradients(
        dy.device,
        ((*epilogue.rows_shape(dy, row_scale), K), dx_dtype),
        ((N, 0 if x is None else x.shape[-1]), dweight_dtype),
        ((N,), dbias_dtype),
        ((N,), dlayer_scale_dtype),
    )


def _flops_bwd(dy, x, weight, row_scale, dx_dtype, dweight_dtype):
    wide = (weight[1] if dx_dtype else 0) + (x[-1] if dweight_dtype else 0)
    return 2 * epilogue.count_rows(dy, row_scale) * dy[-1] * wide


@operator(fake=_empty_bwd, flops=_flops_bwd)
def linear_bwd(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    dx_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (..., K), dweight (N, K), dbias (N,), dlayer_scale (N,); empty where its dtype is None.

    x, weight, bias and z are in `dtype`, the forward's compute dtype; each may be None where no
    wanted gradient reads it. g (N,) fp32 has the column sums of dy, which is then in `dtype`.
    """
    dx, dweight, dbias, dlayer_scale = grads = _empty_bwd(
        dy, x, weight, row_scale, dx_dtype, dweight_dtype, dbias_dtype, dlayer_scale_dtype
    )
    if dy.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    N = dy.shape[-1]
    M = math.prod(epilogue.rows_shape(dy, row_scale))
    x_rows = None if x is None else deferred.read(x).reshape(M, x.shape[-1])
    if activation:
        assert z is not None
        dz, partial = epilogue.backward_epilogue(
            dy.reshape(-1, N),
            z.contiguous().view(M, N),
            activation,
            dtype,
            layer_scale,
            row_scale,
            sum_dz=dbias_dtype is not None,
            sum_dlayer_scale=dlayer_scale_dtype is not None,
            batch=dy.shape[0],
        )
        if dbias_dtype is not None:
            column_sum(partial[:, :N], dbias)
        if dlayer_scale_dtype is not None:
            column_sum(partial[:, -N:], dlayer_scale)
        if dweight_dtype is not None and x_rows is not None:
            gemm.matmul(dz.t(), x_rows, out=dweight)
        if dx_dtype is not None and weight is not None:
            gemm.matmul(dz, weight, out=dx.view(M, weight.shape[1]))
    else:
        needs_g = dbias_dtype is not None or (dlayer_scale_dtype is not None and bias is not None)
        d, sums = epilogue.scaled_rows(dy, row_scale, dtype, needs_g and g is None)
        sums = sums if g is None else g.view(1, N)
        epilogue.weight_gradients(d, sums, x_rows, weight, bias, layer_scale, *grads[1:])
        if dx_dtype is not None and weight is not None:
            operands = epilogue.input_gradient_operands(d, weight, layer_scale)
            gemm.matmul(*operands, out=dx.view(M, weight.shape[1]))
    return grads


def _empty_by_library_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, needs_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    N, dtype = dy.shape[-1], dy.dtype
    dx = ((0,), None) if weight is None else ((*dy.shape[:-1], weight.shape[1]), dtype)
    dweight = ((0,), None) if x is None else ((N, x.shape[-1]), dtype)
    return empty_gradients(dy.device, dx, dweight, ((N,), dtype if needs_dbias else None))


def _flops_by_library_bwd(dy, x, weight):
    return 2 * math.prod(dy) * ((weight[1] if weight else 0) + (x[-1] if x else 0))


@operator(fake=_empty_by_library_bwd, flops=_flops_by_library_bwd)
def linear_by_library_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, needs_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx of weight, dweight of x, dbias, all in dy's dtype; None where that is None or False."""
    rows = as_rows(dy)
    dx: Any = None
    dweight: Any = None
    dbias: Any = None
    if weight is not None:
        dx = gemm.matmul(rows, weight).view(*dy.shape[:-1], weight.shape[1])
    if x is not None:
        dweight = gemm.matmul(rows.t(), as_rows(x))
    if needs_dbias:
        dbias = column_sum(rows, empty((dy.shape[-1],), dy.dtype, dy.device))
    return dx, dweight, dbias
