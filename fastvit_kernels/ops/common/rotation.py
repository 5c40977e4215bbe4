"""Kernels of rotary position embedding, with an optional norm of each head before it.

A row is one head of one token, its D columns taken as D/2 pairs (a, b): columns (2i, 2i + 1) where
interleaved, else (i, i + R/2). With tables of full width, whose two columns of a pair may differ:

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b;  the backward transposes this 2 x 2 matrix

Columns past R and the first tokens of a sample stay as they are. A program reads and writes each
element once, in one thread, so that outputs may be the inputs' own memory.

Where the tables learn, with y = x or norm(x) and (da', db') the gradients of a turned pair,

    dcos_a = sum da' a,  dsin_a = -sum da' b,  dcos_b = sum db' b,  dsin_b = sum db' a

over q, k and all samples and heads that share a row of the tables. A program holds BLOCK_ROWS rows
of the tables and walks along a range of what shares them, so that it reads each row once; fp32 sums
of the ranges are added by `column_sum` in a fixed order. No atomics.
Precision: fp32 until the store. Derivation: docs/rope.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import Layout, contiguous
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import ConfigTable, launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from .reduction import column_sum

NORMS = ("layer_norm", "rms_norm")
MAX_D = 1024  # a head is held in the registers of one program
MAX_ROWS = 2**31  # rows are counted in 32 bits


class RopeConfig(NamedTuple):
    """BLOCK_ROWS heads of tokens a program takes at once, and its warps."""

    block_rows: int
    num_warps: int


# Key: BLOCK_P, pairs of a row up to a power of two. Eight pairs a thread, so that each loads 16
# bytes of a and of b; in the backward of a norm, with fewer, a step's addresses bound it; where
# tables learn, four beside eight fp32 sums. By the model of docs/compile.md; not yet measured.
PAIRS = 1024
CONFIGS = [RopeConfig(rows, warps) for warps in (4, 8) for rows in (1, 2, 4, 8, 16, 32, 64)]
PROGRAMS_PER_SM = 8
MIN_SHARED = 8  # samples and heads of a range: its sums are 16 bytes for 12 of each of these


def _default(gpu: Gpu, block_p: int) -> RopeConfig:
    return RopeConfig(min(64, max(1, PAIRS // block_p)), 4)


def _fits(gpu: Gpu, config: RopeConfig, block_p: int) -> bool:
    pairs = config.block_rows * block_p // (32 * config.num_warps)  # a thread
    return 1 <= pairs <= 16 or config.block_rows == _default(gpu, block_p).block_rows


FWD_TABLE = ConfigTable("rope_fwd", CONFIGS, _default, _fits)
BWD_TABLE = ConfigTable("rope_bwd", CONFIGS, _default, _fits)
TABLES_TABLE = ConfigTable("rope_tables_bwd", CONFIGS, _default, _fits)


class Form(NamedTuple):
    """Constants of a launch."""

    NORM: Any  # "": none
    INTERLEAVED: Any
    D: Any
    R: Any
    BLOCK_ROWS: Any
    BLOCK_P: Any


class RowStrides(NamedTuple):
    """Of (B, T, H, D), the last axis contiguous; of tables 0 along what shares them."""

    b: Any
    t: Any
    h: Any


@triton.jit
def _pair_columns(WIDTH: tl.constexpr, FORM: tl.constexpr):
    """The columns of a and of b, half pairing; columns past R make pairs of their own."""
    pair = tl.arange(0, FORM.BLOCK_P)
    HALF: tl.constexpr = FORM.R // 2
    if WIDTH == FORM.R:
        return pair, pair + HALF
    rotated = pair < HALF
    return tl.where(rotated, pair, pair + HALF), tl.where(rotated, pair + HALF, pair + FORM.D // 2)


@triton.jit
def _load_pairs(row_ptrs, mask_row, other, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """a and b (rows, BLOCK_P) in fp32; `other` in masked rows and in pairs past WIDTH."""
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    if FORM.INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_P)
        mask = mask_row[:, None] & (offs < WIDTH)[None, :]
        x = tl.load(row_ptrs[:, None] + offs[None, :], mask=mask, other=other).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BLOCK_P, 2)))
    else:
        offs_a, offs_b = _pair_columns(WIDTH, FORM)
        mask = mask_row[:, None] & (tl.arange(0, BLOCK_P) < WIDTH // 2)[None, :]
        a = tl.load(row_ptrs[:, None] + offs_a[None, :], mask=mask, other=other).to(tl.float32)
        b = tl.load(row_ptrs[:, None] + offs_b[None, :], mask=mask, other=other).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(row_ptrs, a, b, mask_row, WIDTH: tl.constexpr, FORM: tl.constexpr):
    element = row_ptrs.dtype.element_ty
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    if FORM.INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_P)
        mask = mask_row[:, None] & (offs < WIDTH)[None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK_P))
        tl.store(row_ptrs[:, None] + offs[None, :], x.to(element), mask=mask)
    else:
        offs_a, offs_b = _pair_columns(WIDTH, FORM)
        mask = mask_row[:, None] & (tl.arange(0, BLOCK_P) < WIDTH // 2)[None, :]
        tl.store(row_ptrs[:, None] + offs_a[None, :], a.to(element), mask=mask)
        tl.store(row_ptrs[:, None] + offs_b[None, :], b.to(element), mask=mask)


@triton.jit
def _load_parameter(ptr, other, FORM: tl.constexpr):
    """a and b (1, BLOCK_P) of a norm's weight or bias; `other` where there is none."""
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    if ptr is None:
        a = tl.full((1, BLOCK_P), other, tl.float32)
        b = a
    else:
        one = tl.arange(0, 1)
        a, b = _load_pairs(ptr + one, one < 1, other, FORM.D, FORM)
    return a, b


