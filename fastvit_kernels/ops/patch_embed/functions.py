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
Operators: launch.py. Kernels: kernels.py. Source: arXiv:2010.11929, section 3.1; lists of patches:
arXiv:2111.06377; videos: arXiv:2203.12602. Derivation: docs/patch_embed.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import as_dtype, compute_dtype, needs_gradient
from ...runtime.dispatch import backward_route, cached_dispatch, choose_route, first_order
from ...runtime.operator import Route, differentiable
from ...runtime.values import values_are_checked
from .arguments import check_call, check_kept
from .launch import (
    grid_of,
    patch_embed_bwd_images,
    patch_embed_bwd_tokens,
    patch_embed_bwd_weight,
    patch_embed_fwd,
)


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


class PatchEmbedSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    dtype: torch.dtype  # to compute in
    out_dtype: torch.dtype
    images_dtype: torch.dtype
    weight_dtype: torch.dtype
    dtypes: tuple[torch.dtype | None, ...]  # of bias, prefix_tokens, pos_embed


class PatchEmbedFunction(torch.autograd.Function):
    """(images, weight, bias, prefix_tokens, pos_embed, keep) -> tokens."""

    @staticmethod
    def forward(ctx, images, weight, bias, prefix_tokens, pos_embed, keep, spec):
        needs = ctx.needs_input_grad
        saved = images if needs[1] else None, weight if needs[0] else None
        ctx.save_for_backward(*saved, *(() if keep is None else (keep,)))
        ctx.shapes = (
            images.shape,
            weight.shape[2:],
            None if bias is None else bias.shape,
            None if prefix_tokens is None else prefix_tokens.shape,
            None if pos_embed is None else pos_embed.shape,
        )
        ctx.spec = spec
        return patch_embed_fwd[spec.route](
            images,
            as_dtype(weight, spec.dtype),
            bias,
            prefix_tokens,
            pos_embed,
            keep,
            spec.out_dtype,
        )

    @staticmethod
    @first_order("patch_embed")
    def backward(ctx, dout):
        images, weight, *keep = ctx.saved_tensors
        keep = keep[0] if keep else None
        spec, needs = ctx.spec, ctx.needs_input_grad
        route = backward_route(spec.route, dout)
        images_shape, patch, bias_shape, prefix_shape, pos_shape = ctx.shapes
        dimages = dweight = dbias = dprefix = dpos = None
        if needs[0]:
            dimages = patch_embed_bwd_images[route](
                dout, as_dtype(weight, spec.dtype), images_shape, keep, spec.images_dtype
            )
        if needs[1]:
            dweight = patch_embed_bwd_weight[route](
                dout,
                images,
                patch,
                keep,
                spec.dtype,
                spec.weight_dtype,
            )
        if needs[2] or needs[3] or needs[4]:
            dtypes = (t if need else None for t, need in zip(spec.dtypes, needs[2:5], strict=True))
            num_prefix = 0 if prefix_shape is None else prefix_shape[-2]
            num_pos = 0 if pos_shape is None else pos_shape[-2]
            num_patches = math.prod(grid_of(images_shape, patch))
            dbias, dprefix, dpos = patch_embed_bwd_tokens[route](
                dout, num_prefix, num_patches, num_pos, keep, *dtypes
            )
            dbias = dbias.view(bias_shape) if needs[2] else None
            dprefix = dprefix.view(prefix_shape) if needs[3] else None
            dpos = dpos.view(pos_shape) if needs[4] else None
        return dimages, dweight, dbias, dprefix, dpos, None, None


apply_patch_embed = differentiable(PatchEmbedFunction)


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
    unsupported = check_call(images, weight, bias, prefix_tokens, pos_embed, keep)
    inputs = (weight, images, bias, prefix_tokens, pos_embed)
    dtype = compute_dtype("patch_embed", images=images, weight=weight, bias=bias)
    out_dtype = dtype
    for tokens in (prefix_tokens, pos_embed):
        out_dtype = out_dtype if tokens is None else torch.promote_types(out_dtype, tokens.dtype)
    return PatchEmbedSpec(
        route=choose_route("patch_embed", unsupported, *inputs, keep),
        needs_gradient=needs_gradient(*inputs),
        dtype=dtype,
        out_dtype=out_dtype,
        images_dtype=images.dtype,
        weight_dtype=weight.dtype,
        dtypes=tuple(None if x is None else x.dtype for x in inputs[2:]),
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
        check_kept(keep, math.prod(grid_of(images.shape, weight.shape[2:])))
    if spec.route is None:
        return patch_embed_ref(*inputs)
    if spec.needs_gradient:
        return apply_patch_embed[spec.route](*inputs, spec)
    return patch_embed_fwd[spec.route](
        images,
        as_dtype(weight, spec.dtype),
        bias,
        prefix_tokens,
        pos_embed,
        keep,
        spec.out_dtype,
    )
