"""LayerNorm over the last axis, and its variant that hands its input on.

    y = (x - mean) * rstd * weight + bias,   mean = sum(x) / C,   rstd = (var + eps)**-0.5

With xhat = (x - mean) * rstd and g = dy * weight:

    dx      = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))  [+ dresidual]
    dweight = sum_rows dy * xhat,   dbias = sum_rows dy

Saved: x, and mean and rstd in one fp32 tensor (2, ...).
Precision: fp32 statistics, the variance about the mean, never E[x^2] - mean^2; fp32 partials for
dweight and dbias, one row a program, summed in a fixed order by a second kernel. No atomics.
`layer_norm_and_input` norms some samples alone where it is told which (common/samples.py): y and dy
have their rows, x and dx those of all.
Where a linear layer gave x, the backward kernel also writes what that one's backward reads of dx,
d = row_scale * dx in its dtype, and the partials of sum_rows d: common/handover.py.
Source: arXiv:1607.06450. Derivation: docs/layer_norm.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import (
    Layout,
    as_dtype,
    autocast_dtype,
    check_dtype,
    check_eps,
    check_input,
    check_samples,
    check_shape,
    contiguous,
    empty_strided,
    layout,
    needs_gradient,
    row_stride,
)
from ..runtime.backend import Gpu, device_guard, gpu
from ..runtime.configs import launch_plan
from ..runtime.dispatch import decide_once, first_order, ops_for, route
from ..runtime.operator import Routed, differentiable, operator
from ..runtime.triton import tl, triton
from .common.handover import dtype_of_sums, hand, reader_of
from .common.reduction import column_sum
from .common.rows import (
    MAX_C,
    block_width,
    bwd_programs,
    bwd_stages,
    load_rows,
    norm_tables,
    rows_to_hand_over,
)
from .common.samples import compact_rows, keeps_some, kept_rows, kept_shape, shape_of_d, stream_rows

_compiling = torch.compiler.is_compiling


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The specification of `layer_norm`: torch's own, in x.dtype, then one cast."""
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(out_dtype or x.dtype)


FWD_TABLE, BWD_TABLE = norm_tables("layer_norm")


