"""The kernel of `mlp`'s backward: dz, with the rebuilt act(z) and the partials of db1 beside it.

Forward is twice that of `linear`. Formulas: functions.py.
"""

from __future__ import annotations

from ...runtime.triton import ANY_BATCH, tl, triton
from ..common.activation import activate_and_derivative
from ..common.gemm import column_halves, grouped_tile, tile_operands, tile_product


@triton.jit
def _hidden_epilogue(
    dz_ptr,
    act_ptr,
    partial_ptr,
    dact,
    z_ptr,
    first_m,
    first_f,
    M,
    F,
    ACTIVATION: tl.constexpr,
    WRITE_ACT: tl.constexpr,
    SUM_DZ: tl.constexpr,
    SUBTILES: tl.constexpr,
    EVEN_F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the tile of dact at (first_m, first_f) to dz, act and the sums of dz over its rows."""
    if SUBTILES > 1:
        halves = column_halves(dact, BLOCK_M, BLOCK_N)
        for i in tl.static_range(2):
            _hidden_epilogue(
                dz_ptr,
                act_ptr,
                partial_ptr,
                halves[i],
                z_ptr,
                first_m,
                first_f + i * (BLOCK_N // 2),
                M,
                F,
                ACTIVATION,
                WRITE_ACT,
                SUM_DZ,
                SUBTILES // 2,
                EVEN_F,
                BLOCK_M,
                BLOCK_N // 2,
            )
    else:
        offs_m, offs_f = first_m + tl.arange(0, BLOCK_M), first_f + tl.arange(0, BLOCK_N)
        mask_f = offs_f < F
        mask = (offs_m < M)[:, None]
        if not EVEN_F:
            mask = mask & mask_f[None, :]
        offs = offs_m[:, None] * F + offs_f[None, :]
        z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        act, derivative = activate_and_derivative(z, ACTIVATION, dz_ptr.dtype.element_ty)
        if WRITE_ACT:
            tl.store(act_ptr + offs, act.to(act_ptr.dtype.element_ty), mask=mask)
        dz = dact * derivative
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if SUM_DZ:
            partial = tl.sum(tl.where(mask, dz, 0.0), axis=0)
            tl.store(partial_ptr + offs_f, partial, mask=mask_f)


@triton.jit(**ANY_BATCH)
def _mlp_bwd_hidden_kernel(
    dz_ptr,
    act_ptr,
    partial_ptr,
    d_ptr,
    weight_ptr,
    z_ptr,
    M,
    F,
    N,
    stride_d_m,
    stride_d_n,
    stride_weight_n,
    stride_weight_f,
    ACTIVATION: tl.constexpr,
    WRITE_ACT: tl.constexpr,
    SUM_DZ: tl.constexpr,
    PERSISTENT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_K_LAST: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUBTILES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    # dz (M, F) = d (M, N) W2 (N, F) * act'(z); partial[pid_m] = sum of dz over the tile's rows.
    d, weight = tile_operands(
        d_ptr,
        weight_ptr,
        M,
        F,
        N,
        stride_d_m,
        stride_weight_n,
        stride_weight_f,
        DESCRIPTORS,
        B_K_LAST,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    first, last, step = tl.program_id(0), tl.program_id(0) + 1, 1
    if PERSISTENT:
        last, step = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_N), tl.num_programs(0)
    for tile in tl.range(first, last, step, flatten=FLATTEN):
        pid_m, pid_f = grouped_tile(tile, M, F, BLOCK_M, BLOCK_N, GROUP_M)
        dact = tile_product(
            d,
            weight,
            pid_m,
            pid_f,
            M,
            F,
            N,
            stride_d_m,
            stride_d_n,
            stride_weight_n,
            stride_weight_f,
            DESCRIPTORS,
            B_K_LAST,
            EVEN_N,
            EVEN_K,
            INPUT_PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        _hidden_epilogue(
            dz_ptr,
            act_ptr,
            partial_ptr + pid_m.to(tl.int64) * F,
            dact,
            z_ptr,
            pid_m.to(tl.int64) * BLOCK_M,
            pid_f.to(tl.int64) * BLOCK_N,
            M,
            F,
            ACTIVATION,
            WRITE_ACT,
            SUM_DZ,
            SUBTILES,
            EVEN_N,
            BLOCK_M,
            BLOCK_N,
        )
