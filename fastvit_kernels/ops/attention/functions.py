"""Softmax attention over all tokens, of packed QKV.

    out[b,t,h] = sum_s softmax_s(scale * q[b,t,h] . k[b,s,h]) v[b,s,h]

Gradient, with p = softmax(s), delta[t] = sum_d out[t,d] dout[t,d]:

    dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q

Saved: qkv, out, lse (B, H, T) fp32 in log2 units.
Precision: scores, softmax and accumulators fp32; p and ds are cast to the input dtype before their
products. With the QKV projection: projected.py; torch's signature: sdpa.py; kernels and launch
configs: the other files here. Source: arXiv:2307.08691. Derivation: docs/attention.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    autocast_dtype,
    check_dropout,
    check_number,
    check_tensor,
    empty,
    needs_gradient,
)
from ...runtime.compat import torch_sdpa, torch_sdpa_with
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.operator import Route, differentiable, operator
from ..common.reduction import column_sum, zeroed
from .backward_bias import launch_bias_grad
from .configs import MAX_D
from .launch import (
    Softmax,
    bwd_flops,
    empty_dqkv,
    empty_lse,
    fwd_flops,
    launch_bwd,
    launch_fwd,
    readable,
)
from .masked import as_four_axes, check_mask, unsupported_mask


def attention_ref(
    qkv: Tensor,
    scale: float | None = None,
    dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The specification of `attention`: torch's own, on the three views of qkv."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if attn_mask is None:
        return torch_sdpa(q, k, v, dropout_p=dropout_p, scale=scale).transpose(1, 2)
    mask = as_four_axes(attn_mask)
    if mask.dtype not in (torch.bool, torch.float32):  # torch adds those as they are
        mask = mask.to(qkv.dtype)
    if mask.shape[0] in (1, q.shape[0]):  # len() would fix the sizes of an export
        out = torch_sdpa_with(mask, q, k, v, dropout_p, scale=scale)
    else:
        q, k, v = (x.unflatten(0, (-1, len(mask))) for x in (q, k, v))
        out = torch_sdpa_with(mask, q, k, v, dropout_p, scale=scale).flatten(0, 1)
    return out.transpose(1, 2)


def draw_seed(device: torch.device) -> Tensor:
    """One random int64 on the device, from torch's generator: a CUDA graph redraws it at replay."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