@triton.jit
def _layer_norm_fwd_kernel(
    y_ptr, stats_ptr, x_ptr, weight_ptr, bias_ptr, samples_ptr,
    num_rows, C, rows_per_sample, stride_x_row, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_STATS: tl.constexpr,
    SOME: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_rows = tl.program_id(0).to(tl.int64)
    offs_row = pid_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_c = tl.arange(0, BLOCK_C)
    mask_row, mask_c = offs_row < num_rows, offs_c < C
    mask = mask_row[:, None] & mask_c[None, :]

    rows_x = offs_row
    if SOME:
        rows_x = stream_rows(samples_ptr, offs_row, mask_row, rows_per_sample)
    x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)
    if HAS_WEIGHT:  # on their way during the sums
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    mean = tl.sum(x, axis=1) / C
    # Second pass: otherwise a constant row's rounding error shows up as variance.
    mean += tl.sum(tl.where(mask, x - mean[:, None], 0.0), axis=1) / C
    centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / C + eps)
    y = centered * rstd[:, None]
    if HAS_WEIGHT:
        y *= weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        y += bias.to(tl.float32)[None, :]

    if SAVE_STATS:  # [mean (rows) | rstd (rows)]
        tl.store(stats_ptr + offs_row, mean, mask=mask_row)
        tl.store(stats_ptr + num_rows + offs_row, rstd, mask=mask_row)
    y_ptrs = y_ptr + offs_row[:, None] * C + offs_c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_bwd_kernel(
    dx_ptr, d_ptr, partial_ptr, dy_ptr, dresidual_ptr, x_ptr, weight_ptr, stats_ptr, row_scale_ptr,
    samples_ptr, num_rows, C, rows_per_sample, num_kept, num_kept_of_d,
    stride_dy_row, stride_dresidual_row, stride_x_row, keep_scale,
    HAS_WEIGHT: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, NEEDS_DPARAMS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, WRITE_D: tl.constexpr, SUM_D: tl.constexpr,
    SOME: tl.constexpr, SOME_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Program p takes row blocks p, p + P, p + 2P, ... and keeps its share of the sums over rows.
    pid = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    sum_d = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]

    step = tl.num_programs(0) * BLOCK_ROWS
    for row in tl.range(pid * BLOCK_ROWS, num_rows, step, num_stages=STAGES):
        offs_row = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_row = offs_row < num_rows
        mask = mask_row[:, None] & mask_c[None, :]
        rows_dy, mask_dy, num_stats = offs_row, mask_row, num_rows
        if SOME:  # other samples load zeros, which leave dresidual
            num_stats = num_kept * rows_per_sample
            rows_dy, mask_dy = compact_rows(
                samples_ptr, num_kept, offs_row, mask_row, rows_per_sample
            )  # fmt: skip
        mask_x = mask_dy[:, None] & mask_c[None, :]
        x = load_rows(x_ptr, offs_row, stride_x_row, offs_c, mask_x)
        dy = load_rows(dy_ptr, rows_dy, stride_dy_row, offs_c, mask_x)
        if HAS_DRESIDUAL:
            dresidual = load_rows(dresidual_ptr, offs_row, stride_dresidual_row, offs_c, mask)
        mean = tl.load(stats_ptr + rows_dy, mask=mask_dy, other=0.0)
        rstd = tl.load(stats_ptr + num_stats + rows_dy, mask=mask_dy, other=0.0)

        xhat = tl.where(mask_x, (x - mean[:, None]) * rstd[:, None], 0.0)
        g = dy * weight if HAS_WEIGHT else dy
        mean_g = tl.sum(g, axis=1) / C
        mean_g_xhat = tl.sum(g * xhat, axis=1) / C
        dx = rstd[:, None] * (g - mean_g[:, None] - xhat * mean_g_xhat[:, None])
        if HAS_DRESIDUAL:
            dx += dresidual
        offs = offs_row[:, None] * C + offs_c[None, :]
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask)
        if WRITE_D or SUM_D:
            d = rows_to_hand_over(
                d_ptr, dx, offs, mask, row_scale_ptr, offs_row, mask_row, rows_per_sample, C,
                num_kept_of_d, keep_scale, HAS_ROW_SCALE, SOME_D, WRITE_D,
            )  # fmt: skip
            if SUM_D:
                sum_d += d
        if NEEDS_DPARAMS:
            dweight += dy * xhat
            dbias += dy

    if NEEDS_DPARAMS or SUM_D:  # partial[p] = [dweight (C) | dbias (C)] [sum d (C)]
        SUMS: tl.constexpr = 2 * NEEDS_DPARAMS + SUM_D
        partial_ptrs = partial_ptr + pid * SUMS * C + offs_c
        if NEEDS_DPARAMS:
            tl.store(partial_ptrs, tl.sum(dweight, axis=0), mask=mask_c)
            tl.store(partial_ptrs + C, tl.sum(dbias, axis=0), mask=mask_c)
            partial_ptrs += 2 * C
        if SUM_D:
            tl.store(partial_ptrs, tl.sum(sum_d, axis=0), mask=mask_c)


class FwdPlan(NamedTuple):
    """All that a forward launch derives from the kind of its arguments."""

    launch: Callable[..., Any] | None  # the kernel on its grid; None where x is empty
    sizes: tuple[int, int, int, int, float]  # rows of y, C, rows a sample, row stride of x, eps
    options: dict[str, Any]
    y: Layout
    stats: Layout
    copies_x: bool  # its rows are no view


@launch_plan
def _fwd_plan(
    gpu: Gpu, shape: tuple[int, ...], strides: tuple[int, ...], has_weight: bool, has_bias: bool,
    eps: float, save_stats: bool, num_samples: int,
) -> FwdPlan:  # fmt: skip
    stride = row_stride(shape, strides)
    some = num_samples > 0
    shape = (num_samples - shape[0], *shape[1:]) if some else shape
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = FWD_TABLE.choose(gpu, block_c)
    grid = (triton.cdiv(num_rows, config.block_rows),)
    return FwdPlan(
        launch=_layer_norm_fwd_kernel[grid] if num_rows * C else None,
        sizes=(
            num_rows, C, math.prod(shape[1:-1]) if some else 0, C if stride is None else stride, eps
        ),
        options=dict(
            HAS_WEIGHT=has_weight, HAS_BIAS=has_bias, SAVE_STATS=save_stats, SOME=some,
            BLOCK_ROWS=config.block_rows, BLOCK_C=block_c, num_warps=config.num_warps,
        ),
        y=layout(shape),
        stats=layout((2, *shape[:-1]) if save_stats else (0,)),
        copies_x=stride is None,
    )  # fmt: skip


