"""The kernel of `linear`: a matrix product with the epilogue inside. Formulas: functions.py."""

from __future__ import annotations

from ...runtime.triton import ANY_BATCH, tl, triton
from ..common.epilogue import finish_tile
from ..common.gemm import column_halves, grouped_tile, tile_operands, tile_product


@triton.jit
def _linear_epilogue(
    y_ptr,
    z_ptr,
    z,
    x_ptr,
    bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    first_m,
    first_n,
    M,
    N,
    rows_per_sample,
    stride_residual_m,
    keep_scale,
    ACTIVATION: tl.constexpr,
    SAVE_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SUBSET: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the products z of the tile at (first_m, first_n) to y, SUBTILES column parts in turn."""
    if SUBTILES > 1:
        halves = column_halves(z, BLOCK_M, BLOCK_N)
        for i in tl.static_range(2):
            _linear_epilogue(
                y_ptr,
                z_ptr,
                halves[i],
                x_ptr,
                bias_ptr,
                layer_scale_ptr,
                row_scale_ptr,
                residual_ptr,
                first_m,
                first_n + i * (BLOCK_N // 2),
                M,
                N,
                rows_per_sample,
                stride_residual_m,
                keep_scale,
                ACTIVATION,
                SAVE_Z,
                HAS_BIAS,
                HAS_LAYER_SCALE,
                HAS_ROW_SCALE,
                HAS_RESIDUAL,
                SUBSET,
                SUBTILES // 2,
                BLOCK_M,
                BLOCK_N // 2,
            )
    else:
        offs_m, offs_n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            z += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            z_low = z.to(x_ptr.dtype.element_ty)
            if SAVE_Z:
                mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
                tl.store(z_ptr + offs_m[:, None] * N + offs_n[None, :], z_low, mask=mask)
            z = z_low.to(tl.float32)  # act reads the bits that are saved
        finish_tile(
            y_ptr,
            z,
            layer_scale_ptr,
            row_scale_ptr,
            residual_ptr,
            offs_m,
            offs_n,
            M,
            N,
            rows_per_sample,
            stride_residual_m,
            keep_scale,
            ACTIVATION,
            HAS_LAYER_SCALE,
            HAS_ROW_SCALE,
            HAS_RESIDUAL,
            SUBSET,
        )


@triton.jit(**ANY_BATCH)
def _linear_fwd_kernel(
    y_ptr,
    z_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    M,
    N,
    K,
    rows_per_sample,
    stride_x_m,
    stride_x_k,
    stride_weight_n,
    stride_weight_k,
    stride_residual_m,
    keep_scale,
    ACTIVATION: tl.constexpr,
    SAVE_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SUBSET: tl.constexpr,
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
    x, weight = tile_operands(
        x_ptr,
        weight_ptr,
        M,
        N,
        K,
        stride_x_m,
        stride_weight_k,
        stride_weight_n,
        DESCRIPTORS,
        B_K_LAST,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    first, last, step = tl.program_id(0), tl.program_id(0) + 1, 1
    if PERSISTENT:
        last, step = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)
    for tile in tl.range(first, last, step, flatten=FLATTEN):
        pid_m, pid_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        z = tile_product(
            x,
            weight,
            pid_m,
            pid_n,
            M,
            N,
            K,
            stride_x_m,
            stride_x_k,
            stride_weight_k,
            stride_weight_n,
            DESCRIPTORS,
            B_K_LAST,
            EVEN_N,
            EVEN_K,
            INPUT_PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        _linear_epilogue(
            y_ptr,
            z_ptr,
            z,
            x_ptr,
            bias_ptr,
            layer_scale_ptr,
            row_scale_ptr,
            residual_ptr,
            pid_m.to(tl.int64) * BLOCK_M,
            pid_n.to(tl.int64) * BLOCK_N,
            M,
            N,
            rows_per_sample,
            stride_residual_m,
            keep_scale,
            ACTIVATION,
            SAVE_Z,
            HAS_BIAS,
            HAS_LAYER_SCALE,
            HAS_ROW_SCALE,
            HAS_RESIDUAL,
            SUBSET,
            SUBTILES,
            BLOCK_M,
            BLOCK_N,
        )
