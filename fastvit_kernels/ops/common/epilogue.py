"""What may follow a matrix product, forward and backward: the elementwise side of linear and mlp.

    y = residual + row_scale[sample] * layer_scale[n] * act(z)

    d = row_scale * dy,   dz = layer_scale * d * act'(z),   dlayer_scale = sum_m d * act(z)

A row_scale that `keep_samples` gave stands for B / S in the samples that it keeps and 0 in others:
z, d and dz have the rows of those alone, y, the residual and dy those of all (samples.py).
`finish_tile` ends a Triton GEMM; the kernels here end a library's product. Both do the same
arithmetic, in fp32. Column sums leave a kernel as fp32 partials, one row a split of M, and are
finished by `column_sum` in a fixed order. No atomics. Derivation: docs/linear.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    Layout,
    as_rows,
    contiguous,
    empty,
    empty_gradients,
    empty_strided,
    layout,
    row_stride,
)
from ...runtime.backend import Gpu, gpu
from ...runtime.configs import launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from .activation import activate, activate_and_derivative
from .gemm import matmul
from .reduction import column_sum
from .samples import is_sample_subset, pass_dropped, stream_rows

# Tile of (rows, columns), warps. Not yet measured. With four warps the forward spills on sm_90.
BLOCK_R, BLOCK_N, NUM_WARPS = 16, 128, 4
_FWD_TILE = dict(BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, num_warps=8)
_BWD_TILE = dict(BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS)
WEIGHT_BLOCK_N, WEIGHT_BLOCK_K = 4, 512
BWD_PROGRAMS_PER_SM = 8
MIN_ROWS_PER_SPLIT = 64


class Epilogue(NamedTuple):
    """Constants of what follows a product."""

    ACTIVATION: Any  # "": none
    SAVE_Z: Any
    HAS_BIAS: Any
    HAS_LAYER_SCALE: Any
    HAS_ROW_SCALE: Any
    HAS_RESIDUAL: Any
    SUBSET: Any  # row_scale keeps samples


class Rows(NamedTuple):
    """Scalars of what follows a product."""

    per_sample: Any
    stride_residual_m: Any
    keep_scale: Any


@triton.jit
def finish_tile(y_ptr, z, ptrs, offs_m, offs_n, M, N, rows, EPILOGUE: tl.constexpr):
    """y = residual + row_scale * layer_scale * act(z) of one fp32 tile, stored; where SUBSET, of
    the samples that row_scale keeps. ptrs: of layer_scale, row_scale, residual."""
    layer_scale_ptr, row_scale_ptr, residual_ptr = ptrs
    mask_m, mask_n = offs_m < M, offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    ACTIVATION: tl.constexpr = EPILOGUE.ACTIVATION
    y = activate(z, ACTIVATION, y_ptr.dtype.element_ty)
    if EPILOGUE.HAS_LAYER_SCALE:
        y *= tl.load(layer_scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE.HAS_ROW_SCALE:
        row_scale_ptrs = row_scale_ptr + offs_m // rows.per_sample
        y *= tl.load(row_scale_ptrs, mask=mask_m, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE.SUBSET:
        offs_m = stream_rows(row_scale_ptr, offs_m, mask_m, rows.per_sample)
        y *= rows.keep_scale
    if EPILOGUE.HAS_RESIDUAL:
        residual_ptrs = residual_ptr + offs_m[:, None] * rows.stride_residual_m + offs_n[None, :]
        y += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(**ANY_BATCH)
def _epilogue_fwd_kernel(
    y_ptr,
    z_ptr,
    bias_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    residual_ptr,
    M,
    N,
    rows_per_sample,
    stride_residual_m,
    keep_scale,
    EPILOGUE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    z_ptrs = z_ptr + offs_m[:, None] * N + offs_n[None, :]
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE.HAS_BIAS:
        z += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    ptrs = layer_scale_ptr, row_scale_ptr, residual_ptr
    rows = Rows(rows_per_sample, stride_residual_m, keep_scale)
    finish_tile(y_ptr, z, ptrs, offs_m, offs_n, M, N, rows, EPILOGUE)


@triton.jit(**ANY_BATCH)
def _epilogue_bwd_kernel(
    dz_ptr,
    act_ptr,
    partial_ptr,
    dy_ptr,
    z_ptr,
    layer_scale_ptr,
    row_scale_ptr,
    M,
    N,
    width,
    rows_per_split,
    rows_per_sample,
    stride_dy_m,
    stride_dy_n,
    keep_scale,
    ACTIVATION: tl.constexpr,
    HAS_LAYER_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SUBSET: tl.constexpr,
    WRITE_ACT: tl.constexpr,
    SUM_DZ: tl.constexpr,
    SUM_DLAYER_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Program (n, s) walks the rows of split s; partial[s] = [sum dz (N)] [sum d * act(z) (N)].
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first = tl.program_id(1).to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, M)
    sum_dz = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    sum_dlayer_scale = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    if HAS_LAYER_SCALE:
        layer_scale = tl.load(layer_scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    for row in range(first, last, BLOCK_R):
        offs_m = row + tl.arange(0, BLOCK_R).to(tl.int64)
        mask_m = offs_m < last
        mask = mask_m[:, None] & mask_n[None, :]
        offs_dy = stream_rows(row_scale_ptr, offs_m, mask_m, rows_per_sample) if SUBSET else offs_m
        dy_ptrs = dy_ptr + offs_dy[:, None] * stride_dy_m + offs_n[None, :] * stride_dy_n
        dz = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
        offs = offs_m[:, None] * N + offs_n[None, :]
        if HAS_ROW_SCALE:
            row_scale_ptrs = row_scale_ptr + offs_m // rows_per_sample
            dz *= tl.load(row_scale_ptrs, mask=mask_m, other=0.0).to(tl.float32)[:, None]
        if SUBSET:
            dz *= keep_scale
        if ACTIVATION != "":
            z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            act, derivative = activate_and_derivative(z, ACTIVATION, dz_ptr.dtype.element_ty)
            if WRITE_ACT:
                tl.store(act_ptr + offs, act.to(act_ptr.dtype.element_ty), mask=mask)
            if SUM_DLAYER_SCALE:
                sum_dlayer_scale += dz * act
        if HAS_LAYER_SCALE:
            dz *= layer_scale[None, :]
        if ACTIVATION != "":
            dz *= derivative
        tl.store(dz_ptr + offs, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if SUM_DZ:
            sum_dz += dz
    partial_ptrs = partial_ptr + tl.program_id(1).to(tl.int64) * width + offs_n
    if SUM_DZ:
        tl.store(partial_ptrs, tl.sum(sum_dz, axis=0), mask=mask_n)
        partial_ptrs += N
    if SUM_DLAYER_SCALE:
        tl.store(partial_ptrs, tl.sum(sum_dlayer_scale, axis=0), mask=mask_n)


@triton.jit
def _weight_bwd_kernel(
    dweight_ptr,
    dbias_ptr,
    dlayer_scale_ptr,
    gram_ptr,
    g_ptr,
    weight_ptr,
    bias_ptr,
    layer_scale_ptr,
    N,
    K,
    stride_weight_n,
    stride_weight_k,
    NEEDS_DWEIGHT: tl.constexpr,
    NEEDS_DBIAS: tl.constexpr,
    NEEDS_DLAYER_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # dW = layer_scale G,   db = layer_scale g,   dlayer_scale[n] = W[n] . G[n] + b[n] g[n]
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    layer_scale = tl.load(layer_scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    dot = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if NEEDS_DWEIGHT or NEEDS_DLAYER_SCALE:
        for k in range(tl.cdiv(K, BLOCK_K)):
            offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
            mask = mask_n[:, None] & (offs_k < K)[None, :]
            offs = offs_n[:, None] * K + offs_k[None, :]
            gram = tl.load(gram_ptr + offs, mask=mask, other=0.0)
            if NEEDS_DWEIGHT:
                dweight = layer_scale[:, None] * gram
                tl.store(dweight_ptr + offs, dweight.to(dweight_ptr.dtype.element_ty), mask=mask)
            if NEEDS_DLAYER_SCALE:
                weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
                weight_ptrs += offs_k[None, :] * stride_weight_k
                dot += gram * tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    if NEEDS_DBIAS:
        dbias = layer_scale * tl.load(g_ptr + offs_n, mask=mask_n, other=0.0)
        tl.store(dbias_ptr + offs_n, dbias.to(dbias_ptr.dtype.element_ty), mask=mask_n)
    if NEEDS_DLAYER_SCALE:
        dlayer_scale = tl.sum(dot, axis=1)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
            dlayer_scale += bias * tl.load(g_ptr + offs_n, mask=mask_n, other=0.0)
        dlayer_scale = dlayer_scale.to(dlayer_scale_ptr.dtype.element_ty)
        tl.store(dlayer_scale_ptr + offs_n, dlayer_scale, mask=mask_n)


Follows = tuple[tuple[Tensor | None, ...], Rows, Epilogue]  # layer_scale, row_scale, residual


def epilogue_arguments(
    M: int,
    activation: str,
    save_z: bool,
    has_bias: bool,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
) -> Follows:
    """What finish_tile wants of M rows of z."""
    rows_per_sample, stride_residual_m, keep_scale, some = 1, 0, 1.0, False
    if row_scale is not None and row_scale.dtype is torch.int64:
        assert residual is not None
        B, some = residual.shape[0], True
        S = row_scale.shape[0] - B
        rows_per_sample, keep_scale = M // S, B / S
    elif row_scale is not None:
        rows_per_sample = M // row_scale.numel()
    if residual is not None:
        stride = row_stride(residual.shape, residual.stride())
        if stride is None:
            residual, stride = residual.contiguous(), residual.shape[-1]
        stride_residual_m = stride
    has_row_scale = row_scale is not None and not some
    follows = Epilogue(
        activation,
        save_z,
        has_bias,
        layer_scale is not None,
        has_row_scale,
        residual is not None,
        some,
    )
    pointers = (
        None if layer_scale is None else layer_scale.contiguous(),
        None if row_scale is None else row_scale.contiguous(),
        residual,
    )
    return pointers, Rows(rows_per_sample, stride_residual_m, keep_scale), follows


@functools.lru_cache(maxsize=1024)
def _fwd_launch(M: int, N: int, follows: Epilogue) -> Any:
    grid = triton.cdiv(M, BLOCK_R), triton.cdiv(N, BLOCK_N)
    return bind_launch(_epilogue_fwd_kernel, grid, EPILOGUE=follows, **_FWD_TILE)


def apply_epilogue(
    y: Tensor,
    z: Tensor,
    activation: str,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Write residual + row_scale * layer_scale * act(z + bias) into y; y, z (..., N) contiguous.

    Where row_scale keeps some samples, z has their rows, and those of others are copied.
    """
    N = z.shape[-1]
    M = z.numel() // N
    given = activation, False, bias is not None, layer_scale, row_scale, residual
    pointers, rows, follows = epilogue_arguments(M, *given)
    _fwd_launch(M, N, follows)(y, z, contiguous(bias), *pointers, M, N, *rows)
    copy_dropped(y, pointers, rows, follows)