def _empty_fwd(qkv: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out = qkv.new_empty(qkv.shape[:2] + qkv.shape[3:])
    return out, empty_lse(out, mask)


@operator(fake=_empty_fwd, flops=fwd_flops)
def attention_fwd(
    qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Packed (B, T, 3, H, D), mask of four axes -> out (B, T, H, D), lse (`empty_lse`)."""
    qkv = readable(qkv)
    packed = qkv if mask is None else None
    return launch_fwd(qkv.unbind(2), Softmax(scale, dropout_p, seed, mask), packed=packed)


def _empty_bwd(
    qkv: Tensor, mask: Tensor | None, needs_dmask: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dmask = mask.new_empty(mask.shape) if needs_dmask and mask is not None else None
    dbias = None
    if bias_dtype is not None:
        dbias = empty((qkv.shape[2:].numel(),), bias_dtype, qkv.device)
    return empty_dqkv(qkv), dmask, dbias


def _flops_bwd(dout, needs_dmask):
    again = 4 * math.prod(dout) * dout[1]  # scores and dp once more
    return bwd_flops(dout) + (again if needs_dmask else 0)


@operator(fake=_empty_bwd, flops=_flops_bwd)
def attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    mask: Tensor | None = None,
    needs_dmask: bool = False,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dqkv (B, T, 3, H, D), contiguous; the mask's gradient, None where none is needed; the column
    sums of dqkv (3 H D,) in bias_dtype, without a mask, None where that is None."""
    dqkv, dmask, dbias = grads = _empty_bwd(qkv, mask, needs_dmask, bias_dtype)
    if qkv.numel() == 0:
        return zeroed(*grads)
    dout, qkv = readable(dout), readable(qkv)
    heads, softmax = qkv.unbind(2), Softmax(scale, dropout_p, seed, mask)
    packed = (dqkv, qkv) if mask is None else None
    _, delta, sums = launch_bwd(
        dqkv.unbind(2), dout, heads, out, lse, softmax, packed, has_bias=dbias is not None
    )
    if dmask is not None:
        assert delta is not None and mask is not None
        launch_bias_grad(dmask, dout, heads, lse, delta, mask, softmax)
    if dbias is not None:
        column_sum(dqkv.view(-1, dbias.shape[0]) if sums is None else sums, dbias)
    return dqkv, dmask, dbias  # pyright: ignore[reportReturnType]


class AttentionSpec(NamedTuple):
    """What `_decide` found for a kind of call, here and in varlen.py."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    casts: bool  # qkv has another dtype
    scale: float
    dropout_p: float
    max_seqlen: int = 0  # of packed sequences


class AttentionFunction(torch.autograd.Function):
    """qkv, mask -> out. Saves both, out, lse and the dropout seed."""

    @staticmethod
    def forward(ctx, qkv, mask, seed, spec):
        out, lse = attention_fwd[spec.route](qkv, seed, spec.scale, spec.dropout_p, mask)
        ctx.save_for_backward(qkv, out, lse, mask, seed)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("attention", AttentionFunction.backward, ctx, dout)
        qkv, out, lse, mask, seed = ctx.saved_tensors
        scale, dropout_p = ctx.spec.scale, ctx.spec.dropout_p
        route = backward_route(ctx.spec.route, dout)
        needs_dmask = ctx.needs_input_grad[1]
        dqkv, dmask, _ = attention_bwd[route](
            dout, qkv, out, lse, seed, scale, dropout_p, mask, needs_dmask
        )
        return dqkv, dmask if needs_dmask else None, None, None


apply_attention = differentiable(AttentionFunction)


def check_head_dim(op: str, D: int) -> None:
    """Raise ValueError unless D is a multiple of 8 from 8 to 256."""
    if D > MAX_D:
        raise ValueError(f"{op}: D must be at most {MAX_D}, got {D}")
    if D % 8 or D == 0:
        raise ValueError(f"{op}: D must be a multiple of 8, got {D}")


def check_scores(op: str, D: int, scale: float | None, dropout_p: float) -> float:
    """Raise unless the kernels can have such heads, scale and dropout; the scale."""
    check_head_dim(op, D)
    check_dropout(op, dropout_p)
    scale = default_scale(D) if scale is None else scale
    check_number(op, "scale", scale)
    return scale


def default_scale(D: int) -> float:
    """D**-0.5, as torch's own."""
    return float(D) ** -0.5


def unsupported_scale(scale: float) -> str | None:
    """The kernels take the maximum of unscaled scores and masks, so that scale is no tiny one."""
    return None if scale >= 1e-20 else f"scale must be at least 1e-20 in the kernel, got {scale}"


@cached_dispatch
def _decide(
    qkv: Tensor, attn_mask: Tensor | None, scale: float | None, dropout_p: float
) -> AttentionSpec:
    """Check the arguments of `attention`; what runs, and how."""
    check_tensor("attention", "qkv", qkv, ndim=5)
    if qkv.shape[2] != 3:
        raise ValueError(f"attention: qkv must be (B, T, 3, H, D), got {tuple(qkv.shape)}")
    scale = check_scores("attention", qkv.shape[4], scale, dropout_p)
    check_mask(attn_mask, qkv)
    dtype = autocast_dtype(qkv) or qkv.dtype
    unsupported = unsupported_scale(scale) or unsupported_mask(attn_mask)
    return AttentionSpec(
        route=choose_route("attention", unsupported, qkv, attn_mask),
        needs_gradient=needs_gradient(qkv, attn_mask),
        dtype=dtype,
        casts=qkv.dtype != dtype,
        scale=scale,
        dropout_p=dropout_p,
    )


def attention(
    qkv: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Bidirectional softmax attention on packed QKV.

    out[b,t,h] = sum_s softmax_s(scale * q[b,t,h].k[b,s,h] + attn_mask[b,h,t,s]) v[b,s,h]

    Args:
        qkv: (B, T, 3, H, D), fp16, bf16 or fp32, read by its strides (a last axis that is not
            contiguous is copied). D a multiple of 8 up to 256. Under autocast, autocast's dtype.
        attn_mask: broadcasts to (B, H, T, T), boolean (True is seen) or added to the scores, of any
            dtype, then perhaps with a gradient. Its first axis may also be a divisor W of B, as
            for W windows of an image: sample b has attn_mask[b % W].
        scale: multiplies the scores, dimensionless. Default D**-0.5.
        dropout_p: probability of dropping a softmax probability; the rest is divided by
            1 - dropout_p. The mask comes from torch's generator on qkv's device.
    Returns:
        (B, T, H, D), contiguous, dtype of qkv.
    Precision: scores, softmax and accumulators fp32; P is cast to qkv.dtype before P V.
    Route: from T = 2048 on, cuDNN's or flash's kernels may run, whose gradients repeat their bits
        only under torch.use_deterministic_algorithms(True).
    Saved: qkv, attn_mask, out, lse (B, H, T) fp32, log2 units; (B, 2 H, T) beside an additive mask.
    Raises: ValueError, such as "attention: D must be at most 256, got 320"; TypeError.
    Source: arXiv:2307.08691. Specification: attention_ref. Derivation: docs/attention.md.
    """
    spec = _decide(qkv, attn_mask, scale, dropout_p)
    route = spec.route
    if route is None:
        return attention_ref(qkv, scale, dropout_p, attn_mask)
    if spec.casts:
        qkv = qkv.to(spec.dtype)
    seed = draw_seed(qkv.device) if dropout_p > 0 else None
    if attn_mask is not None:
        attn_mask = as_four_axes(attn_mask)
    if spec.needs_gradient:
        return apply_attention[route](qkv, attn_mask, seed, spec)
    return attention_fwd[route](qkv, seed, spec.scale, dropout_p, attn_mask)[0]
