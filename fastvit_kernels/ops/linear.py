"""Linear layer with everything that may follow it in one epilogue.

    z = x W^T + b,   a = act(z),   y = residual + row_scale[sample] * layer_scale[n] * a

With d = row_scale * dy and sums over the M rows of x:

    with act      dz = layer_scale * d * act'(z),   dlayer_scale = sum d * a
                  dx = dz W,   dW = dz^T x,   db = sum dz
    without       G = d^T x,   g = sum d,   both fp32
                  dx = d (layer_scale * W),   dW = layer_scale * G,   db = layer_scale * g
                  dlayer_scale[n] = W[n] . G[n] + b[n] g[n]
    dresidual = dy

Saved: x, W, and z where there is an activation; without one nothing of size (M, N) is needed.
Precision: fp32 accumulators, sums and epilogue. act reads z rounded to the compute dtype, which is
what is saved, so that a backward that rebuilds act(z) gets the same bits. No atomics.
Routes: the library's product and one elementwise kernel, or one Triton GEMM with the epilogue
inside; gemm_configs.py decides. Derivation: docs/linear.md.
d and g come from the backward of a LayerNorm that reads y, where one does: common/grad_handoff.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import (
    as_dtype,
    as_rows,
    autocast_dtype,
    check_epilogue,
    check_input,
    check_weight,
    compute_dtype,
    contiguous,
    empty,
    empty_gradients,
    needs_gradient,
)
from ..runtime.backend import gpu
from ..runtime.compat import FakeTensor, needs_dispatcher
from ..runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ..runtime.operator import EAGER, Route, differentiable, operator
from ..runtime.triton import ANY_BATCH, tl, triton
from .common import epilogue, gemm, grad_handoff
from .common.activation import ACTIVATIONS, check_activation
from .common.deferred import deferred
from .common.epilogue import Rows, ScaledLinear, finish_tile
from .common.gemm import (
    TilePlan,
    column_halves,
    grouped_tile,
    tile_launch,
    tile_operands,
    tile_plan,
    tile_product,
    tiles_of_program,
)
from .common.gemm_configs import FWD_TABLE, gemm_config
from .common.grad_handoff import Reads, layer_backward
from .common.reduction import column_sum, zeroed
from .common.samples import add_branch, check_drawn, is_sample_subset


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """The specification of `linear`: torch's own operations, one after the other."""
    y = F.linear(x, weight, bias)
    out_dtype = y.dtype
    if residual is not None and residual.dtype != out_dtype:
        out_dtype = torch.promote_types(out_dtype, residual.dtype)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return as_dtype(add_branch(y, residual, layer_scale, row_scale), out_dtype)


