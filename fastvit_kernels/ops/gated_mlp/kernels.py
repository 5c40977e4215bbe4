"""Gate and product of a gated MLP in one pass, with the LayerNorm that may follow: both directions.

    h = act(gate) * value                                 gate, value, h (M, F)
    dgate = dh * value * act'(gate),   dvalue = dh * act(gate)

With an inner LayerNorm n = (h - mean) * rstd * weight + bias, and g = dn * weight:

    dh = rstd * (g - mean_F(g) - xhat * mean_F(g * xhat))
    dweight = sum dn * xhat,   dbias = sum dn

gate and value lie where their products left them: the halves of one (M, 2F), or two tensors. The
backward writes dz with both halves in one buffer whose rows begin 16-byte multiples apart whatever
F is, and h (or n) again from the same reads. Sums leave as fp32 partials, one row a program.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import Layout, contiguous, empty_strided, layout
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import ConfigTable, launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from ..common.activation import activate, activate_and_derivative
from ..common.rows import NormConfig, block_width

# Tile of (rows, columns), warps. Not yet measured. By 16 rows the backward spills on sm_120.
BLOCK_R, BLOCK_F, NUM_WARPS = 16, 128, 4
_TILE = dict(BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=NUM_WARPS)
_BWD_TILE = dict(BLOCK_R=BLOCK_R // 2, BLOCK_F=BLOCK_F, num_warps=NUM_WARPS)
BWD_PROGRAMS_PER_SM = 8
MIN_ROWS_PER_SPLIT = 64

MAX_NORM_F = 4096  # wider rows, with the four sums of their columns, spill
MAX_KEPT_F = 2048  # wider ones are read twice in the backward, the second time from L1, or spill

# Key: F as a power of two. Up to eight elements a thread: in the backward 32 registers of sums. Two
# rows of the forward share one read of the norm's weight and bias. By the model of docs/compile.md;
# not yet measured.
FWD_ROWS = {64: (8, 4), 128: (4, 4), 256: (4, 4), 512: (2, 4), 1024: (2, 8), 2048: (2, 16)}
BWD_ROWS = {64: (4, 4), 128: (4, 4), 256: (2, 4), 512: (2, 4), 1024: (1, 4), 2048: (1, 8)}
LARGE_CONFIG = NormConfig(1, 16)  # BLOCK_F above 2048
CONFIGS = [NormConfig(rows, warps) for warps in (4, 8, 16) for rows in (1, 2, 4, 8)]
BWD_WARPS_PER_SM = 16


def _fits(gpu: Gpu, config: NormConfig, block_f: int) -> bool:
    """Whether a thread holds two to eight elements of a row block; sixteen and their sums spill."""
    return 2 <= config.block_rows * block_f // (32 * config.num_warps) <= 8


FWD_TABLE = ConfigTable(
    "gated_norm_fwd", CONFIGS, lambda gpu, F: NormConfig(*FWD_ROWS.get(F, LARGE_CONFIG)), _fits
)
BWD_TABLE = ConfigTable(
    "gated_norm_bwd", CONFIGS, lambda gpu, F: NormConfig(*BWD_ROWS.get(F, LARGE_CONFIG)), _fits
)


@triton.jit
def _load_halves(gate_ptr, value_ptr, offs, gate_column, value_column, mask):
    gate = tl.load(gate_ptr + (offs + gate_column), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + (offs + value_column), mask=mask, other=0.0).to(tl.float32)
    return gate, value


@triton.jit
def _store_halves(ptr, gate, value, offs, gate_column, value_column, mask):
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(ptr + (offs + gate_column), gate.to(dtype), mask=mask)
    tl.store(ptr + (offs + value_column), value.to(dtype), mask=mask)


@triton.jit(**ANY_BATCH)
def _gate_fwd_kernel(
    hidden_ptr,
    gate_ptr,
    value_ptr,
    M,
    F,
    stride_z_m,
    gate_column,
    value_column,
    ACTIVATION: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # F, stride and columns come in units of VECTOR, so that the compiler knows what divides them.
    F, stride_z_m = F * VECTOR, stride_z_m * VECTOR
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_f = tl.program_id(1).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (offs_m < M)[:, None] & (offs_f < F)[None, :]
    offs = offs_m[:, None] * stride_z_m + offs_f[None, :]
    in_z = gate_column * VECTOR, value_column * VECTOR
    gate, value = _load_halves(gate_ptr, value_ptr, offs, *in_z, mask)
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    hidden = activate(gate, ACTIVATION, dtype) * value
    hidden_ptrs = hidden_ptr + (offs_m[:, None] * F + offs_f[None, :])
    tl.store(hidden_ptrs, hidden.to(dtype), mask=mask)


@triton.jit(**ANY_BATCH)
def _gate_bwd_kernel(
    dz_ptr,
    hidden_ptr,
    partial_ptr,
    dhidden_ptr,
    gate_ptr,
    value_ptr,
    M,
    F,
    rows_per_split,
    stride_z_m,
    gate_column,
    value_column,
    stride_dz_m,
    dgate_column,
    dvalue_column,
    ACTIVATION: tl.constexpr,
    WRITE_HIDDEN: tl.constexpr,
    SUM_DZ: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # Program (f, s) walks the rows of split s; partial[s] = sum dz, in dz's columns.
    F, stride_z_m, stride_dz_m = F * VECTOR, stride_z_m * VECTOR, stride_dz_m * VECTOR
    in_z = gate_column * VECTOR, value_column * VECTOR
    in_dz = dgate_column * VECTOR, dvalue_column * VECTOR
    offs_f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    first = tl.program_id(1).to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, M)
    dz_dtype: tl.constexpr = dz_ptr.dtype.element_ty
    sum_dgate = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
    sum_dvalue = tl.zeros((BLOCK_R, BLOCK_F), dtype=tl.float32)
    for row in range(first, last, BLOCK_R):
        offs_m = row + tl.arange(0, BLOCK_R).to(tl.int64)
        mask = (offs_m < last)[:, None] & mask_f[None, :]
        offs = offs_m[:, None] * stride_z_m + offs_f[None, :]
        gate, value = _load_halves(gate_ptr, value_ptr, offs, *in_z, mask)
        offs = offs_m[:, None] * F + offs_f[None, :]
        dhidden = tl.load(dhidden_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        act, derivative = activate_and_derivative(gate, ACTIVATION, dz_dtype)
        if WRITE_HIDDEN:
            hidden = (act * value).to(hidden_ptr.dtype.element_ty)
            tl.store(hidden_ptr + offs, hidden, mask=mask)
        dgate, dvalue = dhidden * value * derivative, dhidden * act
        offs = offs_m[:, None] * stride_dz_m + offs_f[None, :]
        _store_halves(dz_ptr, dgate, dvalue, offs, *in_dz, mask)
        if SUM_DZ:
            sum_dgate += dgate
            sum_dvalue += dvalue
    if SUM_DZ:
        partial_ptr += tl.program_id(1).to(tl.int64) * stride_dz_m
        sums = tl.sum(sum_dgate, axis=0), tl.sum(sum_dvalue, axis=0)
        _store_halves(partial_ptr, *sums, offs_f, *in_dz, mask_f)


@triton.jit(**ANY_BATCH)
def _gate_norm_fwd_kernel(
    normed_ptr,
    stats_ptr,
    gate_ptr,
    value_ptr,
    weight_ptr,
    bias_ptr,
    M,
    F,
    stride_z_m,
    gate_column,
    value_column,
    eps,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    F, stride_z_m = F * VECTOR, stride_z_m * VECTOR
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_f = tl.arange(0, BLOCK_F)
    mask_m, mask_f = offs_m < M, offs_f < F
    mask = mask_m[:, None] & mask_f[None, :]
    offs = offs_m[:, None] * stride_z_m + offs_f[None, :]
    in_z = gate_column * VECTOR, value_column * VECTOR
    gate, value = _load_halves(gate_ptr, value_ptr, offs, *in_z, mask)
    weight = tl.load(weight_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    hidden = activate(gate, ACTIVATION, dtype) * value
    mean = tl.sum(hidden, axis=1) / F
    # Second pass: otherwise a constant row's rounding error shows up as variance.
    mean += tl.sum(tl.where(mask, hidden - mean[:, None], 0.0), axis=1) / F
    centered = tl.where(mask, hidden - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / F + eps)
    normed = centered * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        normed += tl.load(bias_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)[None, :]
    tl.store(stats_ptr + offs_m, mean, mask=mask_m)  # [mean (M) | rstd (M)]
    tl.store(stats_ptr + M + offs_m, rstd, mask=mask_m)
    normed_ptrs = normed_ptr + (offs_m[:, None] * F + offs_f[None, :])
    tl.store(normed_ptrs, normed.to(dtype), mask=mask)


@triton.jit(**ANY_BATCH)
def _gate_norm_bwd_kernel(
    dz_ptr,
    normed_ptr,
    partial_ptr,
    dnormed_ptr,
    gate_ptr,
    value_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    M,
    F,
    stride_z_m,
    gate_column,
    value_column,
    stride_dz_m,
    dgate_column,
    dvalue_column,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITE_NORMED: tl.constexpr,
    REREAD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    # Program p takes row blocks p, p + P, ...
    # partial[p] = [sum dz, in dz's columns] [dweight (F)] [dbias (F)]
    F, stride_z_m, stride_dz_m = F * VECTOR, stride_z_m * VECTOR, stride_dz_m * VECTOR
    in_z = gate_column * VECTOR, value_column * VECTOR
    in_dz = dgate_column * VECTOR, dvalue_column * VECTOR
    pid = tl.program_id(0).to(tl.int64)
    offs_f = tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    weight = tl.load(weight_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)[None, :]
    dz_dtype: tl.constexpr = dz_ptr.dtype.element_ty
    sum_dgate = tl.zeros((BLOCK_ROWS, BLOCK_F), dtype=tl.float32)
    sum_dvalue = tl.zeros((BLOCK_ROWS, BLOCK_F), dtype=tl.float32)
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_F), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_F), dtype=tl.float32)
    for row in range(pid * BLOCK_ROWS, M, tl.num_programs(0) * BLOCK_ROWS):
        offs_m = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_f[None, :]
        offs = offs_m[:, None] * stride_z_m + offs_f[None, :]
        gate, value = _load_halves(gate_ptr, value_ptr, offs, *in_z, mask)
        offs = offs_m[:, None] * F + offs_f[None, :]
        dnormed = tl.load(dnormed_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)
        rstd = tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)
        act, derivative = activate_and_derivative(gate, ACTIVATION, dz_dtype)
        xhat = (act * value - mean[:, None]) * rstd[:, None]  # past F it meets a dnormed of 0
        if WRITE_NORMED:
            normed = xhat * weight
            if HAS_BIAS:
                bias = tl.load(bias_ptr + offs_f, mask=mask_f, other=0.0)
                normed += bias.to(tl.float32)[None, :]
            tl.store(normed_ptr + offs, normed.to(normed_ptr.dtype.element_ty), mask=mask)
        dweight += dnormed * xhat  # here fewer values live at once than at the end
        dbias += dnormed
        g = dnormed * weight
        mean_g = tl.sum(g, axis=1) / F
        mean_g_xhat = tl.sum(g * xhat, axis=1) / F
        if REREAD:  # what lives across the two sums would take the registers of the four
            offs = offs_m[:, None] * stride_z_m + offs_f[None, :]
            gate, value = _load_halves(gate_ptr, value_ptr, offs, *in_z, mask)
            offs = offs_m[:, None] * F + offs_f[None, :]
            dnormed = tl.load(dnormed_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            act, derivative = activate_and_derivative(gate, ACTIVATION, dz_dtype)
            xhat = (act * value - mean[:, None]) * rstd[:, None]
            g = dnormed * weight
        dhidden = rstd[:, None] * (g - mean_g[:, None] - xhat * mean_g_xhat[:, None])
        dgate, dvalue = dhidden * value * derivative, dhidden * act
        offs = offs_m[:, None] * stride_dz_m + offs_f[None, :]
        _store_halves(dz_ptr, dgate, dvalue, offs, *in_dz, mask)
        sum_dgate += dgate
        sum_dvalue += dvalue
    partial_ptr += pid * (stride_dz_m + 2 * F)
    sums = tl.sum(sum_dgate, axis=0), tl.sum(sum_dvalue, axis=0)
    _store_halves(partial_ptr, *sums, offs_f, *in_dz, mask_f)
    sums = tl.sum(dweight, axis=0), tl.sum(dbias, axis=0)
    _store_halves(partial_ptr + stride_dz_m, *sums, offs_f, 0, F, mask_f)


class Columns(NamedTuple):
    """Where the halves lie in a row of dz (and of the partial sums), in elements."""

    stride: int  # of its rows
    gate: int
    value: int


def dz_columns(F: int, packed: bool, gate_last: bool) -> Columns:
    """Packed: as fc1 has them, side by side. Separate: each 16-byte aligned, the value first."""
    if packed:
        return Columns(_padded(2 * F), *((F, 0) if gate_last else (0, F)))
    return Columns(2 * _padded(F), _padded(F), 0)


def _padded(columns: int) -> int:
    """A multiple of 8 elements: products whose rows lie otherwise take the library's slow ones."""
    return triton.cdiv(columns, 8) * 8


