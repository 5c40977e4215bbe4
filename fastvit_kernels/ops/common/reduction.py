"""Column sums in a fixed order: every op's bias gradient, and the second stage of its partials.

    out[n] = sum_r x[r, n]        many rows in two stages: S row ranges in parallel, then S partials

Precision: fp32 accumulators whatever x is; no atomics, so equal bits at every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.backend import Gpu, gpu
from ...runtime.configs import launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton

# One program sums BLOCK_R x BLOCK_N tiles down a row range. Partials of another kernel, up to
# ONE_STAGE_ROWS of them, take one launch: narrow tiles, so that there are programs enough. Not yet
# measured.
WIDE = dict(BLOCK_R=32, BLOCK_N=128, num_warps=4)
NARROW = dict(BLOCK_R=64, BLOCK_N=32, num_warps=4)
PROGRAMS_PER_SM = 4
MIN_ROWS_PER_SPLIT = 256
ONE_STAGE_ROWS = 2560  # 8 programs on each of up to 320 multiprocessors


@triton.jit(**ANY_BATCH)
def _column_sum_kernel(
    out_ptr,
    x_ptr,
    num_rows,
    N,
    rows_per_split,
    stride_x_row,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first = tl.program_id(1).to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    # Four stages: 24 KB of loads in flight a program, where a plain loop waits for each.
    for row in tl.range(first, last, BLOCK_R, num_stages=4):
        offs_r = row + tl.arange(0, BLOCK_R).to(tl.int64)
        x_ptrs = x_ptr + offs_r[:, None] * stride_x_row + offs_n[None, :]
        mask = (offs_r < last)[:, None] & mask_n[None, :]
        acc += tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + tl.program_id(1).to(tl.int64) * N + offs_n
    tl.store(out_ptrs, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=mask_n)


class _Plan(NamedTuple):
    splits: int
    rows_per_split: int
    first: Any  # the kernel on the grid of each stage
    second: Any


@launch_plan
def _plan(gpu: Gpu, num_rows: int, N: int) -> _Plan:
    tile = NARROW if MIN_ROWS_PER_SPLIT < num_rows <= ONE_STAGE_ROWS else WIDE
    column_blocks = triton.cdiv(N, tile["BLOCK_N"])
    splits = 1
    if num_rows > ONE_STAGE_ROWS:
        wanted = max(1, PROGRAMS_PER_SM * gpu.num_sms // column_blocks)
        splits = min(wanted, triton.cdiv(num_rows, MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(num_rows, splits)
    splits = triton.cdiv(num_rows, rows_per_split)
    first, second = (
        bind_launch(_column_sum_kernel, (column_blocks, rows), **tile) for rows in (splits, 1)
    )
    return _Plan(splits, rows_per_split, first, second)


def column_sum(x: Tensor, out: Tensor) -> Tensor:
    """Sum x over its rows into out.

    Args:
        x: (R, N), any dtype, last axis contiguous, any row stride.
        out: N elements in any axes, contiguous, any dtype; written whole, zeros where R is 0.
    Returns: out.
    """
    num_rows, N = x.shape
    if num_rows == 0 or N == 0:
        return out.zero_()
    splits, rows_per_split, launch, launch_second = _plan(gpu(x.device), num_rows, N)
    first = out
    if splits > 1:
        first = x.new_empty((splits, N), dtype=torch.float32)
    launch(first, x, num_rows, N, rows_per_split, x.stride(0))
    if splits > 1:
        launch_second(out, first, splits, N, splits, N)
    return out


def zeroed(*sums: Tensor | None) -> Any:
    """The sums, or gradients, of no rows: each that is given, filled with 0."""
    return tuple([None if x is None else x.zero_() for x in sums])
