"""MLP of a ViT block: fc1 with its activation in one epilogue, fc2 with what follows in another.

    z = x W1^T + b1,   a = act(z),   y = residual + row_scale[sample] * layer_scale * (a W2^T + b2)

With d = row_scale * dy and sums over the M rows of x:

    dz = d (layer_scale * W2) * act'(z),   db1 = sum dz,   dW1 = dz^T x,   dx = dz W1
    G = d^T a,   g = sum d:   dW2 = layer_scale * G,   db2 = layer_scale * g
    dlayer_scale[n] = W2[n] . G[n] + b2[n] g[n],   dresidual = dy

Saved: x, z, W1, W2. a is not: the pass that reads z for act'(z) writes act(z) again, from the same
bits, so every gradient keeps its bits. With recompute=False a is saved too. dz takes z's memory
where no other code can see it: no hook of others on what is saved, no retain_graph, no CUDA graph.
Precision: fp32 accumulators and epilogues; z and a are rounded to the compute dtype. No atomics.
Routes as for linear; in the Triton one act'(z), the rebuilt a and the partials of db1 ride in the
epilogue of the product that gives dz. Derivation: docs/mlp.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.arguments import (
    aligned,
    check_epilogue,
    check_flags,
    check_input,
    check_weight,
    compute_dtype,
    empty,
    empty_gradients,
    needs_gradient,
)
from ..runtime.backend import gpu
from ..runtime.compat import reads_last, saves_are_own
from ..runtime.dispatch import cached_dispatch, choose_route
from ..runtime.operator import EAGER, Route, differentiable, operator
from ..runtime.triton import ANY_BATCH, tl, triton
from .common import epilogue, gemm, grad_handoff
from .common.activation import activate_and_derivative, check_activation
from .common.deferred import deferred
from .common.epilogue import ScaledLinear
from .common.gemm import (
    column_halves,
    grouped_tile,
    tile_launch,
    tile_operands,
    tile_plan,
    tile_product,
    tiles_of_program,
)
from .common.gemm_configs import HIDDEN_TABLE, gemm_config
from .common.grad_handoff import layer_backward
from .common.reduction import column_sum, zeroed
from .common.samples import check_drawn
from .gated_mlp.functions import GATED, gated_mlp, gated_mlp_ref
from .linear import Output, decide_output, linear_fwd, linear_ref, linear_to_output


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
    """The specification of `mlp`: two of `linear_ref`, or `gated_mlp_ref`."""
    if activation in GATED:
        layers = fc1_weight, fc1_bias, fc2_weight, fc2_bias
        end: Any = dict(residual=residual, layer_scale=layer_scale, row_scale=row_scale)
        return gated_mlp_ref(x, *layers, activation=GATED[activation], **end)
    hidden = linear_ref(x, fc1_weight, fc1_bias, activation)
    return linear_ref(hidden, fc2_weight, fc2_bias, None, residual, layer_scale, row_scale)


class Hidden(NamedTuple):
    """Constants of the hidden gradient."""

    ACTIVATION: Any
    WRITE_ACT: Any
    SUM_DZ: Any


@triton.jit
def _hidden_epilogue(
    ptrs,
    dact,
    first_m,
    first_f,
    M,
    F,
    HIDDEN: tl.constexpr,
    SUBTILES: tl.constexpr,
    EVEN_F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the tile of dact at (first_m, first_f) to dz, act and the sums of dz over its rows."""
    if SUBTILES > 1:
        halves = column_halves(dact, BLOCK_M, BLOCK_N)
        PARTS: tl.constexpr = SUBTILES // 2
        HALF: tl.constexpr = BLOCK_N // 2
        for i in tl.static_range(2):
            column = first_f + i * HALF
            _hidden_epilogue(
                ptrs, halves[i], first_m, column, M, F, HIDDEN, PARTS, EVEN_F, BLOCK_M, HALF
            )
    else:
        dz_ptr, act_ptr, partial_ptr, z_ptr = ptrs
        offs_m, offs_f = first_m + tl.arange(0, BLOCK_M), first_f + tl.arange(0, BLOCK_N)
        mask_f = offs_f < F
        mask = (offs_m < M)[:, None]
        if not EVEN_F:
            mask = mask & mask_f[None, :]
        offs = offs_m[:, None] * F + offs_f[None, :]
        z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        ACTIVATION: tl.constexpr = HIDDEN.ACTIVATION
        act, derivative = activate_and_derivative(z, ACTIVATION, dz_ptr.dtype.element_ty)
        if HIDDEN.WRITE_ACT:
            tl.store(act_ptr + offs, act.to(act_ptr.dtype.element_ty), mask=mask)
        dz = dact * derivative
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if HIDDEN.SUM_DZ:
            partial = tl.sum(tl.where(mask, dz, 0.0), axis=0)
            tl.store(partial_ptr + offs_f, partial, mask=mask_f)


