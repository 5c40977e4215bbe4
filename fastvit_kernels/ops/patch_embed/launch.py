"""The operators of patch_embed: each allocates, chooses tiles and launches its kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import contiguous, empty_gradients
from ...runtime.backend import Gpu, gpu
from ...runtime.compat import matmul_precision
from ...runtime.configs import launch_plan
from ...runtime.dtypes import DTYPE_NAMES
from ...runtime.operator import operator
from ...runtime.triton import VERSION, bind_launch, tl, triton
from ..common.gemm import needs_fence
from ..common.gemm_configs import gemm_key
from ..common.reduction import column_sum
from . import configs, kernels


def grid_of(images: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]:
    """Patches along each axis past the channels: rows and columns, for a video frames before."""
    return tuple(n // p for n, p in zip(images[2:], patch, strict=True))


def _strides(strides: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Of batch, channels, frames, rows and columns; an image has one frame."""
    b, c, *t, h, w = strides
    return b, c, t[0] if t else 0, h, w


def _patch_constants(patch: Sequence[int]) -> dict[str, int | None]:
    *t, h, w = patch
    return dict(PATCH_T=t[0] if t else None, PATCH_H=h, PATCH_W=w)


def _alignment(strides: Sequence[int], patch_w: int) -> int:
    """A power of two that divides the offset of every run of pixels; 1 where there are no runs."""
    if strides[-1] != 1:
        return 1
    return math.gcd(16, patch_w, *strides[:-1])


def _block(largest: int, size: int) -> int:
    """The tile side for an axis: a power of two, at least the 16 that tl.dot needs."""
    return min(largest, max(16, triton.next_power_of_2(size)))


def _depth(largest: int, size: int, bytes_per_step: int) -> int:
    """The tile side along the summed axis: a stage of both operands within STAGE_BYTES."""
    while largest * bytes_per_step > configs.STAGE_BYTES:
        largest //= 2
    return _block(largest, size)


