"""Patch embedding: images to tokens by an implicit GEMM, prefix tokens and positions with it.

    patch   out[b, n+i, c] = sum_k pixel[b, p, k] weight[c, k] + bias[c] [+ pos[p or n+p, c]]
    prefix  out[b, t, c]   = prefix[t, c] [+ pos[t, c]],   t < n

k = (channel, row, column) runs over the pixels of one patch, p = (patch row, patch column) over the
patches of one image, and pixel[b, p, k] is read where it lies: there is no unfolded copy. Of a
video, k has a frame before its row and p a patch frame before its patch row. p = i, or keep[b, i]
under a list of patches to keep.

    dweight[c, k]      = sum_{b,i} dout[b, n+i, c] pixel[b, p, k]
    dimages[b, (p, k)] = sum_c dout[b, n+i, c] weight[c, k]        a pixel lies in one patch only
    dtoken[t, c]       = sum_b dout[b, t, c],   dprefix = dtoken[:n],   dpos = dtoken[n: or 0:]
    dbias[c]           = sum_p dtoken[n+p, c]

Saved: images where weight needs a gradient, weight where images do, keep.
Precision: pixels, weight and dout are cast to the compute dtype at the load; fp32 accumulators
start from bias, prefix and position, summed once for all images in fp32, and one rounding to the
result's dtype follows. dweight in fp32 partials, one a row range, summed in a fixed order. No
atomics.
Source: arXiv:2010.11929, section 3.1; lists of patches: arXiv:2111.06377; videos:
arXiv:2203.12602. Derivation: docs/patch_embed.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import (
    as_dtype,
    check_dense,
    check_device,
    check_shape,
    check_tensor,
    compute_dtype,
    contiguous,
    empty,
    empty_gradients,
    needs_gradient,
)
from ...runtime.backend import Gpu, gpu
from ...runtime.compat import matmul_precision
from ...runtime.configs import launch_plan
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.dtypes import DTYPE_NAMES
from ...runtime.operator import Route, differentiable, operator
from ...runtime.triton import VERSION, bind_launch, tl, triton
from ...runtime.values import values_are_checked
from ..common.gemm import needs_fence
from ..common.gemm_configs import gemm_key
from ..common.reduction import column_sum
from . import kernels


def patch_embed_ref(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """The specification of `patch_embed`: conv, cat, add, gather."""
    conv = F.conv3d if images.ndim == 5 else F.conv2d
    x = conv(images, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    return add_tokens(x, prefix_tokens, pos_embed, keep)


def add_tokens(
    x: Tensor, prefix_tokens: Tensor | None, pos_embed: Tensor | None, keep: Tensor | None
) -> Tensor:
    """Projected patches (B, P, C) -> (B, n + K, C), with prefix tokens and positions."""
    num_patches = x.shape[1]
    if pos_embed is not None and pos_embed.shape[-2] == num_patches:
        x, pos_embed = x + pos_embed, None
    if prefix_tokens is not None:
        prefix_tokens = prefix_tokens.expand(x.shape[0], -1, -1)
        x = torch.cat([prefix_tokens.to(torch.promote_types(x.dtype, prefix_tokens.dtype)), x], 1)
    x = x if pos_embed is None else x + pos_embed
    if keep is None:
        return x
    n = x.shape[1] - num_patches
    index = keep.long()[:, :, None].expand(-1, -1, x.shape[2])
    return torch.cat([x[:, :n], x[:, n:].gather(1, index)], 1)


def grid_of(images: Sequence[int], patch: Sequence[int]) -> tuple[int, ...]:
    """Patches along each axis past the channels: rows and columns, for a video frames before."""
    return tuple(n // p for n, p in zip(images[2:], patch, strict=True))


def _strides(strides: Sequence[int]) -> kernels.ImageStrides:
    """An image has one frame."""
    b, c, *t, h, w = strides
    return kernels.ImageStrides(b, c, t[0] if t else 0, h, w)


def _patch(channels: int, patch: Sequence[int], strides: Sequence[int]) -> kernels.Patch:
    *t, h, w = patch
    pixels = channels * math.prod(patch)
    return kernels.Patch(t[0] if t else None, h, w, pixels, _alignment(strides, w))


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
    while largest * bytes_per_step > kernels.STAGE_BYTES:
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


def _added_launch(
    tokens: int, C: int, has_bias: bool, num_prefix: int, num_pos: int | None
) -> Callable[..., None]:
    """Of the kernel that sums what is added to the product."""
    return bind_launch(
        kernels._patch_embed_added_kernel,
        (tokens, triton.cdiv(C, kernels.ADDED_TILE["BLOCK_C"])),
        C,
        num_prefix,
        tokens - (num_pos or tokens),
        HAS_BIAS=has_bias,
        HAS_PREFIX=num_prefix > 0,
        HAS_POS=num_pos is not None,
        **kernels.ADDED_TILE,
    )


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
    config = kernels.FWD_TABLE.choose(gpu, *gemm_key(B * T, C, K, dtype))
    block_m, block_n, block_k = config[:3]
    block_m, block_n = _block(block_m, B * T), _block(block_n, C)
    largest_k = block_k if K % block_k == 0 else block_k // 2  # the smaller one pads less
    bytes_per_step = block_m * images_dtype.itemsize + block_n * dtype.itemsize
    block_k = _depth(largest_k, K, bytes_per_step)
    added = None
    if has_bias or num_prefix or num_pos is not None:
        added = _added_launch(tokens, C, has_bias, num_prefix, num_pos)
    launch = bind_launch(
        kernels._patch_embed_fwd_kernel,
        (triton.cdiv(B * T, block_m) * triton.cdiv(C, block_n),),
        B * T,
        T,
        C,
        num_prefix,
        num_patches,
        *grid[-2:],
        _strides(strides),
        PATCH=_patch(channels, patch, strides),
        HAS_ADDED=added is not None,
        HAS_KEEP=num_kept is not None,
        TILE=kernels.GemmTile(
            images_dtype == dtype and needs_fence(gpu, dtype, precision),
            precision,
            block_m,
            block_n,
            block_k,
        ),
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
    return empty((dout.shape[2], images.shape[1], *patch), weight_dtype, dout.device)


class BwdWeightPlan(NamedTuple):
    splits: int  # of the rows; with several there are partial sums
    launch: Callable[..., None]  # called with tensors


@launch_plan
def _bwd_weight_plan(
    gpu: Gpu,
    precision: str,
    images_dtype: torch.dtype,
    images: tuple[int, ...],
    strides: tuple[int, ...],
    dout_dtype: torch.dtype,
    dout: tuple[int, ...],
    patch: tuple[int, ...],
    num_kept: int | None,
    dtype: torch.dtype,
) -> BwdWeightPlan:
    """images, dout: their shapes."""
    B, T, C = dout
    grid = grid_of(images, patch)
    num_patches, K = math.prod(grid), images[1] * math.prod(patch)
    rows_per_image = num_patches if num_kept is None else num_kept
    num_rows = B * rows_per_image
    config = kernels.BWD_WEIGHT_TABLE.choose(gpu, DTYPE_NAMES[dtype])
    block_m, block_n, block_k = config[:3]
    block_n, block_k = _block(block_n, C), _block(block_k, K)
    bytes_per_step = block_n * dout_dtype.itemsize + block_k * images_dtype.itemsize
    block_m = _depth(block_m, num_rows, bytes_per_step)
    tiles = triton.cdiv(C, block_n) * triton.cdiv(K, block_k)
    wanted = max(1, kernels.BWD_WEIGHT_PROGRAMS_PER_SM * gpu.num_sms // tiles)
    splits = min(wanted, triton.cdiv(num_rows, kernels.MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, splits), block_m) * block_m
    splits = triton.cdiv(num_rows, rows_per_split)
    constants = _patch(images[1], patch, strides)
    # For a second block on an SM ptxas would spill 8 bytes.
    fits = {10: constants.ALIGN >= 4, 12: images_dtype.itemsize < 4 or VERSION < (3, 9)}
    spills = not fits.get(gpu.family, True)
    fence = images_dtype == dout_dtype == dtype and needs_fence(gpu, dtype, precision)
    launch = bind_launch(
        kernels._patch_embed_bwd_weight_kernel,
        (tiles, splits),
        num_rows,
        rows_per_split,
        C,
        T - rows_per_image,
        rows_per_image,
        num_patches,
        *grid[-2:],
        _strides(strides),
        PATCH=constants,
        HAS_KEEP=num_kept is not None,
        PIXELS_LEFT=images_dtype == dtype,
        COMPUTE_DTYPE=tl.dtype(DTYPE_NAMES[dtype]),
        TILE=kernels.GemmTile(fence, precision, block_m, block_n, block_k),
        **config.options(),
        **({"maxnreg": 168} if spills else {}),
    )
    return BwdWeightPlan(splits, launch)


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
    splits, launch = _bwd_weight_plan(
        gpu(dout.device),
        matmul_precision(),
        images.dtype,
        images.shape,
        images.stride(),
        dout.dtype,
        dout.shape,
        tuple(patch),
        None if keep is None else keep.shape[1],
        compute_dtype,
    )
    partial = dweight
    if splits > 1:
        shape = (splits, dweight.numel())
        partial = torch.empty(shape, dtype=torch.float32, device=dout.device)
    launch(partial, contiguous(dout), images, contiguous(keep))
    if splits > 1:
        column_sum(partial, dweight)
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
    """dbias (C,), dprefix (n, C), dpos (L, C), each in its dtype; None where that is None."""
    B, T, C = dout.shape
    dout = dout.contiguous()
    if keep is not None and pos_dtype is not None:
        dtoken = _kept_tokens(dout, num_prefix, num_patches, keep)
    else:
        dtoken = empty((T, C), torch.float32, dout.device)
        column_sum(dout.view(B, T * C), dtoken)
    dbias: Any = None
    dprefix: Any = None
    dpos: Any = None
    if bias_dtype is not None:
        dbias = column_sum(dtoken[num_prefix:], empty((C,), bias_dtype, dout.device))
    # Copies, never views: two parameters' .grad must not share memory.
    if prefix_dtype is not None:
        dprefix = as_dtype(dtoken.narrow_copy(0, 0, num_prefix), prefix_dtype)
    if pos_dtype is not None:
        others = dtoken.shape[0] - num_pos  # without any, nothing else keeps dtoken
        dpos = dtoken.narrow_copy(0, others, num_pos) if others else dtoken
        dpos = as_dtype(dpos, pos_dtype)
    return dbias, dprefix, dpos


def _kept_tokens(dout: Tensor, num_prefix: int, num_patches: int, keep: Tensor) -> Tensor:
    """(n + patches, C) fp32: the sum over the images that keep it, for each token of an image."""
    B, T, C = dout.shape
    dtoken = empty((num_prefix + num_patches, C), torch.float32, dout.device)
    if B == 0:
        return dtoken.zero_()
    if num_prefix:
        column_sum(dout.view(B, T * C)[:, : num_prefix * C], dtoken[:num_prefix].view(-1))
    slots = empty((num_patches, B), torch.int32, dout.device)
    blocks = triton.cdiv(num_patches, kernels.SLOTS_TILE["BLOCK_P"])
    launch = bind_launch(kernels._patch_embed_slots_kernel, (B, blocks), **kernels.SLOTS_TILE)
    launch(slots, keep.contiguous(), B, keep.shape[1], num_patches)
    grid = num_patches, triton.cdiv(C, kernels.KEPT_TILE["BLOCK_C"])
    launch = bind_launch(kernels._patch_embed_bwd_kept_kernel, grid, **kernels.KEPT_TILE)
    launch(dtoken[num_prefix:], dout, slots, B, T, C, num_prefix)
    return dtoken


def _empty_bwd_images(
    dout: Tensor, images_shape: Sequence[int], images_dtype: torch.dtype
) -> Tensor:
    return torch.empty(tuple(images_shape), dtype=images_dtype, device=dout.device)


@launch_plan
def _bwd_images_plan(
    gpu: Gpu,
    precision: str,
    images: tuple[int, ...],
    strides: tuple[int, ...],
    dout_dtype: torch.dtype,
    dout: tuple[int, ...],
    dtype: torch.dtype,
    weight: tuple[int, ...],
    num_kept: int | None,
) -> Callable[..., None]:
    """The launch, called with tensors; images, dout, weight: their shapes."""
    B, T, C = dout
    _, channels, *patch = weight
    grid = grid_of(images, patch)
    num_patches, K = math.prod(grid), math.prod(weight[1:])
    rows_per_image = num_patches if num_kept is None else num_kept
    num_rows = B * rows_per_image
    config = kernels.BWD_IMAGES_TABLE.choose(gpu, DTYPE_NAMES[dtype])
    block_m, block_n, block_k = config[:3]
    block_m, block_k = _block(block_m, num_rows), _block(block_k, K)
    block_n = _depth(block_n, C, block_m * dout_dtype.itemsize + block_k * dtype.itemsize)
    fence = dout_dtype == dtype and needs_fence(gpu, dtype, precision)
    return bind_launch(
        kernels._patch_embed_bwd_images_kernel,
        (triton.cdiv(num_rows, block_m) * triton.cdiv(K, block_k),),
        num_rows,
        rows_per_image,
        C,
        T - rows_per_image,
        num_patches,
        *grid[-2:],
        _strides(strides),
        PATCH=_patch(channels, patch, strides),
        HAS_KEEP=num_kept is not None,
        TILE=kernels.GemmTile(fence, precision, block_m, block_n, block_k),
        **config.options(),
    )


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
    launch = _bwd_images_plan(
        gpu(dout.device),
        matmul_precision(),
        dimages.shape,
        dimages.stride(),
        dout.dtype,
        dout.shape,
        weight.dtype,
        weight.shape,
        None if keep is None else keep.shape[1],
    )
    launch(dimages, contiguous(dout), contiguous(weight), contiguous(keep))
    return dimages


class PatchEmbedSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    out_dtype: torch.dtype
    images_dtype: torch.dtype
    weight_dtype: torch.dtype
    dtypes: tuple[torch.dtype | None, ...]  # of bias, prefix_tokens, pos_embed
    num_patches: int  # of an image


class PatchEmbedFunction(torch.autograd.Function):
    """(images, weight, bias, prefix_tokens, pos_embed, keep) -> tokens."""

    @staticmethod
    def forward(ctx, images, weight, bias, prefix_tokens, pos_embed, keep, spec):
        needs = ctx.needs_input_grad
        saved = images if needs[1] else None, weight if needs[0] else None
        ctx.save_for_backward(*saved, keep)
        ctx.shapes = (
            images.shape,
            weight.shape[2:],
            None if prefix_tokens is None else prefix_tokens.shape,
            None if pos_embed is None else pos_embed.shape,
        )
        ctx.spec = spec
        weight = as_dtype(weight, spec.dtype)
        return patch_embed_fwd[spec.route](
            images, weight, bias, prefix_tokens, pos_embed, keep, spec.out_dtype
        )

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("patch_embed", PatchEmbedFunction.backward, ctx, dout)
        images, weight, keep = ctx.saved_tensors
        spec, needs = ctx.spec, ctx.needs_input_grad
        route = backward_route(spec.route, dout)
        images_shape, patch, prefix_shape, pos_shape = ctx.shapes
        dimages = dweight = dbias = dprefix = dpos = None
        if needs[0]:
            dimages = patch_embed_bwd_images[route](
                dout, as_dtype(weight, spec.dtype), images_shape, keep, spec.images_dtype
            )
        if needs[1]:
            dweight = patch_embed_bwd_weight[route](
                dout, images, patch, keep, spec.dtype, spec.weight_dtype
            )
        if needs[2] or needs[3] or needs[4]:
            dtypes = [t if need else None for t, need in zip(spec.dtypes, needs[2:5], strict=True)]
            num_prefix = 0 if prefix_shape is None else prefix_shape[-2]
            num_pos = 0 if pos_shape is None else pos_shape[-2]
            dbias, dprefix, dpos = patch_embed_bwd_tokens[route](
                dout, num_prefix, spec.num_patches, num_pos, keep, *dtypes
            )
            dbias = dbias if needs[2] else None
            dprefix = dprefix.view(*prefix_shape) if prefix_shape and needs[3] else None
            dpos = dpos.view(*pos_shape) if pos_shape and needs[4] else None
        return dimages, dweight, dbias, dprefix, dpos, None, None


apply_patch_embed = differentiable(PatchEmbedFunction)

OP = "patch_embed"


def check_call(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix_tokens: Tensor | None,
    pos_embed: Tensor | None,
    keep: Tensor | None,
) -> None:
    """Raise on bad arguments."""
    check_tensor(OP, "images", images)
    check_dense(OP, "weight", weight)
    check_tensor(OP, "weight", weight, ndim=5 if weight.ndim == 5 else 4)
    check_device(OP, "weight", weight, images)
    if images.ndim != weight.ndim:
        raise ValueError(
            f"{OP}: images must have {weight.ndim} axes, got shape {tuple(images.shape)}"
        )
    C, channels, *patch = weight.shape
    if images.shape[1] != channels:
        raise ValueError(
            f"{OP}: images must have the {channels} channels of weight, got {images.shape[1]}"
        )
    if not weight.numel():
        raise ValueError(f"{OP}: weight must not be empty, got shape {tuple(weight.shape)}")
    size = images.shape[2:]
    if any(n % p or not n for n, p in zip(size, patch, strict=True)):
        axes = "height and width" if len(patch) == 2 else "frames, height and width"
        raise ValueError(
            f"{OP}: {axes} of images must be positive multiples of the patch {tuple(patch)}, "
            f"got {tuple(size)}"
        )
    check_shape(OP, "bias", bias, (C,), like=images)
    num_patches = math.prod(grid_of(images.shape, patch))
    num_prefix = 0
    if prefix_tokens is not None:
        _check_tokens("prefix_tokens", prefix_tokens, C, images)
        num_prefix = prefix_tokens.shape[-2]
    if pos_embed is not None:
        _check_tokens("pos_embed", pos_embed, C, images)
        if pos_embed.shape[-2] not in (num_patches, num_patches + num_prefix):
            raise ValueError(
                f"{OP}: pos_embed must have {num_patches} rows (patches) or "
                f"{num_patches + num_prefix} (prefix tokens and patches), "
                f"got shape {tuple(pos_embed.shape)}"
            )
    if keep is not None:
        _check_keep(keep, images, num_patches)


def _check_tokens(name: str, x: Tensor, C: int, images: Tensor) -> None:
    """Check that x is (rows, C) or (1, rows, C), on the device of images."""
    check_tensor(OP, name, x)
    if x.ndim not in (2, 3) or x.shape[-1] != C or x.shape[:-2] not in ((), (1,)):
        raise ValueError(
            f"{OP}: {name} must have shape (1, rows, {C}) or (rows, {C}), got {tuple(x.shape)}"
        )
    check_device(OP, name, x, images)


def _check_keep(keep: Tensor, images: Tensor, num_patches: int) -> None:
    """Check that keep is (B, K) of integers, 1 <= K <= patches, on the device of images."""
    check_dense(OP, "keep", keep)
    if keep.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{OP}: keep must be int32 or int64, got {keep.dtype}")
    B = images.shape[0]
    if keep.ndim != 2 or keep.shape[0] != B or not 1 <= keep.shape[1] <= num_patches:
        raise ValueError(
            f"{OP}: keep must have shape ({B}, K), 1 <= K <= {num_patches} patches, "
            f"got {tuple(keep.shape)}"
        )
    check_device(OP, "keep", keep, images)


def check_kept(keep: Tensor, num_patches: int) -> None:
    """Raise ValueError unless each row of keep lists patches of the image, each once. It waits for
    the values."""
    low, high = (int(x) for x in keep.aminmax())
    if low < 0 or high >= num_patches:
        raise ValueError(
            f"{OP}: keep must list patches from 0 to {num_patches - 1}, got {low} to {high}"
        )
    ordered = keep.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"{OP}: keep must list a patch of an image once")


@cached_dispatch
def _decide(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix_tokens: Tensor | None,
    pos_embed: Tensor | None,
    keep: Tensor | None,
) -> PatchEmbedSpec:
    """Check the arguments; what runs, and in which dtypes."""
    check_call(images, weight, bias, prefix_tokens, pos_embed, keep)
    inputs = (weight, images, bias, prefix_tokens, pos_embed)
    dtype = compute_dtype("patch_embed", images=images, weight=weight, bias=bias)
    out_dtype = dtype
    for tokens in (prefix_tokens, pos_embed):
        out_dtype = out_dtype if tokens is None else torch.promote_types(out_dtype, tokens.dtype)
    return PatchEmbedSpec(
        route=choose_route("patch_embed", None, *inputs, keep),
        needs_gradient=needs_gradient(*inputs),
        dtype=dtype,
        out_dtype=out_dtype,
        images_dtype=images.dtype,
        weight_dtype=weight.dtype,
        dtypes=tuple(None if x is None else x.dtype for x in inputs[2:]),
        num_patches=math.prod(grid_of(images.shape, weight.shape[2:])),
    )


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    prefix_tokens: Tensor | None = None,
    pos_embed: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """Images to tokens: the patch convolution, prefix tokens before it, positions added.

    out[b, n + p] = weight . images[b, patch p] + bias + pos
    out[b, t] = prefix[t] + pos[t],   t < n

    Args:
        images: (B, Cin, height, width), fp16, bf16 or fp32, any strides, read in place; or a video
            (B, Cin, frames, height, width).
        weight: (C, Cin, patch height, patch width), as Conv2d's with stride = kernel size; of a
            video (C, Cin, patch frames, patch height, patch width), as Conv3d's.
        bias: (C,) or None.
        prefix_tokens: (1, n, C) or (n, C), class token then registers, or None for n = 0.
        pos_embed: (1, L, C) or (L, C) or None. L = patches: added to the patches alone (timm's
            no_embed_class). L = n + patches: added to all tokens.
        keep: (B, K) int32 or int64, the patches of each image to keep, in this order, each once;
            the others are not read and their images' gradient is 0. A patch keeps its position.
            An index that is out of range gives a row of NaN; inside
            `runtime.values.checked_values()` it raises ValueError, and so does one listed twice.
    Returns:
        (B, n + patches, C), or (B, n + K, C). Its dtype is the compute dtype (autocast's, else
        that of images) promoted with those of prefix_tokens and
        pos_embed, as torch's cat and add promote.
    Precision: fp32 accumulators and epilogue, one rounding at the store; fp32 matmuls follow
        torch.backends.cuda.matmul.fp32_precision. Gradients accumulate in fp32.
    Saved: images where weight needs a gradient, weight where images do, keep.
    Raises: ValueError, such as "patch_embed: height and width of images must be positive multiples
        of the patch (16, 16), got (225, 224)"; TypeError.
    Source: arXiv:2010.11929. Specification: patch_embed_ref. Derivation: docs/patch_embed.md.
    """
    inputs = (images, weight, bias, prefix_tokens, pos_embed, keep)
    spec = _decide(*inputs)
    if keep is not None and values_are_checked():
        check_kept(keep, spec.num_patches)
    if spec.route is None:
        return patch_embed_ref(*inputs)
    if spec.needs_gradient:
        return apply_patch_embed[spec.route](*inputs, spec)
    weight = as_dtype(weight, spec.dtype)
    return patch_embed_fwd[spec.route](
        images, weight, bias, prefix_tokens, pos_embed, keep, spec.out_dtype
    )
