"""Rotary position embedding of queries and keys, after an optional norm of each head (qk-norm).

With y = x, or layer_norm(x) or rms_norm(x) over D, and pairs (a, b) of y's first R columns:

    a' = a cos_a - b sin_a,   b' = b cos_b + a sin_b
    da = da' cos_a + db' sin_b,   db = db' cos_b - da' sin_a       then back through the norm
    dcos_a = sum da' a,   dsin_a = -sum da' b,   dcos_b = sum db' b,   dsin_b = sum db' a

Pairs are columns (i, i + R/2), or (2i, 2i + 1) where interleaved; the tables have all R columns.
Saved: the tables; with a norm, or where the tables want a gradient, q, k and the norm's parameters
too: the backward rebuilds its statistics.
Precision: fp32 from the load to the store, one rounding; fp32 partials for the gradients of norms
and tables, summed in a fixed order by a second kernel. No atomics.
Source: arXiv:2104.09864, arXiv:2302.05442 (qk-norm). Kernels: common/rotation.py. Derivation:
docs/rope.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import (
    check_device,
    check_eps,
    check_flags,
    check_int,
    check_shape,
    check_tensor,
    needs_gradient,
)
from ..runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ..runtime.operator import Route, differentiable, operator
from .common.reduction import zeroed
from .common.rotation import MAX_D, MAX_ROWS, NORMS, Rotation, rotate, rotate_bwd, tables_of

Norm = Literal["layer_norm", "rms_norm"]
PARAMS = ("q_norm_weight", "q_norm_bias", "k_norm_weight", "k_norm_bias")


def _partner(x: Tensor, interleaved: bool) -> Tensor:
    """What the sines multiply: (-b, a) in the places of (a, b)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotated_ref(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, prefix_tokens: int
) -> Tensor:
    R = cos.shape[-1]
    prefix, x = x[:, :prefix_tokens], x[:, prefix_tokens:]
    turned, rest = x[..., :R], x[..., R:]
    turned = (turned * cos + _partner(turned, interleaved) * sin).to(x.dtype)
    return torch.cat((prefix, torch.cat((turned, rest), -1)), 1)