@triton.jit(**ANY_BATCH)
def _mlp_bwd_hidden_kernel(
    dz_ptr,
    act_ptr,
    partial_ptr,
    d_ptr,
    weight_ptr,
    z_ptr,
    M,
    F,
    N,
    stride_d_m,
    stride_d_n,
    stride_weight_n,
    stride_weight_f,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
):
    # dz (M, F) = d (M, N) W2 (N, F) * act'(z); partial[pid_m] = sum of dz over the tile's rows.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_F: tl.constexpr = TILE.BLOCK_N
    sizes, strides = (M, F, N), (stride_d_m, stride_d_n, stride_weight_n, stride_weight_f)
    d, weight = tile_operands(d_ptr, weight_ptr, sizes, strides, TILE)
    first, last, step = tiles_of_program(M, F, TILE)
    for tile in tl.range(first, last, step, flatten=TILE.FLATTEN):
        pid_m, pid_f = grouped_tile(tile, M, F, BLOCK_M, BLOCK_F, TILE.GROUP_M)
        dact = tile_product(d, weight, pid_m, pid_f, sizes, strides, TILE)
        ptrs = dz_ptr, act_ptr, partial_ptr + pid_m.to(tl.int64) * F, z_ptr
        row, column = pid_m.to(tl.int64) * BLOCK_M, pid_f.to(tl.int64) * BLOCK_F
        _hidden_epilogue(
            ptrs, dact, row, column, M, F, HIDDEN, TILE.SUBTILES, TILE.EVEN_N, BLOCK_M, BLOCK_F
        )


