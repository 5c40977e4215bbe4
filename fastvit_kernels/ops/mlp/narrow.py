"""MLP of narrow models, C and N at most 256, in one kernel: the hidden activations stay on chip.

    z^T = W1 x^T + b1,   a^T = act(z^T),   y^T = W2 a^T + b2
    y = residual + row_scale[sample] * layer_scale * y

One program owns BLOCK_M rows of x, whole, and walks F in steps of BLOCK_F. Everything is
transposed: each product's first operand is then a weight tile and its second one lies in shared
memory, on Hopper too, where a first operand that was computed would stay in registers (a reported
race: triton #9433, #9514). Nothing is saved, so it runs where no gradient is wanted.
Precision: as mlp: fp32 accumulators and epilogue; z and a are rounded to the compute dtype.
Why it has this shape: docs/mlp.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import as_rows, contiguous, is_aligned
from ...runtime.backend import Gpu, gpu
from ...runtime.compat import matmul_precision
from ...runtime.configs import ConfigTable
from ...runtime.dtypes import DTYPE_NAMES, DTYPES
from ...runtime.operator import operator
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from ..common.activation import activate
from ..common.epilogue import epilogue_arguments

MAX_WIDTH = 256
MAX_OFFSET = 2**31 - 1  # within a weight, and within a tile of the residual


class NarrowTiles(NamedTuple):
    """Rows of x a program owns, hidden columns a step, launch options."""

    block_m: int
    block_f: int
    num_warps: int
    num_stages: int


# By what multiplies; the first that fits is taken. wgmma wants 64 rows of a weight tile; for
# mma.sync two warp groups share 32 of them, as 64 spill. Fewer rows of x have work for four warps
# alone. Not yet measured.
SMALL = (NarrowTiles(32, 64, 4, 2), NarrowTiles(16, 64, 4, 2))
WGMMA = (NarrowTiles(128, 64, 8, 2), NarrowTiles(64, 64, 8, 2), *SMALL)
MMA = (
    NarrowTiles(128, 32, 8, 3),
    NarrowTiles(64, 32, 8, 3),
    NarrowTiles(64, 32, 8, 2),
    NarrowTiles(64, 32, 4, 3),
    NarrowTiles(64, 32, 4, 2),
    *SMALL,
)
MFMA = (NarrowTiles(64, 32, 4, 2), NarrowTiles(32, 32, 4, 2), NarrowTiles(16, 32, 4, 2))
ALL = tuple(dict.fromkeys((*WGMMA, *MMA, *MFMA)))
# Elements of x or y a thread may have without spills, equal widths allowing more.
MAX_ELEMENTS, MAX_ELEMENTS_EQUAL = 64, 96


def _family(gpu: Gpu) -> tuple[NarrowTiles, ...]:
    if gpu.arch == "cpu":
        return ALL
    if gpu.is_amd:
        return MFMA
    return WGMMA if gpu.family in (9, 10) else MMA


def _fits(gpu: Gpu, tiles: NarrowTiles, C: int, N: int, dtype: str, rows: int) -> bool:
    """Whether nothing spills and shared memory suffices; C and N are padded."""
    block_m, block_f, num_warps, num_stages = tiles
    is_amd = gpu.is_amd
    buffers = num_stages if _family(gpu) is WGMMA else num_stages - 1
    itemsize = DTYPES[dtype].itemsize
    loop = itemsize * (block_m * C + block_m * block_f + buffers * block_f * (C + N))
    y = 4 * block_m * max(_parts(N))  # changes its layout before it is stored
    elements = block_m * max(C, N) // (num_warps * (64 if is_amd else 32))
    limit = MAX_ELEMENTS_EQUAL if C == N else MAX_ELEMENTS
    # mma.sync: eight warps would compute y^T's part of 64 rows twice behind the loop
    repeats = _family(gpu) is MMA and num_warps == 8 and 64 in _parts(N) and block_m < 128
    known = tiles in _family(gpu) and not repeats
    return known and elements <= limit and max(loop, y) <= gpu.shared_limit


def _default(gpu: Gpu, C: int, N: int, dtype: str, rows: int) -> NarrowTiles:
    family = _family(gpu)
    fitting = (t for t in family if t.block_m <= rows and _fits(gpu, t, C, N, dtype, rows))
    return next(fitting, family[-1])


# (C, N padded, dtype, rows a program would have if each SM got one: 16, 32, 64, 128)
FWD_TABLE = ConfigTable("narrow_mlp_fwd", ALL, _default, _fits)


def _parts(width: int) -> tuple[int, int]:
    """A width of at most 256 as one or two powers of two, none below the 64 that wgmma wants."""
    padded = triton.cdiv(width, 64) * 64
    return (128, 64) if padded == 192 else (padded, 0)


@triton.jit
def _tile(
    ptr,
    offs_row,
    offs_col,
    rows,
    cols,
    stride_row,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr,
):
    """A tile of a matrix whose columns are contiguous; 0 past its rows and columns."""
    ptrs = ptr + offs_row[:, None] * stride_row + offs_col[None, :]
    if EVEN_ROWS and EVEN_COLS:
        return tl.load(ptrs)
    elif EVEN_ROWS:
        return tl.load(ptrs, mask=(offs_col < cols)[None, :], other=0.0)
    elif EVEN_COLS:
        return tl.load(ptrs, mask=(offs_row < rows)[:, None], other=0.0)
    else:
        mask = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _transposed_rows(ptr, offs_c, offs_m, C, stride_m, EVEN_C: tl.constexpr):
    """x^T (C, BLOCK_M) of the rows offs_m."""
    ptrs = ptr + offs_m[None, :] * stride_m + offs_c[:, None]
    if EVEN_C:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(offs_c < C)[:, None], other=0.0)


@triton.jit
def _finish_transposed(
    y_ptr,
    y,
    bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    first,
    offs_n,
    M,
    N,
    rows_per_sample,
    stride_residual_m,
    HAS_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """epilogue.finish_tile for y^T (N, BLOCK_M), whose first column is row `first` of y."""
    # Offsets within the tile are 32-bit: with 64 they would spill.
    offs_m = tl.arange(0, BLOCK_M)
    mask_m, mask_n = offs_m < M - first, offs_n < N
    mask = mask_n[:, None] & mask_m[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if HAS_LAYER_SCALE:
        y *= tl.load(layer_scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if HAS_ROW_SCALE:
        row_scale_ptrs = row_scale_ptr + (first + offs_m) // rows_per_sample
        y *= tl.load(row_scale_ptrs, mask=mask_m, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + first * stride_residual_m
        residual_ptrs += offs_m[None, :] * stride_residual_m + offs_n[:, None]
        y += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + first * N + (offs_m[None, :] * N + offs_n[:, None])
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_BATCH)
def _narrow_mlp_fwd_kernel(
    y_ptr,
    x_ptr,
    fc1_weight_ptr,
    fc1_bias_ptr,
    fc2_weight_ptr,
    fc2_bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    M,
    C,
    F,
    N,
    rows_per_sample,
    stride_x_m,
    stride_fc1_weight_f,
    stride_fc2_weight_n,
    stride_residual_m,
    ACTIVATION: tl.constexpr,
    HAS_FC1_BIAS: tl.constexpr,
    HAS_FC2_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_F: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    # C = C0 + C1 and N = N0 + N1, padded; C1 and N1 may be 0.
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    offs_m = tl.minimum(first + tl.arange(0, BLOCK_M), M - 1)  # rows past M repeat the last one
    offs_f = tl.arange(0, BLOCK_F)
    offs_c0, offs_n0 = tl.arange(0, C0), tl.arange(0, N0)
    x0 = _transposed_rows(x_ptr, offs_c0, offs_m, C, stride_x_m, EVEN_C or C1 > 0)
    y0 = tl.zeros((N0, BLOCK_M), dtype=tl.float32)
    if C1 > 0:
        offs_c1 = C0 + tl.arange(0, C1)
        x1 = _transposed_rows(x_ptr, offs_c1, offs_m, C, stride_x_m, EVEN_C)
    if N1 > 0:
        offs_n1 = N0 + tl.arange(0, N1)
        y1 = tl.zeros((N1, BLOCK_M), dtype=tl.float32)

    # The second product lags by one: each step multiplies the previous step's act. Without the lag
    # Triton lays all warps along z's 64 rows, and both halves of 8 warps compute the same.
    act = tl.zeros((BLOCK_F, BLOCK_M), dtype=dtype)
    offs_before = offs_f - BLOCK_F
    for first_f in range(0, F, BLOCK_F):
        end_before = tl.where(first_f > 0, F, -BLOCK_F)  # none before the first step
        fc2_weight = _tile(
            fc2_weight_ptr,
            offs_n0,
            offs_before,
            N,
            end_before,
            stride_fc2_weight_n,
            EVEN_N or N1 > 0,
            False,
        )
        y0 = tl.dot(fc2_weight, act, y0, input_precision=INPUT_PRECISION)
        if N1 > 0:
            fc2_weight = _tile(
                fc2_weight_ptr,
                offs_n1,
                offs_before,
                N,
                end_before,
                stride_fc2_weight_n,
                EVEN_N,
                False,
            )
            y1 = tl.dot(fc2_weight, act, y1, input_precision=INPUT_PRECISION)
        offs_before += BLOCK_F
        fc1_weight = _tile(
            fc1_weight_ptr,
            offs_before,
            offs_c0,
            F,
            C,
            stride_fc1_weight_f,
            EVEN_F,
            EVEN_C or C1 > 0,
        )
        z = tl.dot(fc1_weight, x0, input_precision=INPUT_PRECISION)
        if C1 > 0:
            fc1_weight = _tile(
                fc1_weight_ptr, offs_before, offs_c1, F, C, stride_fc1_weight_f, EVEN_F, EVEN_C
            )
            # By fma: the first product, as accumulator of the second, would be a chain, for which
            # Triton lays all warps along z's rows.
            z = tl.fma(z, 1.0, tl.dot(fc1_weight, x1, input_precision=INPUT_PRECISION))
        if HAS_FC1_BIAS:
            fc1_bias = tl.load(fc1_bias_ptr + offs_before, mask=offs_before < F, other=0.0)
            z += fc1_bias.to(tl.float32)[:, None]
        act = activate(z.to(dtype).to(tl.float32), ACTIVATION, dtype)
        if not EVEN_F:
            act = tl.where((offs_before < F)[:, None], act, 0.0)  # 0 * inf is NaN
        act = act.to(dtype)

    fc2_weight = _tile(
        fc2_weight_ptr, offs_n0, offs_before, N, F, stride_fc2_weight_n, EVEN_N or N1 > 0, EVEN_F
    )
    y0 = tl.dot(fc2_weight, act, y0, input_precision=INPUT_PRECISION)
    if N1 > 0:
        fc2_weight = _tile(
            fc2_weight_ptr, offs_n1, offs_before, N, F, stride_fc2_weight_n, EVEN_N, EVEN_F
        )
        y1 = tl.dot(fc2_weight, act, y1, input_precision=INPUT_PRECISION)
    if N1 > 0:  # the smaller part first, while the larger one waits in registers
        _finish_transposed(
            y_ptr,
            y1,
            fc2_bias_ptr,
            layer_scale_ptr,
            row_scale_ptr,
            residual_ptr,
            first,
            offs_n1,
            M,
            N,
            rows_per_sample,
            stride_residual_m,
            HAS_FC2_BIAS,
            HAS_LAYER_SCALE,
            HAS_ROW_SCALE,
            HAS_RESIDUAL,
            BLOCK_M,
        )
    _finish_transposed(
        y_ptr,
        y0,
        fc2_bias_ptr,
        layer_scale_ptr,
        row_scale_ptr,
        residual_ptr,
        first,
        offs_n0,
        M,
        N,
        rows_per_sample,
        stride_residual_m,
        HAS_FC2_BIAS,
        HAS_LAYER_SCALE,
        HAS_ROW_SCALE,
        HAS_RESIDUAL,
        BLOCK_M,
    )


def is_narrow(dtype: torch.dtype, C: int, N: int) -> bool:
    """Whether this kernel is the forward of an MLP of these widths that computes in `dtype`.

    fp32 stays with two products: its tiles spill, or ask for more shared memory than there is.
    """
    return dtype.itemsize == 2 and max(C, N) <= MAX_WIDTH


def _rows(x: Tensor, num_rows: int) -> Tensor:
    """x as rows, of which num_rows in sequence are within reach of a 32-bit offset."""
    rows = as_rows(x)
    near = num_rows * rows.stride(0) <= MAX_OFFSET
    return rows if near else rows.clone(memory_format=torch.contiguous_format)


def _weight_rows(x: Tensor, num_rows: int) -> Tensor:
    """The same of a weight, which every program reads whole: never off 16 bytes, or its loads would
    be of one element each."""
    rows = _rows(x, num_rows)
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def _empty(x: Tensor, fc2_weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    shape = (*x.shape[:-1], fc2_weight.shape[0])
    return torch.empty(shape, dtype=out_dtype, device=x.device)


def _flops(x, fc1_weight, fc2_weight):
    (F, C), N = fc1_weight, fc2_weight[0]
    return 2 * math.prod(x[:-1]) * F * (C + N)


@operator(fake=_empty, flops=_flops)
def narrow_mlp_fwd(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """y (..., N) in out_dtype. x and the weights share one dtype."""
    y = _empty(x, fc2_weight, out_dtype)
    if y.numel() == 0:
        return y
    (F, C), N, rows = fc1_weight.shape, fc2_weight.shape[0], as_rows(x)
    M = rows.shape[0]
    fc1_weight = _weight_rows(fc1_weight, F + 64)
    fc2_weight = _weight_rows(fc2_weight, MAX_WIDTH)
    pointers, sizes, _ = epilogue_arguments(
        M, layer_scale, row_scale, None if residual is None else _rows(residual, 128)
    )
    (c0, c1), (n0, n1) = _parts(C), _parts(N)
    device = gpu(x.device)
    rows_per_sm = triton.next_power_of_2(triton.cdiv(M, device.num_sms))
    tiles = FWD_TABLE.choose(
        device, c0 + c1, n0 + n1, DTYPE_NAMES[x.dtype], min(max(rows_per_sm, 16), 128)
    )
    launch = bind_launch(
        _narrow_mlp_fwd_kernel,
        (triton.cdiv(M, tiles.block_m),),
        ACTIVATION=activation,
        HAS_FC1_BIAS=fc1_bias is not None,
        HAS_FC2_BIAS=fc2_bias is not None,
        HAS_LAYER_SCALE=layer_scale is not None,
        HAS_ROW_SCALE=row_scale is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_C=c0 + c1 == C,
        EVEN_F=F % tiles.block_f == 0,
        EVEN_N=n0 + n1 == N,
        BLOCK_M=tiles.block_m,
        BLOCK_F=tiles.block_f,
        C0=c0,
        C1=c1,
        N0=n0,
        N1=n1,
        INPUT_PRECISION=matmul_precision(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    launch(
        y,
        rows,
        fc1_weight,
        contiguous(fc1_bias),
        fc2_weight,
        contiguous(fc2_bias),
        *pointers,
        M,
        C,
        F,
        N,
        sizes[0],
        rows.stride(0),
        fc1_weight.stride(0),
        fc2_weight.stride(0),
        sizes[1],
    )
    return y