@triton.jit
def _linear_epilogue(
    y_ptr,
    z_ptr,
    z,
    ptrs,
    first_m,
    first_n,
    M,
    N,
    rows,
    EPILOGUE: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the products z of the tile at (first_m, first_n) to y, SUBTILES column parts in turn."""
    if SUBTILES > 1:
        halves = column_halves(z, BLOCK_M, BLOCK_N)
        PARTS: tl.constexpr = SUBTILES // 2
        HALF: tl.constexpr = BLOCK_N // 2
        for i in tl.static_range(2):
            z, column = halves[i], first_n + i * HALF
            _linear_epilogue(
                y_ptr, z_ptr, z, ptrs, first_m, column, M, N, rows, EPILOGUE, PARTS, BLOCK_M, HALF
            )
    else:
        x_ptr, bias_ptr, layer_scale_ptr, row_scale_ptr, residual_ptr = ptrs
        offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        if EPILOGUE.HAS_BIAS:
            z += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        if EPILOGUE.ACTIVATION != "":
            z_low = z.to(x_ptr.dtype.element_ty)
            if EPILOGUE.SAVE_Z:
                mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
                tl.store(z_ptr + offs_m[:, None] * N + offs_n[None, :], z_low, mask=mask)
            z = z_low.to(tl.float32)  # act reads the bits that are saved
        scales = layer_scale_ptr, row_scale_ptr, residual_ptr
        finish_tile(y_ptr, z, scales, offs_m, offs_n, M, N, rows, EPILOGUE)


@triton.jit(**ANY_BATCH)
def _linear_fwd_kernel(
    y_ptr,
    z_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    M,
    N,
    K,
    rows_per_sample,
    stride_x_m,
    stride_x_k,
    stride_weight_n,
    stride_weight_k,
    stride_residual_m,
    keep_scale,
    EPILOGUE: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    sizes, strides = (M, N, K), (stride_x_m, stride_x_k, stride_weight_k, stride_weight_n)
    ptrs = x_ptr, bias_ptr, layer_scale_ptr, row_scale_ptr, residual_ptr
    rows = Rows(rows_per_sample, stride_residual_m, keep_scale)
    x, weight = tile_operands(x_ptr, weight_ptr, sizes, strides, TILE)
    first, last, step = tiles_of_program(M, N, TILE)
    for tile in tl.range(first, last, step, flatten=TILE.FLATTEN):
        pid_m, pid_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N, TILE.GROUP_M)
        z = tile_product(x, weight, pid_m, pid_n, sizes, strides, TILE)
        row, column = pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N
        _linear_epilogue(
            y_ptr,
            z_ptr,
            z,
            ptrs,
            row,
            column,
            M,
            N,
            rows,
            EPILOGUE,
            TILE.SUBTILES,
            BLOCK_M,
            BLOCK_N,
        )


def _gemm_with_epilogue(
    plan: TilePlan,
    y: Tensor,
    z: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_z: bool,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
) -> None:
    """Write y, and z where it is saved, from x (M, K) in one Triton GEMM."""
    if bias is not None and (layer_scale is not None or row_scale is not None):
        bias = bias.to(x.dtype)  # beside both scales, one in fp32 spills on sm_90 (triton 3.6)
    (M, K), N, bias = x.shape, weight.shape[0], contiguous(bias)
    given = activation, save_z, bias is not None, layer_scale, row_scale, residual
    pointers, sizes, follows = epilogue.epilogue_arguments(M, *given)
    if plan.config.route == "gluon":
        from .common.gemm_warp_specialized import launch_warp_specialized

        launch_warp_specialized(plan, y, z, None, x, weight, None, bias, activation)
        return
    launch = tile_launch(plan, _linear_fwd_kernel, EPILOGUE=follows)
    launch(
        y,
        z,
        x,
        weight,
        bias,
        *pointers,
        M,
        N,
        K,
        sizes.per_sample,
        *x.stride(),
        *weight.stride(),
        sizes.stride_residual_m,
        sizes.keep_scale,
    )
    epilogue.copy_dropped(y, pointers, sizes, follows)


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
        y = empty(y_shape, out_dtype, x.device)
        return y, x.new_empty(shape) if save_z else no_z
    if not (activation or scaled or residual is not None):
        return gemm.product_with_bias(x, weight, bias), no_z
    (N, K), plan = weight.shape, None
    M = x.numel() // K
    config = gemm_config(gpu(x.device), FWD_TABLE, M, N, K, x.dtype)
    if config.route != "library":
        rows, has_more = x.reshape(M, K), scaled or residual is not None
        plan = tile_plan(config, rows, weight, transposed=True, plain=has_more)
    if plan is None:
        plain = not (activation or scaled) and residual is not None and residual.dtype == x.dtype
        last_bias = None  # one of another dtype joins in the epilogue, where that need not save z
        if bias is not None and bias.dtype != x.dtype and not (activation or plain):
            bias, last_bias = None, bias
        z = gemm.product_with_bias(x, weight, bias)
        if plain and residual is not None:
            return z.add_(residual), no_z
        y = empty(y_shape, out_dtype, x.device)
        epilogue.apply_epilogue(y, z, activation, layer_scale, row_scale, residual, last_bias)
        return y, z if save_z else no_z
    y = empty(y_shape, out_dtype, x.device)
    z = x.new_empty(shape) if save_z else no_z
    _gemm_with_epilogue(
        plan, y, z, rows, weight, bias, activation, save_z, layer_scale, row_scale, residual
    )
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
    """dx (..., K), dweight (N, K), dbias (N,), dlayer_scale (N,); None where its dtype is None.

    x, weight, bias and z are in `dtype`, the forward's compute dtype; each may be None where no
    wanted gradient reads it. g (N,) fp32 has the column sums of dy, which is then in `dtype`.
    """
    dtypes = dweight_dtype, dbias_dtype, dlayer_scale_dtype
    if dy.numel() == 0:
        return zeroed(*_empty_bwd(dy, x, weight, row_scale, dx_dtype, *dtypes))
    N, shape = dy.shape[-1], epilogue.rows_shape(dy, row_scale)
    M = math.prod(shape)
    x_rows = None if x is None else deferred.read(x).reshape(M, x.shape[-1])
    dx: Any = None
    if activation:
        assert z is not None
        d, partial = epilogue.backward_epilogue(
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
        # d is dz here, with the layer scale and act'(z) in it.
        layer = ScaledLinear(weight, None, None, dweight_dtype, dbias_dtype, None)
        dweight, dbias, dlayer_scale = epilogue.weight_gradients(d, partial[:, :N], x_rows, layer)
        if dlayer_scale_dtype is not None:
            out = empty((N,), dlayer_scale_dtype, dy.device)
            dlayer_scale = column_sum(partial[:, -N:], out)
    else:
        layer = ScaledLinear(weight, bias, layer_scale, *dtypes)
        d, sums = epilogue.scaled_gradient(dy, row_scale, dtype, layer, g)
        dweight, dbias, dlayer_scale = epilogue.weight_gradients(d, sums, x_rows, layer)
    if dx_dtype is not None and weight is not None:
        operands = epilogue.input_gradient_operands(d, weight, layer.layer_scale)
        dx = gemm.matmul(*operands, out_dtype=dx_dtype).view(*shape, -1)
    return dx, dweight, dbias, dlayer_scale  # pyright: ignore[reportReturnType]


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


def by_library(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y (..., N) from x (..., K) contiguous, weight (N, K), residual (..., N), all of one dtype."""
    y = F.linear(x, weight, bias).data  # no view, as in `product_with_bias`
    return y if residual is None else y.add_(residual)


class Output(NamedTuple):
    """How a layer ends in a Linear with its epilogue."""

    dtype: torch.dtype
    reads: Reads | None  # what its backward can take of the gradient
    by_library: bool  # nothing but the residual is left to fuse, if x is contiguous, route eager


class LinearSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    activation: str  # "" is none
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    output: Output
    input_dtypes: tuple[torch.dtype | None, ...]  # of x, weight, bias, residual, layer_scale
    saves_x: bool
    saves_weight: bool
    saves_bias: bool
    saves_z: bool
    saves_scales: bool
    is_repeatable: bool  # y from its residual and what is saved, in one product no wider than y


@grad_handoff.register
class LinearFunction(torch.autograd.Function):
    """Casts to the compute dtype inside, so that each gradient is written in its input's dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, layer_scale, row_scale, spec):
        if spec.casts:  # the kernels read a bias of any dtype
            x, weight = x.to(spec.dtype), weight.to(spec.dtype)
        end = residual, layer_scale, row_scale
        y, z = linear_fwd[spec.route](
            x, weight, bias, *end, spec.activation, spec.output.dtype, spec.saves_z
        )
        ctx.save_for_backward(
            x if spec.saves_x else None,
            weight if spec.saves_weight else None,
            bias if spec.saves_bias else None,
            z if spec.saves_z else None,
            layer_scale if spec.saves_scales else None,
            row_scale if spec.saves_scales else None,
        )
        ctx.spec, ctx.options = spec, (spec.activation, spec.dtype)
        grad_handoff.publish(ctx, spec.output.reads, row_scale)
        return y

    backward = layer_backward("linear", linear_bwd, bias=2, layer_scale=4)


@grad_handoff.register
class LinearByLibraryFunction(torch.autograd.Function):
    """(x, weight, bias, residual) -> y in few calls: at small batches the host's time decides.

    Nothing is cast: the operands share one dtype.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, reads):
        needs_dx, needs_dweight, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dweight else None, weight if needs_dx else None)
        grad_handoff.publish(ctx, reads, None)
        return by_library(x, weight, bias, residual)

    @staticmethod
    def backward(ctx, dy):
        if grad_enabled():
            return first_order("linear", LinearByLibraryFunction.backward, ctx, dy)
        needs_dx, needs_dweight, needs_dbias, needs_dresidual, _ = ctx.needs_input_grad
        _, _, _, known = grad_handoff.take(ctx, dy, None, None)
        dx, dweight, dbias = linear_by_library_bwd[backward_route(EAGER, dy)](
            dy, *ctx.saved_tensors, needs_dbias and known is None
        )
        if known is not None:
            dbias = known
        return (
            dx if needs_dx else None,
            dweight if needs_dweight else None,
            dbias if needs_dbias else None,
            dy if needs_dresidual else None,
            None,
        )


