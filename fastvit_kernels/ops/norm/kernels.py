"""The kernels of LayerNorm (CENTER) and RMSNorm: forward, and the backward with its partial sums.

A program holds whole rows: common/rows.py. Formulas: functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import Layout, contiguous, empty_strided, layout, row_stride
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from ..common.reduction import column_sum
from ..common.rows import (
    block_width,
    bwd_programs,
    bwd_stages,
    load_rows,
    norm_tables,
    rows_to_hand_over,
)
from ..common.samples import compact_rows, is_sample_subset, stream_rows

TABLES = {True: norm_tables("layer_norm"), False: norm_tables("rms_norm")}  # by center


class FwdForm(NamedTuple):
    """Constants of the forward."""

    CENTER: Any  # LayerNorm
    HAS_WEIGHT: Any
    HAS_BIAS: Any
    HAS_RESIDUAL: Any
    SAVE_STATS: Any
    SUBSET: Any  # of the samples that `samples` keeps
    BLOCK_ROWS: Any
    BLOCK_C: Any


class BwdForm(NamedTuple):
    """Constants of the backward."""

    CENTER: Any
    HAS_WEIGHT: Any
    HAS_DRESIDUAL: Any
    NEEDS_DPARAMS: Any
    HAS_ROW_SCALE: Any
    WRITE_D: Any
    SUM_D: Any
    SUBSET: Any  # dy has the rows of kept samples
    SUBSET_D: Any  # so has d
    BLOCK_ROWS: Any
    BLOCK_C: Any
    STAGES: Any


@triton.jit
def _normalised(x, mask, C, eps, FORM: tl.constexpr):
    """x without its mean, if centered, the mean, and rstd."""
    centered, mean = x, 0.0
    if FORM.CENTER:
        mean = tl.sum(x, axis=1) / C
        # Second pass: otherwise a constant row's rounding error shows up as variance.
        mean += tl.sum(tl.where(mask, x - mean[:, None], 0.0), axis=1) / C
        centered = tl.where(mask, x - mean[:, None], 0.0)
    return centered, mean, tl.rsqrt(tl.sum(centered * centered, axis=1) / C + eps)


@triton.jit(**ANY_BATCH)
def _norm_fwd_kernel(
    y_ptr,
    stats_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    samples_ptr,
    residual_ptr,
    num_rows,
    C,
    rows_per_sample,
    stride_x_row,
    stride_residual_row,
    eps,
    FORM: tl.constexpr,
):
    pid_rows = tl.program_id(0).to(tl.int64)
    offs_row = pid_rows * FORM.BLOCK_ROWS + tl.arange(0, FORM.BLOCK_ROWS)
    offs_c = tl.arange(0, FORM.BLOCK_C)
    mask_row, mask_c = offs_row < num_rows, offs_c < C
    mask = mask_row[:, None] & mask_c[None, :]

    rows_x = offs_row
    if FORM.SUBSET:
        rows_x = stream_rows(samples_ptr, offs_row, mask_row, rows_per_sample)
    x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)
    if FORM.HAS_WEIGHT:  # on their way during the sums
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0)
    if FORM.HAS_BIAS:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    if FORM.HAS_RESIDUAL:
        residual = load_rows(residual_ptr, offs_row, stride_residual_row, offs_c, mask)
    centered, mean, rstd = _normalised(x, mask, C, eps, FORM)
    y = centered * rstd[:, None]
    if FORM.HAS_WEIGHT:
        y *= weight.to(tl.float32)[None, :]
    if FORM.HAS_BIAS:
        y += bias.to(tl.float32)[None, :]
    if FORM.HAS_RESIDUAL:
        y += residual

    if FORM.SAVE_STATS:  # [mean (rows), if centered | rstd (rows)]
        if FORM.CENTER:
            tl.store(stats_ptr + offs_row, mean, mask=mask_row)
            stats_ptr += num_rows
        tl.store(stats_ptr + offs_row, rstd, mask=mask_row)
    y_ptrs = y_ptr + offs_row[:, None] * C + offs_c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(ptrs, dweight, dbias, sum_d, mask_c, C, FORM: tl.constexpr):
    """[dweight (C) | dbias (C), if centered] [sum d (C)], those that are wanted."""
    if FORM.NEEDS_DPARAMS:
        tl.store(ptrs, tl.sum(dweight, axis=0), mask=mask_c)
        ptrs += C
        if FORM.CENTER:
            tl.store(ptrs, tl.sum(dbias, axis=0), mask=mask_c)
            ptrs += C
    if FORM.SUM_D:
        tl.store(ptrs, tl.sum(sum_d, axis=0), mask=mask_c)


@triton.jit(**ANY_BATCH)
def _norm_bwd_kernel(
    dx_ptr,
    d_ptr,
    partial_ptr,
    dy_ptr,
    dresidual_ptr,
    x_ptr,
    weight_ptr,
    stats_ptr,
    row_scale_ptr,
    samples_ptr,
    num_rows,
    C,
    rows_per_sample,
    num_kept,
    num_kept_of_d,
    stride_dy_row,
    stride_dresidual_row,
    stride_x_row,
    keep_scale,
    FORM: tl.constexpr,
):
    # Program p takes row blocks p, p + P, p + 2P, ... and keeps its share of the sums over rows.
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_C: tl.constexpr = FORM.BLOCK_C
    pid = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    sum_d = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    if FORM.HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]

    step = tl.num_programs(0) * BLOCK_ROWS
    for row in tl.range(pid * BLOCK_ROWS, num_rows, step, num_stages=FORM.STAGES):
        offs_row = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_row = offs_row < num_rows
        mask = mask_row[:, None] & mask_c[None, :]
        rows_dy, mask_dy, num_stats = offs_row, mask_row, num_rows
        if FORM.SUBSET:  # other samples load zeros, which leave dresidual
            num_stats = num_kept * rows_per_sample
            rows_dy, mask_dy = compact_rows(
                samples_ptr, num_kept, offs_row, mask_row, rows_per_sample
            )
        mask_x = mask_dy[:, None] & mask_c[None, :]
        x = load_rows(x_ptr, offs_row, stride_x_row, offs_c, mask_x)
        dy = load_rows(dy_ptr, rows_dy, stride_dy_row, offs_c, mask_x)
        if FORM.HAS_DRESIDUAL:
            dresidual = load_rows(dresidual_ptr, offs_row, stride_dresidual_row, offs_c, mask)
        rstd_ptrs = stats_ptr + rows_dy
        if FORM.CENTER:
            mean = tl.load(stats_ptr + rows_dy, mask=mask_dy, other=0.0)
            rstd_ptrs = stats_ptr + num_stats + rows_dy
        rstd = tl.load(rstd_ptrs, mask=mask_dy, other=0.0)

        if FORM.CENTER:
            xhat = tl.where(mask_x, (x - mean[:, None]) * rstd[:, None], 0.0)
        else:
            xhat = x * rstd[:, None]
        g = dy * weight if FORM.HAS_WEIGHT else dy
        if FORM.CENTER:
            mean_g = tl.sum(g, axis=1) / C
        mean_g_xhat = tl.sum(g * xhat, axis=1) / C
        if FORM.CENTER:
            g -= mean_g[:, None]
        dx = rstd[:, None] * (g - xhat * mean_g_xhat[:, None])
        if FORM.HAS_DRESIDUAL:
            dx += dresidual
        offs = offs_row[:, None] * C + offs_c[None, :]
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask)
        if FORM.WRITE_D or FORM.SUM_D:
            kept = rows_per_sample, num_kept_of_d, keep_scale
            d = rows_to_hand_over(
                d_ptr, dx, offs, mask, row_scale_ptr, offs_row, mask_row, C, kept, FORM
            )
            if FORM.SUM_D:
                sum_d += d
        if FORM.NEEDS_DPARAMS:
            dweight += dy * xhat
            if FORM.CENTER:
                dbias += dy

    if FORM.NEEDS_DPARAMS or FORM.SUM_D:
        SUMS: tl.constexpr = (1 + FORM.CENTER) * FORM.NEEDS_DPARAMS + FORM.SUM_D
        _store_sums(partial_ptr + pid * SUMS * C + offs_c, dweight, dbias, sum_d, mask_c, C, FORM)


def stats_shape(center: bool, shape: Sequence[int], saved: bool) -> tuple[int, ...]:
    """Of the statistics of y's rows, for a y of this shape."""
    if not saved:
        return (0,)
    return (2, *shape[:-1]) if center else (*shape[:-1],)


