"""LayerNorm and RMSNorm over the last axis, and their variants that hand their input on.

    LayerNorm   y = (x - mean) * rstd * weight + bias,  mean = sum(x) / C,  rstd = (var + eps)**-0.5
    RMSNorm     y = x * rstd * weight,                  rstd = (sum(x^2) / C + eps)**-0.5

With xhat = (x - mean) * rstd, mean 0 in RMSNorm, and g = dy * weight:

    dx      = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))  [+ dresidual]
    dweight = sum_rows dy * xhat,   dbias = sum_rows dy

where RMSNorm has neither mean_C(g) nor a bias. A norm behind a branch adds the residual to y as it
writes it; the residual's gradient is dy.

Saved: x; mean and rstd in one fp32 tensor (2, ...), of RMSNorm rstd alone.
Precision: fp32 from the load to the store, weight included, and one rounding, as torch's own
(transformers' RMSNorms round x * rstd to x.dtype before the weight: one rounding more). The
variance about the mean, never E[x^2] - mean^2. fp32 partials for dweight and dbias, one row a
program, summed in a fixed order by a second kernel. No atomics.
The `_and_input` variants norm some samples alone where they are told which (common/samples.py): y
and dy have their rows, x and dx those of all.
Where a linear layer gave x, the backward kernel also writes what that one's backward reads of dx,
d = row_scale * dx in its dtype, and the partials of sum_rows d: common/grad_handoff.py.
Sources: arXiv:1607.06450, arXiv:1910.07467. Derivations: docs/layer_norm.md, docs/rms_norm.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import (
    as_dtype,
    autocast_dtype,
    check_dtype,
    check_eps,
    check_input,
    check_samples,
    check_shape,
    needs_gradient,
)
from ...runtime.backend import dtype_reason
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.operator import Operator, Route, differentiable, operator
from ..common import grad_handoff
from ..common.grad_handoff import consumer_of, dtype_of_sums
from ..common.rows import MAX_C
from ..common.samples import check_drawn, kept_rows, kept_shape, shape_of_d
from .kernels import launch_norm_bwd, launch_norm_fwd, num_sums, stats_shape


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification of `layer_norm`: torch's own, rounded to x.dtype, the sum, then one cast.

    It runs in weight's dtype where that is the wider, as under autocast: torch's kernel for CPUs
    would round mean and rstd to x.dtype.
    """
    wide = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    weight = weight if weight is None else as_dtype(weight, wide)
    bias = bias if bias is None else as_dtype(bias, wide)
    y = F.layer_norm(as_dtype(x, wide), x.shape[-1:], weight, bias, eps).to(x.dtype)
    if residual is None and (out_dtype is None or out_dtype == y.dtype):
        return y
    return _added(y, residual, out_dtype)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification of `rms_norm`: torch's own, in x.dtype, the sum, then one cast."""
    weight = weight if weight is None else as_dtype(weight, x.dtype)
    return _added(F.rms_norm(x, x.shape[-1:], weight, eps), residual, out_dtype)


