"""`python -m bench traffic`: patch embedding and attention alone, where inputs need not be moved.

Attention in bf16, with as many heads as ViT-B: images of 128 to 1024 tokens, padded to the longest
or packed; a mask that is learnt. SDPA takes masks as torch dispatches them on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.bench_varlen_attention import SPREAD, lengths
from bench.counting import Count, Step, counting
from bench.shapes import VITS, Shape
from fastvit_kernels import attention, backend, patch_embed, varlen_attention
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.tools.aot import tensor_bytes

BATCH, SIZE, PATCH = 256, 224, 16
TOKENS = BATCH * ((SIZE // PATCH) ** 2 + 1)

# Of patch_embed: what stands in a data loader or after it, counted with it.
NORMALISE = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PATCHES = (SIZE // PATCH) ** 2
KEPT_PATCHES = PATCHES // 4


def _count(count: Count, call: Callable[[], Tensor]) -> Step:
    """Forward and backward of one call."""
    count.calls.clear()
    out = call()
    forward = len(count.calls), count.bytes
    out.backward(torch.empty_like(out))
    backward = len(count.calls) - forward[0], count.bytes - forward[1]
    return Step(forward, backward, sum(x.untyped_storage().nbytes() for x in count.kept.values()))


def _figures(step: Step) -> tuple[str, ...]:
    """Launches, then MB."""
    moved = (step.forward[1], step.backward[1], step.kept)
    return str(step.forward[0]), str(step.backward[0]), *(f"{n / 1e6:.0f}" for n in moved)


def patches(size: str, way: str, ours: bool) -> Step:
    """Patch embedding under bf16 autocast: fp32 images, uint8 ones, or a quarter of the patches.

    A launch counts its tensors whole, but ours reads the pixels of kept patches alone.
    """
    C, tokens = VITS[size][0], TOKENS // BATCH
    function = patch_embed if ours else patch_embed_ref
    shapes = {
        "weight": (C, 3, PATCH, PATCH), "bias": (C,), "prefix_tokens": (1, 1, C),
        "pos_embed": (1, tokens, C),
    }  # fmt: skip
    given: dict[str, Any] = {}
    with backend("triton"), counting() as count:
        parameters = {n: torch.empty(s, requires_grad=True) for n, s in shapes.items()}
        images = torch.empty(BATCH, 3, SIZE, SIZE)
        if "uint8" in way:
            images, given = images.to(torch.uint8), {**NORMALISE}
        if "kept" in way:
            given["keep"] = torch.zeros(BATCH, KEPT_PATCHES, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            step = _count(count, lambda: function(images, **parameters, **given))
    unread = 0
    if ours and "keep" in given:
        unread = tensor_bytes(images) * (PATCHES - KEPT_PATCHES) // PATCHES
    return step.without(unread, unread)


IMAGES = ("fp32 images", "uint8 images", "fp32, 25 % kept", "uint8, 25 % kept")


def patch_rows() -> Iterator[tuple[str, ...]]:
    """A line for each kind of images: launches and MB of patch_embed, a step of ViT-B/16."""
    for way in IMAGES:
        for provider, ours in (("torch", False), ("ours", True)):
            yield way, provider, *_figures(patches("B", way, ours))


_COUNTED = ("launches forward", "backward", "MB forward", "backward", "MB kept")
PATCH_HEADER = ("images", "patch_embed", *_COUNTED)


@dataclass(frozen=True)
class Way:
    """Attention of images of their own lengths: what is given, and which pairs are multiplied.

    A launch counts its tensors whole, but where keys are passed over, ours reads no k and v of
    them, in the forward and where dq is made.
    """

    name: str
    call: Callable[[Tensor, list[int]], Tensor]
    is_packed: bool
    pairs: Callable[[int, int], int]  # of an image with n tokens, padded to T
    skips_keys: bool = False


def _sdpa(qkv: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def _by_image(qkv: Tensor, n: list[int]) -> Tensor:
    return torch.cat([_sdpa(part.unsqueeze(0)) for part in qkv.split(n)], dim=1)


def _mask(qkv: Tensor, queries: int) -> Tensor:
    return torch.empty(len(qkv), 1, queries, qkv.shape[1], dtype=torch.bool)


def _packed(qkv: Tensor, n: list[int]) -> Tensor:
    return varlen_attention(qkv, torch.empty(len(n) + 1, dtype=torch.int32), max(n))


WAYS = (
    Way("SDPA, mask (B, 1, T, T)", lambda x, n: _sdpa(x, _mask(x, x.shape[1])), False,
        lambda n, T: T * T),
    Way("SDPA, mask (B, 1, 1, T)", lambda x, n: _sdpa(x, _mask(x, 1)), False, lambda n, T: T * T),
    Way("SDPA image by image", _by_image, True, lambda n, T: n * n),
    Way("attention, mask (B, 1, 1, T)", lambda x, n: attention(x, attn_mask=_mask(x, 1)), False,
        lambda n, T: n * T, skips_keys=True),
    Way("varlen_attention", _packed, True, lambda n, T: n * n),
)  # fmt: skip
IMAGES_PACKED = Shape("NaFlex-B", 64, 1024, 768, 12, 3072, variant=SPREAD)


def images_attended(way: Way, shape: Shape = IMAGES_PACKED) -> Step:
    """Attention alone, forward and backward, of images of their own lengths."""
    n = lengths(shape)
    tokens = (sum(n),) if way.is_packed else (shape.B, shape.T)
    with backend("triton"), counting() as count:
        qkv = torch.empty(*tokens, 3, shape.H, shape.D, dtype=torch.bfloat16, requires_grad=True)
        step = _count(count, lambda: way.call(qkv, n))
    hidden = 2 * 2 * shape.C * (shape.B * shape.T - sum(n)) if way.skips_keys else 0
    return step.without(hidden, hidden)


def bias_learnt(ours: bool) -> Step:
    """Attention alone with a learnt bias (1, H, T, T), BEiT-B's, and its gradient."""
    C, _, H, _ = VITS["B"]
    T = TOKENS // BATCH
    with backend("triton"), counting() as count:
        qkv, bias = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((BATCH, T, 3, H, C // H), (1, H, T, T))
        )
        return _count(count, lambda: attention(qkv, attn_mask=bias) if ours else _sdpa(qkv, bias))


def attention_rows() -> Iterator[tuple[str, ...]]:
    """Images padded and packed, then a learnt bias: launches, MB, products of the least."""
    n, T = lengths(IMAGES_PACKED), IMAGES_PACKED.T
    least = sum(x * x for x in n)
    for way in WAYS:
        share = sum(way.pairs(x, T) for x in n) / least
        name = f"{len(n)} images of {min(n)} to {T} tokens"
        yield name, way.name, *_figures(images_attended(way)), f"{share:.2f}"
    for provider, ours in (("SDPA", False), ("attention", True)):
        name = f"learnt bias, {BATCH} images of {TOKENS // BATCH}"
        yield name, provider, *_figures(bias_learnt(ours)), "1.00"


ATTENTION_HEADER = ("sequences", "attention", *_COUNTED, "products of least")
