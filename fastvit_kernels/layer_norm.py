"""LayerNorm over the last axis, and its variant that hands its input on.

    y = (x - mean) * rstd * weight + bias,   mean = sum(x) / C,   rstd = (var + eps)**-0.5

With xhat = (x - mean) * rstd and g = dy * weight:

    dx      = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))  [+ dresidual]
    dweight = sum_rows dy * xhat,   dbias = sum_rows dy

Saved: x, mean, rstd (fp32, one a row).
Precision: fp32 statistics, the variance about the mean, never E[x^2] - mean^2; fp32 partials for
dweight and dbias, one row a program, summed in a fixed order by a second kernel. No atomics.
Source: arXiv:1607.06450. Derivation: docs/layer_norm.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastvit_kernels._triton import tl, triton
from fastvit_kernels.arguments import as_rows, autocast_dtype, check_shape, check_tensor
from fastvit_kernels.backend import num_sms, use_triton
from fastvit_kernels.operators import operator
from fastvit_kernels.reduction import column_sum

MAX_C = 65536  # one row is held in the registers of one program


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The specification of `layer_norm`: torch's own, in x.dtype, then one cast."""
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(out_dtype or x.dtype)


# BLOCK_C -> (rows a program takes, num_warps). Small rows share a program, so that every warp has
# full vector loads. Not yet measured.
FWD_CONFIGS = {64: (16, 4), 128: (8, 4), 256: (8, 4), 512: (4, 4), 1024: (2, 4), 2048: (1, 4)}
BWD_CONFIGS = {64: (16, 4), 128: (8, 4), 256: (4, 4), 512: (2, 4), 1024: (2, 8), 2048: (1, 8)}
LARGE_CONFIG = (1, 16)  # BLOCK_C above 2048
BWD_PROGRAMS_PER_SM = 8