def _empty_fwd(
    images: Tensor,
    weight: Tensor,
    prefix_tokens: Tensor | None,
    keep: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    C, _, *patch = weight.shape
    num_prefix = 0 if prefix_tokens is None else prefix_tokens.shape[-2]
    rows = math.prod(grid_of(images.shape, patch)) if keep is None else keep.shape[1]
    shape = (images.shape[0], num_prefix + rows, C)
    return torch.empty(shape, dtype=out_dtype, device=images.device)


def _flops(images, C, patch, keep):
    if keep is not None:
        return 2 * math.prod(keep) * images[1] * math.prod(patch) * C
    return 2 * math.prod(images) * C  # a pixel lies in one patch only


class FwdPlan(NamedTuple):
    out: tuple[int, ...]  # its shape
    tokens: int  # of an image, with those that a list leaves out
    added: Callable[..., None] | None  # called with tensors; None where nothing is added
    launch: Callable[..., None] | None  # the same; None where out is empty


@launch_plan
def _fwd_plan(
    gpu: Gpu,
    precision: str,
    images_dtype: torch.dtype,
    images: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    weight: tuple[int, ...],
    has_bias: bool,
    num_prefix: int,
    num_pos: int | None,
    num_kept: int | None,
) -> FwdPlan:
    """images, weight: their shapes."""
    C, channels, *patch = weight
    K = math.prod(weight[1:])
    grid = grid_of(images, patch)
    num_patches = math.prod(grid)
    B, T = images[0], num_prefix + (num_patches if num_kept is None else num_kept)
    tokens = num_prefix + num_patches
    if B * T * C == 0:
        return FwdPlan((B, T, C), tokens, None, None)
    config = configs.FWD_TABLE.choose(gpu, *gemm_key(B * T, C, K, dtype))
    block_m, block_n, block_k = config[:3]
    block_m, block_n = _block(block_m, B * T), _block(block_n, C)
    largest_k = block_k if K % block_k == 0 else block_k // 2  # the smaller one pads less
    bytes_per_step = block_m * images_dtype.itemsize + block_n * dtype.itemsize
    block_k = _depth(largest_k, K, bytes_per_step)
    added = None
    if has_bias or num_prefix or num_pos is not None:
        added = bind_launch(
            kernels._patch_embed_added_kernel,
            (tokens, triton.cdiv(C, configs.ADDED_TILE["BLOCK_C"])),
            C,
            num_prefix,
            tokens - (num_pos or tokens),
            HAS_BIAS=has_bias,
            HAS_PREFIX=num_prefix > 0,
            HAS_POS=num_pos is not None,
            **configs.ADDED_TILE,
        )
    launch = bind_launch(
        kernels._patch_embed_fwd_kernel,
        (triton.cdiv(B * T, block_m) * triton.cdiv(C, block_n),),
        B * T,
        T,
        C,
        num_prefix,
        num_patches,
        *grid[-2:],
        *_strides(strides),
        CHANNELS=channels,
        **_patch_constants(patch),
        ALIGN=_alignment(strides, patch[-1]),
        HAS_ADDED=added is not None,
        HAS_KEEP=num_kept is not None,
        FENCE=images_dtype == dtype and needs_fence(gpu, dtype, precision),
        INPUT_PRECISION=precision,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **config.options(),
    )
    return FwdPlan((B, T, C), tokens, added, launch)


@operator(
    fake=_empty_fwd, flops=lambda images, weight, keep: _flops(images, weight[0], weight[2:], keep)
)
def patch_embed_fwd(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix_tokens: Tensor | None,
    pos_embed: Tensor | None,
    keep: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """images by any strides -> tokens (B, T, C) in out_dtype, computed in weight's dtype.

    keep: (B, K) patches, or None for all.
    """
    C = weight.shape[0]
    shape, tokens, add, launch = _fwd_plan(
        gpu(images.device),
        matmul_precision(),
        images.dtype,
        images.shape,
        images.stride(),
        weight.dtype,
        weight.shape,
        bias is not None,
        0 if prefix_tokens is None else prefix_tokens.shape[-2],
        None if pos_embed is None else pos_embed.shape[-2],
        None if keep is None else keep.shape[1],
    )
    out = images.new_empty(shape, dtype=out_dtype)
    if launch is None:
        return out
    added = None
    if add is not None:
        added = out.new_empty((tokens, C), dtype=torch.float32)
        add(added, contiguous(bias), contiguous(prefix_tokens), contiguous(pos_embed))
    launch(out, images, weight.contiguous(), added, contiguous(keep))
    return out


def _empty_bwd_weight(
    dout: Tensor, images: Tensor, patch: Sequence[int], weight_dtype: torch.dtype
) -> Tensor:
    shape = (dout.shape[2], images.shape[1], *patch)
    return torch.empty(shape, dtype=weight_dtype, device=dout.device)


@operator(
    fake=_empty_bwd_weight,
    flops=lambda dout, images, patch, keep: _flops(images, dout[2], patch, keep),
)
def patch_embed_bwd_weight(
    dout: Tensor,
    images: Tensor,
    patch: Sequence[int],
    keep: Tensor | None,
    compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> Tensor:
    """dout (B, T, C) -> dweight (C, Cin, *patch) in weight_dtype."""
    dweight = _empty_bwd_weight(dout, images, patch, weight_dtype)
    if dout.numel() == 0:
        return dweight.zero_()
    dout = dout.contiguous()
    B, T, C = dout.shape
    grid = grid_of(images.shape, patch)
    num_patches, K = math.prod(grid), dweight[0].numel()
    rows_per_image = num_patches if keep is None else keep.shape[1]
    num_rows = B * rows_per_image
    config = configs.BWD_WEIGHT_TABLE.choose(gpu(dout.device), DTYPE_NAMES[compute_dtype])
    block_m, block_n, block_k = config[:3]
    block_n, block_k = _block(block_n, C), _block(block_k, K)
    bytes_per_step = block_n * dout.itemsize + block_k * images.itemsize
    block_m = _depth(block_m, num_rows, bytes_per_step)
    tiles = triton.cdiv(C, block_n) * triton.cdiv(K, block_k)
    wanted = max(1, configs.BWD_WEIGHT_PROGRAMS_PER_SM * gpu(dout.device).num_sms // tiles)
    splits = min(wanted, triton.cdiv(num_rows, configs.MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, splits), block_m) * block_m
    splits = triton.cdiv(num_rows, rows_per_split)
    partial = dweight
    if splits > 1:
        partial = torch.empty((splits, C * K), dtype=torch.float32, device=dout.device)
    precision, align = matmul_precision(), _alignment(images.stride(), patch[-1])
    # For a second block on an SM ptxas would spill 8 bytes.
    fits = {10: align >= 4, 12: images.itemsize < 4 or VERSION < (3, 9)}
    spills = not fits.get(gpu(dout.device).family, True)
    launch = bind_launch(
        kernels._patch_embed_bwd_weight_kernel,
        (tiles, splits),
        CHANNELS=images.shape[1],
        **_patch_constants(patch),
        ALIGN=align,
        HAS_KEEP=keep is not None,
        PIXELS_LEFT=images.dtype == compute_dtype,
        FENCE=images.dtype == dout.dtype == compute_dtype
        and needs_fence(gpu(dout.device), compute_dtype, precision),
        COMPUTE_DTYPE=tl.dtype(DTYPE_NAMES[compute_dtype]),
        INPUT_PRECISION=precision,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **config.options(),
        **({"maxnreg": 168} if spills else {}),
    )
    launch(
        partial,
        dout,
        images,
        contiguous(keep),
        num_rows,
        rows_per_split,
        C,
        T - rows_per_image,
        rows_per_image,
        num_patches,
        *grid[-2:],
        *_strides(images.stride()),
    )
    if splits > 1:
        column_sum(partial, dweight.view(-1))
    return dweight


def _empty_bwd_tokens(
    dout: Tensor,
    num_prefix: int,
    num_pos: int,
    bias_dtype: torch.dtype | None,
    prefix_dtype: torch.dtype | None,
    pos_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    C = dout.shape[2]
    return empty_gradients(
        dout.device, ((C,), bias_dtype), ((num_prefix, C), prefix_dtype), ((num_pos, C), pos_dtype)
    )


@operator(fake=_empty_bwd_tokens)
def patch_embed_bwd_tokens(
    dout: Tensor,
    num_prefix: int,
    num_patches: int,
    num_pos: int,
    keep: Tensor | None,
    bias_dtype: torch.dtype | None,
    prefix_dtype: torch.dtype | None,
    pos_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dbias (C,), dprefix (n, C), dpos (L, C), each in its dtype; empty where that is None."""
    grads = _empty_bwd_tokens(dout, num_prefix, num_pos, bias_dtype, prefix_dtype, pos_dtype)
    dbias, dprefix, dpos = grads
    B, T, C = dout.shape
    dout = dout.contiguous()
    if keep is not None and pos_dtype is not None:
        dtoken = _kept_tokens(dout, num_prefix, num_patches, keep)
    else:
        dtoken = torch.empty((T, C), dtype=torch.float32, device=dout.device)
        column_sum(dout.view(B, T * C), dtoken.view(-1))
    if bias_dtype is not None:
        column_sum(dtoken[num_prefix:], dbias)
    # Copies, never views: two parameters' .grad must not share memory.
    if prefix_dtype is not None:
        dprefix.copy_(dtoken[:num_prefix])
    if pos_dtype is not None:
        dpos.copy_(dtoken[len(dtoken) - num_pos :])
    return grads


def _kept_tokens(dout: Tensor, num_prefix: int, num_patches: int, keep: Tensor) -> Tensor:
    """(n + patches, C) fp32: the sum over the images that keep it, for each token of an image."""
    B, T, C = dout.shape
    empty: Any = dict(device=dout.device)
    dtoken = torch.empty((num_prefix + num_patches, C), dtype=torch.float32, **empty)
    if B == 0:
        return dtoken.zero_()
    if num_prefix:
        column_sum(dout.view(B, T * C)[:, : num_prefix * C], dtoken[:num_prefix].view(-1))
    slots = torch.empty((num_patches, B), dtype=torch.int32, **empty)
    blocks = triton.cdiv(num_patches, configs.SLOTS_TILE["BLOCK_P"])
    launch = bind_launch(kernels._patch_embed_slots_kernel, (B, blocks), **configs.SLOTS_TILE)
    launch(slots, keep.contiguous(), B, keep.shape[1], num_patches)
    grid = num_patches, triton.cdiv(C, configs.KEPT_TILE["BLOCK_C"])
    launch = bind_launch(kernels._patch_embed_bwd_kept_kernel, grid, **configs.KEPT_TILE)
    launch(dtoken[num_prefix:], dout, slots, B, T, C, num_prefix)
    return dtoken


def _empty_bwd_images(
    dout: Tensor, images_shape: Sequence[int], images_dtype: torch.dtype
) -> Tensor:
    return torch.empty(tuple(images_shape), dtype=images_dtype, device=dout.device)


@operator(
    fake=_empty_bwd_images,
    flops=lambda weight, images_shape, keep: _flops(images_shape, weight[0], weight[2:], keep),
)
def patch_embed_bwd_images(
    dout: Tensor,
    weight: Tensor,
    images_shape: Sequence[int],
    keep: Tensor | None,
    images_dtype: torch.dtype,
) -> Tensor:
    """dout (B, T, C) -> dimages of images_shape, computed in weight's dtype."""
    dimages = _empty_bwd_images(dout, images_shape, images_dtype)
    if keep is not None or dout.numel() == 0:
        dimages.zero_()  # dropped patches
    if dout.numel() == 0:
        return dimages
    dout = dout.contiguous()
    B, T, C = dout.shape
    _, channels, *patch = weight.shape
    weight = weight.reshape(C, -1).contiguous()
    grid = grid_of(images_shape, patch)
    num_patches, K = math.prod(grid), weight.shape[1]
    rows_per_image = num_patches if keep is None else keep.shape[1]
    num_rows = B * rows_per_image
    config = configs.BWD_IMAGES_TABLE.choose(gpu(dout.device), DTYPE_NAMES[weight.dtype])
    block_m, block_n, block_k = config[:3]
    block_m, block_k = _block(block_m, num_rows), _block(block_k, K)
    block_n = _depth(block_n, C, block_m * dout.itemsize + block_k * weight.itemsize)
    precision = matmul_precision()
    launch = bind_launch(
        kernels._patch_embed_bwd_images_kernel,
        (triton.cdiv(num_rows, block_m) * triton.cdiv(K, block_k),),
        CHANNELS=channels,
        **_patch_constants(patch),
        ALIGN=_alignment(dimages.stride(), patch[-1]),
        HAS_KEEP=keep is not None,
        FENCE=dout.dtype == weight.dtype and needs_fence(gpu(dout.device), weight.dtype, precision),
        INPUT_PRECISION=precision,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        **config.options(),
    )
    launch(
        dimages,
        dout,
        weight,
        contiguous(keep),
        num_rows,
        rows_per_image,
        C,
        T - rows_per_image,
        num_patches,
        *grid[-2:],
        *_strides(dimages.stride())[:4],
    )
    return dimages
