"""patch_embed on a list of patches to keep and on videos: alone and together."""

from typing import Any

import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.patch_embed.functions import (
    patch_embed,
    patch_embed_ref,
)
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.values import checked_values

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (patch_embed, patch_embed_ref)

# images (B, Cin, ..., height, width), C, patch, prefix tokens, what pos_embed covers, kept
CASES: dict[str, Any] = {
    "p16": ((2, 3, 32, 48), 40, (16, 16), 1, "all", 2),
    "p14": ((2, 3, 28, 42), 24, (14, 14), 0, "all", 4),
    "p4x3": ((3, 3, 8, 18), 130, (4, 3), 5, "patches", 7),
    "p1": ((3, 3, 4, 4), 17, (1, 1), 0, "patches", 1),
    "all-kept": ((1, 3, 8, 8), 16, (4, 4), 2, None, 4),
    "video-p2x4x4": ((2, 3, 4, 8, 12), 24, (2, 4, 4), 1, "all", 5),
    "video-p3x2x5": ((1, 3, 6, 6, 5), 33, (3, 2, 5), 0, "patches", 3),
    "video-p1x4x4": ((2, 3, 3, 8, 4), 16, (1, 4, 4), 1, "patches", 2),
}
VIDEOS = [name for name in CASES if name.startswith("video")]


@pytest.fixture(autouse=True)
def _kernels():
    with backend("triton"):
        yield


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _lists(B: int, K: int, num_patches: int, dtype=torch.int64) -> torch.Tensor:
    """K patches of each image, in no order, another list for each image."""
    rows = torch.rand(B, num_patches, generator=_generator(1)).argsort(1)
    return rows[:, :K].to(DEVICE, dtype)


def _inputs(images, C, patch, num_prefix, pos, kept, dtype=fp32, *, keep=False) -> dict[str, Any]:
    num_patches = 1
    for size, side in zip(images[2:], patch, strict=True):
        num_patches *= size // side
    rows = {"all": num_patches + num_prefix, "patches": num_patches, None: None}[pos]
    fan_in = images[1] * torch.Size(patch).numel()
    return {
        "images": rand(*images, dtype=dtype),
        "weight": rand(C, images[1], *patch, dtype=dtype, seed=1, scale=fan_in**-0.5),
        "bias": rand(C, dtype=dtype, seed=2),
        "prefix_tokens": rand(1, num_prefix, C, dtype=dtype, seed=3) if num_prefix else None,
        "pos_embed": rand(1, rows, C, dtype=dtype, seed=4) if rows else None,
        "keep": _lists(images[0], kept, num_patches) if keep else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_kept_patches(case, dtype):
    assert_accurate(*BOTH, _inputs(*CASES[case], dtype=dtype, keep=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", VIDEOS)
def test_videos(case, dtype):
    assert_accurate(*BOTH, _inputs(*CASES[case], dtype=dtype))


def test_keep_expanded_and_strided_gradient():
    inputs = _inputs(*CASES["p4x3"], keep=True)
    inputs["keep"] = inputs["keep"][:1].expand(3, -1)
    out = patch_embed(**inputs)
    whole = torch.randn(*out.shape[:2], 2 * out.shape[2], device=DEVICE)
    assert_accurate(*BOTH, inputs, upstream=[whole[..., ::2]])


def test_keep_rows_bits():
    """Bit for bit: a row's product does not depend on its neighbours."""
    inputs = _inputs(*CASES["video-p2x4x4"], keep=True)
    keep = inputs.pop("keep")
    whole = patch_embed(**inputs)
    patches = whole[:, 1:].gather(1, keep[..., None].expand(-1, -1, whole.shape[2]))
    out = patch_embed(**inputs, keep=keep)
    assert torch.equal(out, torch.cat([whole[:, :1], patches], 1))


def test_dropped_patches_are_not_read():
    """NaN in them reaches nothing, neither the tokens nor a gradient; their own gradient is 0."""
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all", 2, keep=True)
    dropped = torch.ones(2, 6, dtype=torch.bool, device=DEVICE).scatter_(1, inputs["keep"], False)
    pixels = dropped.view(2, 1, 2, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    images = inputs["images"].detach().masked_fill(pixels, float("nan")).requires_grad_()
    inputs["images"] = images
    out = patch_embed(**inputs)
    grads = torch.autograd.grad(
        out, [x for n, x in inputs.items() if n != "keep"], torch.randn_like(out)
    )
    assert all(x.isfinite().all() for x in (out, *grads))
    assert grads[0][pixels.expand_as(images)].eq(0).all() and grads[0].ne(0).any()
    dpos = grads[4][0, 1:]
    seen = ~dropped.all(0)
    assert dpos[~seen].eq(0).all() and dpos[seen].ne(0).any(1).all()


def test_many_images_and_many_rows():
    """More images than a program sums at once, more patches than a tile of the slots, and row
    ranges for dweight."""
    inputs = _inputs((41, 1, 18, 18), 8, (2, 2), 1, "all", 70, bf16, keep=True)
    inputs["images"] = inputs["images"].detach()
    assert_accurate(*BOTH, inputs)


def test_keep_index_out_of_range():
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all", 3, keep=True)
    good = inputs["keep"].clone()
    for bad in (6, -1, 2**40):
        inputs["keep"] = good.clone()
        inputs["keep"][1, 0] = bad
        trained = [x for n, x in inputs.items() if n != "keep"]
        out = patch_embed(**inputs)
        grads = torch.autograd.grad(out, trained, torch.randn_like(out))
        assert out[1, 1].isnan().all()
        out = out.clone()
        out[1, 1] = 0
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        message = r"patch_embed: keep must list patches from 0 to 5, got "
        with checked_values(), pytest.raises(ValueError, match=message):
            patch_embed(**inputs)
    inputs["keep"] = good.clone()
    inputs["keep"][1, 0] = inputs["keep"][1, 2]
    with checked_values(), pytest.raises(ValueError, match="must list a patch of an image once"):
        patch_embed(**inputs)
    with checked_values():
        patch_embed(**inputs | dict(keep=good))
