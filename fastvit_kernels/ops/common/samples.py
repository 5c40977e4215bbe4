"""Branches of some samples only: stochastic depth that computes nothing for what it drops.

    index    the S samples that a branch keeps, in the order of its compact tensors (S, ..., C)
    place    of each of the B samples, its number among the kept; S or more where it is dropped
    samples  both in one tensor, (S + B,) int64: index, then place

S is fixed by B and the rate, so shapes are known without a look at the numbers: nothing waits for
the device. A norm loads the rows of `index` and its backward reads by `place`; the epilogue of the
branch's last product writes by `index`, in place of a row_scale, with the factor B / S.
Source: DINOv2's drop_add_residual_stochastic_depth. Derivation: docs/drop_path.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from ...runtime.arguments import check_int, check_probability, empty
from ...runtime.compat import FakeTensor, needs_dispatcher
from ...runtime.dispatch import choose_route
from ...runtime.operator import EAGER, REGISTERED, operator
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from ...runtime.values import values_are_checked

DropPathMode = Literal["mask", "skip"]

# Tile of rows of one sample and columns, warps. Not yet measured.
_PASS_TILE = dict(BLOCK_R=16, BLOCK_N=128, num_warps=4)
_PLACE_TILE = dict(BLOCK_B=128, num_warps=4)  # samples


def num_kept(B: int, rate: float) -> int:
    """How many of B samples a branch keeps, DINOv2's and DINOv3's count."""
    return max(int(B * (1 - rate)), 1)


def keep_samples(B: int, rate: float, device: torch.device | str | None = None) -> Tensor:
    """Draw the samples that a branch keeps, as DINOv2 and DINOv3 do: the first of torch.randperm.

    Args:
        B: samples of the batch, at least 1.
        rate: the share that is dropped, in [0, 1].
        device: of the result; the numbers are drawn there, without a sync.
    Returns:
        (S + B,) int64, S = max(int(B (1 - rate)), 1): for `samples` of `layer_norm_and_input` and
        `rms_norm_and_input`, and for `row_scale` of `linear`, `mlp` and `gated_mlp`.
    Raises: ValueError, such as "keep_samples: B must be at least 1, got 0"; TypeError.
    """
    check_int("keep_samples", "B", B)
    check_probability("keep_samples", "rate", rate)
    order, kept = torch.randperm(B, device=device), num_kept(B, rate)
    like = torch.empty(0, dtype=torch.float32, device=order.device)
    route = choose_route("keep_samples", None, like)
    if route is not None:
        return place_samples[REGISTERED if needs_dispatcher() else EAGER](order, kept)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(B, device=order.device))
    return torch.cat((order[:kept], place))


@triton.jit(**ANY_BATCH)
def _place_samples_kernel(samples_ptr, order_ptr, num_kept, B, BLOCK_B: tl.constexpr):
    # Program i writes the places of a tile of the order, and its kept samples.
    offs = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = offs < B
    sample = tl.load(order_ptr + offs, mask=mask, other=0)
    tl.store(samples_ptr + offs, sample, mask=offs < num_kept)
    tl.store(samples_ptr + num_kept + sample, offs.to(tl.int64), mask=mask)


def _empty_samples(order: Tensor, num_kept: int) -> Tensor:
    return empty((num_kept + order.shape[0],), order.dtype, order.device)


@operator(fake=_empty_samples)
def place_samples(order: Tensor, num_kept: int) -> Tensor:
    """Of a permutation of B samples, the kept ones first: what `keep_samples` returns."""
    samples, B = _empty_samples(order, num_kept), order.shape[0]
    grid = (triton.cdiv(B, _PLACE_TILE["BLOCK_B"]),)
    bind_launch(_place_samples_kernel, grid, **_PLACE_TILE)(samples, order, num_kept, B)
    return samples


def is_sample_subset(row_scale: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a row_scale is what `keep_samples` gave."""
    return row_scale is not None and row_scale.dtype is torch.int64


