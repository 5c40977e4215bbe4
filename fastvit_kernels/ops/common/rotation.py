"""Kernels of rotary position embedding, with an optional norm of each head before it.

A row is one head of one token, its D columns taken as D/2 pairs (a, b): columns (2i, 2i + 1) where
interleaved, else (i, i + R/2). With tables of full width, whose two columns of a pair may differ:

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b;  the backward transposes this 2 x 2 matrix

Columns past R and the first tokens of a sample stay as they are. A program reads and writes each
element once, in one thread, so that outputs may be the inputs' own memory. Precision: fp32 until
the store. Derivation: docs/rope.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import contiguous
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import ConfigTable, launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton

NORMS = ("layer_norm", "rms_norm")
MAX_D = 1024  # a head is held in the registers of one program
MAX_ROWS = 2**31  # rows are counted in 32 bits


class RopeConfig(NamedTuple):
    """BLOCK_ROWS heads of tokens a program takes at once, and its warps."""

    block_rows: int
    num_warps: int


# Key: BLOCK_P, pairs of a row up to a power of two. Eight pairs a thread, so that each loads 16
# bytes of a and of b; in the backward of a norm, with fewer, a step's addresses bound it. By the
# model of docs/compile.md; not yet measured.
PAIRS = 1024
CONFIGS = [RopeConfig(rows, warps) for warps in (4, 8) for rows in (1, 2, 4, 8, 16, 32, 64)]
PROGRAMS_PER_SM = 8


def _table(name: str) -> ConfigTable[RopeConfig]:
    return ConfigTable(
        name,
        CONFIGS,
        lambda gpu, block_p: RopeConfig(min(64, max(1, PAIRS // block_p)), 4),
        lambda gpu, config, block_p: (
            1 <= config.block_rows * block_p // (32 * config.num_warps) <= 16
            or config.block_rows == min(64, max(1, PAIRS // block_p))
        ),
    )


FWD_TABLE, BWD_TABLE = _table("rope_fwd"), _table("rope_bwd")


@triton.jit
def _pair_columns(D: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """The columns of a and of b, half pairing; columns past R make pairs of their own."""
    pair = tl.arange(0, BLOCK_P)
    if R == D:
        return pair, pair + D // 2
    rotated = pair < R // 2
    return tl.where(rotated, pair, pair + R // 2), tl.where(rotated, pair + R // 2, pair + D // 2)


@triton.jit
def _load_pairs(
    row_ptrs,
    mask_row,
    other,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """a and b (rows, BLOCK_P) in fp32; `other` in masked rows and in pairs past WIDTH."""
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_P)
        mask = mask_row[:, None] & (offs < WIDTH)[None, :]
        x = tl.load(row_ptrs[:, None] + offs[None, :], mask=mask, other=other).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BLOCK_P, 2)))
    else:
        offs_a, offs_b = _pair_columns(D, R, BLOCK_P)
        mask = mask_row[:, None] & (tl.arange(0, BLOCK_P) < WIDTH // 2)[None, :]
        a = tl.load(row_ptrs[:, None] + offs_a[None, :], mask=mask, other=other).to(tl.float32)
        b = tl.load(row_ptrs[:, None] + offs_b[None, :], mask=mask, other=other).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    row_ptrs,
    a,
    b,
    mask_row,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    element = row_ptrs.dtype.element_ty
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_P)
        mask = mask_row[:, None] & (offs < D)[None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK_P))
        tl.store(row_ptrs[:, None] + offs[None, :], x.to(element), mask=mask)
    else:
        offs_a, offs_b = _pair_columns(D, R, BLOCK_P)
        mask = mask_row[:, None] & (tl.arange(0, BLOCK_P) < D // 2)[None, :]
        tl.store(row_ptrs[:, None] + offs_a[None, :], a.to(element), mask=mask)
        tl.store(row_ptrs[:, None] + offs_b[None, :], b.to(element), mask=mask)


@triton.jit
def _load_parameter(
    ptr, other, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr
):
    """a and b (1, BLOCK_P) of a norm's weight or bias; `other` where there is none."""
    if ptr is None:
        a = tl.full((1, BLOCK_P), other, tl.float32)
        b = a
    else:
        one = tl.arange(0, 1)
        a, b = _load_pairs(ptr + one, one < 1, other, D, D, R, INTERLEAVED, BLOCK_P)
    return a, b


@triton.jit
def _normed(a, b, mask_pair, eps, D: tl.constexpr, NORM: tl.constexpr):
    """xhat of both, and rstd (rows). Pairs past D are 0."""
    if NORM == "layer_norm":
        mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / D
        a = tl.where(mask_pair, a - mean[:, None], 0.0)
        b = tl.where(mask_pair, b - mean[:, None], 0.0)
        # Second pass: otherwise a constant row's rounding error shows up as variance.
        mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / D
        a = tl.where(mask_pair, a - mean[:, None], 0.0)
        b = tl.where(mask_pair, b - mean[:, None], 0.0)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)
    return a * rstd[:, None], b * rstd[:, None], rstd


