"""Rotary positions, qk-norm, RMSNorm and biases without the keys': against timm's and transformers'
models with their weights, and what a model does with them otherwise."""

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from model_parity import assert_parity, random_images, randomise, stages_of, timm_names
from numerics import DEVICE
from timm.models.eva import Eva
from torch import nn

from fastvit_kernels import VisionTransformer, create_vit, load_weights
from fastvit_kernels.models.presets import preset_names
from fastvit_kernels.models.rope_tables import RotaryEmbedding

SMALL: dict[str, Any] = dict(
    img_size=(32, 24), patch_size=8, num_classes=5, embed_dim=48, depth=1, num_heads=3
)
norm_1e_5 = partial(nn.LayerNorm, eps=1e-5)
_TIMM = dict(rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True)
# what -> (arguments of both, those of timm's model, ours)
EVA: dict[str, tuple[dict, dict, dict]] = {
    "dinov3": (
        dict(init_values=0.1),
        dict(num_reg_tokens=4, use_abs_pos_emb=False, use_fc_norm=False, norm_layer=norm_1e_5),
        dict(reg_tokens=4, pos_embed="none", fc_norm=False, norm_eps=1e-5, key_bias=False),
    ),
    "dinov3_plus-no_bias": (
        dict(init_values=0.1, qkv_bias=False),
        dict(num_reg_tokens=4, use_abs_pos_emb=False, swiglu_mlp=True, swiglu_align_to=8),
        dict(reg_tokens=4, pos_embed="none", mlp_layer="SwiGLU", act_layer="silu"),
    ),
    "rope-qk_norm": (dict(qk_norm=True), dict(attn_type="rope"), {}),
}


def _model(what: str, **more: Any) -> Any:
    common, _, own = EVA[what]
    shared = {"global_pool": "avg", "rope_type": "dinov3"}
    return VisionTransformer(**{**SMALL, **shared, **common, **own, **more}).to(DEVICE).eval()


def _pair(what: str, **more: Any) -> tuple[Any, Any]:
    common, own, _ = EVA[what]
    shared = {"global_pool": "avg", "use_rot_pos_emb": True, **_TIMM}
    host = randomise(Eva(**{**SMALL, **shared, **common, **own, **more}))
    model = _model(what, **more)
    report = load_weights(model, host.state_dict())
    assert not report.missing and not report.unexpected and not report.resized, str(report)
    return model, host


def _images():
    return random_images(2, 3, 32, 24)


@pytest.mark.parametrize("what", EVA)
def test_timm(what):
    model, host = _pair(what)
    stages = stages_of(1)
    assert_parity(model, host, _images(), stages=stages, host_stages=stages, names=timm_names)


@pytest.mark.parametrize("what", ["dinov3", "rope-qk_norm"])
def test_dynamic_img_size(what):
    """Tables for their grid, and learned positions resampled to it: of 4 x 3 patches, 3 x 4."""
    model, host = _pair(what, dynamic_img_size=True)
    images = random_images(2, 3, 24, 32)
    expected = host(images)
    torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-4)
    larger = nn.functional.pad(images, (0, 5, 0, 3))  # a remainder of rows and columns is left out
    torch.testing.assert_close(model(larger), expected, rtol=1e-3, atol=1e-4)


def test_rope_tables_fp32_not_in_state_dict():
    model = _model("dinov3")
    kept = model.rope.cos.clone()
    assert not any("rope" in name for name in model.state_dict())
    model.to(torch.bfloat16)
    assert model.rope.cos.dtype is torch.float32 and torch.equal(model.rope.cos, kept)
    with torch.device("meta"):
        rope = RotaryEmbedding(16, (4, 3))
    assert rope.cos.is_meta and all(t.is_meta for t in rope((5, 2)))  # those of another grid, too
    assert torch.equal(rope.to_empty(device=DEVICE).cos, kept)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3"])
def test_create_vit_outputs(name):
    """Gates, pooling, LayerScale, images of any size: with timm's random weights."""
    small: Any = dict(depth=1, embed_dim=48, num_heads=3, img_size=32, num_classes=5)
    model, host = create_vit(name, **small).to(DEVICE).eval(), timm.create_model(name, **small)
    assert model.blocks[0].ls1.gamma.tolist() == host.blocks[0].gamma_1.tolist()
    host = randomise(host)
    assert not load_weights(model, host.state_dict()).missing
    images = random_images(2, 3, 48)
    torch.testing.assert_close(model(images), host(images), rtol=1e-4, atol=1e-4)


