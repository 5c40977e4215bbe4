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
inside; gemm_configs.py decides. Files: launch.py, kernels.py. Derivation: docs/linear.md.
d and g come from the backward of a LayerNorm that reads y, where one does: common/grad_handoff.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import (
    as_dtype,
    autocast_dtype,
    check_epilogue,
    check_input,
    check_weight,
    compute_dtype,
    needs_gradient,
)
from ...runtime.backend import gpu
from ...runtime.compat import FakeTensor, needs_dispatcher
from ...runtime.dispatch import backward_route, cached_dispatch, choose_route, first_order
from ...runtime.operator import EAGER, Route, differentiable
from ..common import grad_handoff
from ..common.activation import ACTIVATIONS, check_activation
from ..common.gemm_configs import fwd_config
from ..common.grad_handoff import Reads, layer_gradients
from ..common.samples import add_kept
from .launch import linear_bwd, linear_by_library_bwd, linear_fwd


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
    if layer_scale is not None:
        y = y * layer_scale
    if row_scale is not None and row_scale.dtype is torch.int64:
        assert residual is not None
        return add_kept(residual, y, row_scale).to(out_dtype)
    if row_scale is not None:
        y = y * row_scale.view(-1, *[1] * (y.ndim - 1))
    if residual is not None:
        y = residual + y
    return as_dtype(y, out_dtype)


def by_library(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y (..., N) from x (..., K) contiguous, weight (N, K), residual (..., N), all of one dtype."""
    y = F.linear(x, weight, bias).data  # no view, as in `product_with_bias`
    return y if residual is None else y.add_(residual)


class LinearSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    by_library: bool  # nothing is left to fuse, if x is contiguous and the route eager
    activation: str  # "" is none
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    out_dtype: torch.dtype
    input_dtypes: tuple[torch.dtype | None, ...]  # of x, weight, bias, residual, layer_scale
    saves_x: bool
    saves_weight: bool
    saves_bias: bool
    saves_z: bool
    saves_scales: bool
    reads: Reads | None
    is_repeatable: bool  # y from its residual and what is saved, in one product no wider than y


@grad_handoff.register
class LinearFunction(torch.autograd.Function):
    """Casts to the compute dtype inside, so that each gradient is written in its input's dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, layer_scale, row_scale, spec):
        if spec.casts:  # the kernels read a bias of any dtype
            x, weight = x.to(spec.dtype), weight.to(spec.dtype)
        y, z = linear_fwd[spec.route](
            x,
            weight,
            bias,
            residual,
            layer_scale,
            row_scale,
            spec.activation,
            spec.out_dtype,
            spec.saves_z,
        )
        ctx.save_for_backward(
            x if spec.saves_x else None,
            weight if spec.saves_weight else None,
            bias if spec.saves_bias else None,
            z if spec.saves_z else None,
            layer_scale if spec.saves_scales else None,
            row_scale if spec.saves_scales else None,
        )
        ctx.spec = spec
        grad_handoff.publish(ctx, spec.reads, row_scale)
        return y

    @staticmethod
    @first_order("linear")
    def backward(ctx, dy):
        options = (ctx.spec.activation, ctx.spec.dtype)
        return layer_gradients(ctx, dy, linear_bwd, options, bias=2, layer_scale=4)


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
    @first_order("linear")
    def backward(ctx, dy):
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


def is_by_library(x: Tensor, M: int, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether x W^T + b [+ residual] of one dtype takes the library's route, in its few calls.

    Args:
        x: a tensor with the dtype and device of the product's M rows.
    """
    if needs_dispatcher() or isinstance(x, FakeTensor):
        return False  # the route is not eager
    if M == 0 or autocast_dtype(x) is not None:
        return False
    if x.dtype.itemsize == 2 and not x.is_cuda:
        return False  # some CPUs' 16-bit BLAS accumulates in 16 bits
    if residual is None:
        return True
    N, K = weight.shape
    config = fwd_config(gpu(x.device), M, N, K, x.dtype)
    return config.route == "library" and residual.dtype == x.dtype


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
    unsupported = check_weight("linear", "weight", weight, bias, x.shape[-1], x)
    check_activation("linear", activation)
    unsupported = (
        check_epilogue("linear", x, weight.shape[0], residual, layer_scale, row_scale)
        or unsupported
    )
    dtype = compute_dtype("linear", x=x, weight=weight, bias=bias)
    inputs = (x, weight, bias, residual, layer_scale)
    needs_dx, needs_dweight, needs_dbias, _, needs_dscale = map(needs_gradient, inputs)
    needs_gram = needs_dscale and not activation  # dlayer_scale from W . G + b g
    needs_dz = needs_dx or needs_dweight or needs_dbias or needs_dscale
    route = choose_route("linear", unsupported, *inputs, row_scale)
    casts = any(t is not None and t.dtype != dtype for t in (x, weight, bias))
    out_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    reads = grad_handoff.offer(
        dtype,
        out_dtype,
        bias,
        layer_scale,
        row_scale,
        x=x,
        needs_d=needs_dz and not activation,
        needs_dbias=needs_dbias,
        needs_dlayer_scale=needs_dscale,
    )
    is_small = residual is not None and weight.shape[1] <= weight.shape[0]
    is_repeatable = is_small and needs_dx and needs_dweight and not activation
    return LinearSpec(
        route=route,
        needs_gradient=needs_gradient(*inputs),
        by_library=(
            route is not None
            and not casts
            and not activation
            and layer_scale is None
            and row_scale is None
            and is_by_library(x, x.numel() // max(x.shape[-1], 1), weight, residual)
        ),
        activation=activation or "",
        dtype=dtype,
        casts=casts,
        out_dtype=out_dtype,
        input_dtypes=tuple(None if t is None else t.dtype for t in inputs),
        saves_x=needs_dweight or needs_gram,
        saves_weight=needs_dx or needs_gram,
        saves_bias=needs_gram or is_repeatable,
        saves_z=bool(activation) and needs_dz,
        saves_scales=needs_dz,
        reads=reads,
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
    route = spec.route
    if route is None:
        return linear_ref(x, weight, bias, activation, residual, layer_scale, row_scale)
    if spec.by_library and route is EAGER and x.is_contiguous():
        if spec.needs_gradient:
            return apply_linear_by_library[route](x, weight, bias, residual, spec.reads)
        return by_library(x, weight, bias, residual)
    if spec.needs_gradient:
        return apply_linear[route](x, weight, bias, residual, layer_scale, row_scale, spec)
    if spec.casts:
        x, weight = x.to(spec.dtype), weight.to(spec.dtype)
    return linear_fwd[route](
        x, weight, bias, residual, layer_scale, row_scale, spec.activation, spec.out_dtype, False
    )[0]