def copy_dropped(
    y: Tensor, pointers: tuple[Tensor | None, ...], rows: Rows, follows: Epilogue
) -> None:
    """The rows of y that a kernel leaves out whose epilogue had these arguments."""
    if follows.SUBSET:
        _, samples, residual = pointers
        assert samples is not None and residual is not None
        pass_dropped(y, residual, samples, rows.stride_residual_m)


class _BwdPlan(NamedTuple):
    launch: Any  # the kernel on its grid, called with all but the constexprs
    rows_per_split: int
    dz: Layout
    partial: Layout


@launch_plan
def _bwd_plan(
    gpu: Gpu,
    M: int,
    N: int,
    activation: str,
    has_layer_scale: bool,
    has_row_scale: bool,
    some: bool,
    write_act: bool,
    sum_dz: bool,
    sum_dlayer_scale: bool,
) -> _BwdPlan:
    column_blocks = triton.cdiv(N, BLOCK_N)
    wanted = max(1, BWD_PROGRAMS_PER_SM * gpu.num_sms // column_blocks)
    splits = min(wanted, triton.cdiv(M, MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(M, splits)
    splits = triton.cdiv(M, rows_per_split)
    launch = bind_launch(
        _epilogue_bwd_kernel,
        (column_blocks, splits),
        ACTIVATION=activation,
        HAS_LAYER_SCALE=has_layer_scale,
        HAS_ROW_SCALE=has_row_scale and not some,
        SUBSET=some,
        WRITE_ACT=write_act,
        SUM_DZ=sum_dz,
        SUM_DLAYER_SCALE=sum_dlayer_scale,
        **_BWD_TILE,
    )
    sums = sum_dz + sum_dlayer_scale
    return _BwdPlan(launch, rows_per_split, layout((M, N)), layout((splits, N * sums)))


def _rows_of_z(M: int, row_scale: Tensor | None, batch: int) -> tuple[int, int, float]:
    """(rows of z, rows of a sample, B / S) where dy has M rows."""
    if row_scale is None:
        return M, 1, 1.0
    if not is_sample_subset(row_scale):
        return M, M // row_scale.numel(), 1.0
    per_sample, kept = M // batch, row_scale.shape[0] - batch
    return per_sample * kept, per_sample, batch / kept


def backward_epilogue(
    dy: Tensor,
    z: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    *,
    act: Tensor | None = None,
    sum_dz: bool = False,
    sum_dlayer_scale: bool = False,
    batch: int = 0,
    dz: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The pass over (M, N) that leads from dy to dz.

    Args:
        dy: (M, N), any strides; where row_scale keeps S of the `batch` samples, M is that of dz
            and z, and dy has batch / S as many rows.
        z: (M, N) contiguous; None without an activation.
        dtype: of dz.
        act: (M, N) contiguous; act(z) is written into it where it is not None.
        sum_dz, sum_dlayer_scale: which column sums are wanted.
        dz: dy itself, contiguous and of `dtype`, to be written over; None: memory of its own.
    Returns: dz (M, N), and partials (splits, N or 2 N) fp32 whose column sums are sum_m dz and
        sum_m row_scale * dy * act(z), side by side, of those that are wanted.
    """
    N, device = dy.shape[1], dy.device
    M, rows_per_sample, keep_scale = _rows_of_z(dy.shape[0], row_scale, batch)
    launch, rows_per_split, dz_layout, partial_layout = _bwd_plan(
        gpu(device),
        M,
        N,
        activation,
        layer_scale is not None,
        row_scale is not None,
        is_sample_subset(row_scale),
        act is not None,
        sum_dz,
        sum_dlayer_scale,
    )
    dz = empty_strided(*dz_layout, dtype=dtype, device=device) if dz is None else dz
    partial = empty_strided(*partial_layout, dtype=torch.float32, device=device)
    launch(
        dz,
        act,
        partial,
        dy,
        z,
        contiguous(layer_scale),
        contiguous(row_scale),
        M,
        N,
        partial.shape[1],
        rows_per_split,
        rows_per_sample,
        *dy.stride(),
        keep_scale,
    )
    return dz, partial


def rows_shape(dy: Tensor, row_scale: Tensor | None) -> tuple[int, ...]:
    """Leading axes of x, of dy (B, ..., N): those of kept samples where row_scale keeps some."""
    if not is_sample_subset(row_scale):
        return tuple(dy.shape[:-1])
    return row_scale.shape[0] - dy.shape[0], *dy.shape[1:-1]


def count_rows(dy: Sequence[int], row_scale: Sequence[int] | None) -> int:
    """M of shapes: the rows of x."""
    if len(dy) < 2:
        return 1
    samples = dy[0] if row_scale is None or row_scale[0] == dy[0] else row_scale[0] - dy[0]
    return math.prod(dy[1:-1]) * samples


def input_gradient_operands(
    d: Tensor, weight: Tensor, layer_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(a, b) with a b = (d * layer_scale) W, the small factor scaled rather than the large one."""
    if layer_scale is None:
        return d, weight
    if d.dtype == torch.float16:
        # A layer scale of 1e-5 would push W below fp16's range; d carries the loss scale.
        return backward_epilogue(d, None, "", d.dtype, layer_scale)[0], weight
    scaled = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return d, torch.mul(weight, layer_scale[:, None], out=scaled)


@functools.lru_cache(maxsize=1024)
def _weight_launch(
    N: int, needs_dweight: bool, needs_dbias: bool, needs_dlayer_scale: bool, has_bias: bool
) -> Any:
    return bind_launch(
        _weight_bwd_kernel,
        (triton.cdiv(N, WEIGHT_BLOCK_N),),
        NEEDS_DWEIGHT=needs_dweight,
        NEEDS_DBIAS=needs_dbias,
        NEEDS_DLAYER_SCALE=needs_dlayer_scale,
        HAS_BIAS=has_bias,
        BLOCK_N=WEIGHT_BLOCK_N,
        BLOCK_K=WEIGHT_BLOCK_K,
        num_warps=NUM_WARPS,
    )


class ScaledLinear(NamedTuple):
    """layer_scale * (x W^T + b): what its backward reads, and the dtypes of wanted gradients."""

    weight: Tensor | None  # (N, K), any strides
    bias: Tensor | None  # (N,), read for dlayer_scale alone
    layer_scale: Tensor | None
    dweight_dtype: torch.dtype | None
    dbias_dtype: torch.dtype | None
    dlayer_scale_dtype: torch.dtype | None

    @property
    def needs_x(self) -> bool:
        """Whether `weight_gradients` reads x."""
        return self.dweight_dtype is not None or self.dlayer_scale_dtype is not None

    @property
    def needs_g(self) -> bool:
        """Whether it reads the column sums of d."""
        scales_bias = self.dlayer_scale_dtype is not None and self.bias is not None
        return self.dbias_dtype is not None or scales_bias


def scaled_gradient(
    dy: Tensor, row_scale: Tensor | None, dtype: torch.dtype, layer: ScaledLinear, g: Tensor | None
) -> tuple[Tensor, Tensor]:
    """d = row_scale * dy in dtype, dy itself if it can, and a matrix with the column sums of d.

    dy: (B, ..., N). d: (M, N), the rows of kept samples where row_scale keeps some. g: (N,) fp32,
    the sums where the caller has them.
    """
    if row_scale is None and dy.dtype == dtype:
        d = sums = as_rows(dy)
    else:
        rows, needs_sum = dy.reshape(-1, dy.shape[-1]), g is None and layer.needs_g
        d, sums = backward_epilogue(
            rows, None, "", dtype, None, row_scale, sum_dz=needs_sum, batch=dy.shape[0]
        )
    return d, sums if g is None else g.view(1, -1)


def weight_gradients(
    d: Tensor, sums: Tensor, x: Tensor | None, layer: ScaledLinear
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dweight (N, K), dbias and dlayer_scale (N,) from d, each None where its dtype is.

    Args:
        d: (M, N); sums: a matrix with the same column sums; x: (M, K), dtype of d. A single row of
            sums is fp32.
    """
    if layer.layer_scale is None:
        dweight = dbias = None
        if layer.dweight_dtype is not None and x is not None:
            dweight = matmul(d.t(), x, out_dtype=layer.dweight_dtype)
        if layer.dbias_dtype is not None:
            dbias = column_sum(sums, empty((d.shape[1],), layer.dbias_dtype, d.device))
        return dweight, dbias, None
    weight, bias, layer_scale, *dtypes = layer
    N, K = d.shape[1], 0 if x is None else x.shape[1]
    needs_dweight, needs_dbias, needs_dlayer_scale = [dtype is not None for dtype in dtypes]
    grads = empty_gradients(d.device, *zip(((N, K), (N,), (N,)), dtypes, strict=True))
    gram = g = None
    if layer.needs_x and x is not None:
        gram = matmul(d.t(), x, out_dtype=torch.float32)
    if len(sums) == 1 < len(d):
        g = sums
    elif layer.needs_g:
        g = column_sum(sums, torch.empty(N, dtype=torch.float32, device=d.device))
    _weight_launch(N, needs_dweight, needs_dbias, needs_dlayer_scale, bias is not None)(
        *grads,
        gram,
        g,
        weight,
        contiguous(bias),
        contiguous(layer_scale),
        N,
        0 if gram is None else K,
        *((0, 0) if weight is None else weight.stride()),
    )
    return tuple(
        grad if dtype is not None else None for grad, dtype in zip(grads, dtypes, strict=True)
    )  # pyright: ignore[reportReturnType]