def _structure(model: Any, names: Any) -> tuple[Any, ...]:
    """Parameters, the eps of the norms, activations, heads."""
    state = {n: torch.zeros(()).expand(p.shape) for n, p in model.state_dict().items()}
    shapes = {n: tuple(x.shape) for n, x in names(state).items()}
    eps = Counter(m.eps for m in model.modules() if hasattr(m, "eps"))
    mlp = model.blocks[0].mlp
    activation = mlp.act_layer if hasattr(mlp, "act_layer") else type(mlp.act).__name__.lower()
    return shapes, eps, activation, model.blocks[0].attn.num_heads


def test_preset_names_are_timms():
    ours = preset_names()[31:]  # after vit_mnist and the sizes of the plain ViT
    assert len(set(ours)) == 12 and all(map(timm.is_model, ours))


@pytest.mark.parametrize("name", list(filter(timm.is_model, preset_names())))
def test_presets_match_timm(name):
    """Layers, eps and activations, which timm's arguments do not name as ours do."""
    with torch.device("meta"):
        ours = create_vit(name, depth=1)
        theirs = timm.create_model(name, depth=1, num_classes=ours.num_classes)
    assert _structure(ours, dict) == _structure(theirs, timm_names)


ENDS = ("patch16_224", "huge_patch14_224", "dinov3")  # ends of names
EACH_SIZE = [n for n in preset_names() if n.endswith(ENDS) and timm.is_model(n)]


@pytest.mark.parametrize("name", EACH_SIZE)
def test_presets_have_timms_depth(name):
    with torch.device("meta"):
        assert len(create_vit(name).blocks) == len(timm.create_model(name).blocks)


@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated"])
def test_transformers_dinov3(gated):
    sizes = dict(image_size=32, patch_size=8, hidden_size=48, intermediate_size=72)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=3, num_register_tokens=2)
    activation = "silu" if gated else "gelu"
    config = transformers.DINOv3ViTConfig(**sizes, use_gated_mlp=gated, hidden_act=activation)
    host = randomise(transformers.DINOv3ViTModel(config))
    mlp = dict(mlp_layer="SwiGLU", act_layer="silu") if gated else {}
    own = dict(img_size=32, reg_tokens=2, mlp_ratio=1.5, mask_token=True)
    model = _model("dinov3", num_classes=0, global_pool="", **own, **mlp)
    report = load_weights(model, host.state_dict())
    assert report.family == "transformers" and not report.missing, str(report)
    assert not report.unexpected, str(report)
    images = random_images(2, 3, 32, 32)
    expected = host(images).last_hidden_state
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def _in_the_authors_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DINOv3's repository: one bias of q, k and v, whose part for k a mask hides."""
    renamed = {n.replace("reg_token", "storage_tokens"): x for n, x in state.items()}
    for attn in [n.removesuffix("q_bias") for n in state if n.endswith("q_bias")]:
        q, v = renamed.pop(f"{attn}q_bias"), renamed.pop(f"{attn}v_bias")
        renamed[f"{attn}qkv.bias"] = torch.cat((q, torch.full_like(q, 7.0), v))
    return renamed


def test_load_weights_key_bias():
    model = randomise(_model("dinov3"))
    state = _in_the_authors_names(model.state_dict())
    one = copy.deepcopy(state)
    for name in [n for n in one if n.endswith("qkv.bias")]:
        q, k, v = one[name].chunk(3)
        one[name] = torch.cat((q, torch.eye(1, len(k))[0], v))  # of all keys' biases
    with pytest.raises(
        ValueError, match=r"must be 0 for the keys in a model with key_bias=False, got up to 1"
    ):
        load_weights(_model("dinov3"), one)
    masked = {**state, "blocks.0.attn.qkv.bias_mask": torch.zeros(144)}
    again = _model("dinov3")
    assert not load_weights(again, masked).missing
    torch.testing.assert_close(again(_images()), model(_images()))
    whole = _model("dinov3", key_bias=True)
    assert not load_weights(whole, model.state_dict()).missing
    torch.testing.assert_close(whole(_images()), model(_images()))
