"""Attention with the QKV projection before it, as one Function. rotary.py has the same with RoPE.

    qkv = x W^T + b,  out = attention(qkv);   dx = dqkv W,  dW = dqkv^T x
    db = sum_t dq | 0 | sum_t dout  without dropout: sum_s p = 1, sum_s ds = 0

Saved: x, W, and what functions.py saves. Precision: as there; dW and db accumulate in fp32.
Derivation: docs/attention.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import check_int, check_shape, check_tensor, compute_dtype, needs_gradient
from ...runtime.compat import torch_sdpa
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.operator import Route, differentiable, operator
from ..common.gemm import matmul, product_with_bias
from .functions import attention_bwd, attention_fwd, check_scores, draw_seed, unsupported_scale


def qkv_attention_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int = 1,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The specification of `qkv_attention`: a Linear, then torch's own attention."""
    D = weight.shape[0] // (3 * num_heads)
    qkv = F.linear(x, weight, bias).reshape(*x.shape[:2], 3, num_heads, D)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return torch_sdpa(q, k, v, dropout_p=dropout_p, scale=scale).transpose(1, 2)


def empty_qkv(x: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    """Of a projection: (B, T, 3, H, D)."""
    return x.new_empty((*x.shape[:-1], 3, num_heads, weight.shape[0] // (3 * num_heads)))


@operator(fake=empty_qkv, flops=lambda x, weight: 2 * math.prod(x) * weight[0])
def qkv_projection_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """(B, T, C) -> qkv (B, T, 3, H, D); one dtype."""
    D = weight.shape[0] // (3 * num_heads)
    return product_with_bias(x, weight, bias).view(*x.shape[:2], 3, num_heads, D)


def _empty_qkv_projection_bwd(
    x: Tensor, weight: Tensor, weight_dtype: torch.dtype, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    needs_dx, needs_dweight = needs
    return (
        x.new_empty(x.shape if needs_dx else (0,)),
        x.new_empty(weight.shape if needs_dweight else (0,), dtype=weight_dtype),
    )


def _flops_qkv_projection_bwd(x, weight, needs):
    return 2 * math.prod(x) * weight[0] * (needs[0] + needs[1])


@operator(fake=_empty_qkv_projection_bwd, flops=_flops_qkv_projection_bwd)
def qkv_projection_bwd(
    dqkv: Tensor, x: Tensor, weight: Tensor, weight_dtype: torch.dtype, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """dx and dweight of the projection; each None where it is not needed."""
    needs_dx, needs_dweight = needs
    dx: Any = None
    dweight: Any = None
    N, C = weight.shape
    dqkv = dqkv.view(-1, N)
    if needs_dx:
        dx = matmul(dqkv, weight).view_as(x)
    if needs_dweight:
        dweight = matmul(dqkv.t(), x.reshape(-1, C), out_dtype=weight_dtype)
    return dx, dweight


class QkvAttentionSpec(NamedTuple):
    """What `_decide_qkv` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    scale: float
    dropout_p: float
    num_heads: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype


class QkvAttentionFunction(torch.autograd.Function):
    """x -> out through the QKV projection. Saves x, weight, qkv, out, lse and the dropout seed."""

    @staticmethod
    def forward(ctx, x, weight, bias, seed, spec):
        if spec.casts:
            x, weight = x.to(spec.dtype), weight.to(spec.dtype)
            bias = None if bias is None else bias.to(spec.dtype)
        # two operators: a checkpoint can keep what attention gives, and not qkv
        qkv = qkv_projection_fwd[spec.route](x, weight, bias, spec.num_heads)
        out, lse = attention_fwd[spec.route](qkv, seed, spec.scale, spec.dropout_p)
        ctx.save_for_backward(x, weight, qkv, out, lse, seed)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("qkv_attention", QkvAttentionFunction.backward, ctx, dout)
        x, weight, qkv, out, lse, seed = ctx.saved_tensors
        spec = ctx.spec
        route = backward_route(spec.route, dout)
        needs = list(ctx.needs_input_grad[:3])
        bias_dtype = spec.bias_dtype if needs[2] else None
        dqkv, _, dbias = attention_bwd[route](
            dout, qkv, out, lse, seed, spec.scale, spec.dropout_p, None, False, bias_dtype
        )
        dx, dweight = qkv_projection_bwd[route](dqkv, x, weight, spec.weight_dtype, needs[:2])
        return (
            dx if needs[0] else None,
            dweight if needs[1] else None,
            dbias if needs[2] else None,
            None,
            None,
        )


apply_qkv_attention = differentiable(QkvAttentionFunction)


def check_projection(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int
) -> int:
    """Raise unless they project x (B, T, C) to q, k and v of this many heads; D."""
    check_tensor(op, "x", x, ndim=3)
    check_tensor(op, "weight", weight, ndim=2)
    rows = weight.shape[0]
    check_int(op, "num_heads", num_heads)
    if rows % (3 * num_heads):
        raise ValueError(f"{op}: weight must have 3 * H * D rows with H = {num_heads}, got {rows}")
    check_shape(op, "weight", weight, (rows, x.shape[2]), like=x)
    check_shape(op, "bias", bias, (rows,), like=x)
    return rows // (3 * num_heads)


@cached_dispatch
def _decide_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    scale: float | None,
    dropout_p: float,
) -> QkvAttentionSpec:
    """Check the arguments of `qkv_attention`; what runs, and how."""
    op = "qkv_attention"
    D = check_projection(op, x, weight, bias, num_heads)
    scale = check_scores(op, D, scale, dropout_p)
    dtype = compute_dtype(op, x=x, weight=weight, bias=bias)
    return QkvAttentionSpec(
        route=choose_route(op, unsupported_scale(scale), x, weight, bias),
        needs_gradient=needs_gradient(x, weight, bias),
        dtype=dtype,
        casts=any(t is not None and t.dtype != dtype for t in (x, weight, bias)),
        scale=scale,
        dropout_p=dropout_p,
        num_heads=num_heads,
        weight_dtype=weight.dtype,
        bias_dtype=weight.dtype if bias is None else bias.dtype,
    )


def qkv_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """QKV projection and bidirectional softmax attention as one Function.

    qkv = x weight^T + bias, its columns ordered (3, H, D);  out = attention(qkv)

    Args:
        x: (B, T, C), fp16, bf16 or fp32. Under autocast computed in autocast's dtype.
        weight: (3 * H * D, C), rows [q; k; v], as timm's `qkv` and torch's `in_proj_weight`.
        bias: (3 * H * D,) or None.
        num_heads: H; D = weight.shape[0] / (3 H) is a multiple of 8 up to 256.
        scale, dropout_p: as for `attention`.
    Returns:
        (B, T, H, D), contiguous, in the compute dtype.
    Precision: as `attention`; dweight and dbias are summed in fp32 and written in the dtype of the
        parameter.
    Saved: x, weight, qkv, out, lse.
    Raises: ValueError, such as "qkv_attention: weight must have 3 * H * D rows with H = 12, got
        1000"; TypeError where dtypes differ outside autocast.
    Specification: qkv_attention_ref. Derivation: docs/attention.md.
    """
    spec = _decide_qkv(x, weight, bias, num_heads, scale, dropout_p)
    if spec.route is None:
        return qkv_attention_ref(x, weight, bias, num_heads, scale, dropout_p)
    seed = draw_seed(x.device) if dropout_p > 0 else None
    if spec.needs_gradient:
        return apply_qkv_attention[spec.route](x, weight, bias, seed, spec)
    if spec.casts:
        x, weight = x.to(spec.dtype), weight.to(spec.dtype)
        bias = None if bias is None else bias.to(spec.dtype)
    qkv = qkv_projection_fwd[spec.route](x, weight, bias, num_heads)
    return attention_fwd[spec.route](qkv, seed, spec.scale, dropout_p)[0]