def _empty_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype,
    save_stats: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = kept_shape(x, samples)
    stats_shape = (2, *shape[:-1]) if save_stats else (0,)
    return x.new_empty(shape, dtype=out_dtype), x.new_empty(stats_shape, dtype=torch.float32)


@operator(fake=_empty_fwd)
def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype,
    save_stats: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(..., C) -> y (..., C) in out_dtype, stats (2, ...) fp32: mean, rstd; empty if not saved.

    Both of the samples of x that `samples` keeps, where it is given.
    """
    device = x.device
    launch, sizes, options, y_layout, stats_layout, copies_x = _fwd_plan(
        gpu(device), x.shape, x.stride(), weight is not None, bias is not None, eps, save_stats,
        0 if samples is None else samples.shape[0],
    )  # fmt: skip
    y = empty_strided(*y_layout, dtype=out_dtype, device=device)
    stats = empty_strided(*stats_layout, dtype=torch.float32, device=device)
    if launch is not None:
        if copies_x:
            x = x.contiguous()
        with device_guard(x):
            launch(
                y, stats, x, contiguous(weight), contiguous(bias), contiguous(samples), *sizes,
                **options,
            )  # fmt: skip
    return y, stats


class BwdPlan(NamedTuple):
    """All that a backward launch derives from the kind of its arguments."""

    launch: Callable[..., Any] | None  # the kernel on its grid; None where x is empty
    # rows of x, C, rows a sample, samples kept of dy and d, row strides of dy, dresidual and x,
    # factor of kept samples in d
    sizes: tuple[float, ...]
    copies: tuple[bool, ...]  # whose rows are no view: of dy, dresidual and x
    options: dict[str, Any]
    dx: Layout
    sums: Layout
    partial: Layout


@launch_plan
def _bwd_plan(
    gpu: Gpu, shape: tuple[int, ...], has_weight: bool, needs_dparams: bool, has_row_scale: bool,
    writes_d: bool, sums_d: bool, num_samples: int, num_samples_of_d: int,
    *strides: tuple[int, ...] | None,
) -> BwdPlan:  # fmt: skip
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = BWD_TABLE.choose(gpu, block_c)
    programs = bwd_programs(gpu, config, num_rows, writes_d or sums_d, has_row_scale)
    B = max(1, shape[0])
    kept, kept_of_d = (max(0, n - B) for n in (num_samples, num_samples_of_d))
    shape_of_dy = (kept, *shape[1:]) if kept else shape
    row_strides = [
        0 if s is None else row_stride(shape_of_dy if i == 0 else shape, s)
        for i, s in enumerate(strides)
    ]
    sums = 2 * needs_dparams + sums_d
    return BwdPlan(
        launch=_layer_norm_bwd_kernel[(programs,)] if num_rows * C else None,
        sizes=(
            num_rows, C, num_rows // B, kept, kept_of_d,
            *(C if s is None else s for s in row_strides), B / kept_of_d if kept_of_d else 1.0,
        ),
        copies=tuple(stride is None for stride in row_strides),
        options=dict(
            HAS_WEIGHT=has_weight, HAS_DRESIDUAL=strides[1] is not None,
            NEEDS_DPARAMS=needs_dparams, HAS_ROW_SCALE=has_row_scale and not kept_of_d,
            WRITE_D=writes_d, SUM_D=sums_d, SOME=kept > 0, SOME_D=kept_of_d > 0,
            BLOCK_ROWS=config.block_rows, BLOCK_C=block_c,
            STAGES=bwd_stages(config, block_c, kept + kept_of_d > 0), num_warps=config.num_warps,
        ),
        dx=layout(shape),
        sums=layout((sums, C)),
        partial=layout((programs, sums * C)),
    )  # fmt: skip


def _launch_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    sum_dtype: torch.dtype, needs_dparams: bool, d: Tensor | None = None,
    row_scale: Tensor | None = None, needs_g: bool = False, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and sums; d is written where it is not None."""
    device = x.device
    launch, sizes, copies, options, dx_layout, sums_layout, partial_layout = _bwd_plan(
        gpu(device), x.shape, weight is not None, needs_dparams, row_scale is not None,
        d is not None, needs_g, 0 if samples is None else samples.shape[0],
        row_scale.shape[0] if keeps_some(row_scale) else 0,
        dy.stride(), None if dresidual is None else dresidual.stride(), x.stride(),
    )  # fmt: skip
    dx = empty_strided(*dx_layout, dtype=x.dtype, device=device)
    sums = empty_strided(*sums_layout, dtype=sum_dtype, device=device)
    if launch is None:
        return dx, sums.zero_()
    rows = (dy, dresidual, x)
    if any(copies):
        rows = [contiguous(t) if c else t for t, c in zip(rows, copies, strict=True)]
    partial = None
    if needs_dparams or needs_g:
        partial = empty_strided(*partial_layout, dtype=torch.float32, device=device)
    with device_guard(x):
        launch(
            dx, d, partial, *rows, contiguous(weight), contiguous(stats), contiguous(row_scale),
            contiguous(samples), *sizes, **options,
        )  # fmt: skip
    if partial is not None:
        column_sum(partial, sums)
    return dx, sums


