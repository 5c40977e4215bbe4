"""`scaled_dot_product_attention` with torch's signature, on the kernels of attention.py.

Queries, keys and values come as (B, H, T, D) in any strides, of different lengths, with a boolean
or additive mask that broadcasts, causal or not. What the kernels cannot do takes torch's own path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    FLOATS,
    autocast_dtype,
    check_device,
    check_flags,
    check_number,
    check_probability,
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
from ..common.reduction import zeroed
from .backward_bias import launch_bias_grad
from .configs import MAX_D
from .functions import default_scale, draw_seed, unsupported_scale
from .launch import Softmax, empty_lse, launch_bwd, launch_fwd, readable
from .masked import as_four_axes, unsupported_mask


def _empty_like(x: Tensor) -> Tensor:
    """An uninitialised (B, H, T, D) that lies as (B, T, H, D), contiguous."""
    B, H, T, D = x.shape
    return x.new_empty((B, T, H, D)).transpose(1, 2)


def _empty_fwd(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out = _empty_like(q)
    return out, empty_lse(out.transpose(1, 2), mask)


def _flops_fwd(q, k):
    return 4 * math.prod(q) * k[2]


@operator(fake=_empty_fwd, flops=_flops_fwd)
def sdpa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """out (B, H, T_q, D) laid out as (B, T_q, H, D), so that joining heads is free; lse."""
    heads = readable(q, 2), readable(k, 2), readable(v, 2)
    return launch_fwd(heads, Softmax(scale, dropout_p, seed, mask, is_causal), heads_first=True)


def _empty_bwd(
    q: Tensor, k: Tensor, mask: Tensor | None, needs_dmask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dmask = mask.new_empty(mask.shape) if needs_dmask and mask is not None else None
    return _empty_like(q), _empty_like(k), _empty_like(k), dmask


def _flops_bwd(q, k, needs_dmask):
    products = 14 if needs_dmask else 10  # as torch counts it, with the scores computed anew
    return products * math.prod(q) * k[2]


@operator(fake=_empty_bwd, flops=_flops_bwd)
def sdpa_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
    needs_dmask: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (B, H, T_q, D), dk and dv (B, H, T_kv, D), and the gradient of an additive mask of four
    axes that broadcast, None where none is needed."""
    if not out.numel():
        return zeroed(*_empty_bwd(q, k, mask, needs_dmask))  # keys without a query, perhaps
    dout, heads = readable(dout, 2), (readable(q, 2), readable(k, 2), readable(v, 2))
    softmax = Softmax(scale, dropout_p, seed, mask, is_causal)
    grads, delta, _ = launch_bwd(None, dout, heads, out, lse, softmax, heads_first=True)
    dmask = None
    if needs_dmask:
        assert mask is not None and delta is not None
        dmask = mask.new_empty(mask.shape)
        dout, *views = (x.transpose(1, 2) for x in (dout, *heads))
        launch_bias_grad(dmask, dout, tuple(views), lse, delta, mask, softmax)
    return *grads, dmask  # pyright: ignore[reportReturnType]


class SdpaSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: torch's own function runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    scale: float
    dropout_p: float
    is_causal: bool


class SdpaFunction(torch.autograd.Function):
    """q, k, v, mask -> out. Saves q, k, v, out, lse, the mask and the dropout seed."""

    @staticmethod
    def forward(ctx, q, k, v, mask, seed, spec):
        out, lse = sdpa_fwd[spec.route](
            q, k, v, mask, seed, spec.scale, spec.dropout_p, spec.is_causal
        )
        ctx.save_for_backward(q, k, v, out, lse, mask, seed)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("sdpa", SdpaFunction.backward, ctx, dout)
        spec, route = ctx.spec, backward_route(ctx.spec.route, dout)
        needs_dmask = ctx.needs_input_grad[3]
        arguments = *ctx.saved_tensors, spec.scale, spec.dropout_p, spec.is_causal
        *grads, dmask = sdpa_bwd[route](dout, *arguments, needs_dmask)
        return *grads, dmask if needs_dmask else None, None, None