def _normed_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm | None, eps: float
) -> Tensor:
    if norm is None:
        return x
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    if norm == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope_ref(
    q: Tensor,
    k: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """The specification of `rope`: torch's norm in x.dtype, then x cos + partner(x) sin."""
    if cos.ndim == 4:  # (B, H, T', R) -> by token, then head
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
    else:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    q = _normed_ref(q, q_norm_weight, q_norm_bias, norm, eps)
    k = _normed_ref(k, k_norm_weight, k_norm_bias, norm, eps)
    return (
        _rotated_ref(q, cos, sin, interleaved, prefix_tokens),
        _rotated_ref(k, cos, sin, interleaved, prefix_tokens),
    )


def _rows(x: Tensor) -> Tensor:
    """x itself if its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of x are."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator(fake=lambda q: (_empty_like(q), _empty_like(q)))
def rope_fwd(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    q_norm_bias: Tensor | None,
    k_norm_weight: Tensor | None,
    k_norm_bias: Tensor | None,
    interleaved: bool,
    prefix_tokens: int,
    norm: str,
    eps: float,
    transpose: bool,
) -> tuple[Tensor, Tensor]:
    """q and k (B, T, H, D), normed and turned; turned back where `transpose`. Contiguous."""
    out = _empty_like(q), _empty_like(q)
    norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    rotation = Rotation(interleaved, prefix_tokens, norm, eps)
    rotate(out, q, k, tables_of(cos, sin), rotation, norms, transpose)
    return out


def empty_sums(
    x: Tensor,
    D: int,
    cos: Tensor,
    param_dtype: torch.dtype,
    needs_dparams: bool,
    table_dtype: torch.dtype,
    needs_dtables: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dparams (4, D) and dtables (2, ...), each None where it is not needed."""
    dparams = x.new_empty((4, D), dtype=param_dtype) if needs_dparams else None
    dtables = x.new_empty((2, *cos.shape), dtype=table_dtype) if needs_dtables else None
    return dparams, dtables


def _empty_bwd(
    q: Tensor,
    cos: Tensor,
    param_dtype: torch.dtype,
    needs_dparams: bool,
    table_dtype: torch.dtype,
    needs_dtables: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    sums = empty_sums(q, q.shape[-1], cos, param_dtype, needs_dparams, table_dtype, needs_dtables)
    return _empty_like(q), _empty_like(q), *sums


@operator(fake=_empty_bwd)
def rope_bwd(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    q_norm_bias: Tensor | None,
    k_norm_weight: Tensor | None,
    k_norm_bias: Tensor | None,
    interleaved: bool,
    prefix_tokens: int,
    norm: str,
    eps: float,
    param_dtype: torch.dtype,
    needs_dparams: bool,
    table_dtype: torch.dtype,
    needs_dtables: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a norm, of tables that learn or of both: dq, dk; dparams (4, D), dweight and dbias of q's
    norm, then of k's; dtables (2, ...), of cos and of sin. None where they are not needed."""
    norms = (q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    dq, dk, dparams, dtables = _empty_bwd(
        q, cos, param_dtype, needs_dparams, table_dtype, needs_dtables
    )
    if q.numel() == 0:
        return dq, dk, *zeroed(dparams, dtables)  # pyright: ignore[reportReturnType]
    rotation, tables = Rotation(interleaved, prefix_tokens, norm, eps), tables_of(cos, sin)
    dout = _rows(dq_out), _rows(dk_out)
    rotate_bwd((dq, dk), dout, _rows(q), _rows(k), tables, rotation, norms, dparams, dtables)
    return dq, dk, dparams, dtables  # pyright: ignore[reportReturnType]


class RopeSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    rotation: Rotation
    param_dtype: torch.dtype
    table_dtype: torch.dtype
    learns: bool  # the tables want a gradient


class RopeFunction(torch.autograd.Function):
    """(q, k, cos, sin, weights and biases) -> (q, k)."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, q_weight, q_bias, k_weight, k_bias, spec):
        norms, saved = (q_weight, q_bias, k_weight, k_bias), (None,) * 6
        if spec.rotation.norm or spec.learns:
            saved = (q, k, *norms)
        ctx.save_for_backward(cos, sin, *saved)
        ctx.spec = spec
        return rope_fwd[spec.route](q, k, cos, sin, *norms, *spec.rotation, False)

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        if grad_enabled():
            return first_order("rope", RopeFunction.backward, ctx, dq_out, dk_out)
        cos, sin, q, k, *norms = ctx.saved_tensors
        spec, needs = ctx.spec, ctx.needs_input_grad
        route, rotation = backward_route(spec.route, dq_out, dk_out), spec.rotation
        needs_dtables, needs_dparams = any(needs[2:4]), any(needs[4:8])
        if rotation.norm or needs_dtables:
            of_sums = spec.param_dtype, needs_dparams, spec.table_dtype, needs_dtables
            dq, dk, dparams, dtables = rope_bwd[route](
                dq_out, dk_out, q, k, cos, sin, *norms, *rotation, *of_sums
            )
        else:
            dq, dk = rope_fwd[route](dq_out, dk_out, cos, sin, *(None,) * 4, *rotation, True)
            dparams = dtables = None
        sums = parts(dtables, needs[2:4]) + parts(dparams, needs[4:8])
        return dq if needs[0] else None, dk if needs[1] else None, *sums, None


apply_rope = differentiable(RopeFunction)


def parts(sums: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The rows of a tensor of gradients, None for each that nothing needs."""
    if sums is None or not any(needs):
        return (None,) * len(needs)
    return tuple(x if n else None for x, n in zip(sums.unbind(0), needs, strict=True))


def check_tables(op: str, cos: Tensor, sin: Tensor, shape: tuple[int, ...], prefix: int) -> None:
    """Raise unless cos and sin are tables for q of this shape, (B, T, H, D)."""
    B, T, H, D = shape
    check_tensor(op, "cos", cos)
    found = tuple(cos.shape)
    R = found[-1] if found else 0
    wanted = ((T - prefix, R), (B, T - prefix, R), (1, T - prefix, R))
    if len(found) == 4 and found[0] in (1, B) and found[1] in (1, H):
        wanted = ((*found[:2], T - prefix, R),)
    # element by element: a tracer with dynamic sizes finds no tuple of them in another
    fits = any(
        len(w) == len(found) and all(a == b for a, b in zip(found, w, strict=True)) for w in wanted
    )
    if not fits or R % 2 or not 0 < R <= D:
        raise ValueError(
            f"{op}: cos must have shape (T', R), (B, T', R) or (B, H, T', R), T' = {T - prefix} "
            f"tokens past the prefix and R even, at most {D}, got {found}"
        )
    check_tensor(op, "sin", sin)
    if sin.shape != cos.shape:
        raise ValueError(f"{op}: sin must have the shape of cos, {found}, got {tuple(sin.shape)}")


def check_norm(op: str, norm: object, **params: Tensor | None) -> None:
    """Raise unless norm is a name or None, and goes with the parameters that are given."""
    if norm is not None and (not isinstance(norm, str) or norm not in NORMS):
        error = ValueError if isinstance(norm, str) else TypeError
        raise error(f"{op}: norm must be None or one of {list(NORMS)}, got {norm!r}")
    for name, x in params.items():
        if x is not None and (norm is None or (norm == "rms_norm" and name.endswith("bias"))):
            raise ValueError(f"{op}: {name} must be None with norm={norm!r}, got a Tensor")


def check_rotation(
    op: str,
    shape: tuple[int, ...],
    like: Tensor,
    cos: Tensor,
    sin: Tensor,
    params: tuple[Tensor | None, ...],
    interleaved: bool,
    prefix_tokens: int,
    norm: Norm | None,
    eps: float,
) -> tuple[str | None, Rotation, torch.dtype, torch.dtype]:
    """Raise unless q of this shape, (B, T, H, D), can be normed and turned so.

    Args:
        like: on the device where the rest must be. params: the norms' of q, then of k.
    Returns: what the kernels cannot do, if anything; the rotation; the dtypes of the gradients of
        params and of the tables.
    """
    B, T, H, D = shape
    check_flags(op, interleaved=interleaved)
    check_int(op, "prefix_tokens", prefix_tokens, least=0)
    if prefix_tokens > T:
        raise ValueError(f"{op}: prefix_tokens must be at most T = {T}, got {prefix_tokens}")
    check_tables(op, cos, sin, shape, prefix_tokens)
    check_device(op, "cos", cos, like)
    check_device(op, "sin", sin, like)
    named = dict(zip(PARAMS, params, strict=True))
    for name, x in named.items():
        check_shape(op, name, x, (D,), like)
    check_norm(op, norm, **named)
    check_eps(op, eps)
    unsupported = None
    rows = B * T * H
    if isinstance(rows, int) and rows >= MAX_ROWS:  # a size left open is known at the launch
        unsupported = f"B T H must be below 2^31, got {rows}"
    given = {x.dtype for x in params if x is not None}
    rotation = Rotation(interleaved, prefix_tokens, norm or "", eps)
    param_dtype = given.pop() if len(given) == 1 else torch.float32
    table_dtype = cos.dtype if cos.dtype == sin.dtype else torch.float32
    return unsupported, rotation, param_dtype, table_dtype


@cached_dispatch
def _decide(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    interleaved: bool,
    prefix_tokens: int,
    norm: Norm | None,
    eps: float,
) -> RopeSpec:
    """Check the arguments; what runs, and how."""
    op = "rope"
    check_tensor(op, "q", q, ndim=4)
    B, T, H, D = q.shape
    check_tensor(op, "k", k)
    check_shape(op, "k", k, (B, T, H, D), like=q)
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k must have the dtype of q, {q.dtype}, got {k.dtype}")
    if D % 2:
        raise ValueError(f"{op}: D must be even, got {D}")
    params = (q_weight, q_bias, k_weight, k_bias)
    unsupported, rotation, param_dtype, table_dtype = check_rotation(
        op, (B, T, H, D), q, cos, sin, params, interleaved, prefix_tokens, norm, eps
    )
    if not 0 < D <= MAX_D:
        unsupported = unsupported or f"D must be from 2 to {MAX_D}, got {D}"
    return RopeSpec(
        route=choose_route(op, unsupported, q, k, cos, sin, *params),
        needs_gradient=needs_gradient(q, k, cos, sin, *params),
        rotation=rotation,
        param_dtype=param_dtype,
        table_dtype=table_dtype,
        learns=cos.requires_grad or sin.requires_grad,
    )


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    prefix_tokens: int = 0,
    norm: Norm | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_bias: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_norm_bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, after an optional norm of each head.

    out = y * cos + partner(y) * sin,   y = x or norm(x),   partner: (-b, a) in the places of (a, b)

    Args:
        q, k: (B, T, H, D), fp16, bf16 or fp32, D even, any strides: views of a packed qkv, or of
            (B, H, T, D) by `transpose(1, 2)`. A last axis that is not contiguous is copied.
        cos, sin: (T', R) for all heads, (B, T', R) by sample or (B, H, T', R) by head, where B or H
            may be 1; T' = T - prefix_tokens. R, even, is the rotated width, at most D. Best fp32.
            They get their gradients, as frequencies that learn need.
        interleaved: pairs are columns (2i, 2i + 1); else (i, i + R/2), as `rotate_half`.
        prefix_tokens: the first tokens of a sample (class and register tokens): normed, not turned.
        norm: "layer_norm" or "rms_norm" over D first (qk-norm), or None.
        q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias: (D,) or None for 1 and 0.
        eps: of the norm.
    Returns:
        q and k, (B, T, H, D), contiguous, in the dtype of q.
    Precision: fp32 from the load to the store, norm included.
    Saved: cos, sin; with a norm, or where cos or sin wants a gradient, q and k.
    Raises: ValueError, such as "rope: D must be even, got 15"; TypeError.
    Source: arXiv:2104.09864. Specification: rope_ref. Derivation: docs/rope.md.
    """
    tensors = (q, k, cos, sin, q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias)
    spec = _decide(*tensors, interleaved, prefix_tokens, norm, eps)
    if spec.route is None:
        return rope_ref(*tensors[:4], interleaved, prefix_tokens, norm, *tensors[4:], eps)
    if spec.needs_gradient:
        return apply_rope[spec.route](*tensors, spec)
    return rope_fwd[spec.route](*tensors, *spec.rotation, False)
