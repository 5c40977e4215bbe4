"""VisionTransformer(drop_path="skip"): branches that compute nothing for the samples they drop.
What `keep_samples` draws and how it scales, tests/ops/test_samples.py says."""

import copy

import pytest
import torch
from model_parity import randomise
from numerics import DEVICE, assert_accurate, rand
from tiny_calls import assert_same_bits
from torch.func import functional_call

from fastvit_kernels import VisionTransformer, backend, create_vit
from fastvit_kernels.accuracy.cases import plain_vit

# Blocks with all that a branch may have around its products.
BLOCKS = (
    dict(init_values=0.5),
    dict(rope_type="dinov3", qk_norm=True, mlp_layer="SwiGLU", act_layer="silu", init_values=0.5),
    dict(mlp_layer="GluMlp", act_layer="silu"),
)
SIZES = dict(img_size=16, patch_size=8, num_classes=5, embed_dim=32, depth=2, num_heads=2)


def _vit(**arguments):
    model = VisionTransformer(drop_path="skip", drop_path_rate=0.5, **SIZES, **arguments)  # pyright: ignore
    return randomise(model).train()


def _images():
    return rand(5, 3, 16, 16)


@pytest.mark.parametrize("what", range(3))
def test_skip_forward_backward(what):
    model = _vit(**BLOCKS[what])

    def drawn(forward):
        def call(images, **parameters):
            torch.manual_seed(11)  # the same samples
            return forward(model, parameters, images)

        return call

    kernels = drawn(lambda model, parameters, images: functional_call(model, parameters, (images,)))
    parameters = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    with backend("triton"):
        inputs = {"images": _images(), **parameters}
        assert_accurate(kernels, drawn(plain_vit), inputs)
        skipped = kernels(**inputs)
    kept_all = model.eval()(inputs["images"])
    assert not torch.allclose(kept_all, skipped, atol=0.1)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_skip_low_memory_bits(hooked):
    model, images, results = _vit(), _images(), []
    if hooked:  # the backward cannot rebuild what the hook made of the output
        model.blocks[0].norm2.register_forward_hook(lambda module, given, y: (2 * y[0], y[1]))
    for memory in ("default", "low"):
        for block in model.blocks:
            block.memory = memory
        torch.manual_seed(11)
        with backend("triton"), torch.autocast(DEVICE.type, torch.bfloat16):
            logits = model(images)
        grads = torch.autograd.grad(logits.square().sum(), [images, *model.parameters()])
        results.append([logits.detach(), *grads])
    assert_same_bits(*results)


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