apply_sdpa = differentiable(SdpaFunction)


OP = "scaled_dot_product_attention"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise unless dtypes, devices and layouts are such that torch at least can compute."""
    tensors = {"query": q, "key": k, "value": v}
    if mask is not None:
        tensors["attn_mask"] = mask
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{OP}: {name} must be a Tensor, got {type(x).__name__}")
        if x.layout not in (torch.strided, torch.jagged):
            raise TypeError(f"{OP}: {name} must be dense or nested, got layout {x.layout}")
        nested = q.is_nested and x is not mask
        if x.is_nested != nested:
            kind = "a nested tensor, as query is" if nested else "dense"
            raise TypeError(f"{OP}: {name} must be {kind}, got layout {x.layout}")
        if x.dtype not in FLOATS and not (x is mask and x.dtype is torch.bool):
            kinds = "floating point or bool" if x is mask else "floating point of 16, 32 or 64 bits"
            raise TypeError(f"{OP}: {name} must be {kinds}, got {x.dtype}")
        check_device(OP, name, x, q)
        if x is not mask and x.dtype != q.dtype and autocast_dtype(q) is None:
            raise TypeError(f"{OP}: {name} must have the dtype of query, {q.dtype}, got {x.dtype}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
    """Raise unless query (..., T_q, D), key (..., T_kv, D) and value (..., T_kv, D_v) agree."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 2:
            raise ValueError(f"{OP}: {name} must have axes (..., T, D), got {tuple(x.shape)}")
    for name, x in (("key", k), ("value", v)):
        if enable_gqa:
            _check_groups(name, x, q)
            continue
        pairs = _last_axes(x.shape[:-2], q.shape[:-2])
        if not all(m == n or m == 1 or n == 1 for m, n in pairs):
            raise ValueError(
                f"{OP}: {name} must have the batch and heads of query, {tuple(q.shape[:-2])}, "
                f"got {tuple(x.shape[:-2])}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{OP}: key must have the D of query, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"{OP}: value must have the T of key, {k.shape[-2]}, got {v.shape[-2]}")
    if mask is None:
        return
    batch = q.shape[:-2] if enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    wanted = (*batch, q.shape[-2], k.shape[-2])
    pairs = _last_axes(mask.shape, wanted)
    if mask.ndim > len(wanted) or not all(m in (1, n) for m, n in pairs):
        raise ValueError(
            f"{OP}: attn_mask must broadcast to {tuple(wanted)}, got shape {tuple(mask.shape)}"
        )


def _last_axes(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Sizes that meet where two shapes broadcast. (Dynamo of 2.9 takes strict=False for True.)"""
    both = min(len(a), len(b))
    return zip(a[len(a) - both :], b[len(b) - both :], strict=True)


def _check_groups(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless the heads of key or value divide those of query."""
    if x.ndim < 3 or q.ndim < 3 or x.shape[-3] == 0 or q.shape[-3] % x.shape[-3]:
        raise ValueError(
            f"{OP}: {name} must have heads that divide those of query, {tuple(q.shape)}, where "
            f"enable_gqa is True, got {tuple(x.shape)}"
        )


def _unsupported(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str | None:
    """What torch's function can do and the kernels cannot, or None."""
    if q.is_nested:
        return "query, key and value are nested tensors"
    if not q.ndim == k.ndim == v.ndim == 4:
        return "query, key and value must be (B, H, T, D)"
    if not q.dtype == k.dtype == v.dtype and autocast_dtype(q) is None:
        return "query, key and value differ in dtype"
    B, H, _, D = q.shape
    if k.shape != v.shape or k.shape[:2] != (B, H) or k.shape[3] != D:
        return "query, key and value differ in batch, heads or head dim"
    if D % 8 or not 8 <= D <= MAX_D:
        return f"D must be a multiple of 8 up to {MAX_D}, got {D}"
    if k.shape[2] == 0:
        return "there are no keys"
    if not 0 <= dropout_p < 1:
        return f"dropout_p must be in [0, 1), got {dropout_p}"
    if attn_mask is not None and is_causal:
        return "attn_mask and is_causal are both given"  # some of torch's backends add the two
    return unsupported_mask(attn_mask)


@cached_dispatch
def _decide(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> SdpaSpec:
    """Check the arguments; what runs, and how. It raises on what torch cannot compute either."""
    _check_tensors(query, key, value, attn_mask)
    check_probability(OP, "dropout_p", dropout_p)
    check_flags(OP, is_causal=is_causal, enable_gqa=enable_gqa)
    if scale is not None:
        check_number(OP, "scale", scale)
    if not query.is_nested:
        _check_shapes(query, key, value, attn_mask, enable_gqa)
    unsupported = _unsupported(query, key, value, attn_mask, dropout_p, is_causal)
    scale_ = 0.0
    if unsupported is None:
        scale_ = default_scale(query.shape[-1]) if scale is None else scale
        unsupported = unsupported_scale(scale_)
    return SdpaSpec(
        route=choose_route(OP, unsupported, query, key, value, attn_mask),
        needs_gradient=needs_gradient(query, key, value, attn_mask),
        dtype=autocast_dtype(query) or query.dtype,
        scale=scale_,
        dropout_p=dropout_p,
        is_causal=is_causal,
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (B, H, T_q, D), fp16, bf16 or fp32, any strides (a last axis that is not contiguous
            is copied).
        key, value: (B, H, T_kv, D).
        attn_mask: broadcasts to (B, H, T_q, T_kv); boolean (True is seen) or added to the scores,
            then perhaps with a gradient. A query that sees no key gives zeros, as in torch.
        dropout_p: as for `attention`. Note that, as in torch, it applies whatever the mode is.
        is_causal: query i sees keys 0..i.
        scale: multiplies the scores, dimensionless. Default D**-0.5.
        enable_gqa: key and value may have fewer heads than query, a divisor of them.
    Returns:
        (B, H, T_q, D), dtype of query, laid out as (B, T_q, H, D).
    Precision: scores, softmax and accumulators fp32; P is cast to the input dtype before P V.
    Saved: query, key, value, attn_mask, out, lse (B, H, T_q) fp32, log2 units.
    Raises: ValueError, such as "scaled_dot_product_attention: key must have the D of query, 64, got
        32"; TypeError. Whatever the kernels cannot do and torch can (a mask beside
        is_causal, one alike for all keys that needs a gradient, fewer heads of key than of query,
        D not a multiple of 8, other ranks, nested tensors) takes torch's path.
    Specification: torch.nn.functional.scaled_dot_product_attention.
    """
    if isinstance(scale, Tensor):
        scale = float(scale)  # torch takes one too
    spec = _decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if spec.route is None:
        options: dict[str, Any] = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None:
            return torch_sdpa(query, key, value, None, dropout_p, **options)
        return torch_sdpa_with(attn_mask, query, key, value, dropout_p, **options)
    q, k, v = query, key, value
    if not q.dtype == k.dtype == v.dtype == spec.dtype:
        q, k, v = q.to(spec.dtype), k.to(spec.dtype), v.to(spec.dtype)
    if attn_mask is not None:
        attn_mask = as_four_axes(attn_mask)
    seed = draw_seed(q.device) if dropout_p > 0 else None
    if spec.needs_gradient:
        return apply_sdpa[spec.route](q, k, v, attn_mask, seed, spec)
    fwd = sdpa_fwd[spec.route]
    return fwd(q, k, v, attn_mask, seed, spec.scale, dropout_p, is_causal)[0]
