"""patch_embed of images and videos, of all patches and of a list to keep."""

import math
from typing import Any

import pytest
import torch
from fuzz import in_precision
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.patch_embed.functions import patch_embed, patch_embed_ref
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.values import checked_values

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (patch_embed, patch_embed_ref)

# images (B, Cin, ..., height, width), C, patch, prefix tokens, what pos_embed covers, kept
CASES: dict[str, Any] = {
    "p16-T7": ((2, 3, 32, 48), 40, (16, 16), 1, "all"),
    "p32-T4": ((1, 4, 64, 32), 33, (32, 32), 2, "patches"),
    "p2-T65": ((2, 1, 16, 16), 64, (2, 2), 1, "patches"),
    "p1-T16": ((3, 2, 4, 4), 17, (1, 1), 0, "patches"),
    "p3x8-T9": ((2, 5, 12, 16), 7, (3, 8), 1, None),
    "one-patch": ((1, 3, 8, 8), 16, (8, 8), 1, "all"),
    "all-prefix-tile": ((2, 1, 4, 4), 16, (4, 4), 70, "all"),
    "video-p2x4x4": ((2, 3, 4, 8, 12), 24, (2, 4, 4), 1, "all"),
    "video-p3x2x5": ((1, 3, 6, 6, 5), 33, (3, 2, 5), 0, "patches"),
    "video-p1x4x4": ((2, 3, 3, 8, 4), 16, (1, 4, 4), 1, "patches"),
    "p16-kept": ((2, 3, 32, 48), 40, (16, 16), 1, "all", 2),
    "p14-kept": ((2, 3, 28, 42), 24, (14, 14), 0, "all", 4),
    "p4x3-kept": ((3, 3, 8, 18), 130, (4, 3), 5, "patches", 7),
    "p1-kept": ((3, 3, 4, 4), 17, (1, 1), 0, "patches", 1),
    "all-kept": ((1, 3, 8, 8), 16, (4, 4), 2, None, 4),
    "video-p2x4x4-kept": ((2, 3, 4, 8, 12), 24, (2, 4, 4), 1, "all", 5),
    "video-p3x2x5-kept": ((1, 3, 6, 6, 5), 33, (3, 2, 5), 0, "patches", 3),
}


@pytest.fixture(autouse=True)
def _kernels():
    with backend("triton"):
        yield


def _lists(B: int, K: int, num_patches: int) -> torch.Tensor:
    """K patches of each image, in no order, another list for each image."""
    rows = torch.rand(B, num_patches, generator=torch.Generator().manual_seed(1)).argsort(1)
    return rows[:, :K].to(DEVICE)


