"""The operator of `mlp`: its backward. Forward is twice that of `linear`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...runtime.arguments import aligned, empty_gradients
from ...runtime.backend import gpu
from ...runtime.operator import operator
from ...runtime.triton import triton
from ..common import epilogue, gemm
from ..common.deferred import deferred
from ..common.gemm import tile_launch, tile_plan
from ..common.gemm_configs import HIDDEN_TABLE, gemm_key
from ..common.reduction import column_sum
from .kernels import _mlp_bwd_hidden_kernel


def _hidden_gradient(
    d: Tensor,
    weight: Tensor,
    layer_scale: Tensor | None,
    z: Tensor,
    act: Tensor | None,
    activation: str,
    sum_dz: bool,
    reuse_z: bool,
) -> tuple[Tensor, Tensor]:
    """dz = d (layer_scale * W2) * act'(z), (M, F), and partials whose column sums are db1.

    d (M, N) in z's dtype, weight (N, F), z (M, F); act(z) is written into act if it is not None,
    and dz over z if that may be: a program has read the elements that it writes.
    """
    a, b = epilogue.input_gradient_operands(d, weight, layer_scale)
    (M, F), N = z.shape, d.shape[1]
    config = HIDDEN_TABLE.choose(gpu(z.device), *gemm_key(M, F, N, z.dtype))
    plan = tile_plan(config, a, b)
    if plan is None:
        dact = gemm.matmul(a, b)
        return epilogue.backward_epilogue(
            dact, z, activation, z.dtype, act=act, sum_dz=sum_dz, dz=dact
        )
    dz = z if reuse_z else torch.empty_like(z)
    rows = triton.cdiv(M, plan.config.block_m)
    warp_specialized = plan.config.route == "gluon"
    if warp_specialized:
        from ..common.gemm_warp_specialized import FINISHERS, launch_warp_specialized

        rows *= FINISHERS.value
    partial = torch.empty((rows, F if sum_dz else 0), dtype=torch.float32, device=z.device)
    if warp_specialized:
        sums = partial if sum_dz else None
        z = aligned(z)  # it comes by TMA
        launch_warp_specialized(plan, dz, act, sums, a, b, z, None, activation)
        return dz, partial
    tile_launch(
        plan,
        _mlp_bwd_hidden_kernel,
        dz,
        act,
        partial,
        a,
        b,
        z,
        M,
        F,
        N,
        *a.stride(),
        *b.stride(),
        ACTIVATION=activation,
        WRITE_ACT=act is not None,
        SUM_DZ=sum_dz,
    )
    return dz, partial


def _empty_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    z: Tensor | None,
    act: Tensor | None,
    row_scale: Tensor | None,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, C = dy.shape[-1], 0 if fc1_weight is None else fc1_weight.shape[1]
    hidden = z if z is not None else act
    F = 0 if hidden is None else hidden.shape[-1]
    return empty_gradients(
        dy.device,
        ((*epilogue.rows_shape(dy, row_scale), C), dx_dtype),
        ((F, 0 if x is None else x.shape[-1]), dfc1_weight_dtype),
        ((F,), dfc1_bias_dtype),
        ((N, F), dfc2_weight_dtype),
        ((N,), dfc2_bias_dtype),
        ((N,), dlayer_scale_dtype),
    )


def _flops_bwd(
    dy,
    x,
    fc1_weight,
    z,
    act,
    row_scale,
    dx_dtype,
    dfc1_weight_dtype,
    dfc1_bias_dtype,
    dfc2_weight_dtype,
):
    M, N = epilogue.count_rows(dy, row_scale), dy[-1]
    F = (z or act or (0,))[-1]
    needs_dz = dx_dtype or dfc1_weight_dtype or dfc1_bias_dtype
    wide = N * (bool(needs_dz) + bool(dfc2_weight_dtype))
    wide += (fc1_weight[1] if dx_dtype else 0) + (x[-1] if dfc1_weight_dtype else 0)
    return 2 * M * F * wide


@operator(fake=_empty_bwd, flops=_flops_bwd)
def mlp_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    fc2_weight: Tensor | None,
    fc2_bias: Tensor | None,
    z: Tensor | None,
    act: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    reuse_z: bool,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, in this order.

    Each in its dtype, empty where that is None. The tensors are in `dtype`, the forward's compute
    dtype; each may be None where no wanted gradient reads it, act also where z, kept for other
    gradients, can rebuild it. g (N,) fp32 has the column sums of dy, which is then in `dtype`. With
    reuse_z, which no compiler passes, z holds other numbers afterwards.
    """
    grads = _empty_bwd(
        dy,
        x,
        fc1_weight,
        z,
        act,
        row_scale,
        None if dy.numel() else dx_dtype,
        dfc1_weight_dtype,
        dfc1_bias_dtype,
        dfc2_weight_dtype,
        dfc2_bias_dtype,
        dlayer_scale_dtype,
    )
    if dy.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    dx, dfc1_weight, dfc1_bias, dfc2_weight, dfc2_bias, dlayer_scale = grads
    shape = epilogue.rows_shape(dy, row_scale)
    M, dz = math.prod(shape), None
    needs_g = dfc2_bias_dtype is not None or (
        dlayer_scale_dtype is not None and fc2_bias is not None
    )
    d, sums = epilogue.scaled_rows(dy, row_scale, dtype, needs_g and g is None)
    sums = sums if g is None else g.view(1, -1)
    # A hook on saved tensors may have brought them back in other strides.
    z_rows = None if z is None else z.contiguous().view(M, -1)
    act_rows = None if act is None else act.contiguous().view(M, -1)
    rebuilt = None
    if act_rows is None and (dfc2_weight_dtype is not None or dlayer_scale_dtype is not None):
        assert z_rows is not None
        act_rows = rebuilt = torch.empty_like(z_rows)
    if dx_dtype is not None or dfc1_weight_dtype is not None or dfc1_bias_dtype is not None:
        assert z_rows is not None and fc2_weight is not None
        sum_dz = dfc1_bias_dtype is not None
        dz, partial = _hidden_gradient(
            d, fc2_weight, layer_scale, z_rows, rebuilt, activation, sum_dz, reuse_z
        )
        if sum_dz:
            column_sum(partial, dfc1_bias)
    else:
        assert rebuilt is None
    epilogue.weight_gradients(
        d, sums, act_rows, fc2_weight, fc2_bias, layer_scale, dfc2_weight, dfc2_bias, dlayer_scale
    )
    act_rows = rebuilt = None  # before x and dx take memory
    if dz is not None and dfc1_weight_dtype is not None and x is not None:
        gemm.matmul(dz.t(), deferred.read(x).reshape(M, x.shape[-1]), out=dfc1_weight)
    if dz is not None and dx_dtype is not None and fc1_weight is not None:
        dx = gemm.matmul(dz, fc1_weight, out_dtype=dx_dtype).view(*shape, -1)
    return dx, *grads[1:]
