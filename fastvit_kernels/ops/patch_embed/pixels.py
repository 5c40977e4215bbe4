"""Where the kernels of patch_embed find the pixels of a patch, and what they read there."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import tl, triton


class Images(NamedTuple):
    """(B, channels, [frames,] height, width) in memory, in a grid of patches."""

    ptr: Any
    stride_b: Any
    stride_c: Any
    stride_t: Any
    stride_h: Any
    stride_w: Any
    grid_h: Any
    grid_w: Any


@triton.jit
def fenced(tile, mask, FENCE: tl.constexpr):
    """The tile, which is 0 outside the mask, by way of registers where FENCE.

    wgmma reads shared memory through the async proxy, cp.async writes it through the generic one,
    and before 3.7.1 triton fences only what registers wrote (triton #9610, #10537). One operand
    that passes registers brings the fence for both; one that is cast passes them anyway.
    """
    return tl.where(mask, tile, 0.0) if FENCE else tile


@triton.jit
def split_rows(row, rows_per_image, BLOCK_M: tl.constexpr):
    """(image int64, row of the image int32) of rows row ... row + BLOCK_M - 1."""
    # One scalar int64 division; those of the vector fit in int32 and are cheap.
    i = tl.cast(row % rows_per_image, tl.int32) + tl.arange(0, BLOCK_M)
    b = tl.cast(row // rows_per_image, tl.int64) + i // rows_per_image
    return b, i % rows_per_image


@triton.jit
def kept_patches(keep_ptr, offs, mask, num_patches):
    """(patch int32, whether the image has it) at these places of the list; 0 where it has not."""
    p = tl.load(keep_ptr + offs, mask=mask, other=0)
    is_there = (p >= 0) & (p < num_patches)
    return tl.where(is_there, p, 0).to(tl.int32), is_there


@triton.jit
def patch_offset(
    images,
    b,
    p,
    PATCH_T: tl.constexpr,
    PATCH_H: tl.constexpr,
    PATCH_W: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Offset of the first pixel of patch p of image b, int64."""
    row, column = p // images.grid_w, (p % images.grid_w).to(tl.int64) * PATCH_W
    offset = b * images.stride_b + column * images.stride_w
    if PATCH_T is not None:
        offset += (row // images.grid_h).to(tl.int64) * PATCH_T * images.stride_t
        row = row % images.grid_h
    return tl.multiple_of(offset + row.to(tl.int64) * PATCH_H * images.stride_h, ALIGN)


@triton.jit
def pixel_offset(
    images,
    offs_k,
    PATCH_T: tl.constexpr,
    PATCH_H: tl.constexpr,
    PATCH_W: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Offset of pixel k from its patch's first pixel, int64: runs of PATCH_W neighbours."""
    row = (offs_k // PATCH_W % PATCH_H).to(tl.int64)
    offset = row * images.stride_h + (offs_k % PATCH_W).to(tl.int64) * images.stride_w
    channel = offs_k // (PATCH_H * PATCH_W)  # and frame
    if PATCH_T is not None:
        offset += (channel % PATCH_T).to(tl.int64) * images.stride_t
        channel = channel // PATCH_T
    return tl.multiple_of(offset + channel.to(tl.int64) * images.stride_c, ALIGN)
