"""Softmax attention over all tokens: packed QKV, QKV projection + attention, and torch's signature.

    out[b,t,h] = sum_s softmax_s(scale * q[b,t,h] . k[b,s,h]) v[b,s,h]

Gradient, with p = softmax(s), delta[t] = sum_d out[t,d] dout[t,d]:

    dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q
    dbias of the projection = sum_t dq | 0 | sum_t dout  without dropout: sum_s p = 1, sum_s ds = 0

Saved: qkv (or q, k, v), out, lse (B, H, T) fp32 in log2 units; `qkv_attention` adds x and weight.
Precision: scores, softmax and accumulators fp32; p and ds are cast to the input dtype before their
products. Kernels and launch configs: the other files here. Source: arXiv:2307.08691. Derivation:
docs/attention.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import (
    autocast_dtype,
    check_dropout,
    check_int,
    check_number,
    check_shape,
    check_tensor,
    compute_dtype,
    needs_gradient,
)
from ...runtime.dispatch import decide_once, first_order, ops_for, route
from ...runtime.operator import Routed, differentiable, operator
from ..common.gemm import matmul, product_with_bias
from ..common.reduction import column_sum
from .configs import MAX_D
from .launch import (
    bias_partials,
    bwd_flops,
    empty_dqkv,
    empty_outputs,
    fwd_flops,
    launch_bwd,
    launch_fwd,
    readable,
)
from .masked import as_four_axes, check_mask, unsupported_mask

# Torch's own: F's attribute of this name may be ours by now, as a drop-in.
torch_sdpa = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]


def attention_ref(
    qkv: Tensor, scale: float | None = None, dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `attention`: torch's own, on the three views of qkv."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if attn_mask is None:
        return torch_sdpa(q, k, v, dropout_p=dropout_p, scale=scale).transpose(1, 2)
    mask = as_four_axes(attn_mask)
    mask = mask if mask.dtype is torch.bool else mask.to(qkv.dtype)
    if len(mask) in (1, len(q)):
        out = torch_sdpa(q, k, v, mask, dropout_p, scale=scale)
    else:
        q, k, v = (x.unflatten(0, (-1, len(mask))) for x in (q, k, v))
        out = torch_sdpa(q, k, v, mask, dropout_p, scale=scale).flatten(0, 1)
    return out.transpose(1, 2)


def qkv_attention_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int = 1,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The specification of `qkv_attention`: a Linear, then `attention_ref`."""
    D = weight.shape[0] // (3 * num_heads)
    qkv = F.linear(x, weight, bias).unflatten(-1, (3, num_heads, D))
    return attention_ref(qkv, scale, dropout_p)


def draw_seed(device: torch.device) -> Tensor:
    """One random int64 on the device, from torch's generator: a CUDA graph redraws it at replay."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


@operator(fake=empty_outputs, flops=fwd_flops)
def attention_fwd(
    qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Packed (B, T, 3, H, D) -> out (B, T, H, D), lse (B, H, T) fp32 in log2 units."""
    out, lse = empty_outputs(qkv)
    if qkv.numel():
        launch_fwd(out, lse, readable(qkv).unbind(2), None, seed, scale, dropout_p, False)
    return out, lse


@operator(fake=empty_dqkv, flops=bwd_flops)
def attention_bwd(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float,
) -> Tensor:  # fmt: skip
    """dqkv (B, T, 3, H, D), contiguous."""
    dqkv = empty_dqkv(qkv)
    if qkv.numel():
        launch_bwd(
            dqkv.unbind(2), readable(dout), readable(qkv).unbind(2), out.contiguous(), lse, None,
            seed, scale, dropout_p, False,
        )  # fmt: skip
    return dqkv


