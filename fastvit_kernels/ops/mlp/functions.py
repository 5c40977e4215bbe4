"""MLP of a ViT block: fc1 with its activation in one epilogue, fc2 with what follows in another.

    z = x W1^T + b1,   a = act(z),   y = residual + row_scale[sample] * layer_scale * (a W2^T + b2)

With d = row_scale * dy and sums over the M rows of x:

    dz = d (layer_scale * W2) * act'(z),   db1 = sum dz,   dW1 = dz^T x,   dx = dz W1
    G = d^T a,   g = sum d:   dW2 = layer_scale * G,   db2 = layer_scale * g
    dlayer_scale[n] = W2[n] . G[n] + b2[n] g[n],   dresidual = dy

Saved: x, z, W1, W2. a is not: the pass that reads z for act'(z) writes act(z) again, from the same
bits, so every gradient keeps its bits. With recompute=False a is saved too. dz takes z's memory
where nobody else can see it: no hook of others on what is saved, no retain_graph, no CUDA graph.
Precision: fp32 accumulators and epilogues; z and a are rounded to the compute dtype. No atomics.
Routes as for linear; in the Triton one act'(z), the rebuilt a and the partials of db1 ride in the
epilogue of the product that gives dz. Files: launch.py, kernels.py. Derivation: docs/mlp.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    check_epilogue,
    check_flags,
    check_input,
    check_weight,
    compute_dtype,
    needs_gradient,
)
from ...runtime.compat import reads_last, saves_are_own
from ...runtime.dispatch import cached_dispatch, choose_route, first_order
from ...runtime.operator import EAGER, Route, differentiable
from ..common import grad_handoff
from ..common.activation import check_activation
from ..common.grad_handoff import Reads, layer_gradients
from ..gated_mlp.functions import GATED, gated_mlp, gated_mlp_ref
from ..linear.functions import linear_fwd, linear_ref
from .launch import mlp_bwd


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
        return gated_mlp_ref(
            x,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation=GATED[activation],
            residual=residual,
            layer_scale=layer_scale,
            row_scale=row_scale,
        )
    hidden = linear_ref(x, fc1_weight, fc1_bias, activation)
    return linear_ref(hidden, fc2_weight, fc2_bias, None, residual, layer_scale, row_scale)


class MlpSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    activation: str
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    out_dtype: torch.dtype
    input_dtypes: tuple[torch.dtype | None, ...]  # of the first seven inputs, in mlp's order
    saves_x: bool
    saves_fc1_weight: bool
    saves_fc2_weight: bool
    saves_fc2_bias: bool
    saves_z: bool
    saves_act: bool
    reads: Reads | None


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
        y, _ = linear_fwd[spec.route](
            act, fc2_weight, fc2_bias, residual, layer_scale, row_scale, "", spec.out_dtype, False
        )
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
        ctx.spec, ctx.owns_z = spec, spec.route == EAGER and saves_are_own()
        grad_handoff.publish(ctx, spec.reads, row_scale)
        return y

    @staticmethod
    @first_order("mlp")
    def backward(ctx, dy):
        options = (ctx.spec.activation, ctx.spec.dtype, ctx.owns_z and reads_last(dy))
        return layer_gradients(ctx, dy, mlp_bwd, options, bias=4, layer_scale=6)


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
    reasons = [
        check_weight("mlp", "fc1_weight", fc1_weight, fc1_bias, x.shape[-1], x),
        check_weight("mlp", "fc2_weight", fc2_weight, fc2_bias, fc1_weight.shape[0], x),
        check_epilogue("mlp", x, fc2_weight.shape[0], residual, layer_scale, row_scale),
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
    (
        needs_dx,
        needs_dfc1_weight,
        needs_dfc1_bias,
        needs_dfc2_weight,
        needs_dfc2_bias,
        _,
        needs_dlayer_scale,
    ) = map(needs_gradient, inputs)
    needs_dz = needs_dx or needs_dfc1_weight or needs_dfc1_bias
    needs_act = needs_dfc2_weight or needs_dlayer_scale
    unsupported = next(filter(None, reasons), None)
    out_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    reads = grad_handoff.offer(
        dtype,
        out_dtype,
        fc2_bias,
        layer_scale,
        row_scale,
        x=x,
        needs_d=needs_dz or needs_act or needs_dfc2_bias,
        needs_dbias=needs_dfc2_bias,
        needs_dlayer_scale=needs_dlayer_scale,
    )
    return MlpSpec(
        route=choose_route("mlp", unsupported, *inputs, row_scale),
        needs_gradient=needs_gradient(*inputs),
        activation=activation,
        dtype=dtype,
        casts=any(t is not None and t.dtype != dtype for t in inputs[:5]),
        out_dtype=out_dtype,
        input_dtypes=tuple(None if t is None else t.dtype for t in inputs),
        saves_x=needs_dfc1_weight,
        saves_fc1_weight=needs_dx,
        saves_fc2_weight=needs_dz or needs_dlayer_scale,
        saves_fc2_bias=needs_dlayer_scale,
        saves_z=needs_dz,
        saves_act=needs_act and not (recompute and needs_dz),
        reads=reads,
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
    """The MLP of a ViT block with all that follows it.

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
    route = spec.route
    if route is None:
        return mlp_ref(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, *epilogue)
    if spec.needs_gradient:
        return apply_mlp[route](x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *epilogue, spec)
    if spec.casts:
        dtype = spec.dtype
        x, fc1_weight, fc2_weight = x.to(dtype), fc1_weight.to(dtype), fc2_weight.to(dtype)
    fwd = linear_fwd[route]
    act, _ = fwd(x, fc1_weight, fc1_bias, None, None, None, activation, spec.dtype, False)
    return fwd(act, fc2_weight, fc2_bias, *epilogue, "", spec.out_dtype, False)[0]
