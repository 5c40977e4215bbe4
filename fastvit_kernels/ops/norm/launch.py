"""Launches of the norms' kernels, registered as the operators of LayerNorm and of RMSNorm.

`center` says which: LayerNorm has a bias and saves mean and rstd, RMSNorm saves rstd alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    Layout,
    contiguous,
    empty_gradients,
    empty_strided,
    layout,
    row_stride,
)
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import launch_plan
from ...runtime.operator import Operator, operator
from ...runtime.triton import bind_launch, triton
from ..common.reduction import column_sum
from ..common.rows import block_width, bwd_programs, bwd_stages, norm_tables
from ..common.samples import is_sample_subset, kept_shape, shape_of_d
from .kernels import _norm_bwd_kernel, _norm_fwd_kernel

TABLES = {True: norm_tables("layer_norm"), False: norm_tables("rms_norm")}  # by center


def _stats_shape(center: bool, shape: Sequence[int], saved: bool) -> tuple[int, ...]:
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
        CENTER=center,
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        HAS_RESIDUAL=residual_strides is not None,
        SAVE_STATS=save_stats,
        SUBSET=some,
        BLOCK_ROWS=config.block_rows,
        BLOCK_C=block_c,
        num_warps=config.num_warps,
    )
    return FwdPlan(
        launch=launch if num_rows * C else None,
        y=layout(shape),
        stats=layout(_stats_shape(center, shape, save_stats)),
        copies_x=stride is None,
        copies_residual=residual_stride is None,
    )


def _launch_fwd(
    center: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    save_stats: bool,
    samples: Tensor | None,
    residual: Tensor | None,
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


def _empty_fwd(
    center: bool, x: Tensor, out_dtype: torch.dtype, save_stats: bool, samples: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = kept_shape(x, samples)
    stats_shape = _stats_shape(center, shape, save_stats)
    return x.new_empty(shape, dtype=out_dtype), x.new_empty(stats_shape, dtype=torch.float32)


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
    sums = _num_sums(center, needs_dparams, sums_d)
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


def _num_sums(center: bool, needs_dparams: bool, needs_g: bool = False) -> int:
    """Rows of the sums: dweight, dbias (LayerNorm's), sum_rows d."""
    return (1 + center) * needs_dparams + needs_g


def _launch_bwd(
    center: bool,
    dy: Tensor,
    dresidual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    sum_dtype: torch.dtype,
    needs_dparams: bool,
    samples: Tensor | None,
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
    dx = x.new_empty_strided(*dx_layout)
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


def _empty_bwd(
    center: bool,
    x: Tensor,
    sum_dtype: torch.dtype,
    needs_dparams: bool,
    d_dtype: torch.dtype | None = None,
    row_scale: Tensor | None = None,
    needs_g: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = (_num_sums(center, needs_dparams, needs_g), x.shape[-1])
    d, *_ = empty_gradients(x.device, (tuple(shape_of_d(x, row_scale)), d_dtype))
    return x.new_empty(x.shape), x.new_empty(sums, dtype=sum_dtype), d


def _operators(center: bool) -> tuple[Operator, Operator, Operator]:
    """Of LayerNorm or of RMSNorm, which has no bias: forward, backward, and the backward that gives
    besides what the linear layer reads that gave x."""

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
        return _launch_fwd(center, x, weight, bias, eps, out_dtype, save_stats, samples, residual)

    def bwd(
        dy: Tensor,
        dresidual: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        param_dtype: torch.dtype,
        needs_dparams: bool,
        samples: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """dx (..., C) in x.dtype; (2, C), dweight above dbias, in param_dtype, of RMSNorm dweight
        alone, or (0, C)."""
        given = dy, dresidual, x, weight, stats, param_dtype, needs_dparams, samples
        return _launch_bwd(center, *given)[:2]

    def rows_bwd(
        dy: Tensor,
        dresidual: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        stats: Tensor,
        sum_dtype: torch.dtype,
        needs_dparams: bool,
        d_dtype: torch.dtype | None,
        row_scale: Tensor | None,
        needs_g: bool,
        samples: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx; sums in sum_dtype, of the rows dweight, dbias, sum_rows d those that are needed;
        d = row_scale * dx (..., C) in d_dtype, None where that is None."""
        return _launch_bwd(
            center,
            dy,
            dresidual,
            x,
            weight,
            stats,
            sum_dtype,
            needs_dparams,
            samples,
            d_dtype,
            row_scale,
            needs_g,
        )

    def empty_bwd(x: Tensor, param_dtype: torch.dtype, needs_dparams: bool) -> Any:
        return _empty_bwd(center, x, param_dtype, needs_dparams)[:2]

    for launcher in (fwd, bwd, rows_bwd):
        launcher.__name__ = f"{'layer' if center else 'rms'}_norm_{launcher.__name__}"
    rows = operator(fake=functools.partial(_empty_bwd, center))(rows_bwd)
    forward = operator(fake=functools.partial(_empty_fwd, center))(fwd)
    return forward, operator(fake=empty_bwd)(bwd), rows


layer_norm_fwd, layer_norm_bwd, layer_norm_rows_bwd = _operators(center=True)
rms_norm_fwd, rms_norm_bwd, rms_norm_rows_bwd = _operators(center=False)