apply_linear = differentiable(LinearFunction)
apply_linear_by_library = differentiable(LinearByLibraryFunction)


def _is_by_library(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether a layer of x ends in a library's product, of one dtype, in its few calls."""
    M = x.numel() // max(x.shape[-1], 1)
    if needs_dispatcher() or isinstance(x, FakeTensor):
        return False  # the route is not eager
    if M == 0 or autocast_dtype(x) is not None:
        return False
    if x.dtype.itemsize == 2 and not x.is_cuda:
        return False  # some CPUs' 16-bit BLAS accumulates in 16 bits
    if residual is None:
        return True
    N, K = weight.shape
    config = gemm_config(gpu(x.device), FWD_TABLE, M, N, K, x.dtype)
    return config.route == "library" and residual.dtype == x.dtype


def decide_output(
    x: Tensor,
    dtype: torch.dtype,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    needs_d: bool,
    is_plain: bool,
) -> Output:
    """How a layer of x that computes in dtype ends in a Linear and its epilogue.

    Args:
        needs_d: whether its backward reads d. is_plain: no cast and no activation come between.
    """
    out_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    scales = layer_scale, row_scale
    reads = grad_handoff.offer(dtype, out_dtype, bias, *scales, x=x, needs_d=needs_d)
    is_plain = is_plain and layer_scale is None and row_scale is None
    return Output(out_dtype, reads, is_plain and _is_by_library(x, weight, residual))


def linear_to_output(
    spec: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
) -> Tensor:
    """The Linear that a layer ends in, as its spec's route and `output` say; x in its dtype."""
    if spec.output.by_library and spec.route is EAGER:
        return by_library(x, weight, bias, residual)
    return linear_fwd[spec.route](
        x, weight, bias, residual, layer_scale, row_scale, "", spec.output.dtype, False
    )[0]


@cached_dispatch
def _decide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str | None,
) -> LinearSpec:
    """Check the arguments; what runs, in which dtypes, and what is saved."""
    check_input("linear", x)
    unusable = check_weight("linear", "weight", weight, bias, x.shape[-1], x)
    check_activation("linear", activation)
    end = residual, layer_scale, row_scale
    unsupported = check_epilogue("linear", x, weight.shape[0], *end) or unusable
    dtype = compute_dtype("linear", x=x, weight=weight, bias=bias)
    inputs = (x, weight, bias, residual, layer_scale)
    needs_dx, needs_dweight, needs_dbias, _, needs_dscale = map(needs_gradient, inputs)
    needs_gram = needs_dscale and not activation  # dlayer_scale from W . G + b g
    needs_dz = needs_dx or needs_dweight or needs_dbias or needs_dscale
    route = choose_route("linear", unsupported, *inputs, row_scale)
    casts = any(t is not None and t.dtype != dtype for t in (x, weight, bias))
    needs_d, fuses = needs_dz and not activation, route is not None
    output = decide_output(
        x, dtype, weight, bias, *end, needs_d, fuses and not (casts or activation)
    )
    is_small = residual is not None and weight.shape[1] <= weight.shape[0]
    is_repeatable = is_small and needs_dx and needs_dweight and not activation
    return LinearSpec(
        route=route,
        needs_gradient=needs_gradient(*inputs),
        activation=activation or "",
        dtype=dtype,
        casts=casts,
        output=output,
        input_dtypes=tuple(None if t is None else t.dtype for t in inputs),
        saves_x=needs_dweight or needs_gram,
        saves_weight=needs_dx or needs_gram,
        saves_bias=needs_gram or is_repeatable,
        saves_z=bool(activation) and needs_dz,
        saves_scales=needs_dz,
        is_repeatable=is_repeatable,
    )


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
    """Linear layer with a fused epilogue.

    y = residual + row_scale[sample] * layer_scale * act(x weight^T + bias)

    Args:
        x: (B, ..., K), fp16, bf16 or fp32, any strides; (K,) too where there is no row_scale.
        weight: (N, K), any strides. bias: (N,) or None. Both in x.dtype unless under autocast.
        activation: None, "gelu" (exact erf), "gelu_tanh", "quick_gelu" or "silu".
        residual: (B, ..., N), any floating dtype, added last.
        layer_scale: (N,), any floating dtype.
        row_scale: (B,), any floating dtype: 0 or 1 / keep for each sample (DropPath). One that
            requires a gradient takes the PyTorch path. Or what `keep_samples(B, rate)` gave: x then
            has the S samples that it keeps, (S, ..., K), which are multiplied by B / S, and the
            others of the residual (B, ..., N) pass as they are.
    Returns:
        (B, ..., N) in the compute dtype (autocast's, else x.dtype), promoted with residual.dtype.
    Precision: fp32 accumulators and epilogue; act reads x weight^T + bias rounded to the compute
        dtype. dweight, dbias and dlayer_scale accumulate in fp32, each in its parameter's dtype.
    Saved: x and weight in the compute dtype; with an activation its input (B, ..., N) as well.
    Raises: ValueError, such as "linear: bias must have shape (768,), got (384,)"; TypeError.
    Specification: linear_ref. Derivation: docs/linear.md.
    """
    spec = _decide(x, weight, bias, residual, layer_scale, row_scale, activation)
    if row_scale is not None:
        check_drawn("linear", row_scale, residual)
    route = spec.route
    if route is None:
        return linear_ref(x, weight, bias, activation, residual, layer_scale, row_scale)
    if spec.output.by_library and route is EAGER and x.is_contiguous():
        if spec.needs_gradient:
            return apply_linear_by_library[route](x, weight, bias, residual, spec.output.reads)
        return by_library(x, weight, bias, residual)
    if spec.needs_gradient:
        return apply_linear[route](x, weight, bias, residual, layer_scale, row_scale, spec)
    if spec.casts:
        x, weight = x.to(spec.dtype), weight.to(spec.dtype)
    return linear_fwd[route](
        x, weight, bias, residual, layer_scale, row_scale, spec.activation, spec.output.dtype, False
    )[0]
