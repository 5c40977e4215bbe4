"""RMSNorm over the last axis, and its variant that hands its input on.

    y = x * rstd * weight,   rstd = (sum(x^2) / C + eps)**-0.5

With xhat = x * rstd and g = dy * weight:

    dx      = rstd * (g - xhat * mean_C(g * xhat))  [+ dresidual]
    dweight = sum_rows dy * xhat

Saved: x, and rstd (fp32, one a row).
Precision: fp32 from the load to the store, weight included, and one rounding, as torch's rms_norm
(transformers' classes round x * rstd to x.dtype before the weight: one rounding more). fp32
partials for dweight, one row a program, summed in a fixed order by a second kernel. No atomics.
Where a linear layer gave x, the backward leaves d and sum_rows d with it, as layer_norm's does:
common/handover.py.
`rms_norm_and_input` norms some samples alone where it is told which (common/samples.py): y and dy
have their rows, x and dx those of all.
Source: arXiv:1910.07467. Derivation: docs/rms_norm.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import (
    Layout,
    as_dtype,
    autocast_dtype,
    check_dtype,
    check_eps,
    check_input,
    check_samples,
    check_shape,
    contiguous,
    empty_strided,
    layout,
    needs_gradient,
    row_stride,
)
from ..runtime.backend import Gpu, device_guard, gpu
from ..runtime.configs import launch_plan
from ..runtime.dispatch import decide_once, first_order, ops_for, route
from ..runtime.operator import Routed, differentiable, operator
from ..runtime.triton import tl, triton
from .common.handover import dtype_of_sums, hand, reader_of
from .common.reduction import column_sum
from .common.rows import (
    MAX_C,
    block_width,
    bwd_programs,
    bwd_stages,
    load_rows,
    norm_tables,
    rows_to_hand_over,
)
from .common.samples import compact_rows, keeps_some, kept_rows, kept_shape, shape_of_d, stream_rows

_compiling = torch.compiler.is_compiling


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The specification of `rms_norm`: torch's own, in x.dtype, then one cast."""
    weight = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(out_dtype or x.dtype)


FWD_TABLE, BWD_TABLE = norm_tables("rms_norm")