def _empty_attention_and_bias_bwd(qkv: Tensor, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return empty_dqkv(qkv), qkv.new_empty(qkv.shape[2:].numel(), dtype=bias_dtype)


@operator(fake=_empty_attention_and_bias_bwd, flops=bwd_flops)
def attention_and_bias_bwd(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dqkv (B, T, 3, H, D) contiguous, and its column sums (3 H D,) in bias_dtype."""
    dqkv, dbias = _empty_attention_and_bias_bwd(qkv, bias_dtype)
    if qkv.numel() == 0:
        return dqkv, dbias.zero_()
    rows, partial = bias_partials(out, seed is not None), None
    if rows:
        partial = torch.empty(rows, len(dbias), dtype=torch.float32, device=qkv.device)
    launch_bwd(
        dqkv.unbind(2), readable(dout), readable(qkv).unbind(2), out.contiguous(), lse, None, seed,
        scale, dropout_p, False, partial,
    )  # fmt: skip
    column_sum(dqkv.view(-1, len(dbias)) if partial is None else partial, dbias)
    return dqkv, dbias


class AttentionDecision(NamedTuple):
    """What `_decide` found for a kind of call, here and in varlen.py."""

    ops: Routed | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    casts: bool  # qkv has another dtype
    scale: float
    dropout_p: float
    max_seqlen: int = 0  # of packed sequences


@differentiable
class AttentionFunction(torch.autograd.Function):
    """qkv, mask -> out. Saves both, out, lse and the dropout seed."""

    @staticmethod
    def forward(ctx, qkv, mask, seed, decision):
        ops, _, _, _, scale, dropout_p, _ = decision
        if mask is None:
            out, lse = ops.attention_fwd(qkv, seed, scale, dropout_p)
        else:
            out, lse = ops.masked_attention_fwd(qkv, mask, seed, scale, dropout_p)
        ctx.save_for_backward(qkv, out, lse, mask, seed)
        ctx.decision = decision
        return out

    @staticmethod
    @first_order("attention")
    def backward(ctx, dout):
        qkv, out, lse, mask, seed = ctx.saved_tensors
        ops, _, _, _, scale, dropout_p, _ = ctx.decision
        ops = ops_for(ops, dout)
        if mask is None:
            return ops.attention_bwd(dout, qkv, out, lse, seed, scale, dropout_p), None, None, None
        needs_dmask = ctx.needs_input_grad[1]
        dqkv, dmask = ops.masked_attention_bwd(
            dout, qkv, out, lse, mask, seed, scale, dropout_p, needs_dmask
        )
        return dqkv, dmask if needs_dmask else None, None, None


def empty_qkv(x: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    """Of a projection: (B, T, 3, H, D)."""
    return x.new_empty((*x.shape[:-1], 3, num_heads, weight.shape[0] // (3 * num_heads)))


def _empty_qkv_attention_fwd(
    x: Tensor, weight: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = empty_qkv(x, weight, num_heads)
    return qkv, *empty_outputs(qkv)


def projected_flops(x, weight):
    """Of a forward with its projection."""
    B, T, C = x
    rows = weight[0]  # 3 H D
    return 2 * B * T * rows * C + 4 * B * T * T * (rows // 3)


@operator(fake=_empty_qkv_attention_fwd, flops=projected_flops)
def qkv_attention_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None, num_heads: int,
    scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(B, T, C) -> qkv (B, T, 3, H, D), out (B, T, H, D), lse (B, H, T); one dtype."""
    B, T, _ = x.shape
    D = weight.shape[0] // (3 * num_heads)
    qkv = product_with_bias(x, weight, bias).view(B, T, 3, num_heads, D)
    out, lse = empty_outputs(qkv)
    if qkv.numel():
        launch_fwd(out, lse, qkv.unbind(2), None, seed, scale, dropout_p, False)
    return qkv, out, lse


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
    """dx and dweight of the projection; each empty where it is not needed."""
    needs_dx, needs_dweight = needs
    dx, dweight = _empty_qkv_projection_bwd(x, weight, weight_dtype, needs)
    dqkv = dqkv.view(-1, weight.shape[0])
    x = x.reshape(-1, x.shape[-1])
    if needs_dx:
        dx = matmul(dqkv, weight).view(dx.shape)
    if needs_dweight:
        dweight = matmul(dqkv.t(), x, out_dtype=weight_dtype)
    return dx, dweight


class QkvAttentionDecision(NamedTuple):
    """What `_decide_qkv` found for a kind of call."""

    ops: Routed | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    scale: float
    dropout_p: float
    num_heads: int
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype


@differentiable
class QkvAttentionFunction(torch.autograd.Function):
    """x -> out through the QKV projection. Saves x, weight, qkv, out, lse and the dropout seed."""

    @staticmethod
    def forward(ctx, x, weight, bias, seed, decision):
        x, weight, qkv, out, lse = _forward_qkv(x, weight, bias, seed, decision)
        ctx.save_for_backward(x, weight, qkv, out, lse, seed)
        ctx.decision = decision
        return out

    @staticmethod
    @first_order("qkv_attention")
    def backward(ctx, dout):
        x, weight, qkv, out, lse, seed = ctx.saved_tensors
        decision = ctx.decision
        ops = ops_for(decision.ops, dout)
        needs = list(ctx.needs_input_grad[:3])
        arguments = dout, qkv, out, lse, seed, decision.scale, decision.dropout_p
        dbias = None
        if needs[2]:
            dqkv, dbias = ops.attention_and_bias_bwd(*arguments, decision.bias_dtype)
        else:
            dqkv = ops.attention_bwd(*arguments)
        dx, dweight = ops.qkv_projection_bwd(dqkv, x, weight, decision.weight_dtype, needs[:2])
        return (
            dx if needs[0] else None, dweight if needs[1] else None, dbias, None, None,
        )  # fmt: skip


def _forward_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None,
    decision: QkvAttentionDecision,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x and weight in the compute dtype, qkv, out, lse."""
    if decision.casts:
        x, weight = x.to(decision.dtype), weight.to(decision.dtype)
        bias = None if bias is None else bias.to(decision.dtype)
    assert decision.ops is not None
    qkv, out, lse = decision.ops.qkv_attention_fwd(
        x, weight, bias, seed, decision.num_heads, decision.scale, decision.dropout_p
    )
    return x, weight, qkv, out, lse


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


def default_scale(D: int) -> float:
    """D**-0.5, as torch's own."""
    return float(D) ** -0.5


def unsupported_scale(scale: float) -> str | None:
    """The kernels take the maximum of the unscaled scores, so that scale must be positive."""
    return None if scale > 0 else f"scale must be positive in the kernel, got {scale}"


@decide_once
def _decide(
    qkv: Tensor, attn_mask: Tensor | None, scale: float | None, dropout_p: float, ops: Routed
) -> AttentionDecision:
    """Check the arguments of `attention`; what runs, and how."""
    check_tensor("attention", "qkv", qkv, ndim=5)
    if qkv.shape[2] != 3:
        raise ValueError(f"attention: qkv must be (B, T, 3, H, D), got {tuple(qkv.shape)}")
    scale = check_scores("attention", qkv.shape[4], scale, dropout_p)
    check_mask(attn_mask, qkv)
    dtype = autocast_dtype(qkv) or qkv.dtype
    unsupported = unsupported_scale(scale) or unsupported_mask(attn_mask)
    return AttentionDecision(
        route("attention", ops, unsupported, qkv, attn_mask), needs_gradient(qkv, attn_mask),
        dtype, qkv.dtype != dtype, scale, dropout_p,
    )  # fmt: skip


@decide_once
def _decide_qkv(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, scale: float | None,
    dropout_p: float, ops: Routed,
) -> QkvAttentionDecision:  # fmt: skip
    """Check the arguments of `qkv_attention`; what runs, and how."""
    op = "qkv_attention"
    D = check_projection(op, x, weight, bias, num_heads)
    scale = check_scores(op, D, scale, dropout_p)
    dtype = compute_dtype(op, x=x, weight=weight, bias=bias)
    return QkvAttentionDecision(
        route(op, ops, unsupported_scale(scale), x, weight, bias),
        needs_gradient(x, weight, bias), dtype,
        any(t is not None and t.dtype != dtype for t in (x, weight, bias)),
        scale, dropout_p, num_heads, weight.dtype, weight.dtype if bias is None else bias.dtype,
    )  # fmt: skip


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
    Saved: qkv, attn_mask, out, lse (B, H, T) fp32, log2 units.
    Raises: ValueError, such as "attention: D must be at most 256, got 320"; TypeError.
    Source: arXiv:2307.08691. Specification: attention_ref. Derivation: docs/attention.md.
    """
    decision = _decide(qkv, attn_mask, scale, dropout_p)
    ops, needs_gradient, dtype, casts, scale_, _, _ = decision
    if ops is None:
        return attention_ref(qkv, scale, dropout_p, attn_mask)
    if casts:
        qkv = qkv.to(dtype)
    seed = draw_seed(qkv.device) if dropout_p > 0 else None
    if attn_mask is not None:
        attn_mask = as_four_axes(attn_mask)
    if needs_gradient:
        return ops.AttentionFunction(qkv, attn_mask, seed, decision)
    if attn_mask is not None:
        return ops.masked_attention_fwd(qkv, attn_mask, seed, scale_, dropout_p)[0]
    return ops.attention_fwd(qkv, seed, scale_, dropout_p)[0]


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
    decision = _decide_qkv(x, weight, bias, num_heads, scale, dropout_p)
    if decision.ops is None:
        return qkv_attention_ref(x, weight, bias, num_heads, scale, dropout_p)
    seed = draw_seed(x.device) if dropout_p > 0 else None
    if not decision.needs_gradient:
        return _forward_qkv(x, weight, bias, seed, decision)[3]
    return decision.ops.QkvAttentionFunction(x, weight, bias, seed, decision)
