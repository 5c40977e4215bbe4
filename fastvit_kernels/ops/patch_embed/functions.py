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
Kernels: kernels.py. Source: arXiv:2010.11929, section 3.1. Derivation:
docs/patch_embed.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import (
    as_dtype,
    check_device,
    check_shape,
    check_tensor,
    compute_dtype,
    needs_gradient,
)
from ...runtime.backend import device_guard, gpu
from ...runtime.dispatch import decide_once, first_order, ops_for, route
from ...runtime.dtypes import DTYPE_NAMES
from ...runtime.operator import Routed, differentiable, operator
from ...runtime.triton import triton
from ..common.gemm import input_precision, needs_fence
from ..common.reduction import column_sum
from .kernels import (
    BWD_IMAGES_TABLE,
    BWD_WEIGHT_PROGRAMS_PER_SM,
    BWD_WEIGHT_TABLE,
    FWD_TABLE,
    MIN_ROWS_PER_SPLIT,
    STAGE_BYTES,
    TL_DTYPES,
    _patch_embed_bwd_images_kernel,
    _patch_embed_bwd_weight_kernel,
    _patch_embed_fwd_kernel,
)


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


def _flops_fwd(images, weight, *_, **__):
    return 2 * math.prod(images) * weight[0]  # a pixel lies in one patch only


@operator(fake=_empty_fwd, flops=_flops_fwd)
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
    config = FWD_TABLE.choose(gpu(images.device), DTYPE_NAMES[weight.dtype])
    block_m, block_n, block_k = config[:3]
    block_m, block_n = _block(block_m, B * T), _block(block_n, C)
    K = weight.shape[1]
    largest_k = block_k if K % block_k == 0 else block_k // 2  # the smaller one pads less
    bytes_per_step = block_m * images.itemsize + block_n * weight.itemsize
    block_k = _depth(largest_k, K, bytes_per_step)
    precision = input_precision()
    with device_guard(images):
        _patch_embed_fwd_kernel[(triton.cdiv(B * T, block_m) * triton.cdiv(C, block_n),)](
            out, images, weight, bias, prefix, pos, B * T, T, C,
            0 if prefix is None else prefix.shape[0], 0 if pos is None else T - pos.shape[0],
            images.shape[3] // patch_w, *images.stride(),
            CHANNELS=channels, PATCH_H=patch_h, PATCH_W=patch_w,
            ALIGN=_alignment(images, patch_w), HAS_BIAS=bias is not None,
            HAS_PREFIX=prefix is not None, HAS_POS=pos is not None,
            FENCE=images.dtype == weight.dtype
            and needs_fence(gpu(images.device), weight.dtype, precision),
            INPUT_PRECISION=precision, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, **config.options(),
        )  # fmt: skip
    return out