def _empty_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    param_dtype: torch.dtype, needs_dparams: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty((2 * needs_dparams, x.shape[-1]), dtype=param_dtype)


@operator(fake=_empty_bwd)
def layer_norm_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    param_dtype: torch.dtype, needs_dparams: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients: dx (..., C) in x.dtype; (2, C), dweight above dbias, in param_dtype, or (0, C)."""
    return _launch_bwd(dy, dresidual, x, weight, stats, param_dtype, needs_dparams, samples=samples)


def _empty_rows_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    sum_dtype: torch.dtype, needs_dparams: bool, d_dtype: torch.dtype | None,
    row_scale: Tensor | None, needs_g: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums_shape = (2 * needs_dparams + needs_g, x.shape[-1])
    return (
        x.new_empty(x.shape), x.new_empty(sums_shape, dtype=sum_dtype),
        x.new_empty((0,) if d_dtype is None else shape_of_d(x, row_scale), dtype=d_dtype),
    )  # fmt: skip


@operator(fake=_empty_rows_bwd)
def layer_norm_rows_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor,
    sum_dtype: torch.dtype, needs_dparams: bool, d_dtype: torch.dtype | None,
    row_scale: Tensor | None, needs_g: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`layer_norm_bwd`, and what the linear layer reads that gave x.

    Returns: dx; sums in sum_dtype, of the rows dweight, dbias, sum_rows d those that are needed;
        d = row_scale * dx (..., C) in d_dtype, empty where that is None.
    """
    d = x.new_empty((0,) if d_dtype is None else shape_of_d(x, row_scale), dtype=d_dtype)
    dx, sums = _launch_bwd(
        dy, dresidual, x, weight, stats, sum_dtype, needs_dparams,
        None if d_dtype is None else d, row_scale, needs_g, samples,
    )  # fmt: skip
    return dx, sums, d


class LayerNormDecision(NamedTuple):
    """What `_decide` found for a kind of call."""

    ops: Routed | None  # None: the specification runs
    needs_gradient: bool
    eps: float
    out_dtype: torch.dtype
    param_dtype: torch.dtype


@differentiable
class LayerNormFunction(torch.autograd.Function):
    """(x, weight, bias) -> y."""

    @staticmethod
    def forward(ctx, x, weight, bias, decision, samples=None):
        y, stats = decision.ops.layer_norm_fwd(
            x, weight, bias, decision.eps, decision.out_dtype, True, samples
        )
        ctx.save_for_backward(x, weight, stats, samples)
        ctx.decision = decision
        ctx.reader = reader_of(x)
        return y

    @staticmethod
    @first_order("layer_norm")
    def backward(ctx, dy):
        return _backward(ctx, dy, None)[:4]


