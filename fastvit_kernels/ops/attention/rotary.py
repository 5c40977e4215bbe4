"""QKV projection, norm and rotary embedding of queries and keys, attention: one Function.

    q, k, v = x weight^T + bias;  q, k = rope(q, k, cos, sin);  out = attention(q, k, v)

The projection's output belongs to this Function, so q and k turn in their own memory, and so do
their gradients: 2 C elements read and written each way, none kept beside qkv. The gradients of a
norm and of tables that learn need q and k as they came: turned ones take memory of their own then.
Saved: x, weight, qkv, out, lse; turned q and k apart from qkv. Precision: that of its parts.
Specification: `rope_attention_ref`. Derivation: docs/rope.md, docs/attention.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import values
from ...runtime.arguments import compute_dtype, empty, needs_gradient
from ...runtime.compat import torch_sdpa
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.operator import Route, differentiable, operator
from ..common.gemm import product_with_bias
from ..common.reduction import column_sum, zeroed
from ..common.rotation import Rotation, rotate, rotate_bwd, tables_of
from ..rope import Norm, check_rotation, empty_sums, parts, rope_ref
from .functions import check_scores, draw_seed, unsupported_scale
from .launch import (
    Packing,
    Softmax,
    bwd_flops,
    empty_dqkv,
    empty_rows,
    launch_bwd,
    launch_fwd,
    readable,
)
from .projected import check_projection, empty_qkv, qkv_projection_bwd
from .varlen import check_lengths, check_packing, varlen_attention_ref


def rope_attention_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int = 1,
    interleaved: bool = False,
    prefix_tokens: int = 0,
    norm: Norm | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_bias: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_norm_bias: Tensor | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """The specification of `rope_attention`: a Linear, `rope_ref`, torch's own attention."""
    D = weight.shape[0] // (3 * num_heads)
    q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, num_heads, D)).unbind(2)
    norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    q, k = rope_ref(q, k, cos, sin, interleaved, prefix_tokens, norm, *norms, eps)
    if cu_seqlens is not None:
        assert max_seqlen is not None
        qkv = torch.stack((q, k, v), 2).squeeze(0)
        return varlen_attention_ref(qkv, cu_seqlens, max_seqlen, scale, dropout_p).unsqueeze(0)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch_sdpa(q, k, v, dropout_p=dropout_p, scale=scale).transpose(1, 2)


def _packing(cu_seqlens: Tensor | None, max_seqlen: int) -> Packing | None:
    return None if cu_seqlens is None else Packing(cu_seqlens.contiguous(), max_seqlen)