def _empty_bwd_weight(
    dout: Tensor, images: Tensor, patch_h: int, patch_w: int, compute_dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    shape = (dout.shape[2], images.shape[1], patch_h, patch_w)
    return torch.empty(shape, dtype=weight_dtype, device=dout.device)


def _flops_bwd_weight(dout, images, *_, **__):
    return 2 * math.prod(images) * dout[2]


@operator(fake=_empty_bwd_weight, flops=_flops_bwd_weight)
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
    config = BWD_WEIGHT_TABLE.choose(gpu(dout.device), DTYPE_NAMES[compute_dtype])
    block_m, block_n, block_k = config[:3]
    block_n, block_k = _block(block_n, C), _block(block_k, K)
    bytes_per_step = block_n * dout.itemsize + block_k * images.itemsize
    block_m = _depth(block_m, num_rows, bytes_per_step)
    tiles = triton.cdiv(C, block_n) * triton.cdiv(K, block_k)
    wanted = max(1, BWD_WEIGHT_PROGRAMS_PER_SM * gpu(dout.device).num_sms // tiles)
    splits = min(wanted, triton.cdiv(num_rows, MIN_ROWS_PER_SPLIT))
    rows_per_split = triton.cdiv(triton.cdiv(num_rows, splits), block_m) * block_m
    splits = triton.cdiv(num_rows, rows_per_split)
    partial = dweight
    if splits > 1:
        partial = torch.empty((splits, C * K), dtype=torch.float32, device=dout.device)
    precision = input_precision()
    with device_guard(dout):
        _patch_embed_bwd_weight_kernel[(tiles, splits)](
            partial, dout, images, num_rows, rows_per_split, C, T - num_patches,
            num_patches, grid_w, *images.stride(),
            CHANNELS=images.shape[1], PATCH_H=patch_h, PATCH_W=patch_w,
            ALIGN=_alignment(images, patch_w), PIXELS_LEFT=images.dtype == compute_dtype,
            FENCE=images.dtype == dout.dtype == compute_dtype
            and needs_fence(gpu(dout.device), compute_dtype, precision),
            COMPUTE_DTYPE=TL_DTYPES[compute_dtype], INPUT_PRECISION=precision,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            **config.options(),
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


@operator(fake=_empty_bwd_tokens)
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


def _flops_bwd_images(dout, weight, height, width, *_, **__):
    return 2 * dout[0] * height * width * weight[1] * dout[2]


@operator(fake=_empty_bwd_images, flops=_flops_bwd_images)
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
    config = BWD_IMAGES_TABLE.choose(gpu(dout.device), DTYPE_NAMES[weight.dtype])
    block_m, block_n, block_k = config[:3]
    block_m, block_k = _block(block_m, B * num_patches), _block(block_k, K)
    block_n = _depth(block_n, C, block_m * dout.itemsize + block_k * weight.itemsize)
    precision = input_precision()
    with device_guard(dout):
        _patch_embed_bwd_images_kernel[
            (triton.cdiv(B * num_patches, block_m) * triton.cdiv(K, block_k),)
        ](
            dimages, dout, weight, B * num_patches, num_patches, C, T - num_patches, grid_w,
            *dimages.stride()[:3],
            CHANNELS=channels, PATCH_H=patch_h, PATCH_W=patch_w,
            ALIGN=_alignment(dimages, patch_w),
            FENCE=dout.dtype == weight.dtype
            and needs_fence(gpu(dout.device), weight.dtype, precision),
            INPUT_PRECISION=precision, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            **config.options(),
        )  # fmt: skip
    return dimages


class PatchEmbedDecision(NamedTuple):
    """What `_decide` found for a kind of call."""

    ops: Routed | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    out_dtype: torch.dtype


@differentiable
class PatchEmbedFunction(torch.autograd.Function):
    """(images, weight, bias, prefix_tokens, pos_embed) -> tokens."""

    @staticmethod
    def forward(ctx, images, weight, bias, prefix_tokens, pos_embed, decision):
        needs = ctx.needs_input_grad
        ctx.save_for_backward(images if needs[1] else None, weight if needs[0] else None)
        params = (bias, prefix_tokens, pos_embed)
        ctx.shapes = [None if x is None else x.shape for x in params]
        ctx.dtypes = [x.dtype if need else None for x, need in zip(params, needs[2:5], strict=True)]
        ctx.images_shape, ctx.images_dtype = images.shape, images.dtype
        ctx.patch, ctx.weight_dtype = weight.shape[2:], weight.dtype
        ctx.decision = decision
        return _forward(images, weight, bias, prefix_tokens, pos_embed, decision)

    @staticmethod
    @first_order("patch_embed")
    def backward(ctx, dout):
        images, weight = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, ctx.decision.dtype
        ops = ops_for(ctx.decision.ops, dout)
        dimages = dweight = dbias = dprefix = dpos = None
        if needs[0]:
            height, width = ctx.images_shape[2:]
            dimages = ops.patch_embed_bwd_images(
                dout, as_dtype(weight, dtype), height, width, ctx.images_dtype
            )
        if needs[1]:
            dweight = ops.patch_embed_bwd_weight(dout, images, *ctx.patch, dtype, ctx.weight_dtype)
        if needs[2] or needs[3] or needs[4]:
            bias_shape, prefix_shape, pos_shape = ctx.shapes
            num_prefix = 0 if prefix_shape is None else prefix_shape[-2]
            num_pos = 0 if pos_shape is None else pos_shape[-2]
            dbias, dprefix, dpos = ops.patch_embed_bwd_tokens(
                dout, num_prefix, num_pos, *ctx.dtypes
            )
            dbias = dbias.view(bias_shape) if needs[2] else None
            dprefix = dprefix.view(prefix_shape) if needs[3] else None
            dpos = dpos.view(pos_shape) if needs[4] else None
        return dimages, dweight, dbias, dprefix, dpos, None


def _forward(
    images: Tensor, weight: Tensor, bias: Tensor | None, prefix_tokens: Tensor | None,
    pos_embed: Tensor | None, decision: PatchEmbedDecision,
) -> Tensor:  # fmt: skip
    assert decision.ops is not None
    weight = as_dtype(weight, decision.dtype)
    return decision.ops.patch_embed_fwd(
        images, weight, bias, prefix_tokens, pos_embed, decision.out_dtype
    )


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
    dtypes = [x.dtype for x in tensors if x is not None and x.dtype not in DTYPE_NAMES]
    return f"there is no kernel for {dtypes[0]}" if dtypes else None


def _check_tokens(op: str, name: str, x: Tensor, C: int, images: Tensor) -> None:
    """Check that x is (rows, C) or (1, rows, C), on the device of images."""
    check_tensor(op, name, x)
    if x.ndim not in (2, 3) or x.shape[-1] != C or x.shape[:-2] not in ((), (1,)):
        raise ValueError(
            f"{op}: {name} must have shape (1, rows, {C}) or (rows, {C}), got {tuple(x.shape)}"
        )
    check_device(op, name, x, images)


@decide_once
def _decide(
    images: Tensor, weight: Tensor, bias: Tensor | None, prefix_tokens: Tensor | None,
    pos_embed: Tensor | None, ops: Routed,
) -> PatchEmbedDecision:  # fmt: skip
    """Check the arguments; what runs, and in which dtypes."""
    inputs = (images, weight, bias, prefix_tokens, pos_embed)
    unsupported = _check(*inputs)
    dtype = out_dtype = compute_dtype("patch_embed", images=images, weight=weight, bias=bias)
    for tokens in (prefix_tokens, pos_embed):
        out_dtype = out_dtype if tokens is None else torch.promote_types(out_dtype, tokens.dtype)
    return PatchEmbedDecision(
        route("patch_embed", ops, unsupported, *inputs), needs_gradient(*inputs), dtype, out_dtype
    )


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
    inputs = (images, weight, bias, prefix_tokens, pos_embed)
    decision = _decide(*inputs)
    if decision.ops is None:
        return patch_embed_ref(*inputs)
    if not decision.needs_gradient:
        return _forward(*inputs, decision)
    return decision.ops.PatchEmbedFunction(*inputs, decision)