@triton.jit
def _layer_norm_fwd_kernel(
    y_ptr, mean_ptr, rstd_ptr, x_ptr, weight_ptr, bias_ptr,
    num_rows, C, stride_x_row, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_rows = tl.program_id(0).to(tl.int64)
    offs_row = pid_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_c = tl.arange(0, BLOCK_C)
    mask_row, mask_c = offs_row < num_rows, offs_c < C
    mask = mask_row[:, None] & mask_c[None, :]

    x_ptrs = x_ptr + offs_row[:, None] * stride_x_row + offs_c[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / C
    centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / C + eps)
    y = centered * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]

    tl.store(mean_ptr + offs_row, mean, mask=mask_row)
    tl.store(rstd_ptr + offs_row, rstd, mask=mask_row)
    y_ptrs = y_ptr + offs_row[:, None] * C + offs_c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_bwd_kernel(
    dx_ptr, partial_ptr, dy_ptr, dresidual_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,
    num_rows, C, stride_dy_row, stride_dresidual_row, stride_x_row,
    HAS_WEIGHT: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, NEEDS_DPARAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Program p takes row blocks p, p + P, p + 2P, ... and keeps its share of dweight and dbias.
    pid = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]

    for row in range(pid * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        offs_row = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_row = offs_row < num_rows
        mask = mask_row[:, None] & mask_c[None, :]
        x_ptrs = x_ptr + offs_row[:, None] * stride_x_row + offs_c[None, :]
        dy_ptrs = dy_ptr + offs_row[:, None] * stride_dy_row + offs_c[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + offs_row, mask=mask_row, other=0.0)
        rstd = tl.load(rstd_ptr + offs_row, mask=mask_row, other=0.0)

        xhat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        g = dy * weight if HAS_WEIGHT else dy
        mean_g = tl.sum(g, axis=1) / C
        mean_g_xhat = tl.sum(g * xhat, axis=1) / C
        dx = rstd[:, None] * (g - mean_g[:, None] - xhat * mean_g_xhat[:, None])
        if HAS_DRESIDUAL:
            dresidual_ptrs = dresidual_ptr + offs_row[:, None] * stride_dresidual_row
            dx += tl.load(dresidual_ptrs + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        dx_ptrs = dx_ptr + offs_row[:, None] * C + offs_c[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DPARAMS:
            dweight += dy * xhat
            dbias += dy

    if NEEDS_DPARAMS:  # partial[p] = [dweight (C) | dbias (C)]
        partial_ptrs = partial_ptr + pid * 2 * C + offs_c
        tl.store(partial_ptrs, tl.sum(dweight, axis=0), mask=mask_c)
        tl.store(partial_ptrs + C, tl.sum(dbias, axis=0), mask=mask_c)


def _config(configs: dict[int, tuple[int, int]], C: int) -> tuple[int, int, int]:
    block_c = max(64, triton.next_power_of_2(C))
    return block_c, *configs.get(block_c, LARGE_CONFIG)


def _empty_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1]
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    return y, mean, torch.empty_like(mean)


@operator(
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType out_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_empty_fwd,
)
def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., C) -> y (..., C) in out_dtype, mean and rstd (...) fp32."""
    y, mean, rstd = _empty_fwd(x, weight, bias, eps, out_dtype)
    if x.numel() == 0:
        return y, mean, rstd
    rows = as_rows(x)
    num_rows, C = rows.shape
    block_c, block_rows, num_warps = _config(FWD_CONFIGS, C)
    with torch.cuda.device_of(x):
        _layer_norm_fwd_kernel[(triton.cdiv(num_rows, block_rows),)](
            y, mean, rstd, rows, weight, bias, num_rows, C, rows.stride(0), eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            BLOCK_ROWS=block_rows, BLOCK_C=block_c, num_warps=num_warps,
        )  # fmt: skip
    return y, mean, rstd


def _empty_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, param_dtype: torch.dtype, needs_dparams: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    C = x.shape[-1] if needs_dparams else 0
    return dx, torch.empty((2, C), dtype=param_dtype, device=x.device)


@operator(
    "(Tensor dy, Tensor? dresidual, Tensor x, Tensor? weight, Tensor mean, Tensor rstd,"
    " ScalarType param_dtype, bool needs_dparams) -> (Tensor, Tensor)",
    fake=_empty_bwd,
)
def layer_norm_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, param_dtype: torch.dtype, needs_dparams: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients: dx (..., C) in x.dtype; dparams (2, C), dweight above dbias, in param_dtype."""
    dx, dparams = _empty_bwd(dy, dresidual, x, weight, mean, rstd, param_dtype, needs_dparams)
    if x.numel() == 0:
        return dx, dparams.zero_()
    rows, dy_rows = as_rows(x), as_rows(dy)
    dresidual_rows = None if dresidual is None else as_rows(dresidual)
    num_rows, C = rows.shape
    block_c, block_rows, num_warps = _config(BWD_CONFIGS, C)
    programs = min(triton.cdiv(num_rows, block_rows), BWD_PROGRAMS_PER_SM * num_sms(x.device))
    partial_shape = (programs, 2 * C) if needs_dparams else (0,)
    partial = torch.empty(partial_shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _layer_norm_bwd_kernel[(programs,)](
            dx, partial, dy_rows, dresidual_rows, rows, weight, mean, rstd, num_rows, C,
            dy_rows.stride(0), 0 if dresidual_rows is None else dresidual_rows.stride(0),
            rows.stride(0),
            HAS_WEIGHT=weight is not None, HAS_DRESIDUAL=dresidual is not None,
            NEEDS_DPARAMS=needs_dparams,
            BLOCK_ROWS=block_rows, BLOCK_C=block_c, num_warps=num_warps,
        )  # fmt: skip
    if needs_dparams:
        column_sum(partial, dparams.view(-1))
    return dx, dparams


class LayerNormFunction(torch.autograd.Function):
    """(x, weight, bias) -> (y, x): the second output is x itself, handed on to the residual.

    Its gradient arrives beside dy and is added inside the backward kernel, where autograd would
    launch an add over (rows, C) of its own.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, out_dtype):
        y, mean, rstd = layer_norm_fwd(x, weight, bias, eps, out_dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        param = weight if weight is not None else bias
        ctx.param_dtype = torch.float32 if param is None else param.dtype
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dresidual):
        if dy is None:
            return dresidual, None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        _, needs_dweight, needs_dbias, _, _ = ctx.needs_input_grad
        needs_dparams = needs_dweight or needs_dbias
        dx, dparams = layer_norm_bwd(
            dy, dresidual, x, weight, mean, rstd, ctx.param_dtype, needs_dparams
        )
        dweight = dparams[0] if needs_dweight else None
        dbias = dparams[1] if needs_dbias else None
        return dx, dweight, dbias, None, None


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Raise on bad arguments; return what the kernels cannot do, if anything."""
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a scalar")
    C = x.shape[-1]
    check_shape(op, "weight", weight, (C,), like=x)
    check_shape(op, "bias", bias, (C,), like=x)
    return None if 0 < C <= MAX_C else f"C must be from 1 to {MAX_C}, got {C}"


def layer_norm_and_input(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm that hands its input on: returns (`layer_norm(x, ...)`, x).

    For a pre-norm branch, `y, x = layer_norm_and_input(x, ...); x = x + branch(y)`: the residual's
    gradient is then added inside the LayerNorm's backward kernel. Arguments as for `layer_norm`.
    """
    unsupported = _check("layer_norm_and_input", x, weight, bias)
    if out_dtype is None:
        out_dtype = x.dtype if autocast_dtype(x) is None else torch.float32
    if use_triton("layer_norm", x, unsupported):
        return LayerNormFunction.apply(x, weight, bias, eps, out_dtype)
    return layer_norm_ref(x, weight, bias, eps, out_dtype), x


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """LayerNorm over the last axis.

    y = (x - mean(x)) * (var(x) + eps)**-0.5 * weight + bias

    Args:
        x: (..., C), fp16, bf16 or fp32, any strides (a last axis that is not contiguous is copied).
        weight, bias: (C,), any of these dtypes, or None for 1 and 0.
        eps: added to the variance, in squared units of x. timm and torchvision 1e-6, HF ViT 1e-12.
        out_dtype: dtype of the result. Default x.dtype; fp32 under autocast, as torch's own.
    Returns:
        (..., C) in out_dtype.
    Precision: statistics, sums and dweight/dbias partials fp32, whatever the dtypes.
    Saved: x, mean, rstd (fp32, x.shape[:-1]).
    Raises: ValueError, such as "layer_norm: weight must have shape (768,), got (384,)"; TypeError.
    Source: arXiv:1607.06450. Specification: layer_norm_ref. Derivation: docs/layer_norm.md.
    """
    return layer_norm_and_input(x, weight, bias, eps, out_dtype=out_dtype)[0]
