"""The kernels of patch_embed: implicit matrix products over the pixels of an image's patches.

Rows m = b * T + t are tokens or patches, columns of C, and K = (channel, row, column) runs over the
pixels of a patch, read from the image by its strides: no unfolded copy. Derivation:
docs/patch_embed.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime.configs import ConfigTable
from ...runtime.triton import tl, triton


# Tiles: M rows (tokens or patches), N of C, K pixels of a patch. The operand that is cast stands
# right in every product: on Hopper the left one would then reach the tensor cores from registers,
# where pipelining it is a race (triton #9433), the right one always from shared memory.
class PatchConfig(NamedTuple):
    """Largest tile, warps and pipeline stages; small problems shrink the tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Of the launch."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


def _table(name: str, half: list[PatchConfig], fp32: list[PatchConfig]) -> ConfigTable[PatchConfig]:
    """Key: the compute dtype. The default: the first config."""
    by_dtype = {"fp16": half, "bf16": half, "fp32": fp32}
    return ConfigTable(
        name, [*half, *fp32], lambda gpu, dtype: by_dtype[dtype][0],
        lambda gpu, config, dtype: config in by_dtype[dtype],
    )  # fmt: skip


# 128 rows by 8 warps: with 64 rows all of them cast the same pixels (model of docs/compile.md on
# sm_90: 193 us instead of 122 for ViT-S). Not yet measured.
FWD_TABLE = _table(
    "patch_embed_fwd",
    [
        PatchConfig(128, 128, 64, 8, 3),
        PatchConfig(64, 128, 64, 8, 3),
        PatchConfig(64, 128, 64, 4, 3),
    ],
    [PatchConfig(64, 64, 32, 4, 3)],
)
BWD_WEIGHT_TABLE = _table(
    "patch_embed_bwd_weight",
    [PatchConfig(64, 128, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
    [PatchConfig(32, 64, 64, 4, 3)],
)
BWD_IMAGES_TABLE = _table(
    "patch_embed_bwd_images",
    [PatchConfig(64, 64, 128, 4, 3), PatchConfig(128, 64, 128, 8, 3)],
    [PatchConfig(64, 32, 64, 4, 3)],
)
STAGE_BYTES = 32 * 1024  # three stages fit in the 99 KB of shared memory of sm_86, 89, 120
TL_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
BWD_WEIGHT_PROGRAMS_PER_SM = 2
MIN_ROWS_PER_SPLIT = 512


@triton.jit
def _fenced(tile, mask, FENCE: tl.constexpr):
    """The tile, which is 0 outside the mask, by way of registers where FENCE.

    wgmma reads shared memory through the async proxy, cp.async writes it through the generic one,
    and before 3.7.1 triton fences only what registers wrote (triton #9610, #10537). One operand
    that passes registers brings the fence for both; one that is cast passes them anyway.
    """
    return tl.where(mask, tile, 0.0) if FENCE else tile


@triton.jit
def _split_rows(row, rows_per_image, BLOCK_M: tl.constexpr):
    """(image int64, row of the image int32) of rows row ... row + BLOCK_M - 1."""
    # One scalar int64 division; those of the vector fit in int32 and are cheap.
    i = tl.cast(row % rows_per_image, tl.int32) + tl.arange(0, BLOCK_M)
    b = tl.cast(row // rows_per_image, tl.int64) + i // rows_per_image
    return b, i % rows_per_image


@triton.jit
def _patch_offset(
    b, p, grid_w, stride_b, stride_h, stride_w,
    PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Offset of the first pixel of patch p of image b, int64."""
    row, column = (p // grid_w).to(tl.int64) * PATCH_H, (p % grid_w).to(tl.int64) * PATCH_W
    return tl.multiple_of(b * stride_b + row * stride_h + column * stride_w, ALIGN)


@triton.jit
def _pixel_offset(
    offs_k, stride_c, stride_h, stride_w,
    PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Offset of pixel k from its patch's first pixel, int64: runs of PATCH_W neighbours."""
    channel = (offs_k // (PATCH_H * PATCH_W)).to(tl.int64)
    row = (offs_k // PATCH_W % PATCH_H).to(tl.int64)
    column = (offs_k % PATCH_W).to(tl.int64)
    return tl.multiple_of(channel * stride_c + row * stride_h + column * stride_w, ALIGN)


# Sizes of the patch grid are never special: another image size needs no other kernel.
@triton.jit(do_not_specialize=["T", "grid_w"])
def _patch_embed_fwd_kernel(
    out_ptr, images_ptr, weight_ptr, bias_ptr, prefix_ptr, pos_ptr,
    num_rows, T, C, num_prefix, pos_start, grid_w,
    stride_images_b, stride_images_c, stride_images_h, stride_images_w,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_POS: tl.constexpr,
    FENCE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows m = b * T + t, prefix tokens included. The programs of one row block are neighbours, so
    # that its pixels come from DRAM once.
    K: tl.constexpr = CHANNELS * PATCH_H * PATCH_W
    pid = tl.program_id(0).to(tl.int64)
    blocks_n = tl.cdiv(C, BLOCK_N)
    row = pid // blocks_n * BLOCK_M
    offs_n = (pid % blocks_n).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)  # rows of this block
    b, t = _split_rows(row, T, BLOCK_M)
    mask_m, mask_n = offs_m < num_rows - row, offs_n < C
    is_patch = t >= num_prefix

    # The accumulator starts from what is added to the product: the loads come while registers are
    # free (in an epilogue they spill), and prefix rows, whose pixels are 0, are then complete.
    offs_token = offs_n[:, None] + t[None, :] * C
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        acc = tl.where(is_patch[None, :], bias[:, None], acc)
    if HAS_PREFIX:
        mask_prefix = mask_n[:, None] & (t < num_prefix)[None, :]
        acc += tl.load(prefix_ptr + offs_token, mask=mask_prefix, other=0.0).to(tl.float32)
    if HAS_POS:
        mask_pos = mask_n[:, None] & (t >= pos_start)[None, :]
        pos_ptrs = pos_ptr + offs_token - pos_start * C
        acc += tl.load(pos_ptrs, mask=mask_pos, other=0.0).to(tl.float32)

    offs_patch = _patch_offset(
        b, t - num_prefix, grid_w, stride_images_b, stride_images_h, stride_images_w,
        PATCH_H, PATCH_W, ALIGN,
    )  # fmt: skip
    patch_ptrs = images_ptr + offs_patch[None, :]
    mask_patch = (is_patch & mask_m)[None, :]
    # A column past C reads a row of weight that exists; the store drops what it gave.
    weight_ptrs = weight_ptr + tl.minimum(offs_n, C - 1)[:, None].to(tl.int64) * K
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        offs_pixel = _pixel_offset(
            offs_k, stride_images_c, stride_images_h, stride_images_w, PATCH_H, PATCH_W, ALIGN
        )
        pixel_ptrs = patch_ptrs + offs_pixel[:, None]
        if K % BLOCK_K == 0:
            weight = tl.load(weight_ptrs + offs_k[None, :])
            pixels = tl.load(pixel_ptrs, mask=mask_patch, other=0.0)
            pixels = _fenced(pixels, mask_patch, FENCE)
        else:
            mask_k = offs_k < K
            weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_k[None, :], other=0.0)
            mask = mask_k[:, None] & mask_patch
            pixels = _fenced(tl.load(pixel_ptrs, mask=mask, other=0.0), mask, FENCE)
        # Images are often fp32 under autocast: this cast replaces a pass over them.
        acc = tl.dot(weight, pixels.to(weight.dtype), acc, input_precision=INPUT_PRECISION)

    out_ptrs = out_ptr + row * C + (offs_n[:, None] + offs_m[None, :] * C)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["num_patches", "grid_w"])
def _patch_embed_bwd_weight_kernel(
    dweight_ptr, dout_ptr, images_ptr,
    num_rows, rows_per_split, C, num_prefix, num_patches, grid_w,
    stride_images_b, stride_images_c, stride_images_h, stride_images_w,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
    ALIGN: tl.constexpr, PIXELS_LEFT: tl.constexpr, FENCE: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows m = b * num_patches + p, patches only. Program (tile, s) sums row range s of one tile of
    # dweight, (BLOCK_K, BLOCK_N) where PIXELS_LEFT, else (BLOCK_N, BLOCK_K).
    K: tl.constexpr = CHANNELS * PATCH_H * PATCH_W
    blocks_k = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    offs_n = pid // blocks_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = pid % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_n, mask_k = offs_n < C, offs_k < K
    offs_pixel = _pixel_offset(
        offs_k, stride_images_c, stride_images_h, stride_images_w, PATCH_H, PATCH_W, ALIGN
    )
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    if PIXELS_LEFT:
        acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for row in range(first, last, BLOCK_M):
        offs_m = row + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < last
        b, p = _split_rows(row, num_patches, BLOCK_M)
        offs_patch = _patch_offset(
            b, p, grid_w, stride_images_b, stride_images_h, stride_images_w,
            PATCH_H, PATCH_W, ALIGN,
        )  # fmt: skip
        offs_dout = (offs_m + (b + 1) * num_prefix) * C  # b + 1 prefix groups stand before row m
        if PIXELS_LEFT:
            pixel_ptrs = images_ptr + offs_pixel[:, None] + offs_patch[None, :]
            pixels = tl.load(pixel_ptrs, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
            dout_ptrs = dout_ptr + offs_dout[:, None] + offs_n[None, :]
            mask = mask_m[:, None] & mask_n[None, :]
            dout = _fenced(tl.load(dout_ptrs, mask=mask, other=0.0), mask, FENCE)
            left, right = pixels.to(COMPUTE_DTYPE), dout.to(COMPUTE_DTYPE)
        else:
            dout_ptrs = dout_ptr + offs_n[:, None] + offs_dout[None, :]
            dout = tl.load(dout_ptrs, mask=mask_n[:, None] & mask_m[None, :], other=0.0)
            pixel_ptrs = images_ptr + offs_patch[:, None] + offs_pixel[None, :]
            mask = mask_m[:, None] & mask_k[None, :]
            pixels = _fenced(tl.load(pixel_ptrs, mask=mask, other=0.0), mask, FENCE)
            left, right = dout.to(COMPUTE_DTYPE), pixels.to(COMPUTE_DTYPE)
        acc = tl.dot(left, right, acc, input_precision=INPUT_PRECISION)
    dweight_ptr += split * C * K
    dweight = acc.to(dweight_ptr.dtype.element_ty)
    if PIXELS_LEFT:
        dweight_ptrs = dweight_ptr + offs_k[:, None] + offs_n[None, :].to(tl.int64) * K
        tl.store(dweight_ptrs, dweight, mask=mask_k[:, None] & mask_n[None, :])
    else:
        dweight_ptrs = dweight_ptr + offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
        tl.store(dweight_ptrs, dweight, mask=mask_n[:, None] & mask_k[None, :])


@triton.jit(do_not_specialize=["num_patches", "grid_w"])
def _patch_embed_bwd_images_kernel(
    dimages_ptr, dout_ptr, weight_ptr,
    num_rows, num_patches, C, num_prefix, grid_w,
    stride_dimages_b, stride_dimages_c, stride_dimages_h,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
    FENCE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows m = b * num_patches + p. Every pixel is in one patch: one store each, nothing to clear.
    K: tl.constexpr = CHANNELS * PATCH_H * PATCH_W
    pid = tl.program_id(0).to(tl.int64)
    blocks_k = tl.cdiv(K, BLOCK_K)
    row = pid // blocks_k * BLOCK_M
    offs_k = (pid % blocks_k).to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_m = tl.arange(0, BLOCK_M)  # rows of this block
    b, p = _split_rows(row, num_patches, BLOCK_M)
    mask_m, mask_k = offs_m < num_rows - row, offs_k < K
    dout_ptrs = dout_ptr + (row + offs_m + (b + 1) * num_prefix)[None, :] * C
    acc = tl.zeros((BLOCK_K, BLOCK_M), dtype=tl.float32)
    for n in range(0, C, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < C
        weight_ptrs = weight_ptr + offs_k[:, None] + offs_n[None, :].to(tl.int64) * K
        weight = tl.load(weight_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        mask_dout = mask_n[:, None] & mask_m[None, :]
        dout = tl.load(dout_ptrs + offs_n[:, None], mask=mask_dout, other=0.0)
        dout = _fenced(dout, mask_dout, FENCE)
        acc = tl.dot(weight, dout.to(weight.dtype), acc, input_precision=INPUT_PRECISION)
    offs_patch = _patch_offset(
        b, p, grid_w, stride_dimages_b, stride_dimages_h, 1, PATCH_H, PATCH_W, ALIGN
    )
    offs_pixel = _pixel_offset(
        offs_k, stride_dimages_c, stride_dimages_h, 1, PATCH_H, PATCH_W, ALIGN
    )
    dimages_ptrs = dimages_ptr + offs_pixel[:, None] + offs_patch[None, :]
    dimages = acc.to(dimages_ptr.dtype.element_ty)
    tl.store(dimages_ptrs, dimages, mask=mask_k[:, None] & mask_m[None, :])