@triton.jit
def _rms_norm_fwd_kernel(
    y_ptr, rstd_ptr, x_ptr, weight_ptr, samples_ptr,
    num_rows, C, rows_per_sample, stride_x_row, eps,
    HAS_WEIGHT: tl.constexpr, SAVE_STATS: tl.constexpr, SOME: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid_rows = tl.program_id(0).to(tl.int64)
    offs_row = pid_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_c = tl.arange(0, BLOCK_C)
    mask_row, mask_c = offs_row < num_rows, offs_c < C
    mask = mask_row[:, None] & mask_c[None, :]

    rows_x = offs_row
    if SOME:
        rows_x = stream_rows(samples_ptr, offs_row, mask_row, rows_per_sample)
    x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)
    if HAS_WEIGHT:  # on its way during the sum
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= weight.to(tl.float32)[None, :]

    if SAVE_STATS:
        tl.store(rstd_ptr + offs_row, rstd, mask=mask_row)
    y_ptrs = y_ptr + offs_row[:, None] * C + offs_c[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    dx_ptr, d_ptr, partial_ptr, dy_ptr, dresidual_ptr, x_ptr, weight_ptr, rstd_ptr, row_scale_ptr,
    samples_ptr, num_rows, C, rows_per_sample, num_kept, num_kept_of_d,
    stride_dy_row, stride_dresidual_row, stride_x_row, keep_scale,
    HAS_WEIGHT: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, WRITE_D: tl.constexpr, SUM_D: tl.constexpr,
    SOME: tl.constexpr, SOME_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Program p takes row blocks p, p + P, p + 2P, ... and keeps its share of the sums over rows.
    pid = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    sum_d = tl.zeros((BLOCK_ROWS, BLOCK_C), dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]

    step = tl.num_programs(0) * BLOCK_ROWS
    for row in tl.range(pid * BLOCK_ROWS, num_rows, step, num_stages=STAGES):
        offs_row = row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask_row = offs_row < num_rows
        mask = mask_row[:, None] & mask_c[None, :]
        rows_dy, mask_dy = offs_row, mask_row
        if SOME:  # other samples load zeros, which leave dresidual
            rows_dy, mask_dy = compact_rows(
                samples_ptr, num_kept, offs_row, mask_row, rows_per_sample
            )  # fmt: skip
        mask_x = mask_dy[:, None] & mask_c[None, :]
        x = load_rows(x_ptr, offs_row, stride_x_row, offs_c, mask_x)
        dy = load_rows(dy_ptr, rows_dy, stride_dy_row, offs_c, mask_x)
        if HAS_DRESIDUAL:
            dresidual = load_rows(dresidual_ptr, offs_row, stride_dresidual_row, offs_c, mask)
        rstd = tl.load(rstd_ptr + rows_dy, mask=mask_dy, other=0.0)

        xhat = x * rstd[:, None]
        g = dy * weight if HAS_WEIGHT else dy
        mean_g_xhat = tl.sum(g * xhat, axis=1) / C
        dx = rstd[:, None] * (g - xhat * mean_g_xhat[:, None])
        if HAS_DRESIDUAL:
            dx += dresidual
        offs = offs_row[:, None] * C + offs_c[None, :]
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask)
        if WRITE_D or SUM_D:
            d = rows_to_hand_over(
                d_ptr, dx, offs, mask, row_scale_ptr, offs_row, mask_row, rows_per_sample, C,
                num_kept_of_d, keep_scale, HAS_ROW_SCALE, SOME_D, WRITE_D,
            )  # fmt: skip
            if SUM_D:
                sum_d += d
        if NEEDS_DWEIGHT:
            dweight += dy * xhat

    if NEEDS_DWEIGHT or SUM_D:  # partial[p] = [dweight (C)] [sum d (C)]
        SUMS: tl.constexpr = NEEDS_DWEIGHT + SUM_D
        partial_ptrs = partial_ptr + pid * SUMS * C + offs_c
        if NEEDS_DWEIGHT:
            tl.store(partial_ptrs, tl.sum(dweight, axis=0), mask=mask_c)
            partial_ptrs += C
        if SUM_D:
            tl.store(partial_ptrs, tl.sum(sum_d, axis=0), mask=mask_c)


class FwdPlan(NamedTuple):
    """All that a forward launch derives from the kind of its arguments."""

    launch: Callable[..., Any] | None  # the kernel on its grid; None where x is empty
    sizes: tuple[int, int, int, int, float]  # rows of y, C, rows a sample, row stride of x, eps
    options: dict[str, Any]
    y: Layout
    rstd: Layout
    copies_x: bool  # its rows are no view


@launch_plan
def _fwd_plan(
    gpu: Gpu, shape: tuple[int, ...], strides: tuple[int, ...], has_weight: bool, eps: float,
    save_stats: bool, num_samples: int,
) -> FwdPlan:  # fmt: skip
    stride = row_stride(shape, strides)
    some = num_samples > 0
    shape = (num_samples - shape[0], *shape[1:]) if some else shape
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = FWD_TABLE.choose(gpu, block_c)
    grid = (triton.cdiv(num_rows, config.block_rows),)
    return FwdPlan(
        launch=_rms_norm_fwd_kernel[grid] if num_rows * C else None,
        sizes=(
            num_rows, C, math.prod(shape[1:-1]) if some else 0, C if stride is None else stride, eps
        ),
        options=dict(
            HAS_WEIGHT=has_weight, SAVE_STATS=save_stats, SOME=some,
            BLOCK_ROWS=config.block_rows, BLOCK_C=block_c, num_warps=config.num_warps,
        ),
        y=layout(shape),
        rstd=layout(shape[:-1] if save_stats else (0,)),
        copies_x=stride is None,
    )  # fmt: skip