@triton.jit
def _rotated(a, b, cos, sin, mask, TRANSPOSE: tl.constexpr):
    """The pairs turned where `mask`: elsewhere infinity times a sine of 0 would leave NaN."""
    cos_a, cos_b = cos
    sin_a, sin_b = sin
    if TRANSPOSE:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return tl.where(mask, turned_a, a), tl.where(mask, turned_b, b)


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
    stride_b, stride_t, stride_h = strides
    return samples * stride_b + tokens * stride_t + heads * stride_h


@triton.jit
def _tables(
    cos_ptr,
    sin_ptr,
    places,
    mask_row,
    prefix_tokens,
    strides,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """cos and sin, each of a and b, and which pairs turn."""
    samples, tokens, heads = places
    mask_row = mask_row & (tokens >= prefix_tokens)
    offs = _offsets((samples, tokens - prefix_tokens, heads), strides)
    cos = _load_pairs(cos_ptr + offs, mask_row, 1.0, R, D, R, INTERLEAVED, BLOCK_P)
    sin = _load_pairs(sin_ptr + offs, mask_row, 0.0, R, D, R, INTERLEAVED, BLOCK_P)
    return cos, sin, mask_row[:, None] & (tl.arange(0, BLOCK_P) < R // 2)[None, :]


@triton.jit
def _rotate_rows(
    out_ptrs,
    x_ptrs,
    weight_ptr,
    bias_ptr,
    mask_row,
    tables,
    eps,
    NORM: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    cos, sin, turns = tables
    a, b = _load_pairs(x_ptrs, mask_row, 0.0, D, D, R, INTERLEAVED, BLOCK_P)
    if NORM != "":
        mask_pair = mask_row[:, None] & (tl.arange(0, BLOCK_P) < D // 2)[None, :]
        a, b, _ = _normed(a, b, mask_pair, eps, D, NORM)
        weight_a, weight_b = _load_parameter(weight_ptr, 1.0, D, R, INTERLEAVED, BLOCK_P)
        bias_a, bias_b = _load_parameter(bias_ptr, 0.0, D, R, INTERLEAVED, BLOCK_P)
        a, b = a * weight_a + bias_a, b * weight_b + bias_b
    a, b = _rotated(a, b, cos, sin, turns, TRANSPOSE)
    _store_pairs(out_ptrs, a, b, mask_row, D, R, INTERLEAVED, BLOCK_P)


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
    stride_out_b,
    stride_out_t,
    stride_out_h,
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
    TRANSPOSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = rows < num_rows
    places = _places(rows, T, H)
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
    offs_out = _offsets(places, (stride_out_b, stride_out_t, stride_out_h))
    _rotate_rows(
        q_out_ptr + offs_out,
        q_ptr + _offsets(places, (stride_q_b, stride_q_t, stride_q_h)),
        q_weight_ptr,
        q_bias_ptr,
        mask_row,
        tables,
        eps,
        NORM,
        TRANSPOSE,
        D,
        R,
        INTERLEAVED,
        BLOCK_P,
    )
    _rotate_rows(
        k_out_ptr + offs_out,
        k_ptr + _offsets(places, (stride_k_b, stride_k_t, stride_k_h)),
        k_weight_ptr,
        k_bias_ptr,
        mask_row,
        tables,
        eps,
        NORM,
        TRANSPOSE,
        D,
        R,
        INTERLEAVED,
        BLOCK_P,
    )


@triton.jit
def _norm_bwd(
    da, db, xhat_a, xhat_b, rstd, weight_a, weight_b, D: tl.constexpr, NORM: tl.constexpr
):
    """From the gradient of a norm's output to that of its input."""
    g_a, g_b = da * weight_a, db * weight_b
    mean_g_xhat = (tl.sum(g_a * xhat_a, axis=1) + tl.sum(g_b * xhat_b, axis=1)) / D
    if NORM == "layer_norm":
        mean_g = (tl.sum(g_a, axis=1) + tl.sum(g_b, axis=1)) / D
        g_a, g_b = g_a - mean_g[:, None], g_b - mean_g[:, None]
    a = rstd[:, None] * (g_a - xhat_a * mean_g_xhat[:, None])
    b = rstd[:, None] * (g_b - xhat_b * mean_g_xhat[:, None])
    return a, b


@triton.jit
def _store_partial(
    partial_ptr,
    dweight_a,
    dweight_b,
    dbias_a,
    dbias_b,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """[dweight (D) | dbias (D)] of one program, from sums (BLOCK_ROWS, BLOCK_P) each."""
    BLOCK_P: tl.constexpr = dweight_a.shape[1]
    one = tl.arange(0, 1)
    dweight_a, dweight_b = tl.sum(dweight_a, axis=0)[None, :], tl.sum(dweight_b, axis=0)[None, :]
    dbias_a, dbias_b = tl.sum(dbias_a, axis=0)[None, :], tl.sum(dbias_b, axis=0)[None, :]
    _store_pairs(partial_ptr + one, dweight_a, dweight_b, one < 1, D, R, INTERLEAVED, BLOCK_P)
    _store_pairs(partial_ptr + D + one, dbias_a, dbias_b, one < 1, D, R, INTERLEAVED, BLOCK_P)


@triton.jit
def _normed_rows_bwd(
    dx_ptr,
    partial_ptr,
    dy_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    num_rows,
    T,
    H,
    prefix_tokens,
    strides_dx,
    strides_dy,
    strides_x,
    strides_table,
    eps,
    NORM: tl.constexpr,
    NEEDS_DPARAMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """dx of every P-th row block of q or of k, and this program's share of dweight and dbias."""
    weight_a, weight_b = _load_parameter(weight_ptr, 1.0, D, R, INTERLEAVED, BLOCK_P)
    dweight_a = tl.zeros((BLOCK_ROWS, BLOCK_P), dtype=tl.float32)
    dweight_b, dbias_a, dbias_b = dweight_a, dweight_a, dweight_a
    step = tl.num_programs(0) * BLOCK_ROWS
    for row in tl.range(tl.program_id(0) * BLOCK_ROWS, num_rows, step):
        rows = row + tl.arange(0, BLOCK_ROWS)
        mask_row = rows < num_rows
        places = _places(rows, T, H)
        cos, sin, turns = _tables(
            cos_ptr,
            sin_ptr,
            places,
            mask_row,
            prefix_tokens,
            strides_table,
            D,
            R,
            INTERLEAVED,
            BLOCK_P,
        )
        dy_ptrs = dy_ptr + _offsets(places, strides_dy)
        x_ptrs = x_ptr + _offsets(places, strides_x)
        da, db = _load_pairs(dy_ptrs, mask_row, 0.0, D, D, R, INTERLEAVED, BLOCK_P)
        a, b = _load_pairs(x_ptrs, mask_row, 0.0, D, D, R, INTERLEAVED, BLOCK_P)
        da, db = _rotated(da, db, cos, sin, turns, True)
        mask_pair = mask_row[:, None] & (tl.arange(0, BLOCK_P) < D // 2)[None, :]
        xhat_a, xhat_b, rstd = _normed(a, b, mask_pair, eps, D, NORM)
        if NEEDS_DPARAMS:
            dweight_a += da * xhat_a
            dweight_b += db * xhat_b
            dbias_a += da
            dbias_b += db
        a, b = _norm_bwd(da, db, xhat_a, xhat_b, rstd, weight_a, weight_b, D, NORM)
        dx_ptrs = dx_ptr + _offsets(places, strides_dx)
        _store_pairs(dx_ptrs, a, b, mask_row, D, R, INTERLEAVED, BLOCK_P)
    if NEEDS_DPARAMS:
        _store_partial(partial_ptr, dweight_a, dweight_b, dbias_a, dbias_b, D, R, INTERLEAVED)


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
    strides_dx = (stride_dx_b, stride_dx_t, stride_dx_h)
    strides_table = (stride_table_b, stride_table_t, stride_table_h)
    q_partial_ptr, k_partial_ptr = partial_ptr, partial_ptr
    if NEEDS_DPARAMS:
        q_partial_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * 4 * D
        k_partial_ptr = q_partial_ptr + 2 * D
    if tl.program_id(1) == 0:
        _normed_rows_bwd(
            dq_ptr,
            q_partial_ptr,
            dq_out_ptr,
            q_ptr,
            cos_ptr,
            sin_ptr,
            q_weight_ptr,
            num_rows,
            T,
            H,
            prefix_tokens,
            strides_dx,
            (stride_dq_out_b, stride_dq_out_t, stride_dq_out_h),
            (stride_q_b, stride_q_t, stride_q_h),
            strides_table,
            eps,
            NORM,
            NEEDS_DPARAMS,
            INTERLEAVED,
            D,
            R,
            BLOCK_ROWS,
            BLOCK_P,
        )
    else:
        _normed_rows_bwd(
            dk_ptr,
            k_partial_ptr,
            dk_out_ptr,
            k_ptr,
            cos_ptr,
            sin_ptr,
            k_weight_ptr,
            num_rows,
            T,
            H,
            prefix_tokens,
            strides_dx,
            (stride_dk_out_b, stride_dk_out_t, stride_dk_out_h),
            (stride_k_b, stride_k_t, stride_k_h),
            strides_table,
            eps,
            NORM,
            NEEDS_DPARAMS,
            INTERLEAVED,
            D,
            R,
            BLOCK_ROWS,
            BLOCK_P,
        )


class Rotation(NamedTuple):
    """What a call of rope is, besides its tensors."""

    interleaved: bool
    prefix_tokens: int
    norm: str  # "": none
    eps: float


class Tables(NamedTuple):
    """cos and sin (..., T', R) of equal strides, and those by sample, token and head."""

    cos: Tensor
    sin: Tensor
    strides: tuple[int, ...]


def tables_of(cos: Tensor, sin: Tensor) -> Tables:
    """(T', R), (B, T', R) or (B, H, T', R), an axis of 1 for all; any strides."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    shape, strides = cos.shape, cos.stride()
    ndim = len(shape)
    stride_b = strides[0] if ndim > 2 and shape[0] > 1 else 0
    stride_h = strides[1] if ndim == 4 and shape[1] > 1 else 0
    return Tables(cos, sin, (stride_b, strides[-2], stride_h))


def chosen(
    table: ConfigTable[RopeConfig], gpu: Gpu, D: int, R: int, rotation: Rotation, **flags: bool
) -> tuple[RopeConfig, dict[str, Any]]:
    """The config for heads of D columns, and the constexprs and options of the launch."""
    block_p = triton.next_power_of_2(D // 2)
    config = table.choose(gpu, block_p)
    return config, dict(
        flags,
        NORM=rotation.norm,
        INTERLEAVED=rotation.interleaved,
        D=D,
        R=R,
        BLOCK_ROWS=config.block_rows,
        BLOCK_P=block_p,
        num_warps=config.num_warps,
    )


def _count_rows(shape: tuple[int, ...]) -> int:
    """B T H, which a program compiled for any batch learns here."""
    B, T, H, _ = shape
    num_rows = B * T * H
    if num_rows >= MAX_ROWS:
        raise ValueError(f"rope: B T H must be below 2^31, got {num_rows}")
    return num_rows


@launch_plan
def _fwd_plan(
    gpu: Gpu, shape: tuple[int, ...], R: int, rotation: Rotation, transpose: bool
) -> tuple[Any, tuple[int, ...]]:
    """The kernel on its grid, sizes."""
    _, T, H, D = shape
    config, options = chosen(FWD_TABLE, gpu, D, R, rotation, TRANSPOSE=transpose)
    num_rows = _count_rows(shape)
    grid = (triton.cdiv(num_rows, config.block_rows),)
    return bind_launch(_rope_fwd_kernel, grid, **options), (num_rows, T, H, rotation.prefix_tokens)


def rotate(
    out: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    tables: Tables,
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
    R = tables.cos.shape[-1]
    launch, sizes = _fwd_plan(gpu(q.device), q.shape, R, rotation, transpose)
    launch(
        *out,
        q,
        k,
        tables.cos,
        tables.sin,
        *norms,
        *sizes,
        *out[0].stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *tables.strides,
        rotation.eps,
    )


@launch_plan
def _bwd_plan(
    gpu: Gpu, shape: tuple[int, ...], R: int, rotation: Rotation, needs_dparams: bool
) -> tuple[Any, tuple[int, ...], int]:
    """The kernel on its grid, sizes, programs."""
    _, T, H, D = shape
    config, options = chosen(BWD_TABLE, gpu, D, R, rotation, NEEDS_DPARAMS=needs_dparams)
    num_rows = _count_rows(shape)
    programs = min(
        triton.cdiv(num_rows, config.block_rows),
        max(1, PROGRAMS_PER_SM * gpu.num_sms * 4 // config.num_warps // 2),
    )
    sizes = (num_rows, T, H, rotation.prefix_tokens)
    return bind_launch(_rope_norm_bwd_kernel, (programs, 2), **options), sizes, programs


def rotate_norm_bwd(
    dx: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    tables: Tables,
    rotation: Rotation,
    weights: tuple[Tensor | None, Tensor | None],
    needs_dparams: bool,
) -> Tensor | None:
    """Write dq and dk through rotation and norm; returns partials (programs, 4 D) fp32 if wanted.

    A row of them: dweight and dbias of q, then of k. `dx` may be `dy` itself.
    """
    launch, sizes, programs = _bwd_plan(
        gpu(q.device), q.shape, tables.cos.shape[-1], rotation, needs_dparams
    )
    partial = None
    if needs_dparams:
        partial = q.new_empty((programs, 4 * q.shape[-1]), dtype=torch.float32)
    launch(
        *dx,
        partial,
        *dy,
        q,
        k,
        tables.cos,
        tables.sin,
        *weights,
        *sizes,
        *dx[0].stride()[:3],
        *dy[0].stride()[:3],
        *dy[1].stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *tables.strides,
        rotation.eps,
    )
    return partial