def _inputs(images, C, patch, num_prefix, pos, kept=0, dtype=fp32) -> dict[str, Any]:
    num_patches = math.prod(n // p for n, p in zip(images[2:], patch, strict=True))
    rows = {"all": num_patches + num_prefix, "patches": num_patches, None: None}[pos]
    scale = (images[1] * math.prod(patch)) ** -0.5
    return {
        "images": rand(*images, dtype=dtype),
        "weight": rand(C, images[1], *patch, dtype=dtype, seed=1, scale=scale),
        "bias": rand(C, dtype=dtype, seed=2),
        "prefix_tokens": rand(1, num_prefix, C, dtype=dtype, seed=3) if num_prefix else None,
        "pos_embed": rand(1, rows, C, dtype=dtype, seed=4) if rows else None,
        **({"keep": _lists(images[0], kept, num_patches)} if kept else {}),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_patch_embed_backward(case, dtype):
    assert_accurate(*BOTH, _inputs(*CASES[case], dtype=dtype))


def test_patch_embed_rounds_once():
    one = torch.ones(1, 1, 1, 1, device=DEVICE, dtype=bf16)
    bias, pos = one.flatten(), 0.375 * 2**-7 * one.view(1, 1, 1)  # of an ulp of 1; both exact
    out = patch_embed(one, 0.25 * 2**-7 * one, bias, pos_embed=pos)
    assert out.item() == 1 + 2**-7  # bias + pos in bf16 is 1, and so is 1.25 ulp


@pytest.mark.parametrize(
    ("dtype", "prefix_dtype", "pos_dtype"),
    [(bf16, fp32, fp32), (bf16, fp32, bf16), (fp16, bf16, None), (fp32, bf16, fp16)],
    ids=str,
)
def test_patch_embed_promotes_like_cat_and_add(dtype, prefix_dtype, pos_dtype):
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 2, "all", dtype=dtype)
    inputs["prefix_tokens"] = rand(1, 2, 20, dtype=prefix_dtype)
    inputs["pos_embed"] = None if pos_dtype is None else rand(1, 8, 20, dtype=pos_dtype)
    assert_accurate(*BOTH, inputs)


@pytest.mark.parametrize("images_dtype", [fp32, bf16, fp16], ids=dtype_id)
@pytest.mark.parametrize("pos", ["all", "patches", None])
def test_patch_embed_autocast(images_dtype, pos):
    inputs = _inputs((2, 3, 32, 16), 24, (8, 8), 0 if pos is None else 1, pos)
    inputs["images"] = inputs["images"].detach().to(images_dtype).requires_grad_()
    function, reference = (in_precision(f, bf16) for f in BOTH)
    assert function(**inputs).dtype == (bf16 if pos is None else fp32)
    assert_accurate(function, reference, inputs, dtype=bf16)


def test_patch_embed_layouts():
    shape = B, channels, height, width = CASES["p16-T7"][0]
    wide = rand(2 * B, 2 * channels, height + 3, width + 5, grad=False)
    layouts = {
        "channels_last": rand(*shape, grad=False).contiguous(memory_format=torch.channels_last),
        "crop": wide[:B, :channels, 1 : height + 1, 3 : width + 3],
        "strided": wide[::2, ::2, :height, :width],
        "transposed": rand(B, channels, width, height, grad=False).transpose(2, 3),
        "batch last": rand(channels, height, width, B, grad=False).permute(3, 0, 1, 2),
        "expanded batch": rand(1, channels, height, width, grad=False).expand(shape),
        "grey as colour": rand(B, 1, height, width, grad=False).expand(shape),
    }
    inputs = _inputs(*CASES["p16-T7"])
    weight = inputs["weight"].detach()
    for name, images in layouts.items():
        if name == "channels_last":  # of the model, hence of the weight too
            weight = weight.contiguous(memory_format=torch.channels_last)
        inputs["images"], inputs["weight"] = images.requires_grad_(), weight.requires_grad_()
        assert_accurate(*BOTH, inputs)


def test_patch_embed_saves_what_backward_reads():
    def saved(*trained):
        inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all")
        for name, x in inputs.items():
            x.requires_grad_(name in trained)
        out = patch_embed(**inputs)  # alive: torch 2.11 frees what its node saved with it
        node: Any = out.grad_fn
        kept = [t for t in node.saved_tensors if t is not None]
        return [next((n for n, x in inputs.items() if x is t), None) for t in kept]

    assert saved("bias", "prefix_tokens", "pos_embed") == []
    assert saved("weight") == ["images"]
    assert saved("images") == ["weight"]


def test_patch_embed_empty_batch():
    inputs = _inputs((0, 3, 8, 12), 20, (4, 4), 1, "all")
    out = patch_embed(**inputs)
    assert out.shape == (0, 7, 20)
    out.sum().backward()
    for x in inputs.values():
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.eq(0).all()


def test_patch_embed_accumulates_in_fp32():
    # 4096 + 1 is 4096 in bf16: sums that begin with 4096 show every rounding on the way.
    weight = torch.ones(16, 1, 64, 64, device=DEVICE)
    images = torch.zeros(1, 1, 64, 64, device=DEVICE)
    images[..., 0] = 1
    images[..., 0, 0] = 4096
    with torch.autocast(DEVICE.type, dtype=bf16):
        out = patch_embed(images, weight, pos_embed=torch.zeros(1, 16, device=DEVICE))
    assert out.eq(4096 + 63).all()

    weight = torch.ones(16, 1, 2, 2, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=bf16):
        out = patch_embed(torch.ones(1, 1, 56, 56, device=DEVICE), weight)
    upstream = torch.ones_like(out)
    upstream[:, 0] = 4096
    (dweight,) = torch.autograd.grad(out, weight, upstream)
    assert dweight.eq(4096 + 783).all()


def test_keep_expanded_and_strided_gradient():
    inputs = _inputs(*CASES["p4x3-kept"])
    inputs["keep"] = inputs["keep"][:1].expand(3, -1)
    out = patch_embed(**inputs)
    whole = torch.randn(*out.shape[:2], 2 * out.shape[2], device=DEVICE)
    assert_accurate(*BOTH, inputs, upstream=[whole[..., ::2]])


def test_keep_rows_bits():
    """Bit for bit: a row's product does not depend on its neighbours."""
    inputs = _inputs(*CASES["video-p2x4x4-kept"])
    keep = inputs.pop("keep")
    whole = patch_embed(**inputs)
    patches = whole[:, 1:].gather(1, keep[..., None].expand(-1, -1, whole.shape[2]))
    out = patch_embed(**inputs, keep=keep)
    assert torch.equal(out, torch.cat([whole[:, :1], patches], 1))


def test_many_images_and_many_rows():
    """More images than a program sums at once, more patches than a tile of the slots, and row
    ranges for dweight."""
    inputs = _inputs((41, 1, 18, 18), 8, (2, 2), 1, "all", 70, bf16)
    inputs["images"] = inputs["images"].detach()
    assert_accurate(*BOTH, inputs)


def test_keep_index_out_of_range():
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all", 3)
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


def test_patch_embed_gradients_share_no_memory():
    """Clipping scales each in place."""
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all")
    out = patch_embed(**inputs)
    grads = torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)