class FwdPlan(NamedTuple):
    """All that a forward launch derives from the kind of its arguments."""

    launch: Callable[..., None] | None  # called with tensors; None where x is empty
    y: Layout
    stats: Layout
    copies_x: bool  # its rows are no view
    copies_residual: bool


@launch_plan
def _fwd_plan(
    gpu: Gpu,
    center: bool,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    has_weight: bool,
    has_bias: bool,
    eps: float,
    save_stats: bool,
    num_samples: int,
    residual_strides: tuple[int, ...] | None,
) -> FwdPlan:
    stride = row_stride(shape, strides)
    residual_stride = 0 if residual_strides is None else row_stride(shape, residual_strides)
    some = num_samples > 0
    shape = (num_samples - shape[0], *shape[1:]) if some else shape
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = TABLES[center][0].choose(gpu, block_c)
    grid = (triton.cdiv(num_rows, config.block_rows),)
    launch = bind_launch(
        _norm_fwd_kernel,
        grid,
        num_rows,
        C,
        math.prod(shape[1:-1]) if some else 0,
        *(C if s is None else s for s in (stride, residual_stride)),
        eps,
        FORM=FwdForm(
            CENTER=center,
            HAS_WEIGHT=has_weight,
            HAS_BIAS=has_bias,
            HAS_RESIDUAL=residual_strides is not None,
            SAVE_STATS=save_stats,
            SUBSET=some,
            BLOCK_ROWS=config.block_rows,
            BLOCK_C=block_c,
        ),
        num_warps=config.num_warps,
    )
    return FwdPlan(
        launch=launch if num_rows * C else None,
        y=layout(shape),
        stats=layout(stats_shape(center, shape, save_stats)),
        copies_x=stride is None,
        copies_residual=residual_stride is None,
    )