def _added(y: Tensor, residual: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    y = y if residual is None else residual + y
    return y.to(out_dtype or y.dtype)


def _empty_fwd(
    center: bool, x: Tensor, out_dtype: torch.dtype, save_stats: bool, samples: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = kept_shape(x, samples)
    stats = stats_shape(center, shape, save_stats)
    return x.new_empty(shape, dtype=out_dtype), x.new_empty(stats, dtype=torch.float32)


def _empty_bwd(
    center: bool,
    x: Tensor,
    sum_dtype: torch.dtype,
    needs_dparams: bool,
    d_dtype: torch.dtype | None,
    row_scale: Tensor | None,
    needs_g: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    sums = (num_sums(center, needs_dparams, needs_g), x.shape[-1])
    d = None if d_dtype is None else x.new_empty(shape_of_d(x, row_scale), dtype=d_dtype)
    return x.new_empty(x.shape), x.new_empty(sums, dtype=sum_dtype), d


def _operators(center: bool) -> tuple[Operator, Operator]:
    """Forward and backward, which can also give what the linear layer that gave x reads. Eager,
    they are the launchers themselves."""

    def fwd(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
        save_stats: bool,
        samples: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Of the samples that `samples` keeps: (..., C) -> y (..., C) in out_dtype, plus residual;
        fp32 mean and rstd (2, ...) of LayerNorm, rstd (...) of RMSNorm, empty if not saved."""
        assert center or bias is None
        given = x, weight, bias, eps, out_dtype, save_stats, samples, residual
        return launch_norm_fwd(center, *given)

    def bwd(
        dy: Tensor,
        dresidual: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        sum_dtype: torch.dtype,
        needs_dparams: bool,
        samples: Tensor | None = None,
        d_dtype: torch.dtype | None = None,
        row_scale: Tensor | None = None,
        needs_g: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx; sums in sum_dtype, of the rows dweight, dbias, sum_rows d those that are needed;
        d = row_scale * dx (..., C) in d_dtype, None where that is None."""
        given = dy, dresidual, x, weight, stats, sum_dtype, needs_dparams, samples
        return launch_norm_bwd(center, *given, d_dtype, row_scale, needs_g)

    for launcher in (fwd, bwd):
        launcher.__name__ = f"{'layer' if center else 'rms'}_norm_{launcher.__name__}"
    forward = operator(fake=functools.partial(_empty_fwd, center))(fwd)
    backward = operator(fake=functools.partial(_empty_bwd, center))(bwd)
    return (
        forward._replace(eager=functools.partial(launch_norm_fwd, center)),
        backward._replace(eager=functools.partial(launch_norm_bwd, center)),
    )


layer_norm_fwd, layer_norm_bwd = _operators(center=True)
rms_norm_fwd, rms_norm_bwd = _operators(center=False)


class NormSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    op: str
    fwd: Operator
    bwd: Operator
    needs_gradient: bool
    eps: float
    out_dtype: torch.dtype
    param_dtype: torch.dtype
    residual_dtype: torch.dtype | None


class NormFunction(torch.autograd.Function):
    """(x, weight, bias, residual) -> y, with the residual added where there is one."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, samples, spec):
        y, stats = spec.fwd[spec.route](
            x, weight, bias, spec.eps, spec.out_dtype, True, samples, residual
        )
        ctx.save_for_backward(x, weight, stats, samples)
        ctx.spec = spec
        return y

    @staticmethod
    def backward(ctx, dy):
        if grad_enabled():
            return first_order(ctx.spec.op, NormFunction.backward, ctx, dy)
        needs_dx, needs_dweight, needs_dbias, needs_dresidual, _, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if needs_dx or needs_dweight or needs_dbias:
            dx, dweight, dbias = _backward(ctx, dy, None)
        dresidual = as_dtype(dy, ctx.spec.residual_dtype) if needs_dresidual else None
        return dx, dweight, dbias, dresidual, None, None


class NormAndInputFunction(torch.autograd.Function):
    """(x, weight, bias) -> (y, x): the second output is x, handed on to the residual.

    Its gradient arrives beside dy and is added inside the backward kernel, where autograd would
    launch an add over (rows, C) of its own.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, samples, spec):
        y, stats = spec.fwd[spec.route](
            x, weight, bias, spec.eps, spec.out_dtype, True, samples, None
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, stats, samples)
        ctx.spec = spec
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, dy, dresidual):
        if grad_enabled():
            return first_order(ctx.spec.op, NormAndInputFunction.backward, ctx, dy, dresidual)
        if dy is None:
            return dresidual, None, None, None, None
        return *_backward(ctx, dy, dresidual), None, None


apply_norm = differentiable(NormFunction)
apply_norm_and_input = differentiable(NormAndInputFunction)


def _backward(ctx: Any, dy: Tensor, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, stats, samples = ctx.saved_tensors
    _, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    needs_dparams = needs_dweight or needs_dbias
    spec: NormSpec = ctx.spec
    assert spec.route is not None
    route, reader = backward_route(spec.route, dy, dresidual), consumer_of(x)
    given = dy, dresidual, x, weight, stats
    if reader is None:
        wanted = spec.param_dtype, needs_dparams, samples
    else:
        d_dtype, g_dtype = reader.reads
        wanted = dtype_of_sums(reader, spec.param_dtype), needs_dparams, samples, d_dtype
        wanted = *wanted, reader.row_scale, g_dtype is not None
    dx, sums, d = spec.bwd[route](*given, *wanted)
    rows = sums.unbind(0)  # dweight, LayerNorm's dbias, g: of those that are wanted
    if reader is not None:
        grad_handoff.put(reader, dx, d, rows)
    if not needs_dparams:
        return dx, None, None
    if sums.dtype != spec.param_dtype:
        rows = sums.to(spec.param_dtype).unbind(0)
    return dx, rows[0] if needs_dweight else None, rows[1] if needs_dbias else None


@cached_dispatch
def _decide(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    op: str,
    samples: Tensor | None,
    residual: Tensor | None,
) -> NormSpec:
    """Check the arguments; what runs, and how."""
    check_input(op, x)
    if samples is not None:
        check_samples(op, x, samples)
    C = x.shape[-1]
    check_shape(op, "weight", weight, (C,), like=x)
    check_shape(op, "bias", bias, (C,), like=x)
    check_shape(op, "residual", residual, tuple(x.shape), like=x)
    check_eps(op, eps)
    check_dtype(op, "out_dtype", out_dtype)
    unsupported = None if 0 < C <= MAX_C else f"C must be from 1 to {MAX_C}, got {C}"
    if out_dtype is None:  # a CPU's autocast leaves norms alone
        widens = autocast_dtype(x) is not None and x.device.type != "cpu"
        out_dtype = torch.float32 if widens else x.dtype
        if residual is not None:
            out_dtype = torch.promote_types(out_dtype, residual.dtype)
    unsupported = unsupported or dtype_reason(out_dtype)
    params = {p.dtype for p in (weight, bias) if p is not None}
    norm = op.removesuffix("_and_input")
    center = norm == "layer_norm"
    return NormSpec(
        route=choose_route(norm, unsupported, x, weight, bias, samples, residual),
        op=op,
        fwd=layer_norm_fwd if center else rms_norm_fwd,
        bwd=layer_norm_bwd if center else rms_norm_bwd,
        needs_gradient=needs_gradient(x, weight, bias, residual),
        eps=eps,
        out_dtype=out_dtype,
        param_dtype=params.pop() if len(params) == 1 else torch.float32,
        residual_dtype=None if residual is None else residual.dtype,
    )


def layer_norm_and_input(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm that also returns its input: (`layer_norm(x, ...)`, x).

    For a pre-norm branch, `y, x = layer_norm_and_input(x, ...); x = x + branch(y)`: the residual's
    gradient is then added inside the LayerNorm's backward kernel. Arguments as for `layer_norm`;
    and samples, what `keep_samples(B, rate)` gave: y is then that of the S samples that it keeps of
    x (B, ..., C), which alone are read.
    """
    spec = _decide(x, weight, bias, eps, out_dtype, "layer_norm_and_input", samples, None)
    if samples is not None:
        check_drawn("layer_norm_and_input", samples, x)
    if spec.route is None:
        some = x if samples is None else kept_rows(x, samples)
        return layer_norm_ref(some, weight, bias, eps, spec.out_dtype), x
    if spec.needs_gradient:
        return apply_norm_and_input[spec.route](x, weight, bias, samples, spec)
    return spec.fwd[spec.route](x, weight, bias, eps, spec.out_dtype, False, samples)[0], x


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """LayerNorm over the last axis.

    y = (x - mean(x)) * (var(x) + eps)**-0.5 * weight + bias [+ residual]

    Args:
        x: (..., C), fp16, bf16 or fp32, any strides (a last axis that is not contiguous is copied).
        weight, bias: (C,), any of these dtypes, or None for 1 and 0.
        eps: added to the variance, in squared units of x. timm and torchvision 1e-6, HF ViT 1e-12.
        out_dtype: dtype of the result. Default x.dtype; fp32 under a GPU's autocast,
            as torch's own; promoted with residual.dtype.
        residual: as x, any of these dtypes and strides: added to the norm, in fp32.
    Returns:
        (..., C) in out_dtype.
    Precision: statistics, sums and dweight/dbias partials fp32, whatever the dtypes.
    Saved: x, and mean and rstd (fp32, (2, *x.shape[:-1])); nothing where no gradient is wanted.
    Raises: ValueError, such as "layer_norm: weight must have shape (768,), got (384,)"; TypeError.
    Source: arXiv:1607.06450. Specification: layer_norm_ref. Derivation: docs/layer_norm.md.
    """
    spec = _decide(x, weight, bias, eps, out_dtype, "layer_norm", None, residual)
    if spec.route is None:
        return layer_norm_ref(x, weight, bias, eps, spec.out_dtype, residual)
    if spec.needs_gradient:
        return apply_norm[spec.route](x, weight, bias, residual, None, spec)
    return spec.fwd[spec.route](x, weight, bias, eps, spec.out_dtype, False, None, residual)[0]


def rms_norm_and_input(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm that also returns its input: (`rms_norm(x, ...)`, x).

    For a pre-norm branch, `y, x = rms_norm_and_input(x, ...); x = x + branch(y)`: the residual's
    gradient is then added inside the norm's backward kernel. Arguments as for `rms_norm`; samples
    as for `layer_norm_and_input`.
    """
    spec = _decide(x, weight, None, eps, out_dtype, "rms_norm_and_input", samples, None)
    if samples is not None:
        check_drawn("rms_norm_and_input", samples, x)
    if spec.route is None:
        some = x if samples is None else kept_rows(x, samples)
        return rms_norm_ref(some, weight, eps, spec.out_dtype), x
    if spec.needs_gradient:
        return apply_norm_and_input[spec.route](x, weight, None, samples, spec)
    return spec.fwd[spec.route](x, weight, None, eps, spec.out_dtype, False, samples)[0], x


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """RMSNorm over the last axis.

    y = x * (mean(x^2) + eps)**-0.5 * weight [+ residual]

    Args:
        x: (..., C), fp16, bf16 or fp32, any strides (a last axis that is not contiguous is copied).
            (B, T, H D) for a norm of queries over all heads, (B, T, H, D) for one of each head.
        weight: (C,), any of these dtypes, or None for 1.
        eps: added to the mean square, in squared units of x. AIMv2 1e-5, the other towers 1e-6.
        out_dtype: dtype of the result. Default x.dtype; fp32 under a GPU's autocast,
            as torch's own; promoted with residual.dtype.
        residual: as x, any of these dtypes and strides: added to the norm, in fp32.
    Returns:
        (..., C) in out_dtype.
    Precision: fp32 until the store, the product with weight included; dweight's partials fp32.
    Saved: x, and rstd (fp32, x.shape[:-1]); nothing where no gradient is wanted.
    Raises: ValueError, such as "rms_norm: weight must have shape (768,), got (384,)"; TypeError.
    Source: arXiv:1910.07467. Specification: rms_norm_ref. Derivation: docs/rms_norm.md.
    """
    spec = _decide(x, weight, None, eps, out_dtype, "rms_norm", None, residual)
    if spec.route is None:
        return rms_norm_ref(x, weight, eps, spec.out_dtype, residual)
    if spec.needs_gradient:
        return apply_norm[spec.route](x, weight, None, residual, None, spec)
    return spec.fwd[spec.route](x, weight, None, eps, spec.out_dtype, False, None, residual)[0]