@differentiable
class LayerNormAndInputFunction(torch.autograd.Function):
    """(x, weight, bias, samples) -> (y, x): the second output is x, handed on to the residual.

    Its gradient arrives beside dy and is added inside the backward kernel, where autograd would
    launch an add over (rows, C) of its own.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, decision, samples):
        ctx.set_materialize_grads(False)
        return LayerNormFunction.forward(ctx, x, weight, bias, decision, samples), x.view_as(x)

    @staticmethod
    @first_order("layer_norm_and_input")
    def backward(ctx, dy, dresidual):
        if dy is None:
            return dresidual, None, None, None, None
        return _backward(ctx, dy, dresidual)


def _backward(ctx: Any, dy: Tensor, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, stats, samples = ctx.saved_tensors
    _, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
    needs_dparams = needs_dweight or needs_dbias
    ops, param_dtype = ops_for(ctx.decision.ops, dy, dresidual), ctx.decision.param_dtype
    reader = ctx.reader
    if reader is None or _compiling():
        dx, sums = ops.layer_norm_bwd(
            dy, dresidual, x, weight, stats, param_dtype, needs_dparams, samples
        )
    else:
        d_dtype, g_dtype = reader.reads
        dx, sums, d = ops.layer_norm_rows_bwd(
            dy, dresidual, x, weight, stats, dtype_of_sums(reader, param_dtype), needs_dparams,
            d_dtype, reader.row_scale, g_dtype is not None, samples,
        )  # fmt: skip
        hand(reader, dx, d, sums)
        sums = as_dtype(sums, param_dtype)
    if not needs_dparams:
        return dx, None, None, None, None
    dweight, dbias = sums.unbind(0)[:2]
    return dx, dweight if needs_dweight else None, dbias if needs_dbias else None, None, None


@decide_once
def _decide(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    out_dtype: torch.dtype | None, op: str, samples: Tensor | None, ops: Routed,
) -> LayerNormDecision:  # fmt: skip
    """Check the arguments; what runs, and how."""
    check_input(op, x)
    if samples is not None:
        check_samples(op, x, samples)
    C = x.shape[-1]
    check_shape(op, "weight", weight, (C,), like=x)
    check_shape(op, "bias", bias, (C,), like=x)
    check_eps(op, eps)
    check_dtype(op, "out_dtype", out_dtype)
    unsupported = None if 0 < C <= MAX_C else f"C must be from 1 to {MAX_C}, got {C}"
    if out_dtype is None:  # a CPU's autocast leaves layer_norm alone
        widens = autocast_dtype(x) is not None and x.device.type != "cpu"
        out_dtype = torch.float32 if widens else x.dtype
    param = weight if weight is not None else bias
    return LayerNormDecision(
        route("layer_norm", ops, unsupported, x, weight, bias, samples),
        needs_gradient(x, weight, bias), eps, out_dtype,
        torch.float32 if param is None else param.dtype,
    )  # fmt: skip


def layer_norm_and_input(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm that hands its input on: returns (`layer_norm(x, ...)`, x).

    For a pre-norm branch, `y, x = layer_norm_and_input(x, ...); x = x + branch(y)`: the residual's
    gradient is then added inside the LayerNorm's backward kernel. Arguments as for `layer_norm`;
    and samples, what `keep_samples(B, rate)` gave: y is then that of the S samples that it keeps of
    x (B, ..., C), which alone are read.
    """
    decision = _decide(x, weight, bias, eps, out_dtype, "layer_norm_and_input", samples)
    ops, needs_gradient, _, out_dtype, _ = decision
    if ops is None:
        some = x if samples is None else kept_rows(x, samples)
        return layer_norm_ref(some, weight, bias, eps, out_dtype), x
    if not needs_gradient:
        return ops.layer_norm_fwd(x, weight, bias, eps, out_dtype, False, samples)[0], x
    return ops.LayerNormAndInputFunction(x, weight, bias, decision, samples)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm over the last axis.

    y = (x - mean(x)) * (var(x) + eps)**-0.5 * weight + bias

    Args:
        x: (..., C), fp16, bf16 or fp32, any strides (a last axis that is not contiguous is copied).
        weight, bias: (C,), any of these dtypes, or None for 1 and 0.
        eps: added to the variance, in squared units of x. timm and torchvision 1e-6, HF ViT 1e-12.
        out_dtype: dtype of the result. Default x.dtype; fp32 under a GPU's autocast,
            as torch's own.
    Returns:
        (..., C) in out_dtype.
    Precision: statistics, sums and dweight/dbias partials fp32, whatever the dtypes.
    Saved: x, and mean and rstd (fp32, (2, *x.shape[:-1])); nothing where no gradient is wanted.
    Raises: ValueError, such as "layer_norm: weight must have shape (768,), got (384,)"; TypeError.
    Source: arXiv:1607.06450. Specification: layer_norm_ref. Derivation: docs/layer_norm.md.
    """
    decision = _decide(x, weight, bias, eps, out_dtype, "layer_norm", None)
    ops, needs_gradient, _, out_dtype, _ = decision
    if ops is None:
        return layer_norm_ref(x, weight, bias, eps, out_dtype)
    if not needs_gradient:
        return ops.layer_norm_fwd(x, weight, bias, eps, out_dtype, False)[0]
    return ops.LayerNormFunction(x, weight, bias, decision)