def launch_norm_fwd(
    center: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    save_stats: bool,
    samples: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    device = x.device
    launch, y_layout, stats_layout, copies_x, copies_residual = _fwd_plan(
        gpu(device),
        center,
        x.shape,
        x.stride(),
        weight is not None,
        bias is not None,
        eps,
        save_stats,
        0 if samples is None else samples.shape[0],
        None if residual is None else residual.stride(),
    )
    y = empty_strided(*y_layout, dtype=out_dtype, device=device)
    stats = empty_strided(*stats_layout, dtype=torch.float32, device=device)
    if launch is not None:
        if copies_x:
            x = x.contiguous()
        if copies_residual and residual is not None:
            residual = residual.contiguous()
        launch(y, stats, x, contiguous(weight), contiguous(bias), contiguous(samples), residual)
    return y, stats


class BwdPlan(NamedTuple):
    """All that a backward launch derives from the kind of its arguments."""

    launch: Callable[..., None] | None  # called with tensors; None where x is empty
    copies: tuple[bool, ...]  # whose rows are no view: of dy, dresidual and x
    dx: Layout
    sums: Layout
    partial: Layout
    d: Layout


@launch_plan
def _bwd_plan(
    gpu: Gpu,
    center: bool,
    shape: tuple[int, ...],
    has_weight: bool,
    needs_dparams: bool,
    has_row_scale: bool,
    writes_d: bool,
    sums_d: bool,
    num_samples: int,
    num_samples_of_d: int,
    *strides: tuple[int, ...] | None,
) -> BwdPlan:
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = TABLES[center][1].choose(gpu, block_c)
    programs = bwd_programs(gpu, config, num_rows, writes_d or sums_d, has_row_scale)
    B = max(1, shape[0])
    kept, kept_of_d = (max(0, n - B) for n in (num_samples, num_samples_of_d))
    shape_of_dy = (kept, *shape[1:]) if kept else shape
    row_strides = [
        0 if s is None else row_stride(shape_of_dy if i == 0 else shape, s)
        for i, s in enumerate(strides)
    ]
    sums = num_sums(center, needs_dparams, sums_d)
    launch = bind_launch(
        _norm_bwd_kernel,
        (programs,),
        num_rows,
        C,
        num_rows // B,
        kept,
        kept_of_d,
        *(C if s is None else s for s in row_strides),
        B / kept_of_d if kept_of_d else 1.0,
        FORM=BwdForm(
            CENTER=center,
            HAS_WEIGHT=has_weight,
            HAS_DRESIDUAL=strides[1] is not None,
            NEEDS_DPARAMS=needs_dparams,
            HAS_ROW_SCALE=has_row_scale and not kept_of_d,
            WRITE_D=writes_d,
            SUM_D=sums_d,
            SUBSET=kept > 0,
            SUBSET_D=kept_of_d > 0,
            BLOCK_ROWS=config.block_rows,
            BLOCK_C=block_c,
            STAGES=bwd_stages(config, block_c, kept + kept_of_d > 0),
        ),
        num_warps=config.num_warps,
    )
    return BwdPlan(
        launch=launch if num_rows * C else None,
        copies=tuple(stride is None for stride in row_strides),
        dx=layout(shape),
        sums=layout((sums, C)),
        partial=layout((programs, sums * C)),
        d=layout((kept_of_d, *shape[1:]) if kept_of_d else shape),
    )


def num_sums(center: bool, needs_dparams: bool, needs_g: bool) -> int:
    """Rows of the sums: dweight, dbias (LayerNorm's), sum_rows d."""
    return (1 + center) * needs_dparams + needs_g


def launch_norm_bwd(
    center: bool,
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
) -> Any:
    """dx, sums, and d, None where its dtype is."""
    device = x.device
    launch, copies, dx_layout, sums_layout, partial_layout, d_layout = _bwd_plan(
        gpu(device),
        center,
        x.shape,
        weight is not None,
        needs_dparams,
        row_scale is not None,
        d_dtype is not None,
        needs_g,
        0 if samples is None else samples.shape[0],
        row_scale.shape[0] if is_sample_subset(row_scale) else 0,
        dy.stride(),
        None if dresidual is None else dresidual.stride(),
        x.stride(),
    )
    dx = empty_strided(*dx_layout, dtype=x.dtype, device=device)
    sums = empty_strided(*sums_layout, dtype=sum_dtype, device=device)
    d = None if d_dtype is None else empty_strided(*d_layout, dtype=d_dtype, device=device)
    if launch is None:
        return dx, sums.zero_(), d
    rows = (dy, dresidual, x)
    if any(copies):
        rows = [contiguous(t) if c else t for t, c in zip(rows, copies, strict=True)]
    partial = None
    if needs_dparams or needs_g:
        partial = empty_strided(*partial_layout, dtype=torch.float32, device=device)
    launch(
        dx,
        d,
        partial,
        *rows,
        contiguous(weight),
        contiguous(stats),
        contiguous(row_scale),
        contiguous(samples),
    )
    if partial is not None:
        column_sum(partial, sums)
    return dx, sums, d
