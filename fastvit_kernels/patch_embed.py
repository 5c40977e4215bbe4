"""Patch embedding: images to tokens by an implicit GEMM, prefix tokens and positions with it.

    patch   out[b, n+p, c] = sum_k pixel[b, p, k] weight[c, k] + bias[c] [+ pos[p or n+p, c]]
    prefix  out[b, t, c]   = prefix[t, c] [+ pos[t, c]],   t < n

k = (channel, row, column) runs over the pixels of one patch, p = (patch row, patch column) over the
patches of one image, and pixel[b, p, k] is read where it lies: there is no unfolded copy.

    dweight[c, k]      = sum_{b,p} dout[b, n+p, c] pixel[b, p, k]
    dimages[b, (p, k)] = sum_c dout[b, n+p, c] weight[c, k]        a pixel lies in one patch only
    dtoken[t, c]       = sum_b dout[b, t, c],   dprefix = dtoken[:n],   dpos = dtoken[n: or 0:]
    dbias[c]           = sum_p dtoken[n+p, c]

Saved: images where weight needs a gradient, weight where images do.
Precision: pixels, weight and dout are cast to the compute dtype at the load; fp32 accumulators, and
bias, prefix and position are added in fp32 before the one rounding to the result's dtype. dweight
in fp32 partials, one a row range, summed in a fixed order. No atomics.
Source: arXiv:2010.11929, section 3.1. Derivation: docs/patch_embed.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit_kernels._triton import tl, triton
from fastvit_kernels.arguments import check_device, check_shape, check_tensor, compute_dtype
from fastvit_kernels.backend import KERNEL_DTYPES, device_guard, gpu, num_sms, use_triton
from fastvit_kernels.dispatch import first_order
from fastvit_kernels.gemm import input_precision
from fastvit_kernels.launch_configs import ConfigTable
from fastvit_kernels.operators import operator
from fastvit_kernels.reduction import column_sum


def patch_embed_ref(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
) -> Tensor:
    """The specification of `patch_embed`: conv, cat, add."""
    x = F.conv2d(images, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    num_patches = x.shape[1]
    if pos_embed is not None and pos_embed.shape[-2] == num_patches:
        x, pos_embed = x + pos_embed, None
    if prefix_tokens is not None:
        prefix_tokens = prefix_tokens.expand(x.shape[0], -1, -1)
        x = torch.cat([prefix_tokens.to(torch.promote_types(x.dtype, prefix_tokens.dtype)), x], 1)
    return x if pos_embed is None else x + pos_embed


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


def _table(name: str, by_itemsize: dict[int, list[PatchConfig]]) -> ConfigTable[PatchConfig]:
    """Key: bytes of an element of the compute dtype. The first config is the default."""
    return ConfigTable(
        name,
        [config for configs in by_itemsize.values() for config in configs],
        lambda gpu, itemsize: by_itemsize[itemsize][0],
        lambda gpu, config, itemsize: config in by_itemsize[itemsize],
    )


# Not yet measured.
FWD_CONFIGS = _table(
    "patch_embed_fwd",
    {
        2: [PatchConfig(128, 128, 64, 8, 3), PatchConfig(64, 128, 64, 4, 3)],
        4: [PatchConfig(64, 64, 32, 4, 3)],
    },
)
BWD_WEIGHT_CONFIGS = _table(
    "patch_embed_bwd_weight",
    {
        2: [PatchConfig(64, 128, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
        4: [PatchConfig(32, 64, 64, 4, 3)],
    },
)
BWD_IMAGES_CONFIGS = _table(
    "patch_embed_bwd_images",
    {
        2: [PatchConfig(64, 64, 128, 4, 3), PatchConfig(128, 64, 128, 8, 3)],
        4: [PatchConfig(64, 32, 64, 4, 3)],
    },
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


@triton.jit
def _patch_embed_fwd_kernel(
    out_ptr, images_ptr, weight_ptr, bias_ptr, prefix_ptr, pos_ptr,
    num_rows, T, C, num_prefix, pos_start, grid_w,
    stride_images_b, stride_images_c, stride_images_h, stride_images_w,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_POS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
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
        else:
            mask_k = offs_k < K
            weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_k[None, :], other=0.0)
            pixels = tl.load(pixel_ptrs, mask=mask_k[:, None] & mask_patch, other=0.0)
        # Images are often fp32 under autocast: this cast replaces a pass over them.
        acc = tl.dot(weight, pixels.to(weight.dtype), acc, input_precision=INPUT_PRECISION)

    out_ptrs = out_ptr + row * C + (offs_n[:, None] + offs_m[None, :] * C)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def _patch_embed_bwd_weight_kernel(
    dweight_ptr, dout_ptr, images_ptr,
    num_rows, rows_per_split, C, num_prefix,
    stride_images_b, stride_images_c, stride_images_h, stride_images_w,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
    NUM_PATCHES: tl.constexpr, GRID_W: tl.constexpr, ALIGN: tl.constexpr,
    PIXELS_LEFT: tl.constexpr, COMPUTE_DTYPE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Rows m = b * NUM_PATCHES + p, patches only. Program (tile, s) sums row range s of one tile of
    # dweight, (BLOCK_K, BLOCK_N) where PIXELS_LEFT, else (BLOCK_N, BLOCK_K). The patch grid is
    # constexpr: every iteration divides rows by it, and by a constant that is a multiplication.
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
        b, p = _split_rows(row, NUM_PATCHES, BLOCK_M)
        offs_patch = _patch_offset(
            b, p, GRID_W, stride_images_b, stride_images_h, stride_images_w,
            PATCH_H, PATCH_W, ALIGN,
        )  # fmt: skip
        offs_dout = (offs_m + (b + 1) * num_prefix) * C  # b + 1 prefix groups stand before row m
        if PIXELS_LEFT:
            pixel_ptrs = images_ptr + offs_pixel[:, None] + offs_patch[None, :]
            pixels = tl.load(pixel_ptrs, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
            dout_ptrs = dout_ptr + offs_dout[:, None] + offs_n[None, :]
            dout = tl.load(dout_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
            left, right = pixels.to(COMPUTE_DTYPE), dout.to(COMPUTE_DTYPE)
        else:
            dout_ptrs = dout_ptr + offs_n[:, None] + offs_dout[None, :]
            dout = tl.load(dout_ptrs, mask=mask_n[:, None] & mask_m[None, :], other=0.0)
            pixel_ptrs = images_ptr + offs_patch[:, None] + offs_pixel[None, :]
            pixels = tl.load(pixel_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
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


@triton.jit
def _patch_embed_bwd_images_kernel(
    dimages_ptr, dout_ptr, weight_ptr,
    num_rows, num_patches, C, num_prefix, grid_w,
    stride_dimages_b, stride_dimages_c, stride_dimages_h,
    CHANNELS: tl.constexpr, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, ALIGN: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
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


def _alignment(images: Tensor, patch_w: int) -> int:
    """A power of two that divides the offset of every run of pixels; 1 where there are no runs."""
    if images.stride(3) != 1:
        return 1
    return math.gcd(16, patch_w, *images.stride()[:3])


def _block(largest: int, size: int) -> int:
    """The tile side for an axis: a power of two, at least the 16 that tl.dot needs."""
    return min(largest, max(16, triton.next_power_of_2(size)))


def _depth(largest: int, size: int, bytes_per_step: int) -> int:
    """The tile side along the summed axis: a stage of both operands within STAGE_BYTES."""
    while largest * bytes_per_step > STAGE_BYTES:
        largest //= 2
    return _block(largest, size)


def _grid(images: Tensor, patch: tuple[int, int]) -> tuple[int, int]:
    return images.shape[2] // patch[0], images.shape[3] // patch[1]


def _rows(x: Tensor | None, C: int) -> Tensor | None:
    return None if x is None else x.reshape(-1, C).contiguous()


def _empty_fwd(
    images: Tensor, weight: Tensor, bias: Tensor | None, prefix_tokens: Tensor | None,
    pos_embed: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    C, _, patch_h, patch_w = weight.shape
    grid_h, grid_w = _grid(images, (patch_h, patch_w))
    num_prefix = 0 if prefix_tokens is None else prefix_tokens.shape[-2]
    shape = (images.shape[0], num_prefix + grid_h * grid_w, C)
    return torch.empty(shape, dtype=out_dtype, device=images.device)


@operator(
    "(Tensor images, Tensor weight, Tensor? bias, Tensor? prefix_tokens, Tensor? pos_embed,"
    " ScalarType out_dtype) -> Tensor",
    fake=_empty_fwd,
)
def patch_embed_fwd(
    images: Tensor, weight: Tensor, bias: Tensor | None, prefix_tokens: Tensor | None,
    pos_embed: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """images by any strides -> tokens (B, T, C) in out_dtype, computed in weight's dtype."""
    out = _empty_fwd(images, weight, bias, prefix_tokens, pos_embed, out_dtype)
    if out.numel() == 0:
        return out
    B, T, C = out.shape
    _, channels, patch_h, patch_w = weight.shape
    weight = weight.reshape(C, -1).contiguous()
    bias = None if bias is None else bias.contiguous()
    prefix, pos = _rows(prefix_tokens, C), _rows(pos_embed, C)
    block_m, block_n, block_k, num_warps, num_stages = FWD_CONFIGS.choose(
        gpu(images.device), weight.itemsize
    )
    block_m, block_n = _block(block_m, B * T), _block(block_n, C)
    K = weight.shape[1]
    largest_k = block_k if K % block_k == 0 else block_k // 2  # the smaller one pads less
    bytes_per_step = block_m * images.itemsize + block_n * weight.itemsize
    block_k = _depth(largest_k, K, bytes_per_step)
    with device_guard(images):
        _patch_embed_fwd_kernel[(triton.cdiv(B * T, block_m) * triton.cdiv(C, block_n),)](
            out, images, weight, bias, prefix, pos, B * T, T, C,
            0 if prefix is None else prefix.shape[0], 0 if pos is None else T - pos.shape[0],
            images.shape[3] // patch_w, *images.stride(),
            CHANNELS=channels, PATCH_H=patch_h, PATCH_W=patch_w,
            ALIGN=_alignment(images, patch_w), HAS_BIAS=bias is not None,
            HAS_PREFIX=prefix is not None, HAS_POS=pos is not None,
            INPUT_PRECISION=input_precision(), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def _empty_bwd_weight(
    dout: Tensor, images: Tensor, patch_h: int, patch_w: int, compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    shape = (dout.shape[2], images.shape[1], patch_h, patch_w)
    return torch.empty(shape, dtype=weight_dtype, device=dout.device)


@operator(
    "(Tensor dout, Tensor images, int patch_h, int patch_w, ScalarType compute_dtype,"
    " ScalarType weight_dtype) -> Tensor",
    fake=_empty_bwd_weight,
)
def patch_embed_bwd_weight(
    dout: Tensor, images: Tensor, patch_h: int, patch_w: int, compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dout (B, T, C) -> dweight (C, Cin, patch_h, patch_w) in weight_dtype."""
    dweight = _empty_bwd_weight(dout, images, patch_h, patch_w, compute_dtype, weight_dtype)
    if dout.numel() == 0:
        return dweight.zero_()
    dout = dout.contiguous()
    B, T, C = dout.shape
    grid_h, grid_w = _grid(images, (patch_h, patch_w))
    num_patches, K = grid_h * grid_w, dweight[0].numel()
    num_rows = B * num_patches
    block_m, block_n, block_k, num_warps, num_stages = BWD_WEIGHT_CONFIGS.choose(
        gpu(dout.device), compute_dtype.itemsize
    )
    block_n, block_k = _block(block_n, C), _block(block_k, K)
    bytes_per_step = block_n * dout.itemsize + block_k * images.itemsize
    block_m = _depth(block_m, num_rows, bytes_per_step)
    tiles = triton.cdiv(C, block_n) * triton.cdiv(K, block_k)
    wanted = max(1, BWD_WEIGHT_PROGRAMS_PER_SM * num_sms(dout.device) // tiles)
    splits = min(wanted, triton.cdiv(num_rows, MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, splits), block_m) * block_m
    splits = triton.cdiv(num_rows, rows_per_split)
    partial = dweight
    if splits > 1:
        partial = torch.empty((splits, C * K), dtype=torch.float32, device=dout.device)
    with device_guard(dout):
        _patch_embed_bwd_weight_kernel[(tiles, splits)](
            partial, dout, images, num_rows, rows_per_split, C, T - num_patches, *images.stride(),
            CHANNELS=images.shape[1], PATCH_H=patch_h, PATCH_W=patch_w,
            NUM_PATCHES=num_patches, GRID_W=grid_w, ALIGN=_alignment(images, patch_w),
            PIXELS_LEFT=images.dtype == compute_dtype,
            COMPUTE_DTYPE=TL_DTYPES[compute_dtype], INPUT_PRECISION=input_precision(),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    if splits > 1:
        column_sum(partial, dweight.view(-1))
    return dweight


def _empty_bwd_tokens(
    dout: Tensor, num_prefix: int, num_pos: int, bias_dtype: torch.dtype | None,
    prefix_dtype: torch.dtype | None, pos_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    C, device = dout.shape[2], dout.device
    return (
        torch.empty(0 if bias_dtype is None else C, dtype=bias_dtype, device=device),
        torch.empty(
            (0 if prefix_dtype is None else num_prefix, C), dtype=prefix_dtype, device=device
        ),
        torch.empty((0 if pos_dtype is None else num_pos, C), dtype=pos_dtype, device=device),
    )


@operator(
    "(Tensor dout, int num_prefix, int num_pos, ScalarType? bias_dtype, ScalarType? prefix_dtype,"
    " ScalarType? pos_dtype) -> (Tensor, Tensor, Tensor)",
    fake=_empty_bwd_tokens,
)
def patch_embed_bwd_tokens(
    dout: Tensor, num_prefix: int, num_pos: int, bias_dtype: torch.dtype | None,
    prefix_dtype: torch.dtype | None, pos_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dbias (C,), dprefix (n, C), dpos (L, C), each in its dtype; empty where that is None."""
    grads = _empty_bwd_tokens(dout, num_prefix, num_pos, bias_dtype, prefix_dtype, pos_dtype)
    dbias, dprefix, dpos = grads
    B, T, C = dout.shape
    dtoken = torch.empty((T, C), dtype=torch.float32, device=dout.device)
    column_sum(dout.reshape(B, T * C).contiguous(), dtoken.view(-1))
    if bias_dtype is not None:
        column_sum(dtoken[num_prefix:], dbias)
    # Copies, never views: two parameters' .grad must not share memory.
    if prefix_dtype is not None:
        dprefix.copy_(dtoken[:num_prefix])
    if pos_dtype is not None:
        dpos.copy_(dtoken[T - num_pos :])
    return grads


def _empty_bwd_images(
    dout: Tensor, weight: Tensor, height: int, width: int, images_dtype: torch.dtype
) -> Tensor:
    shape = (dout.shape[0], weight.shape[1], height, width)
    return torch.empty(shape, dtype=images_dtype, device=dout.device)


@operator(
    "(Tensor dout, Tensor weight, int height, int width, ScalarType images_dtype) -> Tensor",
    fake=_empty_bwd_images,
)
def patch_embed_bwd_images(
    dout: Tensor, weight: Tensor, height: int, width: int, images_dtype: torch.dtype
) -> Tensor:
    """dout (B, T, C) -> dimages (B, Cin, height, width), computed in weight's dtype."""
    dimages = _empty_bwd_images(dout, weight, height, width, images_dtype)
    if dout.numel() == 0:
        return dimages.zero_()
    dout = dout.contiguous()
    B, T, C = dout.shape
    _, channels, patch_h, patch_w = weight.shape
    weight = weight.reshape(C, -1).contiguous()
    grid_h, grid_w = _grid(dimages, (patch_h, patch_w))
    num_patches, K = grid_h * grid_w, weight.shape[1]
    block_m, block_n, block_k, num_warps, num_stages = BWD_IMAGES_CONFIGS.choose(
        gpu(dout.device), weight.itemsize
    )
    block_m, block_k = _block(block_m, B * num_patches), _block(block_k, K)
    block_n = _depth(block_n, C, block_m * dout.itemsize + block_k * weight.itemsize)
    with device_guard(dout):
        _patch_embed_bwd_images_kernel[
            (triton.cdiv(B * num_patches, block_m) * triton.cdiv(K, block_k),)
        ](
            dimages, dout, weight, B * num_patches, num_patches, C, T - num_patches, grid_w,
            *dimages.stride()[:3],
            CHANNELS=channels, PATCH_H=patch_h, PATCH_W=patch_w,
            ALIGN=_alignment(dimages, patch_w), INPUT_PRECISION=input_precision(),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return dimages


class PatchEmbedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, weight, bias, prefix_tokens, pos_embed, compute_dtype, out_dtype):
        needs = ctx.needs_input_grad
        ctx.save_for_backward(images if needs[1] else None, weight if needs[0] else None)
        params = (bias, prefix_tokens, pos_embed)
        ctx.shapes = [None if x is None else x.shape for x in params]
        ctx.dtypes = [x.dtype if need else None for x, need in zip(params, needs[2:5], strict=True)]
        ctx.images_shape, ctx.images_dtype = images.shape, images.dtype
        ctx.patch, ctx.weight_dtype = weight.shape[2:], weight.dtype
        ctx.compute_dtype = compute_dtype
        weight = weight.to(compute_dtype)
        return patch_embed_fwd(images, weight, bias, prefix_tokens, pos_embed, out_dtype)

    @staticmethod
    @first_order
    def backward(ctx, dout):
        images, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = [None] * 7
        if needs[0]:
            height, width = ctx.images_shape[2:]
            grads[0] = patch_embed_bwd_images(
                dout, weight.to(ctx.compute_dtype), height, width, ctx.images_dtype
            )
        if needs[1]:
            grads[1] = patch_embed_bwd_weight(
                dout, images, *ctx.patch, ctx.compute_dtype, ctx.weight_dtype
            )
        if any(needs[2:5]):
            num_prefix, num_pos = (0 if s is None else s[-2] for s in ctx.shapes[1:])
            tokens = patch_embed_bwd_tokens(dout, num_prefix, num_pos, *ctx.dtypes)
            for i, (grad, shape) in enumerate(zip(tokens, ctx.shapes, strict=True), start=2):
                grads[i] = grad.view(shape) if needs[i] else None
        return tuple(grads)


def _check(
    images: Tensor, weight: Tensor, bias: Tensor | None, prefix_tokens: Tensor | None,
    pos_embed: Tensor | None,
) -> str | None:  # fmt: skip
    """Raise on bad arguments; return what the kernels cannot do, if anything."""
    op = "patch_embed"
    check_tensor(op, "images", images, ndim=4)
    check_tensor(op, "weight", weight, ndim=4)
    check_device(op, "weight", weight, images)
    C, channels, patch_h, patch_w = weight.shape
    _, images_channels, height, width = images.shape
    if images_channels != channels:
        raise ValueError(
            f"{op}: images must have the {channels} channels of weight, got {images_channels}"
        )
    if not weight.numel():
        raise ValueError(f"{op}: weight must not be empty, got shape {tuple(weight.shape)}")
    if height % patch_h or width % patch_w or not height or not width:
        raise ValueError(
            f"{op}: height and width of images must be positive multiples of the patch "
            f"({patch_h}, {patch_w}), got ({height}, {width})"
        )
    check_shape(op, "bias", bias, (C,), like=images)
    num_patches = height // patch_h * (width // patch_w)
    num_prefix = 0
    if prefix_tokens is not None:
        _check_tokens(op, "prefix_tokens", prefix_tokens, C, images)
        num_prefix = prefix_tokens.shape[-2]
    if pos_embed is not None:
        _check_tokens(op, "pos_embed", pos_embed, C, images)
        if pos_embed.shape[-2] not in (num_patches, num_patches + num_prefix):
            raise ValueError(
                f"{op}: pos_embed must have {num_patches} rows (patches) or "
                f"{num_patches + num_prefix} (prefix tokens and patches), "
                f"got shape {tuple(pos_embed.shape)}"
            )
    tensors = (images, weight, bias, prefix_tokens, pos_embed)
    dtypes = [x.dtype for x in tensors if x is not None and x.dtype not in KERNEL_DTYPES]
    return f"there is no kernel for {dtypes[0]}" if dtypes else None


def _check_tokens(op: str, name: str, x: Tensor, C: int, images: Tensor) -> None:
    """Check that x is (rows, C) or (1, rows, C), on the device of images."""
    check_tensor(op, name, x)
    if x.ndim not in (2, 3) or x.shape[-1] != C or x.shape[:-2] not in ((), (1,)):
        raise ValueError(
            f"{op}: {name} must have shape (1, rows, {C}) or (rows, {C}), got {tuple(x.shape)}"
        )
    check_device(op, name, x, images)


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
) -> Tensor:
    """Images to tokens: the patch convolution, prefix tokens before it, positions added.

    out[b, n+p] = weight . pixels[b, p] + bias + pos,   out[b, t] = prefix[t] + pos[t] for t < n

    Args:
        images: (B, Cin, height, width), fp16, bf16 or fp32, any strides, read in place.
        weight: (C, Cin, patch height, patch width), as Conv2d's with stride = kernel size.
        bias: (C,) or None.
        prefix_tokens: (1, n, C) or (n, C), class token then registers, or None for n = 0.
        pos_embed: (1, L, C) or (L, C) or None. L = patches: added to the patches alone (timm's
            no_embed_class). L = n + patches: added to all tokens.
    Returns:
        (B, n + patches, C). Its dtype is the compute dtype (autocast's, else that of images)
        promoted with those of prefix_tokens and pos_embed, as torch's cat and add promote.
    Precision: fp32 accumulators and epilogue, one rounding at the store; fp32 matmuls follow
        torch.get_float32_matmul_precision(). Gradients accumulate in fp32.
    Saved: images where weight needs a gradient, weight where images do.
    Raises: ValueError, such as "patch_embed: height and width of images must be positive multiples
        of the patch (16, 16), got (225, 224)"; TypeError.
    Source: arXiv:2010.11929. Specification: patch_embed_ref. Derivation: docs/patch_embed.md.
    """
    unsupported = _check(images, weight, bias, prefix_tokens, pos_embed)
    dtype = compute_dtype("patch_embed", images=images, weight=weight, bias=bias)
    if not use_triton("patch_embed", images, unsupported):
        return patch_embed_ref(images, weight, bias, prefix_tokens, pos_embed)
    out_dtype = dtype
    for tokens in (prefix_tokens, pos_embed):
        out_dtype = out_dtype if tokens is None else torch.promote_types(out_dtype, tokens.dtype)
    return PatchEmbedFunction.apply(
        images, weight, bias, prefix_tokens, pos_embed, dtype, out_dtype
    )