def _empty_fwd(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    num_heads: int,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = empty_qkv(x, weight, num_heads)
    B, T, _, H, D = qkv.shape
    out = x.new_empty((B, T, H, D))
    turned: Any = x.new_empty((B, T, 2, H, D)) if apart else None
    return qkv, turned, out, empty_rows(out, _packing(cu_seqlens, max_seqlen))


def _flops_fwd(x, weight):
    B, T, C = x
    rows = weight[0]  # 3 H D
    return 2 * B * T * rows * C + 4 * B * T * T * (rows // 3)


@operator(fake=_empty_fwd, flops=_flops_fwd)
def rope_attention_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    q_norm_bias: Tensor | None,
    k_norm_weight: Tensor | None,
    k_norm_bias: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    num_heads: int,
    interleaved: bool,
    prefix_tokens: int,
    norm: str,
    eps: float,
    scale: float,
    dropout_p: float,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv (B, T, 3, H, D), its q and k turned, or where `apart` as they came, and turned ones
    (B, T, 2, H, D); out (B, T, H, D), lse (B, H, T), or of packed sequences as `empty_rows`."""
    B, T, _ = x.shape
    D = weight.shape[0] // (3 * num_heads)
    qkv = product_with_bias(x, weight, bias).view(B, T, 3, num_heads, D)
    turned: Any = qkv.new_empty((B, T, 2, num_heads, D)) if apart else None
    q, k, v = qkv.unbind(2)
    turned_q, turned_k = turned.unbind(2) if apart else (q, k)
    if qkv.numel():
        norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
        rotation = Rotation(interleaved, prefix_tokens, norm, eps)
        rotate((turned_q, turned_k), q, k, tables_of(cos, sin), rotation, norms)
    packing = _packing(cu_seqlens, max_seqlen)
    softmax = Softmax(scale, dropout_p, seed, packing=packing)
    return qkv, turned, *launch_fwd((turned_q, turned_k, v), softmax)


def _empty_bwd(
    qkv: Tensor,
    cos: Tensor,
    param_dtype: torch.dtype,
    table_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    needs_dparams: bool,
    needs_dtables: bool,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    _, _, _, H, D = qkv.shape
    dbias = empty((3 * H * D,), bias_dtype, qkv.device) if needs_dbias else None
    sums = empty_sums(qkv, D, cos, param_dtype, needs_dparams, table_dtype, needs_dtables)
    return empty_dqkv(qkv), *sums, dbias


@operator(fake=_empty_bwd, flops=bwd_flops)
def rope_attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    turned: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    q_norm_bias: Tensor | None,
    k_norm_weight: Tensor | None,
    k_norm_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    interleaved: bool,
    prefix_tokens: int,
    norm: str,
    eps: float,
    scale: float,
    dropout_p: float,
    param_dtype: torch.dtype,
    table_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    needs_dparams: bool,
    needs_dtables: bool,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dqkv (B, T, 3, H, D) of the projection's output; dparams and dtables as in rope; dbias
    (3 H D,) of the projection. The last three are None where they are not needed."""
    norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    dqkv, dparams, dtables, dbias = _empty_bwd(
        qkv, cos, param_dtype, table_dtype, bias_dtype, needs_dparams, needs_dtables, needs_dbias
    )
    if not qkv.numel():
        return dqkv, *zeroed(dparams, dtables, dbias)  # pyright: ignore[reportReturnType]
    q, k, v = readable(qkv).unbind(2)
    turned_q, turned_k = q, k
    if turned is not None and turned.numel():
        turned_q, turned_k = readable(turned).unbind(2)
    dq, dk, dv = dqkv.unbind(2)
    softmax = Softmax(scale, dropout_p, seed, packing=_packing(cu_seqlens, max_seqlen))
    heads = turned_q, turned_k, v
    launch_bwd((dq, dk, dv), readable(dout), heads, out, lse, softmax)
    rotation, tables = Rotation(interleaved, prefix_tokens, norm, eps), tables_of(cos, sin)
    rotate_bwd((dq, dk), (dq, dk), q, k, tables, rotation, norms, dparams, dtables)
    if dbias is not None:
        column_sum(dqkv.view(-1, dbias.numel()), dbias)
    return dqkv, dparams, dtables, dbias  # pyright: ignore[reportReturnType]


class RopeAttentionSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    weight_dtype: torch.dtype
    max_seqlen: int
    fwd_options: tuple[Any, ...]  # what `rope_attention_fwd` takes after its tensors
    bwd_options: tuple[Any, ...]  # the same of `rope_attention_bwd`, but what is needed


class RopeAttentionFunction(torch.autograd.Function):
    """(x, weight, bias, cos, sin, the norms' parameters) -> out."""

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        bias,
        cos,
        sin,
        q_weight,
        q_bias,
        k_weight,
        k_bias,
        seed,
        cu_seqlens,
        spec,
    ):
        norms = (q_weight, q_bias, k_weight, k_bias)
        if spec.casts:
            x, weight = x.to(spec.dtype), weight.to(spec.dtype)
            bias = None if bias is None else bias.to(spec.dtype)
        qkv, turned, out, lse = rope_attention_fwd[spec.route](
            x, weight, bias, cos, sin, *norms, seed, cu_seqlens, *spec.fwd_options
        )
        ctx.save_for_backward(x, weight, qkv, turned, out, lse, seed, cos, sin, *norms, cu_seqlens)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("rope_attention", RopeAttentionFunction.backward, ctx, dout)
        x, weight, *saved = ctx.saved_tensors
        spec, needs = ctx.spec, ctx.needs_input_grad
        route = backward_route(spec.route, dout)
        wanted = any(needs[5:9]), any(needs[3:5]), needs[2]
        dqkv, dparams, dtables, dbias = rope_attention_bwd[route](
            dout, *saved, *spec.bwd_options, *wanted
        )
        dx, dweight = qkv_projection_bwd[route](dqkv, x, weight, spec.weight_dtype, list(needs[:2]))
        return (
            dx if needs[0] else None,
            dweight if needs[1] else None,
            dbias if needs[2] else None,
            *parts(dtables, needs[3:5]),
            *parts(dparams, needs[5:9]),
            None,
            None,
            None,
        )


apply_rope_attention = differentiable(RopeAttentionFunction)


@cached_dispatch
def _decide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    num_heads: int,
    interleaved: bool,
    prefix_tokens: int,
    norm: Norm | None,
    eps: float,
    scale: float | None,
    dropout_p: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> RopeAttentionSpec:
    """Check the arguments; what runs, and how."""
    op = "rope_attention"
    D = check_projection(op, x, weight, bias, num_heads)
    scale = check_scores(op, D, scale, dropout_p)
    B, T, _ = x.shape
    if cu_seqlens is not None:
        check_packing(op, cu_seqlens, max_seqlen, T, like=x)
        if B != 1:
            raise ValueError(f"{op}: x must have B = 1 beside cu_seqlens, got {tuple(x.shape)}")
    elif max_seqlen is not None:
        raise ValueError(f"{op}: cu_seqlens must come with max_seqlen, got None")
    params = (q_weight, q_bias, k_weight, k_bias)
    cannot_turn, rotation, param_dtype, table_dtype = check_rotation(
        op, (B, T, num_heads, D), x, cos, sin, params, interleaved, prefix_tokens, norm, eps
    )
    dtype = compute_dtype(op, x=x, weight=weight, bias=bias)
    unsupported = cannot_turn or unsupported_scale(scale)
    learns = needs_gradient(cos, sin)
    apart = learns or norm is not None  # the backward reads q and k as they came
    bias_dtype = weight.dtype if bias is None else bias.dtype
    softmax, longest = (scale, dropout_p), max_seqlen or 0
    return RopeAttentionSpec(
        route=choose_route(op, unsupported, x, weight, bias, cos, sin, *params, cu_seqlens),
        needs_gradient=learns or needs_gradient(x, weight, bias, *params),
        dtype=dtype,
        casts=any(t is not None and t.dtype != dtype for t in (x, weight, bias)),
        weight_dtype=weight.dtype,
        max_seqlen=longest,
        fwd_options=(longest, num_heads, *rotation, *softmax, apart),
        bwd_options=(longest, *rotation, *softmax, param_dtype, table_dtype, bias_dtype),
    )


def rope_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    prefix_tokens: int = 0,
    norm: Norm | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_bias: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_norm_bias: Tensor | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """QKV projection, optional qk-norm, rotary embedding and attention as one Function.

    q, k, v = x weight^T + bias;  q, k = rope(q, k, cos, sin, ...);  out = attention(q, k, v)

    Args:
        x, weight, bias, num_heads, scale, dropout_p: as for `qkv_attention`.
        cos, sin, interleaved, prefix_tokens, norm, q_norm_weight, q_norm_bias, k_norm_weight,
            k_norm_bias, eps: as for `rope`.
        cu_seqlens, max_seqlen: as for `varlen_attention`: x is (1, total, C), its tokens those of
            packed sequences, and cos and sin have a row for each. None: attention over all of T.
    Returns:
        (B, T, H, D), contiguous, in the compute dtype.
    Precision: as `qkv_attention` and `rope`; q and k are rounded before and after they turn.
    Saved: x, weight, qkv with q and k turned, out, lse; with a norm, or where cos or sin wants a
        gradient, q and k as they came too.
    Raises: as `qkv_attention` and `rope`.
    Specification: rope_attention_ref. Derivation: docs/rope.md.
    """
    norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    rotation = (interleaved, prefix_tokens, norm)
    packing = (cu_seqlens, max_seqlen)
    spec = _decide(
        x, weight, bias, cos, sin, *norms, num_heads, *rotation, eps, scale, dropout_p, *packing
    )
    if spec.route is None:
        return rope_attention_ref(
            x, weight, bias, cos, sin, num_heads, *rotation, *norms, eps, scale, dropout_p, *packing
        )
    if cu_seqlens is not None and values.checked:
        check_lengths("rope_attention", cu_seqlens, x.shape[1], spec.max_seqlen)
    seed = draw_seed(x.device) if dropout_p > 0 else None
    if spec.needs_gradient:
        return apply_rope_attention[spec.route](
            x, weight, bias, cos, sin, *norms, seed, cu_seqlens, spec
        )
    if spec.casts:
        x, weight = x.to(spec.dtype), weight.to(spec.dtype)
        bias = None if bias is None else bias.to(spec.dtype)
    return rope_attention_fwd[spec.route](
        x, weight, bias, cos, sin, *norms, seed, cu_seqlens, *spec.fwd_options
    )[2]
