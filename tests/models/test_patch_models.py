"""VisionTransformer on uint8 images, and its training on some patches of each image."""

import copy
import pickle
from typing import Any

import pytest
import torch
from model_parity import randomise
from numerics import DEVICE
from torch import nn

from fastvit_kernels import VisionTransformer, load_weights
from fastvit_kernels.models.modules import PatchEmbed
from fastvit_kernels.models.patch_dropout import draw_kept

SIZES: dict[str, Any] = dict(
    img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
)
STATISTICS: dict[str, Any] = dict(mean=(0.485, 0.456, 0.406), std=[0.229, 0.224, 0.225])


def _model(**arguments: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**{**SIZES, **arguments}).to(DEVICE)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def _normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(STATISTICS[n], device=DEVICE).view(3, 1, 1) for n in ("mean", "std"))
    return (images / 255 - mean) / std


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        dict(embed_norm_layer="LayerNorm"),
        dict(dynamic_img_size=True),
        dict(conv_stem_configs=[(8, 3, 2), (16, 3, 2)]),
    ],
    ids=["plain", "norm", "any size", "stem"],
)
def test_bytes_are_normalised_inside(arguments):
    model = _model(**arguments, **STATISTICS).eval()
    images = _bytes(2, 3, 16, 16)
    expected = model(_normalised(images))
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    seen = []
    hook = model.patch_embed.proj.register_forward_hook(lambda m, x, y: seen.append(x[0].dtype))
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert seen == [torch.float32]
    hook.remove()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(images), model(images))


def test_bytes_without_statistics_are_refused():
    images = _bytes(2, 3, 16, 16)
    with pytest.raises(TypeError, match=r"images must be floating point, got torch\.uint8"):
        _model()(images)
    with pytest.raises(TypeError, match="images must be floating point"):  # bytes have 4 axes
        _model(**STATISTICS)(images[0])
    with pytest.raises(ValueError, match="mean and std go together, got std=None"):
        _model(mean=(0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="std must be finite and above 0, got 0"):
        PatchEmbed(16, 4, mean=(0.5,) * 3, std=(0.1, 0, 0.1))
    with pytest.raises(ValueError, match="mean must have 3 numbers, one a channel, got 1"):
        PatchEmbed(16, 4, mean=[0.5], std=[0.5])
    with pytest.raises(
        ValueError, match=r"VisionTransformer: patch_drop_rate must be in \[0, 1\), got 1"
    ):
        _model(patch_drop_rate=1.0)


def _of_timm(theirs: nn.Module, ours: VisionTransformer) -> None:
    """The same draws from the same seed, hence the same training step."""
    theirs = randomise(theirs).train()  # fresh weights give scores near 0: no place would matter
    load_weights(ours, theirs.state_dict())
    images = torch.randn(3, 3, 16, 16, device=DEVICE)
    results = []
    for model in (ours.train(), theirs):
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


def test_patch_dropout_is_timm_s():
    timm = pytest.importorskip("timm")
    theirs = timm.models.VisionTransformer(**SIZES, patch_drop_rate=0.6)
    _of_timm(theirs, _model(patch_drop_rate=0.6))


def test_patch_dropout_turns_the_kept_patches_as_timm_does():
    timm = pytest.importorskip("timm")
    rope = dict(use_rot_pos_emb=True, ref_feat_shape=(4, 4))
    theirs = timm.models.Eva(**SIZES, **rope, patch_drop_rate=0.6, qkv_fused=True, num_reg_tokens=0)
    ours = _model(
        patch_drop_rate=0.6, rope_type="cat", ref_feat_shape=4, key_bias=False, global_pool="avg"
    )
    _of_timm(theirs, ours)


def test_one_patch_is_always_kept():
    assert draw_kept(3, 4, 0.9, DEVICE).shape == (3, 1)
    assert draw_kept(3, 4, 0.5, torch.device("meta")).is_meta  # where the images are


def test_positions_resampled_in_16_bits_keep_their_dtype():
    model = _model(dynamic_img_size=True).bfloat16().eval()
    images = torch.randn(1, 3, 12, 20, device=DEVICE, dtype=torch.bfloat16)
    assert model.forward_features(images).dtype is torch.bfloat16


OTHER = {
    "stride": dict(kernel_size=4, stride=2),
    "padding": dict(kernel_size=4, stride=4, padding=1),
    "dilation": dict(kernel_size=4, stride=4, dilation=3),
    "groups": dict(kernel_size=4, stride=4, groups=3),
}


@pytest.mark.parametrize("how", OTHER)
def test_a_convolution_of_other_patches_is_called(how):
    """Its stride set for dense features, or another one in its place."""
    module, images = PatchEmbed(16, 4, embed_dim=33).to(DEVICE), torch.randn(2, 3, 16, 16)
    module.proj = torch.nn.Conv2d(3, 33, **OTHER[how]).to(DEVICE)
    images = images.to(DEVICE)
    assert torch.equal(module(images), module.proj(images).flatten(2).mT)


def test_a_normed_embedding_drops_the_same_patches():
    """The path that calls the projection or a norm gathers afterwards."""
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