@triton.jit
def _normed(a, b, mask_row, eps, FORM: tl.constexpr):
    """xhat of both, and rstd (rows). Pairs past D are 0."""
    mask_pair = mask_row[:, None] & (tl.arange(0, FORM.BLOCK_P) < FORM.D // 2)[None, :]
    if FORM.NORM == "layer_norm":
        mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / FORM.D
        a = tl.where(mask_pair, a - mean[:, None], 0.0)
        b = tl.where(mask_pair, b - mean[:, None], 0.0)
        # Second pass: otherwise a constant row's rounding error shows up as variance.
        mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / FORM.D
        a = tl.where(mask_pair, a - mean[:, None], 0.0)
        b = tl.where(mask_pair, b - mean[:, None], 0.0)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / FORM.D + eps)
    return a * rstd[:, None], b * rstd[:, None], rstd


@triton.jit
def _rotated(a, b, tables, TRANSPOSE: tl.constexpr):
    """The pairs turned where the tables say: elsewhere infinity times a sine of 0 would be NaN."""
    cos_a, cos_b, sin_a, sin_b, turns = tables
    if TRANSPOSE:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return tl.where(turns, turned_a, a), tl.where(turns, turned_b, b)


@triton.jit
def _places(rows, T, H):
    """Sample, token and head of a row, in 64 bits."""
    tokens = rows // H
    samples = tokens // T
    heads, tokens = rows - tokens * H, tokens - samples * T
    return samples.to(tl.int64), tokens.to(tl.int64), heads.to(tl.int64)


@triton.jit
def _offsets(places, strides):
    samples, tokens, heads = places
    return samples * strides.b + tokens * strides.t + heads * strides.h