def _empty_fwd(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, save_stats: bool,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = kept_shape(x, samples)
    rstd_shape = shape[:-1] if save_stats else (0,)
    return x.new_empty(shape, dtype=out_dtype), x.new_empty(rstd_shape, dtype=torch.float32)


@operator(fake=_empty_fwd)
def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype, save_stats: bool,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(..., C) -> y (..., C) in out_dtype, rstd (...) fp32; empty if not saved.

    Both of the samples of x that `samples` keeps, where it is given.
    """
    device = x.device
    launch, sizes, options, y_layout, rstd_layout, copies_x = _fwd_plan(
        gpu(device), x.shape, x.stride(), weight is not None, eps, save_stats,
        0 if samples is None else samples.shape[0],
    )  # fmt: skip
    y = empty_strided(*y_layout, dtype=out_dtype, device=device)
    rstd = empty_strided(*rstd_layout, dtype=torch.float32, device=device)
    if launch is not None:
        if copies_x:
            x = x.contiguous()
        with device_guard(x):
            launch(y, rstd, x, contiguous(weight), contiguous(samples), *sizes, **options)
    return y, rstd


class BwdPlan(NamedTuple):
    """All that a backward launch derives from the kind of its arguments."""

    launch: Callable[..., Any] | None  # the kernel on its grid; None where x is empty
    # rows of x, C, rows a sample, samples kept of dy and d, row strides of dy, dresidual and x,
    # factor of kept samples in d
    sizes: tuple[float, ...]
    copies: tuple[bool, ...]  # whose rows are no view: of dy, dresidual and x
    options: dict[str, Any]
    dx: Layout
    sums: Layout
    partial: Layout


@launch_plan
def _bwd_plan(
    gpu: Gpu, shape: tuple[int, ...], has_weight: bool, needs_dweight: bool, has_row_scale: bool,
    writes_d: bool, sums_d: bool, num_samples: int, num_samples_of_d: int,
    *strides: tuple[int, ...] | None,
) -> BwdPlan:  # fmt: skip
    C, num_rows = shape[-1], math.prod(shape[:-1])
    block_c = block_width(C)
    config = BWD_TABLE.choose(gpu, block_c)
    programs = bwd_programs(gpu, config, num_rows, writes_d or sums_d, has_row_scale)
    B = max(1, shape[0])
    kept, kept_of_d = (max(0, n - B) for n in (num_samples, num_samples_of_d))
    shape_of_dy = (kept, *shape[1:]) if kept else shape
    row_strides = [
        0 if s is None else row_stride(shape_of_dy if i == 0 else shape, s)
        for i, s in enumerate(strides)
    ]
    sums = needs_dweight + sums_d
    return BwdPlan(
        launch=_rms_norm_bwd_kernel[(programs,)] if num_rows * C else None,
        sizes=(
            num_rows, C, num_rows // B, kept, kept_of_d,
            *(C if s is None else s for s in row_strides), B / kept_of_d if kept_of_d else 1.0,
        ),
        copies=tuple(stride is None for stride in row_strides),
        options=dict(
            HAS_WEIGHT=has_weight, HAS_DRESIDUAL=strides[1] is not None,
            NEEDS_DWEIGHT=needs_dweight, HAS_ROW_SCALE=has_row_scale and not kept_of_d,
            WRITE_D=writes_d, SUM_D=sums_d, SOME=kept > 0, SOME_D=kept_of_d > 0,
            BLOCK_ROWS=config.block_rows, BLOCK_C=block_c,
            STAGES=bwd_stages(config, block_c, kept + kept_of_d > 0), num_warps=config.num_warps,
        ),
        dx=layout(shape),
        sums=layout((sums, C)),
        partial=layout((programs, sums * C)),
    )  # fmt: skip


def _launch_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    sum_dtype: torch.dtype, needs_dweight: bool, d: Tensor | None = None,
    row_scale: Tensor | None = None, needs_g: bool = False, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and sums; d is written where it is not None."""
    device = x.device
    launch, sizes, copies, options, dx_layout, sums_layout, partial_layout = _bwd_plan(
        gpu(device), x.shape, weight is not None, needs_dweight, row_scale is not None,
        d is not None, needs_g, 0 if samples is None else samples.shape[0],
        row_scale.shape[0] if keeps_some(row_scale) else 0,
        dy.stride(), None if dresidual is None else dresidual.stride(), x.stride(),
    )  # fmt: skip
    dx = empty_strided(*dx_layout, dtype=x.dtype, device=device)
    sums = empty_strided(*sums_layout, dtype=sum_dtype, device=device)
    if launch is None:
        return dx, sums.zero_()
    rows = (dy, dresidual, x)
    if any(copies):
        rows = [contiguous(t) if c else t for t, c in zip(rows, copies, strict=True)]
    partial = None
    if needs_dweight or needs_g:
        partial = empty_strided(*partial_layout, dtype=torch.float32, device=device)
    with device_guard(x):
        launch(
            dx, d, partial, *rows, contiguous(weight), contiguous(rstd), contiguous(row_scale),
            contiguous(samples), *sizes, **options,
        )  # fmt: skip
    if partial is not None:
        column_sum(partial, sums)
    return dx, sums


def _empty_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    weight_dtype: torch.dtype, needs_dweight: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty((int(needs_dweight), x.shape[-1]), dtype=weight_dtype)


@operator(fake=_empty_bwd)
def rms_norm_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    weight_dtype: torch.dtype, needs_dweight: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients: dx (..., C) in x.dtype; dweight (1, C) in weight_dtype, or (0, C)."""
    return _launch_bwd(dy, dresidual, x, weight, rstd, weight_dtype, needs_dweight, samples=samples)


def _empty_rows_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    sum_dtype: torch.dtype, needs_dweight: bool, d_dtype: torch.dtype | None,
    row_scale: Tensor | None, needs_g: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums_shape = (needs_dweight + needs_g, x.shape[-1])
    return (
        x.new_empty(x.shape), x.new_empty(sums_shape, dtype=sum_dtype),
        x.new_empty((0,) if d_dtype is None else shape_of_d(x, row_scale), dtype=d_dtype),
    )  # fmt: skip


@operator(fake=_empty_rows_bwd)
def rms_norm_rows_bwd(
    dy: Tensor, dresidual: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    sum_dtype: torch.dtype, needs_dweight: bool, d_dtype: torch.dtype | None,
    row_scale: Tensor | None, needs_g: bool, samples: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`rms_norm_bwd`, and what the linear layer reads that gave x.

    Returns: dx; sums in sum_dtype, of the rows dweight, sum_rows d those that are needed;
        d = row_scale * dx (..., C) in d_dtype, empty where that is None.
    """
    d = x.new_empty((0,) if d_dtype is None else shape_of_d(x, row_scale), dtype=d_dtype)
    dx, sums = _launch_bwd(
        dy, dresidual, x, weight, rstd, sum_dtype, needs_dweight,
        None if d_dtype is None else d, row_scale, needs_g, samples,
    )  # fmt: skip
    return dx, sums, d


class RmsNormDecision(NamedTuple):
    """What `_decide` found for a kind of call."""

    ops: Routed | None  # None: the specification runs
    needs_gradient: bool
    eps: float
    out_dtype: torch.dtype
    weight_dtype: torch.dtype


@differentiable
class RmsNormFunction(torch.autograd.Function):
    """(x, weight) -> y."""

    @staticmethod
    def forward(ctx, x, weight, decision, samples=None):
        y, rstd = decision.ops.rms_norm_fwd(
            x, weight, decision.eps, decision.out_dtype, True, samples
        )
        ctx.save_for_backward(x, weight, rstd, samples)
        ctx.decision = decision
        ctx.reader = reader_of(x)
        return y

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx, dy):
        return _backward(ctx, dy, None)[:3]


