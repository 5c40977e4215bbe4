"""Backward of a rotation whose tables learn: the gradients of q, k, their norms and the tables.

With y = x or norm(x), a pair (a, b) of y, and the gradients (da', db') of what it turned into:

    dcos_a = sum da' a,  dsin_a = -sum da' b,  dcos_b = sum db' b,  dsin_b = sum db' a

over q, k and all samples and heads that share a row of the tables. A program holds BLOCK_ROWS rows
of the tables and walks along a range of what shares them, so that it reads each row once. It writes
fp32 sums of its range; `column_sum` adds the ranges in a fixed order. No atomics. A range of all is
written as it is. Derivation: docs/rope.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.backend import Gpu, gpu
from ...runtime.configs import launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from .reduction import column_sum
from .rotation import (
    Rotation,
    Tables,
    _load_pairs,
    _load_parameter,
    _norm_bwd,
    _normed,
    _offsets,
    _places,
    _rotated,
    _store_pairs,
    _store_partial,
    _table,
    _tables,
    chosen,
    rotate,
    rotate_norm_bwd,
)

# Key: BLOCK_P, as for rope_bwd: four pairs a thread, beside eight fp32 sums. Not yet measured.
TABLES_TABLE = _table("rope_tables_bwd")
PROGRAMS_PER_SM = 8
MIN_SHARED = 8  # samples and heads of a range: its sums are 16 bytes for 12 of each of these


@triton.jit
def _shared_rows_bwd(
    dx_ptr,
    partial_ptr,
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    places,
    mask_row,
    tables,
    sums,
    first,
    last,
    heads_shared,
    strides_dx,
    strides_dy,
    strides_x,
    eps,
    NORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """dx of all of q or of k that shares these rows; the tables' sums with what it adds to them."""
    cos, sin, turns = tables
    samples, tokens, heads = places
    dcos_a, dcos_b, dsin_a, dsin_b = sums
    weight_a, weight_b = _load_parameter(weight_ptr, 1.0, D, R, INTERLEAVED, BLOCK_P)
    bias_a, bias_b = _load_parameter(bias_ptr, 0.0, D, R, INTERLEAVED, BLOCK_P)
    mask_pair = mask_row[:, None] & (tl.arange(0, BLOCK_P) < D // 2)[None, :]
    dweight_a = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    dweight_b, dbias_a, dbias_b = dweight_a, dweight_a, dweight_a
    for shared in tl.range(first, last):
        sample = shared // heads_shared
        here = (samples + sample, tokens, heads + (shared - sample * heads_shared))
        dy_ptrs, x_ptrs = dy_ptr + _offsets(here, strides_dy), x_ptr + _offsets(here, strides_x)
        da, db = _load_pairs(dy_ptrs, mask_row, 0.0, D, D, R, INTERLEAVED, BLOCK_P)
        a, b = _load_pairs(x_ptrs, mask_row, 0.0, D, D, R, INTERLEAVED, BLOCK_P)
        if NORM != "":
            xhat_a, xhat_b, rstd = _normed(a, b, mask_pair, eps, D, NORM)
            a, b = xhat_a * weight_a + bias_a, xhat_b * weight_b + bias_b
        dcos_a += da * a
        dcos_b += db * b
        dsin_a -= da * b
        dsin_b += db * a
        da, db = _rotated(da, db, cos, sin, turns, True)
        if NORM != "":
            if NEEDS_DPARAMS:
                dweight_a += da * xhat_a
                dweight_b += db * xhat_b
                dbias_a += da
                dbias_b += db
            da, db = _norm_bwd(da, db, xhat_a, xhat_b, rstd, weight_a, weight_b, D, NORM)
        dx_ptrs = dx_ptr + _offsets(here, strides_dx)
        _store_pairs(dx_ptrs, da, db, mask_row, D, R, INTERLEAVED, BLOCK_P)
    if NEEDS_DPARAMS:
        _store_partial(partial_ptr, dweight_a, dweight_b, dbias_a, dbias_b, D, R, INTERLEAVED)
    return dcos_a, dcos_b, dsin_a, dsin_b


@triton.jit(**ANY_BATCH)
def _rope_tables_bwd_kernel(
    dq_ptr,
    dk_ptr,
    dtables_ptr,
    partial_ptr,
    dq_out_ptr,
    dk_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    q_bias_ptr,
    k_weight_ptr,
    k_bias_ptr,
    num_rows,
    T,
    table_heads,
    prefix_tokens,
    num_shared,
    shared_per_split,
    heads_shared,
    stride_dx_b,
    stride_dx_t,
    stride_dx_h,
    stride_dq_out_b,
    stride_dq_out_t,
    stride_dq_out_h,
    stride_dk_out_b,
    stride_dk_out_t,
    stride_dk_out_h,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_table_b,
    stride_table_t,
    stride_table_h,
    eps,
    NORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = rows < num_rows
    places = _places(rows, T, table_heads)
    tables = _tables(
        cos_ptr,
        sin_ptr,
        places,
        mask_row,
        prefix_tokens,
        (stride_table_b, stride_table_t, stride_table_h),
        D,
        R,
        INTERLEAVED,
        BLOCK_P,
    )
    first = split * shared_per_split
    last = tl.minimum(first + shared_per_split, num_shared)
    q_partial_ptr, k_partial_ptr = partial_ptr, partial_ptr
    if NEEDS_DPARAMS:
        program = split.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        q_partial_ptr = partial_ptr + program * 4 * D
        k_partial_ptr = q_partial_ptr + 2 * D
    zeros = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    strides_dx = (stride_dx_b, stride_dx_t, stride_dx_h)
    sums = _shared_rows_bwd(
        dq_ptr,
        q_partial_ptr,
        dq_out_ptr,
        q_ptr,
        q_weight_ptr,
        q_bias_ptr,
        places,
        mask_row,
        tables,
        (zeros, zeros, zeros, zeros),
        first,
        last,
        heads_shared,
        strides_dx,
        (stride_dq_out_b, stride_dq_out_t, stride_dq_out_h),
        (stride_q_b, stride_q_t, stride_q_h),
        eps,
        NORM,
        NEEDS_DPARAMS,
        INTERLEAVED,
        D,
        R,
        BLOCK_ROWS,
        BLOCK_P,
    )
    dcos_a, dcos_b, dsin_a, dsin_b = _shared_rows_bwd(
        dk_ptr,
        k_partial_ptr,
        dk_out_ptr,
        k_ptr,
        k_weight_ptr,
        k_bias_ptr,
        places,
        mask_row,
        tables,
        sums,
        first,
        last,
        heads_shared,
        strides_dx,
        (stride_dk_out_b, stride_dk_out_t, stride_dk_out_h),
        (stride_k_b, stride_k_t, stride_k_h),
        eps,
        NORM,
        NEEDS_DPARAMS,
        INTERLEAVED,
        D,
        R,
        BLOCK_ROWS,
        BLOCK_P,
    )
    samples, tokens, heads = places
    turned = T - prefix_tokens
    table_rows = (samples * table_heads + heads) * turned + tokens - prefix_tokens
    size = (num_rows // T).to(tl.int64) * turned * R  # of one table
    mask_row = mask_row & (tokens >= prefix_tokens)
    dcos_ptrs = dtables_ptr + split * 2 * size + table_rows * R
    _store_pairs(dcos_ptrs, dcos_a, dcos_b, mask_row, R, R, INTERLEAVED, BLOCK_P)
    _store_pairs(dcos_ptrs + size, dsin_a, dsin_b, mask_row, R, R, INTERLEAVED, BLOCK_P)


class _Plan(NamedTuple):
    launch: Any  # the kernel on its grid
    programs: int
    splits: int
    sizes: tuple[int, ...]


@launch_plan
def _plan(
    gpu: Gpu,
    shape: tuple[int, ...],
    table: tuple[int, ...],
    rotation: Rotation,
    needs_dparams: bool,
) -> _Plan:
    B, T, H, D = shape
    *leading, _, R = table
    table_samples, table_heads = (*leading, 1, 1)[:2]
    samples_shared, heads_shared = B // table_samples, H // table_heads
    config, options = chosen(TABLES_TABLE, gpu, D, R, rotation, NEEDS_DPARAMS=needs_dparams)
    num_rows = table_samples * T * table_heads
    row_blocks = triton.cdiv(num_rows, config.block_rows)
    num_shared = samples_shared * heads_shared
    wanted = max(1, PROGRAMS_PER_SM * gpu.num_sms * 4 // config.num_warps // row_blocks)
    shared_per_split = max(MIN_SHARED, triton.cdiv(num_shared, wanted))
    splits = triton.cdiv(num_shared, shared_per_split)
    rows = (num_rows, T, table_heads, rotation.prefix_tokens)
    sizes = (*rows, num_shared, shared_per_split, heads_shared)
    launch = bind_launch(_rope_tables_bwd_kernel, (row_blocks, splits), **options)
    return _Plan(launch, row_blocks * splits, splits, sizes)


def _rotate_tables_bwd(
    dx: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    tables: Tables,
    rotation: Rotation,
    norms: tuple[Tensor | None, ...],
    dtables: Tensor,
    needs_dparams: bool,
) -> Tensor | None:
    """Write dq, dk and dtables; returns partials (programs, 4 D) fp32 of the norms if wanted."""
    launch, programs, splits, sizes = _plan(
        gpu(q.device), q.shape, tables.cos.shape, rotation, needs_dparams
    )
    partial = None
    if needs_dparams:
        partial = q.new_empty((programs, 4 * q.shape[-1]), dtype=torch.float32)
    sums = dtables
    if splits > 1:
        sums = q.new_empty((splits, dtables.numel()), dtype=torch.float32)
    launch(
        *dx,
        sums,
        partial,
        *dy,
        q,
        k,
        tables.cos,
        tables.sin,
        *norms,
        *sizes,
        *dx[0].stride()[:3],
        *dy[0].stride()[:3],
        *dy[1].stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *tables.strides,
        rotation.eps,
    )
    if splits > 1:
        column_sum(sums, dtables)
    return partial


def turn_back(
    dx: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    q: Tensor | None,
    k: Tensor | None,
    tables: Tables,
    rotation: Rotation,
    norms: tuple[Tensor | None, ...],
    dparams: Tensor,
    dtables: Tensor,
) -> None:
    """The whole backward of a rotation, in one pass over its tensors.

    Args:
        dx: of equal strides; may be dy itself.
        q, k: as they came; read for a norm and for the tables' gradients.
        norms: weight and bias of q, of k; contiguous.
        dparams: (4, D): dweight and dbias of q's norm, then of k's; no element where not wanted.
        dtables: (2, ...), contiguous: of cos and of sin; no element where not wanted.
    """
    if dtables.numel():
        assert q is not None and k is not None
        partial = _rotate_tables_bwd(
            dx, dy, q, k, tables, rotation, norms, dtables, dparams.numel() > 0
        )
    elif rotation.norm:
        assert q is not None and k is not None
        weights = norms[0], norms[2]
        partial = rotate_norm_bwd(dx, dy, q, k, tables, rotation, weights, dparams.numel() > 0)
    else:
        rotate(dx, *dy, tables, rotation, transpose=True)
        partial = None
    if partial is not None:
        column_sum(partial, dparams)
