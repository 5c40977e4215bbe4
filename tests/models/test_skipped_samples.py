"""VisionTransformer(drop_path="skip"): branches that compute nothing for the samples they drop."""

import copy

import pytest
import torch
from model_parity import randomise
from numerics import DEVICE, rand

from fastvit_kernels import VisionTransformer, backend, create_vit
from fastvit_kernels.accuracy.accuracy import measure_all
from fastvit_kernels.accuracy.cases import plain_vit

bf16, fp32 = torch.bfloat16, torch.float32

# Blocks with all that a branch may have around its products.
BLOCKS = (
    dict(init_values=0.5),
    dict(rope_type="dinov3", qk_norm=True, mlp_layer="SwiGLU", act_layer="silu", init_values=0.5),
    dict(mlp_layer="GluMlp", act_layer="silu"),
)


def _vit(drop_path="skip", **arguments):
    given = dict(
        img_size=16,
        patch_size=8,
        num_classes=5,
        embed_dim=32,
        depth=2,
        num_heads=2,
        mlp_ratio=2.0,
        drop_path_rate=0.5,
        **arguments,
    )
    return randomise(VisionTransformer(drop_path=drop_path, **given)).train()  # pyright: ignore


def _images():
    return rand(5, 3, 16, 16, grad=False)


def _upstream():
    return torch.randn(5, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def _step(forward, parameters, images, upstream, autocast=None):
    """Logits and every gradient, by name; the same samples are drawn each time."""
    images = images.detach().clone().requires_grad_()
    torch.manual_seed(11)
    with torch.autocast(DEVICE.type, bf16, enabled=autocast is not None):
        logits = forward(images)
    grads = torch.autograd.grad(logits, [images, *parameters.values()], upstream.to(logits.dtype))
    return {"logits": logits.detach(), **dict(zip(["images", *parameters], grads, strict=True))}


def _own_step(model, images, upstream, autocast=None):
    return _step(model, dict(model.named_parameters()), images, upstream, autocast)


def _plain_step(model, images, upstream, dtype, autocast=None):
    p = {n: x.detach().to(dtype).requires_grad_() for n, x in model.named_parameters()}
    return _step(lambda x: plain_vit(model, p, x), p, images.to(dtype), upstream, autocast)


@pytest.mark.parametrize(("what", "autocast"), [(0, None), (1, bf16), (2, None)], ids=str)
def test_skip_forward_backward(what, autocast):
    model = _vit(**BLOCKS[what])
    images, upstream = _images(), _upstream()
    oracle = _plain_step(model, images, upstream, torch.float64)
    with backend("triton"):
        found = _own_step(model, images, upstream, autocast)
    dtype = autocast or fp32
    errors = measure_all(
        found, lambda: _plain_step(model, images, upstream, fp32, autocast), oracle, dtype
    )
    # Key biases have no gradient but rounding's.
    broken = [str(e) for e in errors if not e.passed and e.max > 1e-5]
    assert not broken, "\n".join(broken)
    dropped_none = _own_step(model.eval(), images, upstream)
    assert not torch.allclose(dropped_none["logits"], found["logits"].float(), atol=0.1)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_skip_low_memory_bits(hooked):
    model = _vit()
    if hooked:  # the backward cannot rebuild what the hook made of the output
        model.blocks[0].norm2.register_forward_hook(lambda module, given, y: (2 * y[0], y[1]))
    images, upstream = _images(), _upstream()
    with backend("triton"):
        wanted = _own_step(model, images, upstream, bf16)
        for block in model.blocks:
            block.memory = "low"
        found = _own_step(model, images, upstream, bf16)
    for name, expected in wanted.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(("batch", "rate"), [(1, 0.9), (0, 0.5), (2, 0.0), (2, 1.0)])
def test_skip_edges(batch, rate):
    """One sample is always kept, as it is without DropPath."""
    model = create_vit("vit_mnist", drop_path_rate=rate, drop_path="skip", img_size=8, patch_size=4)
    plain = copy.deepcopy(randomise(model))
    images = rand(batch, 1, 8, 8, grad=False)
    with backend("triton"):
        y = model.train()(images)
        assert y.shape == (batch, 10) and y.isfinite().all()
        y.sum().backward()
        if batch == 1 or rate == 0.0:
            assert torch.equal(y, plain.eval()(images))
        assert torch.equal(model.eval()(images), plain.eval()(images))