def check_drawn(op: str, samples: Tensor | None, whole: Tensor | None) -> None:
    """Inside `checked_values`: raise unless keep_samples can have given these numbers for the
    samples of `whole`. A row_scale of factors is left alone."""
    if not values_are_checked() or whole is None or not is_sample_subset(samples):
        return
    if isinstance(samples, FakeTensor):
        return
    B, given = whole.shape[0], samples.tolist()
    S = len(given) - B
    place = given[S:]
    if sorted(place) != list(range(B)) or given[:S] != [place.index(i) for i in range(S)]:
        raise ValueError(
            f"{op}: the kept samples must be what keep_samples gave for {B} samples, got {given}"
        )


def kept_shape(x: Tensor, samples: Tensor | None) -> Sequence[int]:
    """The shape of the kept samples of x; of x itself without `samples`."""
    return x.shape if samples is None else (samples.shape[0] - x.shape[0], *x.shape[1:])


def shape_of_d(x: Tensor, row_scale: Tensor | None) -> Sequence[int]:
    """The shape of row_scale * dx, which a norm's backward leaves for the layer that made x."""
    return kept_shape(x, row_scale if is_sample_subset(row_scale) else None)


def kept_rows(x: Tensor, samples: Tensor) -> Tensor:
    """(B, ...) -> (S, ...), for specifications."""
    return x[samples[: samples.shape[0] - x.shape[0]]]


def add_branch(
    y: Tensor,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """residual + row_scale * layer_scale * y, by torch: what an epilogue does.

    Shapes: y and residual (B, ..., C), layer_scale (C,), row_scale (B,); where row_scale is what
    `keep_samples` gave, y (S, ..., C).
    """
    if layer_scale is not None:
        y = y * layer_scale
    if is_sample_subset(row_scale):
        assert residual is not None
        S, B = y.shape[0], residual.shape[0]
        dtype = torch.promote_types(residual.dtype, y.dtype)
        return residual.to(dtype).index_add(0, row_scale[:S], y.to(dtype), alpha=B / S)
    if row_scale is not None:
        y = y * row_scale.view(-1, *[1] * (y.ndim - 1))
    return y if residual is None else residual + y


@triton.jit
def stream_rows(samples_ptr, offs_row, mask_row, rows_per_sample):
    """Rows of (B, ...) of these rows of (S, ...)."""
    index = tl.load(samples_ptr + offs_row // rows_per_sample, mask=mask_row, other=0)
    return index * rows_per_sample + offs_row % rows_per_sample


@triton.jit
def compact_rows(samples_ptr, num_kept, offs_row, mask_row, rows_per_sample):
    """Rows of (S, ...) of these rows of (B, ...), fewer than 2^31, and which there are."""
    row = offs_row.to(tl.int32)
    sample = row // rows_per_sample
    place = tl.load(samples_ptr + num_kept + sample, mask=mask_row, other=num_kept)
    rows = place * rows_per_sample + (row - sample * rows_per_sample)
    return rows, mask_row & (place < num_kept)


@triton.jit(**ANY_BATCH)
def _pass_dropped_kernel(
    y_ptr,
    residual_ptr,
    samples_ptr,
    num_kept,
    rows_per_sample,
    N,
    stride_residual_m,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Program (b, r, n) copies a tile of sample b, if that is dropped.
    sample = tl.program_id(0).to(tl.int64)
    if tl.load(samples_ptr + num_kept + sample) >= num_kept:
        offs_r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_n = tl.program_id(2).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_r < rows_per_sample)[:, None] & (offs_n < N)[None, :]
        offs_m = sample * rows_per_sample + offs_r
        residual_ptrs = residual_ptr + offs_m[:, None] * stride_residual_m + offs_n[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
        tl.store(y_ptrs, residual.to(y_ptr.dtype.element_ty), mask=mask)


def pass_dropped(y: Tensor, residual: Tensor, samples: Tensor, stride_residual_m: int) -> None:
    """Copy the rows of dropped samples from residual to y, (B, ..., N) contiguous."""
    B, N = y.shape[0], y.shape[-1]
    rows = math.prod(y.shape[1:-1])
    S = samples.shape[0] - B
    if S == B or y.numel() == 0:
        return
    grid = (B, triton.cdiv(rows, _PASS_TILE["BLOCK_R"]), triton.cdiv(N, _PASS_TILE["BLOCK_N"]))
    launch = bind_launch(_pass_dropped_kernel, grid, **_PASS_TILE)
    launch(y, residual, samples, S, rows, N, stride_residual_m)