@triton.jit
def _tables(ptrs, places, mask_row, prefix_tokens, strides, FORM: tl.constexpr):
    """cos and sin, each of a and b, and which pairs turn."""
    cos_ptr, sin_ptr = ptrs
    samples, tokens, heads = places
    mask_row = mask_row & (tokens >= prefix_tokens)
    offs = _offsets((samples, tokens - prefix_tokens, heads), strides)
    cos_a, cos_b = _load_pairs(cos_ptr + offs, mask_row, 1.0, FORM.R, FORM)
    sin_a, sin_b = _load_pairs(sin_ptr + offs, mask_row, 0.0, FORM.R, FORM)
    turns = mask_row[:, None] & (tl.arange(0, FORM.BLOCK_P) < FORM.R // 2)[None, :]
    return cos_a, cos_b, sin_a, sin_b, turns


@triton.jit
def _rotate_rows(
    out_ptrs, x_ptrs, params, mask_row, tables, eps, FORM: tl.constexpr, TRANSPOSE: tl.constexpr
):
    a, b = _load_pairs(x_ptrs, mask_row, 0.0, FORM.D, FORM)
    if FORM.NORM != "":
        a, b, _ = _normed(a, b, mask_row, eps, FORM)
        weight_a, weight_b = _load_parameter(params[0], 1.0, FORM)
        bias_a, bias_b = _load_parameter(params[1], 0.0, FORM)
        a, b = a * weight_a + bias_a, b * weight_b + bias_b
    a, b = _rotated(a, b, tables, TRANSPOSE)
    _store_pairs(out_ptrs, a, b, mask_row, FORM.D, FORM)


@triton.jit(**ANY_BATCH)
def _rope_fwd_kernel(
    q_out_ptr,
    k_out_ptr,
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
    H,
    prefix_tokens,
    strides,
    eps,
    FORM: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    stride_out, stride_q, stride_k, stride_table = strides
    rows = tl.program_id(0) * FORM.BLOCK_ROWS + tl.arange(0, FORM.BLOCK_ROWS)
    mask_row = rows < num_rows
    places = _places(rows, T, H)
    tables = _tables((cos_ptr, sin_ptr), places, mask_row, prefix_tokens, stride_table, FORM)
    offs_out = _offsets(places, stride_out)
    out_ptrs, x_ptrs = q_out_ptr + offs_out, q_ptr + _offsets(places, stride_q)
    params = q_weight_ptr, q_bias_ptr
    _rotate_rows(out_ptrs, x_ptrs, params, mask_row, tables, eps, FORM, TRANSPOSE)
    out_ptrs, x_ptrs = k_out_ptr + offs_out, k_ptr + _offsets(places, stride_k)
    params = k_weight_ptr, k_bias_ptr
    _rotate_rows(out_ptrs, x_ptrs, params, mask_row, tables, eps, FORM, TRANSPOSE)


@triton.jit
def _norm_bwd(da, db, xhat_a, xhat_b, rstd, weight, FORM: tl.constexpr):
    """From the gradient of a norm's output to that of its input."""
    weight_a, weight_b = weight
    g_a, g_b = da * weight_a, db * weight_b
    mean_g_xhat = (tl.sum(g_a * xhat_a, axis=1) + tl.sum(g_b * xhat_b, axis=1)) / FORM.D
    if FORM.NORM == "layer_norm":
        mean_g = (tl.sum(g_a, axis=1) + tl.sum(g_b, axis=1)) / FORM.D
        g_a, g_b = g_a - mean_g[:, None], g_b - mean_g[:, None]
    a = rstd[:, None] * (g_a - xhat_a * mean_g_xhat[:, None])
    b = rstd[:, None] * (g_b - xhat_b * mean_g_xhat[:, None])
    return a, b


@triton.jit
def _store_partial(partial_ptr, dweight_a, dweight_b, dbias_a, dbias_b, FORM: tl.constexpr):
    """[dweight (D) | dbias (D)] of one program, from sums (BLOCK_ROWS, BLOCK_P) each."""
    one = tl.arange(0, 1)
    dweight_a, dweight_b = tl.sum(dweight_a, axis=0)[None, :], tl.sum(dweight_b, axis=0)[None, :]
    dbias_a, dbias_b = tl.sum(dbias_a, axis=0)[None, :], tl.sum(dbias_b, axis=0)[None, :]
    _store_pairs(partial_ptr + one, dweight_a, dweight_b, one < 1, FORM.D, FORM)
    _store_pairs(partial_ptr + FORM.D + one, dbias_a, dbias_b, one < 1, FORM.D, FORM)


@triton.jit
def _normed_rows_bwd(
    ptrs,
    partial_ptr,
    table_ptrs,
    sizes,
    strides,
    eps,
    FORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
):
    """dx of every P-th row block of q or of k, and this program's share of dweight and dbias."""
    dx_ptr, dy_ptr, x_ptr, weight_ptr = ptrs
    num_rows, T, H, prefix_tokens = sizes
    stride_dx, stride_dy, stride_x, stride_table = strides
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    weight = _load_parameter(weight_ptr, 1.0, FORM)
    dweight_a = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    dweight_b, dbias_a, dbias_b = dweight_a, dweight_a, dweight_a
    step = tl.num_programs(0) * BLOCK_ROWS
    for row in tl.range(tl.program_id(0) * BLOCK_ROWS, num_rows, step):
        rows = row + tl.arange(0, BLOCK_ROWS)
        mask_row = rows < num_rows
        places = _places(rows, T, H)
        tables = _tables(table_ptrs, places, mask_row, prefix_tokens, stride_table, FORM)
        dy_ptrs = dy_ptr + _offsets(places, stride_dy)
        x_ptrs = x_ptr + _offsets(places, stride_x)
        da, db = _load_pairs(dy_ptrs, mask_row, 0.0, FORM.D, FORM)
        a, b = _load_pairs(x_ptrs, mask_row, 0.0, FORM.D, FORM)
        da, db = _rotated(da, db, tables, True)
        xhat_a, xhat_b, rstd = _normed(a, b, mask_row, eps, FORM)
        if NEEDS_DPARAMS:
            dweight_a += da * xhat_a
            dweight_b += db * xhat_b
            dbias_a += da
            dbias_b += db
        a, b = _norm_bwd(da, db, xhat_a, xhat_b, rstd, weight, FORM)
        _store_pairs(dx_ptr + _offsets(places, stride_dx), a, b, mask_row, FORM.D, FORM)
    if NEEDS_DPARAMS:
        _store_partial(partial_ptr, dweight_a, dweight_b, dbias_a, dbias_b, FORM)


@triton.jit(**ANY_BATCH)
def _rope_norm_bwd_kernel(
    dq_ptr,
    dk_ptr,
    partial_ptr,
    dq_out_ptr,
    dk_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_rows,
    T,
    H,
    prefix_tokens,
    strides,
    eps,
    FORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
):
    stride_dx, stride_dq_out, stride_dk_out, stride_q, stride_k, stride_table = strides
    sizes, tables = (num_rows, T, H, prefix_tokens), (cos_ptr, sin_ptr)
    q_partial_ptr, k_partial_ptr = partial_ptr, partial_ptr
    if NEEDS_DPARAMS:
        q_partial_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * 4 * FORM.D
        k_partial_ptr = q_partial_ptr + 2 * FORM.D
    if tl.program_id(1) == 0:
        q_ptrs = dq_ptr, dq_out_ptr, q_ptr, q_weight_ptr
        q_strides = stride_dx, stride_dq_out, stride_q, stride_table
        _normed_rows_bwd(q_ptrs, q_partial_ptr, tables, sizes, q_strides, eps, FORM, NEEDS_DPARAMS)
    else:
        k_ptrs = dk_ptr, dk_out_ptr, k_ptr, k_weight_ptr
        k_strides = stride_dx, stride_dk_out, stride_k, stride_table
        _normed_rows_bwd(k_ptrs, k_partial_ptr, tables, sizes, k_strides, eps, FORM, NEEDS_DPARAMS)


@triton.jit
def _shared_rows_bwd(
    ptrs,
    partial_ptr,
    places,
    mask_row,
    tables,
    sums,
    shared,
    strides,
    eps,
    FORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
):
    """dx of all of q or of k that shares these rows; the tables' sums with what it adds to them."""
    dx_ptr, dy_ptr, x_ptr, weight_ptr, bias_ptr = ptrs
    stride_dx, stride_dy, stride_x = strides
    first, last, heads_shared = shared
    samples, tokens, heads = places
    dcos_a, dcos_b, dsin_a, dsin_b = sums
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    weight_a, weight_b = _load_parameter(weight_ptr, 1.0, FORM)
    bias_a, bias_b = _load_parameter(bias_ptr, 0.0, FORM)
    dweight_a = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    dweight_b, dbias_a, dbias_b = dweight_a, dweight_a, dweight_a
    for n in tl.range(first, last):
        sample = n // heads_shared
        here = (samples + sample, tokens, heads + (n - sample * heads_shared))
        dy_ptrs, x_ptrs = dy_ptr + _offsets(here, stride_dy), x_ptr + _offsets(here, stride_x)
        da, db = _load_pairs(dy_ptrs, mask_row, 0.0, FORM.D, FORM)
        a, b = _load_pairs(x_ptrs, mask_row, 0.0, FORM.D, FORM)
        if FORM.NORM != "":
            xhat_a, xhat_b, rstd = _normed(a, b, mask_row, eps, FORM)
            a, b = xhat_a * weight_a + bias_a, xhat_b * weight_b + bias_b
        dcos_a += da * a
        dcos_b += db * b
        dsin_a -= da * b
        dsin_b += db * a
        da, db = _rotated(da, db, tables, True)
        if FORM.NORM != "":
            if NEEDS_DPARAMS:
                dweight_a += da * xhat_a
                dweight_b += db * xhat_b
                dbias_a += da
                dbias_b += db
            da, db = _norm_bwd(da, db, xhat_a, xhat_b, rstd, (weight_a, weight_b), FORM)
        _store_pairs(dx_ptr + _offsets(here, stride_dx), da, db, mask_row, FORM.D, FORM)
    if NEEDS_DPARAMS:
        _store_partial(partial_ptr, dweight_a, dweight_b, dbias_a, dbias_b, FORM)
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
    strides,
    eps,
    FORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
):
    stride_dx, stride_dq_out, stride_dk_out, stride_q, stride_k, stride_table = strides
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_P: tl.constexpr = FORM.BLOCK_P
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = rows < num_rows
    places = _places(rows, T, table_heads)
    tables = _tables((cos_ptr, sin_ptr), places, mask_row, prefix_tokens, stride_table, FORM)
    first = split * shared_per_split
    last = tl.minimum(first + shared_per_split, num_shared)
    shared = first, last, heads_shared
    q_partial_ptr, k_partial_ptr = partial_ptr, partial_ptr
    if NEEDS_DPARAMS:
        program = split.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        q_partial_ptr = partial_ptr + program * 4 * FORM.D
        k_partial_ptr = q_partial_ptr + 2 * FORM.D
    zeros = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    sums = zeros, zeros, zeros, zeros
    ptrs = dq_ptr, dq_out_ptr, q_ptr, q_weight_ptr, q_bias_ptr
    of_q = stride_dx, stride_dq_out, stride_q
    sums = _shared_rows_bwd(
        ptrs, q_partial_ptr, places, mask_row, tables, sums, shared, of_q, eps, FORM, NEEDS_DPARAMS
    )
    ptrs = dk_ptr, dk_out_ptr, k_ptr, k_weight_ptr, k_bias_ptr
    of_k = stride_dx, stride_dk_out, stride_k
    dcos_a, dcos_b, dsin_a, dsin_b = _shared_rows_bwd(
        ptrs, k_partial_ptr, places, mask_row, tables, sums, shared, of_k, eps, FORM, NEEDS_DPARAMS
    )
    samples, tokens, heads = places
    turned = T - prefix_tokens
    table_rows = (samples * table_heads + heads) * turned + tokens - prefix_tokens
    size = (num_rows // T).to(tl.int64) * turned * FORM.R  # of one table
    mask_row = mask_row & (tokens >= prefix_tokens)
    dcos_ptrs = dtables_ptr + split * 2 * size + table_rows * FORM.R
    _store_pairs(dcos_ptrs, dcos_a, dcos_b, mask_row, FORM.R, FORM)
    _store_pairs(dcos_ptrs + size, dsin_a, dsin_b, mask_row, FORM.R, FORM)


class Rotation(NamedTuple):
    """What a call of rope is, besides its tensors."""

    interleaved: bool
    prefix_tokens: int
    norm: str  # "": none
    eps: float


Strides = tuple[tuple[int, ...], ...]  # of tensors (B, T, H, D)


def tables_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(T', R), (B, T', R) or (B, H, T', R) of equal strides, the last axis contiguous."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def _row_strides(strides: Strides, table: Layout) -> tuple[RowStrides, ...]:
    """By sample, token and head, of the tensors and then of the tables; 0 for an axis of 1."""
    shape, of_table = table
    stride_b = of_table[0] if len(shape) > 2 and shape[0] > 1 else 0
    stride_h = of_table[1] if len(shape) == 4 and shape[1] > 1 else 0
    each = (RowStrides(*of_x[:3]) for of_x in strides)
    return *each, RowStrides(stride_b, of_table[-2], stride_h)


def _chosen(
    table: ConfigTable[RopeConfig], gpu: Gpu, D: int, R: int, rotation: Rotation
) -> tuple[RopeConfig, dict[str, Any]]:
    """The config for heads of D columns, constants and options of the launch."""
    block_p = triton.next_power_of_2(D // 2)
    config = table.choose(gpu, block_p)
    form = Form(rotation.norm, rotation.interleaved, D, R, config.block_rows, block_p)
    return config, dict(FORM=form, num_warps=config.num_warps)


def _count_rows(shape: tuple[int, ...]) -> int:
    """B T H, which a program compiled for any batch learns here."""
    B, T, H, _ = shape
    num_rows = B * T * H
    if num_rows >= MAX_ROWS:
        raise ValueError(f"rope: B T H must be below 2^31, got {num_rows}")
    return num_rows


class _Plan(NamedTuple):
    launch: Callable[..., None]  # called with tensors
    programs: int
    splits: int = 1


@launch_plan
def _rows_plan(
    gpu: Gpu,
    shape: tuple[int, ...],
    table: Layout,
    strides: Strides,
    rotation: Rotation,
    transpose: bool,
    needs_dparams: bool | None = None,
) -> _Plan:
    """Of the forward or, where transpose, its like that turns back; where needs_dparams is not None
    of the backward of a norm."""
    _, T, H, D = shape
    num_rows, configs = _count_rows(shape), FWD_TABLE if needs_dparams is None else BWD_TABLE
    config, options = _chosen(configs, gpu, D, table[0][-1], rotation)
    programs = triton.cdiv(num_rows, config.block_rows)
    sizes = num_rows, T, H, rotation.prefix_tokens, _row_strides(strides, table), rotation.eps
    if needs_dparams is None:
        launch = bind_launch(_rope_fwd_kernel, (programs,), *sizes, TRANSPOSE=transpose, **options)
        return _Plan(launch, programs)
    programs = min(programs, max(1, PROGRAMS_PER_SM * gpu.num_sms * 4 // config.num_warps // 2))
    options["NEEDS_DPARAMS"] = needs_dparams
    return _Plan(bind_launch(_rope_norm_bwd_kernel, (programs, 2), *sizes, **options), programs)


@launch_plan
def _tables_plan(
    gpu: Gpu,
    shape: tuple[int, ...],
    table: Layout,
    strides: Strides,
    rotation: Rotation,
    needs_dparams: bool,
) -> _Plan:
    B, T, H, D = shape
    *leading, _, R = table[0]
    table_samples, table_heads = (*leading, 1, 1)[:2]
    samples_shared, heads_shared = B // table_samples, H // table_heads
    config, options = _chosen(TABLES_TABLE, gpu, D, R, rotation)
    num_rows = table_samples * T * table_heads
    row_blocks = triton.cdiv(num_rows, config.block_rows)
    num_shared = samples_shared * heads_shared
    wanted = max(1, PROGRAMS_PER_SM * gpu.num_sms * 4 // config.num_warps // row_blocks)
    shared_per_split = max(MIN_SHARED, triton.cdiv(num_shared, wanted))
    splits = triton.cdiv(num_shared, shared_per_split)
    sizes = num_rows, T, table_heads, rotation.prefix_tokens, num_shared, shared_per_split
    last = heads_shared, _row_strides(strides, table), rotation.eps
    options["NEEDS_DPARAMS"] = needs_dparams
    grid = row_blocks, splits
    launch = bind_launch(_rope_tables_bwd_kernel, grid, *sizes, *last, **options)
    return _Plan(launch, row_blocks * splits, splits)


def rotate(
    out: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    tables: tuple[Tensor, Tensor],
    rotation: Rotation,
    norms: tuple[Tensor | None, ...] = (None,) * 4,
    transpose: bool = False,
) -> None:
    """Write both (B, T, H, D) normed and turned, or turned back where `transpose`.

    Args:
        out: of equal strides; may be q and k themselves.
        q, k: any strides but of the last axis.
        norms: weight and bias of q, of k.
    """
    if q.numel() == 0:
        return
    if rotation.norm:
        norms = tuple(map(contiguous, norms))
    cos, sin = tables
    table, strides = (cos.shape, cos.stride()), (out[0].stride(), q.stride(), k.stride())
    plan = _rows_plan(gpu(q.device), q.shape, table, strides, rotation, transpose)
    plan.launch(*out, q, k, cos, sin, *norms)


def rotate_bwd(
    dx: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    q: Tensor | None,
    k: Tensor | None,
    tables: tuple[Tensor, Tensor],
    rotation: Rotation,
    norms: tuple[Tensor | None, ...],
    dparams: Tensor | None,
    dtables: Tensor | None,
) -> None:
    """The whole backward of a rotation, in one pass over its tensors.

    Args:
        dx: of equal strides; may be dy itself.
        q, k: as they came; read for a norm and for the tables' gradients.
        norms: weight and bias of q, of k.
        dparams: (4, D): dweight and dbias of q's norm, then of k's; or None.
        dtables: (2, ...), contiguous: of cos and of sin; or None.
    """
    if dtables is not None and not dtables.numel():  # of prefix tokens alone
        dtables = None
    if dtables is None and not rotation.norm:
        rotate(dx, *dy, tables, rotation, transpose=True)
        return
    assert q is not None and k is not None
    D, (cos, sin), needs_dparams = q.shape[-1], tables, dparams is not None
    norms = tuple(map(contiguous, norms))
    table = cos.shape, cos.stride()
    strides = tuple([x.stride() for x in (dx[0], *dy, q, k)])
    call = gpu(q.device), q.shape, table, strides, rotation
    if dtables is None:
        plan = _rows_plan(*call, True, needs_dparams)
    else:
        plan = _tables_plan(*call, needs_dparams)
    partial = None
    if needs_dparams:  # a row of them: dweight and dbias of q, then of k
        partial = q.new_empty((plan.programs, 4 * D), dtype=torch.float32)
    if dtables is not None:
        sums = dtables
        if plan.splits > 1:
            sums = q.new_empty((plan.splits, dtables.numel()), dtype=torch.float32)
        plan.launch(*dx, sums, partial, *dy, q, k, cos, sin, *norms)
        if plan.splits > 1:
            column_sum(sums, dtables)
    else:
        plan.launch(*dx, partial, *dy, q, k, cos, sin, norms[0], norms[2])
    if dparams is not None and partial is not None:
        column_sum(partial, dparams)
