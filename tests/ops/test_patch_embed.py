from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.patch_embed.functions import (
    patch_embed,
    patch_embed_ref,
)
from fastvit_kernels.runtime.backend import backend

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# images (B, Cin, height, width), C, patch, prefix tokens, what pos_embed covers
CASES: dict[str, Any] = {
    "p16-T7": ((2, 3, 32, 48), 40, (16, 16), 1, "all"),
    "p14-T4": ((2, 3, 28, 28), 24, (14, 14), 0, "all"),
    "p32-T4": ((1, 4, 64, 32), 33, (32, 32), 2, "patches"),
    "p2-T65": ((2, 1, 16, 16), 64, (2, 2), 1, "patches"),
    "p1-T16": ((3, 2, 4, 4), 17, (1, 1), 0, "patches"),
    "p4x3-T13": ((3, 4, 8, 18), 130, (4, 3), 1, "all"),
    "p3x8-T9": ((2, 5, 12, 16), 7, (3, 8), 1, None),
    "one-patch": ((1, 3, 8, 8), 16, (8, 8), 1, "all"),
    "all-prefix-tile": ((2, 1, 4, 4), 16, (4, 4), 70, "all"),
}


def _inputs(
    images, C, patch, num_prefix, pos, dtype=fp32, bias=True, grad_images=True
) -> dict[str, Any]:
    num_patches = images[2] // patch[0] * (images[3] // patch[1])
    rows = {"all": num_patches + num_prefix, "patches": num_patches, None: None}[pos]
    scale = (images[1] * patch[0] * patch[1]) ** -0.5
    return {
        "images": rand(*images, dtype=dtype, grad=grad_images),
        "weight": rand(C, images[1], *patch, dtype=dtype, seed=1, scale=scale),
        "bias": rand(C, dtype=dtype, seed=2) if bias else None,
        "prefix_tokens": rand(1, num_prefix, C, dtype=dtype, seed=3) if num_prefix else None,
        "pos_embed": rand(1, rows, C, dtype=dtype, seed=4) if rows else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_patch_embed_backward(case, dtype):
    assert_accurate(patch_embed, patch_embed_ref, _inputs(*CASES[case], dtype=dtype))


def test_patch_embed_rounds_once():
    one = torch.ones(1, 1, 1, 1, device=DEVICE, dtype=bf16)
    bias, pos = one.flatten(), 0.375 * 2**-7 * one.view(1, 1, 1)  # of an ulp of 1; both exact
    with backend("triton"):
        out = patch_embed(one, 0.25 * 2**-7 * one, bias, pos_embed=pos)
    assert out.item() == 1 + 2**-7  # bias + pos in bf16 is 1, and so is 1.25 ulp


@pytest.mark.parametrize(
    ("dtype", "prefix_dtype", "pos_dtype"),
    [(bf16, fp32, fp32), (bf16, fp32, bf16), (fp16, bf16, None), (fp32, bf16, fp16)],
    ids=str,
)
def test_patch_embed_promotes_like_cat_and_add(dtype, prefix_dtype, pos_dtype):
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 2, "all", dtype)
    inputs["prefix_tokens"] = rand(1, 2, 20, dtype=prefix_dtype)
    inputs["pos_embed"] = None if pos_dtype is None else rand(1, 8, 20, dtype=pos_dtype)
    assert_accurate(patch_embed, patch_embed_ref, inputs)


@pytest.mark.parametrize("images_dtype", [fp32, bf16, fp16], ids=dtype_id)
@pytest.mark.parametrize("pos", ["all", "patches", None])
def test_patch_embed_autocast(images_dtype, pos):
    def under_autocast(function):
        def call(**inputs):
            with torch.autocast(DEVICE.type, dtype=bf16):
                return function(**inputs)

        return call

    inputs = _inputs((2, 3, 32, 16), 24, (8, 8), 0 if pos is None else 1, pos)
    inputs["images"] = inputs["images"].detach().to(images_dtype).requires_grad_()
    out = under_autocast(patch_embed)(**inputs)
    assert out.dtype == (bf16 if pos is None else fp32)
    assert_accurate(
        under_autocast(patch_embed), under_autocast(patch_embed_ref), inputs, dtype=bf16
    )


def test_patch_embed_layouts():
    shape, C, patch, num_prefix, pos = CASES["p16-T7"]
    B, channels, height, width = shape
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
    inputs = _inputs(shape, C, patch, num_prefix, pos)
    weight = inputs["weight"].detach()
    for name, images in layouts.items():
        if name == "channels_last":  # of the model, hence of the weight too
            weight = weight.contiguous(memory_format=torch.channels_last)
        inputs["images"], inputs["weight"] = images.requires_grad_(), weight.requires_grad_()
        assert_accurate(patch_embed, patch_embed_ref, inputs)


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=dtype_id)
def test_patch_embed_split_rows(dtype):
    # 6 x 196 rows of dout: more than one row range for dweight, whose partials are then summed
    assert_accurate(
        patch_embed,
        patch_embed_ref,
        _inputs((6, 1, 28, 28), 64, (2, 2), 1, "all", dtype, grad_images=False),
    )


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=dtype_id)
def test_patch_embed_equals_patchify(dtype):
    """(B, C, H, W) -> (B, H'W', pH pW C), pixels in (pH, pW, C) order, then a Linear."""
    B, channels, patch_h, patch_w, C = 2, 3, 8, 4, 32

    def patchify_and_linear(images, weight, bias):
        x = images.unflatten(3, (-1, patch_w)).unflatten(2, (-1, patch_h))  # B C H' pH W' pW
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return F.linear(x, weight, bias)

    def by_patch_embed(images, weight, bias):
        weight = weight.unflatten(1, (patch_h, patch_w, channels)).permute(0, 3, 1, 2)
        return patch_embed(images, weight, bias)

    inputs = {
        "images": rand(B, channels, 16, 20, dtype=dtype),
        "weight": rand(C, patch_h * patch_w * channels, dtype=dtype, seed=1, scale=0.1),
        "bias": rand(C, dtype=dtype, seed=2),
    }
    assert_accurate(by_patch_embed, patchify_and_linear, inputs)


def test_patch_embed_gradients_share_no_memory():
    inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all")
    out = patch_embed(**inputs)
    grads = torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)


def test_patch_embed_saves_what_backward_reads():
    def saved(*trained):
        inputs = _inputs((2, 3, 8, 12), 20, (4, 4), 1, "all")
        for name, x in inputs.items():
            x.requires_grad_(name in trained)
        out = patch_embed(**inputs)  # alive: torch 2.11 frees what its node saved with it
        node: Any = out.grad_fn
        return [next((n for n, x in inputs.items() if x is t), None) for t in node.saved_tensors]

    assert saved("bias", "prefix_tokens", "pos_embed") == [None, None]
    assert saved("weight") == ["images", None]
    assert saved("images") == [None, "weight"]


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