def _hidden_gradient(
    d: Tensor,
    weight: Tensor,
    layer_scale: Tensor | None,
    z: Tensor,
    act: Tensor | None,
    activation: str,
    sum_dz: bool,
    owns_z: bool,
) -> tuple[Tensor, Tensor]:
    """dz = d (layer_scale * W2) * act'(z), (M, F), and partials whose column sums are db1.

    d (M, N) in z's dtype, weight (N, F), z (M, F); act(z) is written into act if it is not None,
    and dz over z where nothing else reads that: a program has read the elements that it writes.
    """
    a, b = epilogue.input_gradient_operands(d, weight, layer_scale)
    (M, F), N = z.shape, d.shape[1]
    config = gemm_config(gpu(z.device), HIDDEN_TABLE, M, F, N, z.dtype)
    plan = tile_plan(config, a, b)
    if plan is None:
        dact = gemm.matmul(a, b)
        return epilogue.backward_epilogue(
            dact, z, activation, z.dtype, act=act, sum_dz=sum_dz, dz=dact
        )
    dz = z if owns_z and reads_last(z) else torch.empty_like(z)
    rows = triton.cdiv(M, plan.config.block_m)
    warp_specialized = plan.config.route == "gluon"
    if warp_specialized:
        from .common.gemm_warp_specialized import FINISHERS, launch_warp_specialized

        rows *= FINISHERS.value
    partial = torch.empty((rows, F if sum_dz else 0), dtype=torch.float32, device=z.device)
    if warp_specialized:
        sums = partial if sum_dz else None
        z = aligned(z)  # it comes by TMA
        launch_warp_specialized(plan, dz, act, sums, a, b, z, None, activation)
        return dz, partial
    hidden = Hidden(activation, act is not None, sum_dz)
    launch = tile_launch(plan, _mlp_bwd_hidden_kernel, HIDDEN=hidden)
    launch(dz, act, partial, a, b, z, M, F, N, *a.stride(), *b.stride())
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
    owns_z: bool,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, in this order.

    Each in its dtype, None where that is None. The tensors are in `dtype`, the forward's compute
    dtype; each may be None where no wanted gradient reads it, act also where z, kept for other
    gradients, can rebuild it. g (N,) fp32 has the column sums of dy, which is then in `dtype`. With
    owns_z, which no compiler passes, z holds other numbers after a backward that is the last.
    """
    dfc1_dtypes = dx_dtype, dfc1_weight_dtype, dfc1_bias_dtype
    dfc2_dtypes = dfc2_weight_dtype, dfc2_bias_dtype, dlayer_scale_dtype
    if dy.numel() == 0:
        grads = _empty_bwd(dy, x, fc1_weight, z, act, row_scale, *dfc1_dtypes, *dfc2_dtypes)
        return zeroed(*grads)
    fc2 = ScaledLinear(fc2_weight, fc2_bias, layer_scale, *dfc2_dtypes)
    shape = epilogue.rows_shape(dy, row_scale)
    M, dz, dx, dfc1_weight, dfc1_bias = math.prod(shape), None, None, None, None
    d, sums = epilogue.scaled_gradient(dy, row_scale, dtype, fc2, g)
    # A hook on saved tensors may have brought them back in other strides.
    z_rows = None if z is None else z.contiguous().view(M, -1)
    act_rows = None if act is None else act.contiguous().view(M, -1)
    rebuilt = None
    if act_rows is None and fc2.needs_x:
        assert z_rows is not None and any(dfc1_dtypes)  # their pass writes it
        act_rows = rebuilt = torch.empty_like(z_rows)
    if any(dfc1_dtypes):
        assert z_rows is not None and fc2_weight is not None
        sum_dz = dfc1_bias_dtype is not None
        dz, partial = _hidden_gradient(
            d, fc2_weight, layer_scale, z_rows, rebuilt, activation, sum_dz, owns_z
        )
        if sum_dz:
            dfc1_bias = column_sum(partial, empty(z_rows.shape[1:], dfc1_bias_dtype, dy.device))
    dfc2 = epilogue.weight_gradients(d, sums, act_rows, fc2)
    act_rows = rebuilt = None  # before x and dx take memory
    if dz is not None and dfc1_weight_dtype is not None and x is not None:
        x_rows = deferred.read(x).reshape(M, x.shape[-1])
        dfc1_weight = gemm.matmul(dz.t(), x_rows, out_dtype=dfc1_weight_dtype)
    if dz is not None and dx_dtype is not None and fc1_weight is not None:
        dx = gemm.matmul(dz, fc1_weight, out_dtype=dx_dtype).view(*shape, -1)
    return dx, dfc1_weight, dfc1_bias, *dfc2  # pyright: ignore[reportReturnType]


class MlpSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    activation: str
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    output: Output
    input_dtypes: tuple[torch.dtype | None, ...]  # of the first seven inputs, in mlp's order
    saves_x: bool
    saves_fc1_weight: bool
    saves_fc2_weight: bool
    saves_fc2_bias: bool
    saves_z: bool
    saves_act: bool


@grad_handoff.register
class MlpFunction(torch.autograd.Function):
    """Two `linear_fwd` forward, one `mlp_bwd` backward, which rebuilds act(z) if asked."""

    @staticmethod
    def forward(
        ctx,
        x,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        residual,
        layer_scale,
        row_scale,
        spec,
    ):
        if spec.casts:  # the kernels read biases of any dtype
            dtype = spec.dtype
            x, fc1_weight, fc2_weight = x.to(dtype), fc1_weight.to(dtype), fc2_weight.to(dtype)
        act, z = linear_fwd[spec.route](
            x, fc1_weight, fc1_bias, None, None, None, spec.activation, spec.dtype, spec.saves_z
        )
        end = residual, layer_scale, row_scale
        y = linear_to_output(spec, act, fc2_weight, fc2_bias, *end)
        ctx.save_for_backward(
            x if spec.saves_x else None,
            fc1_weight if spec.saves_fc1_weight else None,
            fc2_weight if spec.saves_fc2_weight else None,
            fc2_bias if spec.saves_fc2_bias else None,
            z if spec.saves_z else None,
            act if spec.saves_act else None,
            layer_scale,
            row_scale,
        )
        owns_z = spec.route == EAGER and saves_are_own()
        ctx.spec, ctx.options = spec, (spec.activation, spec.dtype, owns_z)
        grad_handoff.publish(ctx, spec.output.reads, row_scale)
        return y

    backward = layer_backward("mlp", mlp_bwd, bias=4, layer_scale=6)


apply_mlp = differentiable(MlpFunction)


@cached_dispatch
def _decide(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    recompute: bool,
) -> MlpSpec:
    """Check the arguments; what runs, in which dtypes, and what is saved."""
    check_input("mlp", x)
    check_activation("mlp", activation)
    if activation is None:
        raise ValueError("mlp: activation must not be None; use linear twice")
    check_flags("mlp", recompute=recompute)
    end = residual, layer_scale, row_scale
    reasons = [
        check_weight("mlp", "fc1_weight", fc1_weight, fc1_bias, x.shape[-1], x),
        check_weight("mlp", "fc2_weight", fc2_weight, fc2_bias, fc1_weight.shape[0], x),
        check_epilogue("mlp", x, fc2_weight.shape[0], *end),
    ]
    dtype = compute_dtype(
        "mlp",
        x=x,
        fc1_weight=fc1_weight,
        fc1_bias=fc1_bias,
        fc2_weight=fc2_weight,
        fc2_bias=fc2_bias,
    )
    inputs = (x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual, layer_scale)
    needs_dz = needs_gradient(x, fc1_weight, fc1_bias)
    needs_act = needs_gradient(fc2_weight, layer_scale)
    needs_dlayer_scale = needs_gradient(layer_scale)
    route = choose_route("mlp", next(filter(None, reasons), None), *inputs, row_scale)
    casts = any(t is not None and t.dtype != dtype for t in inputs[:5])
    needs_d, fuses = needs_gradient(*inputs[:5], layer_scale), route is not None
    output = decide_output(x, dtype, fc2_weight, fc2_bias, *end, needs_d, fuses and not casts)
    return MlpSpec(
        route=route,
        needs_gradient=needs_gradient(*inputs),
        activation=activation,
        dtype=dtype,
        casts=casts,
        output=output,
        input_dtypes=tuple(None if t is None else t.dtype for t in inputs),
        saves_x=needs_gradient(fc1_weight),
        saves_fc1_weight=needs_gradient(x),
        saves_fc2_weight=needs_dz or needs_dlayer_scale,
        saves_fc2_bias=needs_dlayer_scale,
        saves_z=needs_dz,
        saves_act=needs_act and not (recompute and needs_dz),
    )


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
    recompute: bool = True,
) -> Tensor:
    """The MLP of a ViT block, with LayerScale, DropPath and residual.

    y = residual + row_scale[sample] * layer_scale * (act(x W1^T + b1) W2^T + b2)

    Args:
        x: (B, ..., C), fp16, bf16 or fp32, any strides.
        fc1_weight: (F, C), fc1_bias: (F,) or None, fc2_weight: (N, F), fc2_bias: (N,) or None; any
            strides, in x.dtype unless under autocast.
        activation: "gelu" (exact erf), "gelu_tanh", "quick_gelu" or "silu"; or "swiglu", "geglu" or
            "geglu_tanh" with gate and value packed in fc1_weight (2F, C), the gate first.
            `gated_mlp` has them with separate weights, the gate last, or a LayerNorm inside.
        residual: (B, ..., N), any floating dtype, added last.
        layer_scale: (N,), any floating dtype.
        row_scale: (B,), any floating dtype: 0 or 1 / keep for each sample (DropPath). One that
            requires a gradient takes the PyTorch path. Or what `keep_samples` gave, as in `linear`.
        recompute: save the pre-activation alone and rebuild the activation in the backward, at the
            cost of one write of (B, ..., F). False saves both; the gradients have the same bits.
            Without effect on the PyTorch path.
    Returns:
        (B, ..., N) in the compute dtype (autocast's, else x.dtype), promoted with residual.dtype.
    Precision: fp32 accumulators and epilogues; the pre-activation and the activation are rounded to
        the compute dtype. Parameter gradients accumulate in fp32, each in its parameter's dtype.
    Saved: x and both weights in the compute dtype, the pre-activation (B, ..., F), and
        without recompute the activation (B, ..., F).
    Raises: ValueError, such as "mlp: fc2_weight must have shape (768, 3072), got (3072, 768)";
        TypeError.
    Specification: mlp_ref. Derivation: docs/mlp.md.
    """
    if activation.__class__ is str and activation in GATED:
        return gated_mlp(
            x,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation=GATED[activation],
            residual=residual,
            layer_scale=layer_scale,
            row_scale=row_scale,
            recompute=recompute,
        )
    epilogue = (residual, layer_scale, row_scale)
    spec = _decide(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *epilogue, activation, recompute)
    if row_scale is not None:
        check_drawn("mlp", row_scale, residual)
    route = spec.route
    if route is None:
        return mlp_ref(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, *epilogue)
    if spec.needs_gradient:
        return apply_mlp[route](x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *epilogue, spec)
    if spec.casts:
        dtype = spec.dtype
        x, fc1_weight, fc2_weight = x.to(dtype), fc1_weight.to(dtype), fc2_weight.to(dtype)
    act, _ = linear_fwd[route](
        x, fc1_weight, fc1_bias, None, None, None, activation, spec.dtype, False
    )
    return linear_to_output(spec, act, fc2_weight, fc2_bias, *epilogue)
