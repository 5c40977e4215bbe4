"""The kernels of LayerNorm (CENTER) and RMSNorm: forward, and the backward with its partial sums.

A program holds whole rows: common/rows.py. Formulas: functions.py.
"""

from __future__ import annotations

from ...runtime.triton import ANY_BATCH, tl, triton
from ..common.rows import load_rows, rows_to_hand_over
from ..common.samples import compact_rows, stream_rows


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
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SAVE_STATS: tl.constexpr,
    SUBSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pid_rows = tl.program_id(0).to(tl.int64)
    offs_row = pid_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_c = tl.arange(0, BLOCK_C)
    mask_row, mask_c = offs_row < num_rows, offs_c < C
    mask = mask_row[:, None] & mask_c[None, :]

    rows_x = offs_row
    if SUBSET:
        rows_x = stream_rows(samples_ptr, offs_row, mask_row, rows_per_sample)
    x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)
    if HAS_WEIGHT:  # on their way during the sums
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    if HAS_RESIDUAL:
        residual = load_rows(residual_ptr, offs_row, stride_residual_row, offs_c, mask)
    centered = x
    if CENTER:
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
    if HAS_RESIDUAL:
        y += residual

    if SAVE_STATS:  # [mean (rows), if centered | rstd (rows)]
        if CENTER:
            tl.store(stats_ptr + offs_row, mean, mask=mask_row)
            stats_ptr += num_rows
        tl.store(stats_ptr + offs_row, rstd, mask=mask_row)
    y_ptrs = y_ptr + offs_row[:, None] * C + offs_c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DRESIDUAL: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    WRITE_D: tl.constexpr,
    SUM_D: tl.constexpr,
    SUBSET: tl.constexpr,
    SUBSET_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        if SUBSET:  # other samples load zeros, which leave dresidual
            num_stats = num_kept * rows_per_sample
            rows_dy, mask_dy = compact_rows(
                samples_ptr, num_kept, offs_row, mask_row, rows_per_sample
            )
        mask_x = mask_dy[:, None] & mask_c[None, :]
        x = load_rows(x_ptr, offs_row, stride_x_row, offs_c, mask_x)
        dy = load_rows(dy_ptr, rows_dy, stride_dy_row, offs_c, mask_x)
        if HAS_DRESIDUAL:
            dresidual = load_rows(dresidual_ptr, offs_row, stride_dresidual_row, offs_c, mask)
        rstd_ptrs = stats_ptr + rows_dy
        if CENTER:
            mean = tl.load(stats_ptr + rows_dy, mask=mask_dy, other=0.0)
            rstd_ptrs = stats_ptr + num_stats + rows_dy
        rstd = tl.load(rstd_ptrs, mask=mask_dy, other=0.0)

        if CENTER:
            xhat = tl.where(mask_x, (x - mean[:, None]) * rstd[:, None], 0.0)
        else:
            xhat = x * rstd[:, None]
        g = dy * weight if HAS_WEIGHT else dy
        if CENTER:
            mean_g = tl.sum(g, axis=1) / C
        mean_g_xhat = tl.sum(g * xhat, axis=1) / C
        if CENTER:
            g -= mean_g[:, None]
        dx = rstd[:, None] * (g - xhat * mean_g_xhat[:, None])
        if HAS_DRESIDUAL:
            dx += dresidual
        offs = offs_row[:, None] * C + offs_c[None, :]
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask)
        if WRITE_D or SUM_D:
            d = rows_to_hand_over(
                d_ptr,
                dx,
                offs,
                mask,
                row_scale_ptr,
                offs_row,
                mask_row,
                rows_per_sample,
                C,
                num_kept_of_d,
                keep_scale,
                HAS_ROW_SCALE,
                SUBSET_D,
                WRITE_D,
            )
            if SUM_D:
                sum_d += d
        if NEEDS_DPARAMS:
            dweight += dy * xhat
            if CENTER:
                dbias += dy

    if NEEDS_DPARAMS or SUM_D:  # partial[p] = [dweight (C) | dbias (C), if centered] [sum d (C)]
        SUMS: tl.constexpr = (1 + CENTER) * NEEDS_DPARAMS + SUM_D
        partial_ptrs = partial_ptr + pid * SUMS * C + offs_c
        if NEEDS_DPARAMS:
            tl.store(partial_ptrs, tl.sum(dweight, axis=0), mask=mask_c)
            partial_ptrs += C
            if CENTER:
                tl.store(partial_ptrs, tl.sum(dbias, axis=0), mask=mask_c)
                partial_ptrs += C
        if SUM_D:
            tl.store(partial_ptrs, tl.sum(sum_d, axis=0), mask=mask_c)
