"""The kernels of patch_embed: implicit matrix products over the pixels of an image's patches.

Rows m = b * T + t are tokens or patches, columns of C, and K = (channel, frame, row, column) runs
over the pixels of a patch, read from the image by its strides: no unfolded copy. An image has no
frames, a video's patch has some. Derivation: docs/patch_embed.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.backend import Gpu
from ...runtime.configs import ConfigTable
from ...runtime.triton import ANY_BATCH, tl, triton


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
        name,
        [*half, *fp32],
        lambda gpu, dtype: by_dtype[dtype][0],
        lambda gpu, config, dtype: config in by_dtype[dtype],
    )


# 128 rows by 8 warps: with 64 rows all of them cast the same pixels. 256 columns read each pixel
# half as often: a sixth less time for ViT-B on sm_90 by the model of docs/compile.md, not measured.
FWD = [
    PatchConfig(128, 128, 64, 8, 3),
    PatchConfig(64, 128, 64, 8, 3),
    PatchConfig(64, 128, 64, 4, 3),
]
FWD_WIDE = PatchConfig(128, 256, 32, 8, 3)
FWD_FP32 = PatchConfig(64, 64, 32, 4, 3)


def _fwd_fits(gpu: Gpu, config: PatchConfig, M: int, N: int, K: int, dtype: str) -> bool:
    has_room = config != FWD_WIDE or gpu.shared_limit > 3 * STAGE_BYTES + 4096
    return has_room and (config == FWD_FP32) == (dtype == "fp32")


def _default_fwd(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> PatchConfig:
    if dtype == "fp32":
        return FWD_FP32
    tiles = -(-M // 128) * (N // 256)
    wide = N % 256 == 0 and tiles >= gpu.num_sms and _fwd_fits(gpu, FWD_WIDE, M, N, K, dtype)
    return FWD_WIDE if wide else FWD[0]


STAGE_BYTES = 32 * 1024  # three stages fit in the 99 KB of shared memory of sm_86, 89, 120
FWD_TABLE = ConfigTable("patch_embed_fwd", [*FWD, FWD_WIDE, FWD_FP32], _default_fwd, _fwd_fits)
BWD_WEIGHT_TABLE = _table(
    "patch_embed_bwd_weight",
    [PatchConfig(64, 128, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
    [PatchConfig(32, 64, 64, 4, 3)],
)
BWD_IMAGES_TABLE = _table(
    "patch_embed_bwd_images",
    [PatchConfig(128, 64, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
    [PatchConfig(64, 32, 64, 4, 3)],
)
BWD_WEIGHT_PROGRAMS_PER_SM = 2
MIN_ROWS_PER_SPLIT = 512
ADDED_TILE = dict(BLOCK_C=512, num_warps=4)
# Of the gradient of positions under a list of kept patches. Not yet measured.
SLOTS_TILE = dict(BLOCK_P=64, BLOCK_J=64, num_warps=4)
KEPT_TILE = dict(BLOCK_B=32, BLOCK_C=128, num_warps=4)


class Patch(NamedTuple):
    """Constants of a patch."""

    FRAMES: Any  # None: an image has none
    HEIGHT: Any
    WIDTH: Any
    PIXELS: Any  # of all channels
    ALIGN: Any  # a power of two that divides the offset of every run of pixels


class GemmTile(NamedTuple):
    FENCE: Any
    INPUT_PRECISION: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any


class ImageStrides(NamedTuple):
    """Of (B, channels, [frames,] height, width)."""

    b: Any
    c: Any
    t: Any
    h: Any
    w: Any


class Images(NamedTuple):
    """In a grid of patches."""

    strides: Any
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
def patch_offset(images, b, p, PATCH: tl.constexpr):
    """Offset of the first pixel of patch p of image b, int64."""
    ALIGN: tl.constexpr = PATCH.ALIGN
    row, column = p // images.grid_w, (p % images.grid_w).to(tl.int64) * PATCH.WIDTH
    offset = b * images.strides.b + column * images.strides.w
    if PATCH.FRAMES is not None:
        offset += (row // images.grid_h).to(tl.int64) * PATCH.FRAMES * images.strides.t
        row = row % images.grid_h
    return tl.multiple_of(offset + row.to(tl.int64) * PATCH.HEIGHT * images.strides.h, ALIGN)


@triton.jit
def pixel_offset(images, offs_k, PATCH: tl.constexpr):
    """Offset of pixel k from its patch's first pixel, int64: runs of WIDTH neighbours."""
    ALIGN: tl.constexpr = PATCH.ALIGN
    row = (offs_k // PATCH.WIDTH % PATCH.HEIGHT).to(tl.int64)
    offset = row * images.strides.h + (offs_k % PATCH.WIDTH).to(tl.int64) * images.strides.w
    channel = offs_k // (PATCH.HEIGHT * PATCH.WIDTH)  # and frame
    if PATCH.FRAMES is not None:
        offset += (channel % PATCH.FRAMES).to(tl.int64) * images.strides.t
        channel = channel // PATCH.FRAMES
    return tl.multiple_of(offset + channel.to(tl.int64) * images.strides.c, ALIGN)


@triton.jit
def _patch_embed_added_kernel(
    added_ptr,
    bias_ptr,
    prefix_ptr,
    pos_ptr,
    C,
    num_prefix,
    pos_start,
    HAS_BIAS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_POS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """added[t, c], fp32: what is added to the product in token t of any image."""
    t = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs = t * C + offs_c
    added = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS and t >= num_prefix:
        added += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if HAS_PREFIX and t < num_prefix:
        added += tl.load(prefix_ptr + offs, mask=mask_c, other=0.0).to(tl.float32)
    if HAS_POS and t >= pos_start:
        pos = tl.load(pos_ptr + offs - pos_start * C, mask=mask_c, other=0.0)
        added += pos.to(tl.float32)
    tl.store(added_ptr + offs, added, mask=mask_c)


# Sizes of the patch grid are never special: another image size needs no other kernel.
@triton.jit(do_not_specialize=["T", "num_patches", "grid_h", "grid_w"], **ANY_BATCH)
def _patch_embed_fwd_kernel(
    out_ptr,
    images_ptr,
    weight_ptr,
    added_ptr,
    keep_ptr,
    num_rows,
    T,
    C,
    num_prefix,
    num_patches,
    grid_h,
    grid_w,
    strides,
    PATCH: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    # Rows m = b * T + t, prefix tokens included. The programs of one row block are neighbours, so
    # that its pixels come from DRAM once.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    images = Images(strides, grid_h, grid_w)
    K: tl.constexpr = PATCH.PIXELS
    pid = tl.program_id(0).to(tl.int64)
    blocks_n = tl.cdiv(C, BLOCK_N)
    row = pid // blocks_n * BLOCK_M
    offs_n = (pid % blocks_n).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)  # rows of this block
    b, t = split_rows(row, T, BLOCK_M)
    mask_m, mask_n = offs_m < num_rows - row, offs_n < C
    is_patch = t >= num_prefix
    place = t  # among all tokens of the image, dropped ones included
    if HAS_KEEP:
        listed = is_patch & mask_m
        p, is_there = kept_patches(
            keep_ptr, b * (T - num_prefix) + t - num_prefix, listed, num_patches
        )
        is_patch = is_patch & is_there
        place = tl.where(is_patch, p + num_prefix, t)

    # The accumulator starts from what is added to the product: the loads come while registers are
    # free (in an epilogue they spill), and prefix rows, whose pixels are 0, are then complete.
    # Rows past the last have a place too: a mask of columns alone leaves wide loads. In fp32 it
    # joins last: sums that begin at 0 round half as much.
    ADDED_LAST: tl.constexpr = HAS_ADDED and weight_ptr.dtype.element_ty == tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if HAS_ADDED:
        added_ptrs = added_ptr + (offs_n[:, None] + place[None, :] * C)
        if not ADDED_LAST:
            acc = tl.load(added_ptrs, mask=mask_n[:, None], other=0.0)
    if HAS_KEEP:  # a patch that is not there reads no pixel and gives NaN
        acc = tl.where((listed & ~is_patch)[None, :], float("nan"), acc)

    offs_patch = patch_offset(images, b, place - num_prefix, PATCH)
    patch_ptrs = images_ptr + offs_patch[None, :]
    mask_patch = (is_patch & mask_m)[None, :]
    # A column past C reads a row of weight that exists; the store drops what it gave.
    weight_ptrs = weight_ptr + tl.minimum(offs_n, C - 1)[:, None].to(tl.int64) * K
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        offs_pixel = pixel_offset(images, offs_k, PATCH)
        pixel_ptrs = patch_ptrs + offs_pixel[:, None]
        if K % BLOCK_K == 0:
            weight = tl.load(weight_ptrs + offs_k[None, :])
            pixels = tl.load(pixel_ptrs, mask=mask_patch, other=0)
            pixels = fenced(pixels, mask_patch, TILE.FENCE)
        else:
            mask_k = offs_k < K
            weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_k[None, :], other=0.0)
            mask = mask_k[:, None] & mask_patch
            pixels = fenced(tl.load(pixel_ptrs, mask=mask, other=0), mask, TILE.FENCE)
        # Images are often fp32 under autocast: this cast replaces a pass over them.
        acc = tl.dot(weight, pixels.to(weight.dtype), acc, input_precision=TILE.INPUT_PRECISION)

    out_ptrs = out_ptr + row * C + (offs_n[:, None] + offs_m[None, :] * C)
    if ADDED_LAST:
        acc += tl.load(added_ptrs, mask=mask_n[:, None], other=0.0)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["rows_per_image", "num_patches", "grid_h", "grid_w"], **ANY_BATCH)