@differentiable
class RmsNormAndInputFunction(torch.autograd.Function):
    """(x, weight, samples) -> (y, x): the second output is x itself, handed on to the residual.

    Its gradient arrives beside dy and is added inside the backward kernel, as in layer_norm.
    """

    @staticmethod
    def forward(ctx, x, weight, decision, samples):
        ctx.set_materialize_grads(False)
        return RmsNormFunction.forward(ctx, x, weight, decision, samples), x.view_as(x)

    @staticmethod
    @first_order("rms_norm_and_input")
    def backward(ctx, dy, dresidual):
        if dy is None:
            return dresidual, None, None, None
        return _backward(ctx, dy, dresidual)


def _backward(ctx: Any, dy: Tensor, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, rstd, samples = ctx.saved_tensors
    needs_dweight, weight_dtype = ctx.needs_input_grad[1], ctx.decision.weight_dtype
    ops, reader = ops_for(ctx.decision.ops, dy, dresidual), ctx.reader
    if reader is None or _compiling():
        dx, sums = ops.rms_norm_bwd(
            dy, dresidual, x, weight, rstd, weight_dtype, needs_dweight, samples
        )
    else:
        d_dtype, g_dtype = reader.reads
        dx, sums, d = ops.rms_norm_rows_bwd(
            dy, dresidual, x, weight, rstd, dtype_of_sums(reader, weight_dtype), needs_dweight,
            d_dtype, reader.row_scale, g_dtype is not None, samples,
        )  # fmt: skip
        hand(reader, dx, d, sums)
    return dx, as_dtype(sums[0], weight_dtype) if needs_dweight else None, None, None


@decide_once
def _decide(
    x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype | None, op: str,
    samples: Tensor | None, ops: Routed,
) -> RmsNormDecision:  # fmt: skip
    """Check the arguments; what runs, and how."""
    check_input(op, x)
    if samples is not None:
        check_samples(op, x, samples)
    C = x.shape[-1]
    check_shape(op, "weight", weight, (C,), like=x)
    check_eps(op, eps)
    check_dtype(op, "out_dtype", out_dtype)
    unsupported = None if 0 < C <= MAX_C else f"C must be from 1 to {MAX_C}, got {C}"
    if out_dtype is None:  # a CPU's autocast leaves rms_norm alone
        widens = autocast_dtype(x) is not None and x.device.type != "cpu"
        out_dtype = torch.float32 if widens else x.dtype
    return RmsNormDecision(
        route("rms_norm", ops, unsupported, x, weight, samples), needs_gradient(x, weight), eps,
        out_dtype, torch.float32 if weight is None else weight.dtype,
    )  # fmt: skip


def rms_norm_and_input(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
    samples: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm that hands its input on: returns (`rms_norm(x, ...)`, x).

    For a pre-norm branch, `y, x = rms_norm_and_input(x, ...); x = x + branch(y)`: the residual's
    gradient is then added inside the norm's backward kernel. Arguments as for `rms_norm`; samples
    as for `layer_norm_and_input`.
    """
    decision = _decide(x, weight, eps, out_dtype, "rms_norm_and_input", samples)
    ops, needs_gradient, _, out_dtype, _ = decision
    if ops is None:
        some = x if samples is None else kept_rows(x, samples)
        return rms_norm_ref(some, weight, eps, out_dtype), x
    if not needs_gradient:
        return ops.rms_norm_fwd(x, weight, eps, out_dtype, False, samples)[0], x
    return ops.RmsNormAndInputFunction(x, weight, decision, samples)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMSNorm over the last axis.

    y = x * (mean(x^2) + eps)**-0.5 * weight

    Args:
        x: (..., C), fp16, bf16 or fp32, any strides (a last axis that is not contiguous is copied).
            (B, T, H D) for a norm of queries over all heads, (B, T, H, D) for one of each head.
        weight: (C,), any of these dtypes, or None for 1.
        eps: added to the mean square, in squared units of x. AIMv2 1e-5, the other towers 1e-6.
        out_dtype: dtype of the result. Default x.dtype; fp32 under a GPU's autocast,
            as torch's own.
    Returns:
        (..., C) in out_dtype.
    Precision: fp32 until the store, the product with weight included; dweight's partials fp32.
    Saved: x, and rstd (fp32, x.shape[:-1]); nothing where no gradient is wanted.
    Raises: ValueError, such as "rms_norm: weight must have shape (768,), got (384,)"; TypeError.
    Source: arXiv:1910.07467. Specification: rms_norm_ref. Derivation: docs/rms_norm.md.
    """
    decision = _decide(x, weight, eps, out_dtype, "rms_norm", None)
    ops, needs_gradient, _, out_dtype, _ = decision
    if ops is None:
        return rms_norm_ref(x, weight, eps, out_dtype)
    if not needs_gradient:
        return ops.rms_norm_fwd(x, weight, eps, out_dtype, False)[0]
    return ops.RmsNormFunction(x, weight, decision)
