"""fk.attention_maps: what the heads of ours and of other libraries' models look at."""

from functools import partial

import pytest
import torch
from model_parity import random_images, randomise
from numerics import DEVICE
from references import NotebookViT

from fastvit_kernels import VisionTransformer, attention_maps, create_vit, load_weights, swap_in


def _vit(**overrides):
    arguments = dict(img_size=16, patch_size=4, num_classes=3, embed_dim=16, depth=3, num_heads=2)
    return randomise(VisionTransformer(**{**arguments, **overrides}))


def test_attention_maps_match_notebook():
    reference = NotebookViT(image_size=8, dim=32, mlp_dim=128).to(DEVICE)
    model = create_vit("vit_mnist", img_size=8, embed_dim=32).to(DEVICE)
    load_weights(model, reference.state_dict())
    images = random_images(3, 1, 8)
    maps = attention_maps(model, images)
    assert [m.shape for m in maps] == 2 * [(3, 2, 17, 17)]
    for ours, theirs in zip(maps, reference.attention_maps(images), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(attention_maps(model, images.clone()), maps)


def test_attention_maps_leave_model_state():
    """And are fp32, without gradients, of a model in bf16."""
    model = _vit(attn_drop_rate=0.5, proj_drop_rate=0.5, pos_drop_rate=0.5, drop_path_rate=0.5)
    model.bfloat16().train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    images = random_images(height=16).bfloat16().requires_grad_()
    first, second = attention_maps(model, images), attention_maps(model, images)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for m in first:
        assert m.dtype is torch.float32 and not m.requires_grad
        torch.testing.assert_close(m.sum(-1), torch.ones(m.shape[:-1], device=DEVICE))
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert images.grad is None and all(p.grad is None for p in model.parameters())


def test_attention_maps_with_qkv_hook():
    model, images = _vit(depth=1).eval(), random_images(height=16)
    model.blocks[0].attn.qkv.register_forward_hook(lambda _m, _i, y: torch.zeros_like(y))
    (probabilities,) = attention_maps(model, images)
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 1 / 17))


@pytest.mark.parametrize("name", ["timm", "torch"])
def test_attention_maps_of_other_libraries(name, request):
    """What the first attention's own q and k say, swapped or not; switches are put back."""
    if name == "timm":
        timm = pytest.importorskip("timm")
        sizes = dict(img_size=8, patch_size=4, embed_dim=16, num_heads=2, depth=2, num_classes=3)
        model, x = timm.create_model("vit_tiny_patch16_224", **sizes), torch.randn(2, 3, 8, 8)
    else:
        layer = torch.nn.TransformerEncoderLayer(
            16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
        )
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = torch.randn(2, 5, 16)
    request.addfinalizer(partial(torch.backends.mha.set_fastpath_enabled, True))
    for fast in (False, True):
        torch.backends.mha.set_fastpath_enabled(fast)
        maps = attention_maps(model, x)
        assert torch.backends.mha.get_fastpath_enabled() is fast
    assert [m.shape for m in maps] == 2 * [(2, 2, 5, 5)]
    model.eval()
    with torch.no_grad():
        if name == "timm":
            block, blocks = model.blocks[0], []
            with block.register_forward_pre_hook(lambda m, args: blocks.append(args[0])):
                model(x)
            qkv = block.attn.qkv(block.norm1(blocks[0]))
        else:
            layer = model.layers[0]
            attn = layer.self_attn
            qkv = torch.nn.functional.linear(layer.norm1(x), attn.in_proj_weight, attn.in_proj_bias)
        q, k, _ = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        wanted = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
    torch.testing.assert_close(maps[0], wanted)
    swap_in(model)
    for got, want in zip(attention_maps(model, x), maps, strict=True):
        torch.testing.assert_close(got, want)
