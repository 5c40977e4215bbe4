"""Training on some patches of each image; patch embeddings that are called."""

import copy
from typing import Any

import pytest
import torch
from model_parity import randomise
from numerics import DEVICE

from fastvit_kernels import PatchEmbed, VisionTransformer, load_weights

SIZES: dict[str, Any] = dict(
    img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
)


@pytest.mark.parametrize("rate", [0.6, 0.99])  # one patch is kept at any rate
def test_patch_dropout_matches_timm(rate):
    """The same draws from the same seed, hence the same training step."""
    timm = pytest.importorskip("timm")
    theirs = randomise(timm.models.VisionTransformer(**SIZES, patch_drop_rate=rate))
    ours = VisionTransformer(**SIZES, patch_drop_rate=rate).to(DEVICE)
    load_weights(ours, theirs.state_dict())
    images = torch.randn(3, 3, 16, 16, device=DEVICE)
    results = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(7)
        out = model(images)
        out.square().mean().backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
    (out, grads), (expected, expected_grads) = results
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for name in ("patch_embed.proj.weight", "cls_token", "blocks.0.attn.proj.weight"):
        torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-3, atol=1e-5)
    ours.eval()
    assert torch.equal(ours(images), ours(images))


OTHER = {
    "stride": dict(kernel_size=4, stride=2),
    "padding": dict(kernel_size=4, stride=4, padding=1),
    "dilation": dict(kernel_size=4, stride=4, dilation=3),
    "groups": dict(kernel_size=4, stride=4, groups=3),
}


@pytest.mark.parametrize("how", OTHER)
def test_replaced_patch_conv(how):
    """Its stride set for dense features, or another one in its place."""
    module, images = PatchEmbed(16, 4, embed_dim=33).to(DEVICE), torch.randn(2, 3, 16, 16)
    module.proj = torch.nn.Conv2d(3, 33, **OTHER[how]).to(DEVICE)
    images = images.to(DEVICE)
    assert torch.equal(module(images), module.proj(images).flatten(2).mT)


def test_patch_dropout_with_hooked_proj():
    """The path that calls the projection gathers afterwards."""
    fused = PatchEmbed(16, 4, embed_dim=32).to(DEVICE)
    called = copy.deepcopy(fused)
    called.proj.register_forward_hook(lambda module, args, out: None)
    inputs = {
        "images": torch.randn(2, 3, 16, 16, device=DEVICE),
        "prefix_tokens": torch.randn(1, 1, 32, device=DEVICE),
        "pos_embed": torch.randn(1, 17, 32, device=DEVICE, requires_grad=True),
        "keep": torch.rand(2, 16).argsort(1)[:, :5].to(DEVICE),
    }
    results = []
    for module in (fused, called):
        out = module(**inputs)
        wanted = [inputs["pos_embed"], module.proj.weight]
        results.append((out, *torch.autograd.grad(out, wanted, torch.ones_like(out))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