class FwdPlan(NamedTuple):
    """All that a forward launch derives from the kind of its arguments."""

    launch: Any  # called with tensors
    hidden: Layout
    stats: Layout | None


def _z_sizes(F: int, packed: bool, gate_last: bool) -> tuple[int, tuple[int, ...]]:
    """VECTOR, and (F, the row stride of z, the columns of gate and value in it) in units of it."""
    vector = math.gcd(F, 8)
    columns = (2 * F, *((F, 0) if gate_last else (0, F))) if packed else (F, 0, 0)
    return vector, tuple(n // vector for n in (F, *columns))


@launch_plan
def _fwd_plan(
    gpu: Gpu,
    rows: tuple[int, ...],
    F: int,
    packed: bool,
    gate_last: bool,
    activation: str,
    norm_eps: float | None,
    has_norm_bias: bool,
) -> FwdPlan:
    M = math.prod(rows)
    vector, sizes = _z_sizes(F, packed, gate_last)
    options: dict[str, Any] = dict(ACTIVATION=activation, VECTOR=vector)
    if norm_eps is None:
        grid = triton.cdiv(M, BLOCK_R), triton.cdiv(F, BLOCK_F)
        launch = bind_launch(_gate_fwd_kernel, grid, M, *sizes, **options, **_TILE)
        return FwdPlan(launch, layout((*rows, F)), None)
    block_f = block_width(F)
    config = FWD_TABLE.choose(gpu, block_f)
    launch = bind_launch(
        _gate_norm_fwd_kernel,
        (triton.cdiv(M, config.block_rows),),
        M,
        *sizes,
        norm_eps,
        HAS_BIAS=has_norm_bias,
        BLOCK_ROWS=config.block_rows,
        BLOCK_F=block_f,
        num_warps=config.num_warps,
        **options,
    )
    return FwdPlan(launch, layout((*rows, F)), layout((2, M)))


def gate_fwd(
    z: Tensor,
    value: Tensor | None,
    activation: str,
    gate_last: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float,
    rows: tuple[int, ...],
) -> tuple[Tensor, Tensor | None]:
    """hidden (*rows, F), normed where there is a weight; mean and rstd (2, M) fp32, else None.

    Args:
        rows: M of them, in the axes that hidden has.
        z: (M, 2F) with both halves, or where value is not None the gate's (M, F); contiguous.
        value: (M, F) contiguous, or None. gate_last: whether the gate is the second half.
    """
    F, device = z.shape[1] if value is not None else z.shape[1] // 2, z.device
    eps, stats = None if norm_weight is None else norm_eps, None
    launch, hidden_layout, stats_layout = _fwd_plan(
        gpu(device), rows, F, value is None, gate_last, activation, eps, norm_bias is not None
    )
    hidden = empty_strided(*hidden_layout, dtype=z.dtype, device=device)
    value = z if value is None else value
    if stats_layout is not None:
        stats = empty_strided(*stats_layout, dtype=torch.float32, device=device)
        launch(hidden, stats, z, value, contiguous(norm_weight), contiguous(norm_bias))
    else:
        launch(hidden, z, value)
    return hidden, stats


class BwdPlan(NamedTuple):
    """All that a backward launch derives from the kind of its arguments."""

    launch: Any  # called with tensors
    columns: Columns
    dz: Layout
    partial: Layout


@launch_plan
def _bwd_plan(
    gpu: Gpu,
    M: int,
    F: int,
    packed: bool,
    gate_last: bool,
    activation: str,
    norm: bool,
    has_norm_bias: bool,
    write_hidden: bool,
    sum_dz: bool,
) -> BwdPlan:
    vector, (width, *z_sizes) = _z_sizes(F, packed, gate_last)
    columns = dz_columns(F, packed, gate_last)
    dz_sizes = [n // vector for n in columns]
    options: dict[str, Any] = dict(ACTIVATION=activation, VECTOR=vector)
    if norm:
        block_f = block_width(F)
        config = BWD_TABLE.choose(gpu, block_f)
        programs = max(1, BWD_WARPS_PER_SM // config.num_warps) * gpu.num_sms
        splits = min(triton.cdiv(M, config.block_rows), programs)
        launch = bind_launch(
            _gate_norm_bwd_kernel,
            (splits,),
            M,
            width,
            *z_sizes,
            *dz_sizes,
            HAS_BIAS=has_norm_bias,
            WRITE_NORMED=write_hidden,
            REREAD=F > MAX_KEPT_F,
            BLOCK_ROWS=config.block_rows,
            BLOCK_F=block_f,
            num_warps=config.num_warps,
            **options,
        )
    else:
        column_blocks = triton.cdiv(F, BLOCK_F)
        wanted = max(1, BWD_PROGRAMS_PER_SM * gpu.num_sms // column_blocks)
        rows_per_split = triton.cdiv(M, min(wanted, triton.cdiv(M, MIN_ROWS_PER_SPLIT)))
        splits = triton.cdiv(M, rows_per_split)
        launch = bind_launch(
            _gate_bwd_kernel,
            (column_blocks, splits),
            M,
            width,
            rows_per_split,
            *z_sizes,
            *dz_sizes,
            WRITE_HIDDEN=write_hidden,
            SUM_DZ=sum_dz,
            **options,
            **_BWD_TILE,
        )
    sums = columns.stride + (2 * F if norm else 0)
    return BwdPlan(launch, columns, layout((M, columns.stride)), layout((splits, sums)))


def gate_bwd(
    dhidden: Tensor,
    hidden: Tensor | None,
    z: Tensor,
    value: Tensor | None,
    activation: str,
    gate_last: bool,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    stats: Tensor | None,
    sum_dz: bool,
) -> tuple[Tensor, Tensor, Columns]:
    """dz, fp32 partials whose column sums are [sum dz][dnorm_weight][dnorm_bias], dz's columns.

    Args:
        dhidden: (M, F) contiguous, the gradient of what `gate_fwd` returned.
        hidden: (M, F) contiguous, written with what `gate_fwd` returned where it is not None.
        sum_dz: whether the sums of dz are wanted; with an inner norm all sums are there.
        The others: as for `gate_fwd`.
    """
    M, F = dhidden.shape
    plan = _bwd_plan(
        gpu(z.device),
        M,
        F,
        value is None,
        gate_last,
        activation,
        norm_weight is not None,
        norm_bias is not None,
        hidden is not None,
        sum_dz,
    )
    dz = empty_strided(*plan.dz, dtype=z.dtype, device=z.device)
    partial = empty_strided(*plan.partial, dtype=torch.float32, device=z.device)
    value = z if value is None else value
    norm: tuple[Any, ...] = ()
    if norm_weight is not None:
        norm = contiguous(norm_weight), contiguous(norm_bias), stats
    plan.launch(dz, hidden, partial, dhidden, z, value, *norm)
    return dz, partial, plan.columns