def _patch_embed_bwd_weight_kernel(
    dweight_ptr,
    dout_ptr,
    images_ptr,
    keep_ptr,
    num_rows,
    rows_per_split,
    C,
    num_prefix,
    rows_per_image,
    num_patches,
    grid_h,
    grid_w,
    strides,
    PATCH: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PIXELS_LEFT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    # Rows m = b * rows_per_image + i, patches only. Program (tile, s) sums row range s of one tile
    # of dweight, (BLOCK_K, BLOCK_N) where PIXELS_LEFT, else (BLOCK_N, BLOCK_K).
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    images = Images(strides, grid_h, grid_w)
    K: tl.constexpr = PATCH.PIXELS
    blocks_k = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    offs_n = pid // blocks_k * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = pid % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_n, mask_k = offs_n < C, offs_k < K
    offs_pixel = pixel_offset(images, offs_k, PATCH)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    if PIXELS_LEFT:
        acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for row in range(first, last, BLOCK_M):
        offs_m = row + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < last
        b, p = split_rows(row, rows_per_image, BLOCK_M)
        if HAS_KEEP:
            p, is_there = kept_patches(keep_ptr, offs_m, mask_m, num_patches)
            mask_m = mask_m & is_there
        offs_patch = patch_offset(images, b, p, PATCH)
        offs_dout = (offs_m + (b + 1) * num_prefix) * C  # b + 1 prefix groups stand before row m
        if PIXELS_LEFT:
            pixel_ptrs = images_ptr + offs_pixel[:, None] + offs_patch[None, :]
            pixels = tl.load(pixel_ptrs, mask=mask_k[:, None] & mask_m[None, :], other=0)
            dout_ptrs = dout_ptr + offs_dout[:, None] + offs_n[None, :]
            mask = mask_m[:, None] & mask_n[None, :]
            dout = fenced(tl.load(dout_ptrs, mask=mask, other=0.0), mask, TILE.FENCE)
            left, right = pixels.to(COMPUTE_DTYPE), dout.to(COMPUTE_DTYPE)
        else:
            dout_ptrs = dout_ptr + offs_n[:, None] + offs_dout[None, :]
            dout = tl.load(dout_ptrs, mask=mask_n[:, None] & mask_m[None, :], other=0.0)
            pixel_ptrs = images_ptr + offs_patch[:, None] + offs_pixel[None, :]
            mask = mask_m[:, None] & mask_k[None, :]
            pixels = fenced(tl.load(pixel_ptrs, mask=mask, other=0), mask, TILE.FENCE)
            left, right = dout.to(COMPUTE_DTYPE), pixels.to(COMPUTE_DTYPE)
        acc = tl.dot(left, right, acc, input_precision=TILE.INPUT_PRECISION)
    dweight_ptr += split * C * K
    dweight = acc.to(dweight_ptr.dtype.element_ty)
    if PIXELS_LEFT:
        dweight_ptrs = dweight_ptr + offs_k[:, None] + offs_n[None, :].to(tl.int64) * K
        tl.store(dweight_ptrs, dweight, mask=mask_k[:, None] & mask_n[None, :])
    else:
        dweight_ptrs = dweight_ptr + offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
        tl.store(dweight_ptrs, dweight, mask=mask_n[:, None] & mask_k[None, :])


@triton.jit(do_not_specialize=["rows_per_image", "num_patches", "grid_h", "grid_w"], **ANY_BATCH)
def _patch_embed_bwd_images_kernel(
    dimages_ptr,
    dout_ptr,
    weight_ptr,
    keep_ptr,
    num_rows,
    rows_per_image,
    C,
    num_prefix,
    num_patches,
    grid_h,
    grid_w,
    strides,
    PATCH: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    # Rows m = b * rows_per_image + i. Every pixel is in one patch: one store each. Without a list
    # of kept patches there is nothing to clear.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    dimages = Images(strides, grid_h, grid_w)
    K: tl.constexpr = PATCH.PIXELS
    pid = tl.program_id(0).to(tl.int64)
    blocks_k = tl.cdiv(K, BLOCK_K)
    row = pid // blocks_k * BLOCK_M
    offs_k = (pid % blocks_k).to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_m = tl.arange(0, BLOCK_M)  # rows of this block
    b, p = split_rows(row, rows_per_image, BLOCK_M)
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
        dout = fenced(dout, mask_dout, TILE.FENCE)
        acc = tl.dot(weight, dout.to(weight.dtype), acc, input_precision=TILE.INPUT_PRECISION)
    if HAS_KEEP:
        p, is_there = kept_patches(keep_ptr, row + offs_m, mask_m, num_patches)
        mask_m = mask_m & is_there
    offs_patch = patch_offset(dimages, b, p, PATCH)
    offs_pixel = pixel_offset(dimages, offs_k, PATCH)
    dimages_ptrs = dimages_ptr + offs_pixel[:, None] + offs_patch[None, :]
    store = acc.to(dimages_ptr.dtype.element_ty)
    tl.store(dimages_ptrs, store, mask=mask_k[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["B", "num_kept", "num_patches"], **ANY_BATCH)
def _patch_embed_slots_kernel(
    slots_ptr, keep_ptr, B, num_kept, num_patches, BLOCK_P: tl.constexpr, BLOCK_J: tl.constexpr
):
    """slots[p, b] = j where keep[b, j] = p, else -1: each patch's place in its image's list."""
    b = tl.program_id(0).to(tl.int64)
    offs_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    slots = tl.full((BLOCK_P,), -1, dtype=tl.int32)
    for j in range(0, num_kept, BLOCK_J):
        offs_j = j + tl.arange(0, BLOCK_J)
        keep = tl.load(keep_ptr + b * num_kept + offs_j, mask=offs_j < num_kept, other=-1)
        found = tl.where(keep[None, :] == offs_p[:, None], offs_j[None, :], -1)
        slots = tl.maximum(slots, tl.max(found, axis=1))
    tl.store(slots_ptr + offs_p.to(tl.int64) * B + b, slots, mask=offs_p < num_patches)


@triton.jit(do_not_specialize=["B", "T"], **ANY_BATCH)
def _patch_embed_bwd_kept_kernel(
    dtoken_ptr,
    dout_ptr,
    slots_ptr,
    B,
    T,
    C,
    num_prefix,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dtoken[p, c] = sum_b dout[b, num_prefix + slots[p, b], c] over the images that keep p."""
    p = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    acc = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
    for start in range(0, B, BLOCK_B):
        offs_b = start + tl.arange(0, BLOCK_B)
        slot = tl.load(slots_ptr + p * B + offs_b, mask=offs_b < B, other=-1)
        rows = offs_b.to(tl.int64) * T + num_prefix + slot
        mask = (slot >= 0)[:, None] & mask_c[None, :]
        dout = tl.load(dout_ptr + rows[:, None] * C + offs_c[None, :], mask=mask, other=0.0)
        acc += dout.to(tl.float32)
    tl.store(dtoken_ptr + p * C + offs_c, tl.sum(acc, axis=0), mask=mask_c)
