"""`load_weights`: every family's names and layouts, positions of another grid, the report."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from timm.layers.pos_embed import resample_abs_pos_embed

from fastvit_kernels import VisionTransformer, backend, load_weights
from fastvit_kernels.weights.names import to_timm

C, DEPTH, HEADS, CLASSES = 32, 2, 2, 5
SIZES: dict[str, Any] = dict(
    img_size=32, patch_size=8, num_classes=CLASSES, embed_dim=C, depth=DEPTH, num_heads=HEADS
)


@pytest.fixture(autouse=True)
def _torch_backend():
    """What is loaded does not depend on the kernels, and PyTorch is faster than the interpreter."""
    with backend("torch"):
        yield


def _randomised(model, seed=3):
    """No parameter at a value that a constant could hide."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def _vit(seed=1, **overrides) -> Any:
    return _randomised(VisionTransformer(**{**SIZES, **overrides}), seed)


def _timm(**overrides) -> Any:
    return _randomised(timm.models.VisionTransformer(**{**SIZES, **overrides}))


def _hf(model: Any = transformers.ViTForImageClassification, **overrides) -> Any:
    arguments = dict(
        image_size=32,
        patch_size=8,
        hidden_size=C,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_labels=CLASSES,
    )
    if "Dinov2" not in model.__name__:
        arguments["intermediate_size"] = 4 * C
    return _randomised(model(model.config_class(**arguments, **overrides)))


def _npz(model, prefix="", big_vision=False, stacked=False):
    """Our model as Flax would have saved it."""
    attention, mlp, norm2 = (0, 0, 1) if big_vision else (1, 3, 2)
    D = model.blocks[0].attn.head_dim
    arrays = {"cls": model.cls_token}
    position = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    arrays[position] = model.pos_embed
    arrays["embedding/kernel"] = model.patch_embed.proj.weight.permute(2, 3, 1, 0)
    arrays["embedding/bias"] = model.patch_embed.proj.bias

    def dense(name, linear):
        arrays[f"{name}/kernel"], arrays[f"{name}/bias"] = linear.weight.t(), linear.bias

    def layer_norm(name, norm):
        arrays[f"{name}/scale"], arrays[f"{name}/bias"] = norm.weight, norm.bias

    for i, block in enumerate(model.blocks):
        at = f"Transformer/encoderblock_{i}"
        layer_norm(f"{at}/LayerNorm_0", block.norm1)
        layer_norm(f"{at}/LayerNorm_{norm2}", block.norm2)
        mha = f"{at}/MultiHeadDotProductAttention_{attention}"
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{mha}/{part}/kernel"] = weight.t().unflatten(1, (HEADS, D))
            arrays[f"{mha}/{part}/bias"] = bias.unflatten(0, (HEADS, D))
        arrays[f"{mha}/out/kernel"] = block.attn.proj.weight.t().unflatten(0, (HEADS, D))
        arrays[f"{mha}/out/bias"] = block.attn.proj.bias
        dense(f"{at}/MlpBlock_{mlp}/Dense_0", block.mlp.fc1)
        dense(f"{at}/MlpBlock_{mlp}/Dense_1", block.mlp.fc2)
    layer_norm("Transformer/encoder_norm", model.norm)
    dense("head", model.head)
    arrays = {name: x.detach().numpy().copy() for name, x in arrays.items()}
    if stacked:
        first = [name for name in arrays if "encoderblock_0/" in name]
        for name in first:
            layers = [arrays.pop(name.replace("_0/", f"_{i}/", 1)) for i in range(DEPTH)]
            arrays[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(layers)
    return {prefix + name: x for name, x in arrays.items()}


def _images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _assert_complete(report):
    assert not report.missing and not report.unexpected and not report.resized, str(report)


def _assert_equal_models(a, b):
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(x, y), name


DINOV2 = dict(init_values=1.0, num_classes=0, mask_token=True)
REGISTERS = partial(_hf, transformers.Dinov2WithRegistersModel, num_register_tokens=4)
TRANSFORMERS = {
    "deit's token of distillation": (
        partial(_hf, transformers.DeiTForImageClassification),
        dict(norm_eps=1e-12, reg_tokens=1),
    ),
    "dinov2's LayerScale": (partial(_hf, transformers.Dinov2Model), DINOV2),
    "dinov2's registers": (REGISTERS, dict(DINOV2, reg_tokens=4, no_embed_class=True)),
}


@pytest.mark.parametrize("what", TRANSFORMERS)
def test_transformers(what):
    make, arguments = TRANSFORMERS[what]
    source, model = make(), _vit(**arguments)
    report = load_weights(model, source.state_dict())
    assert not report.missing and not report.unexpected, str(report)
    assert report.family == "transformers"
    out = source(_images())
    wanted = out.pooler_output if "dinov2" in what else out.logits
    torch.testing.assert_close(model(_images()), wanted)


def test_a_mask_token_below_the_name_of_a_base_model():
    source = _hf(transformers.Dinov2ForImageClassification).state_dict()
    model = _vit(**DINOV2)
    report = load_weights(model, {n: x for n, x in source.items() if "classifier" not in n})
    assert not report.missing and not report.unexpected and not report.resized, str(report)
    assert torch.equal(model.mask_token[0], source["dinov2.embeddings.mask_token"])


@pytest.mark.parametrize(
    ("prefix", "layout"),
    [("opt/target/", "paper"), ("params/", "big_vision"), ("params/img/", "stacked")],
)
def test_jax(tmp_path, prefix, layout):
    source, model = _vit(seed=1), _vit(seed=2)
    arrays = _npz(source, prefix, big_vision=layout != "paper", stacked=layout == "stacked")
    np.savez(tmp_path / "vit.npz", **arrays)
    report = load_weights(model, tmp_path / "vit.npz")
    _assert_complete(report)
    assert report.family == "jax"
    _assert_equal_models(model, source)


def test_jax_matches_timm(tmp_path):
    np.savez(tmp_path / "vit.npz", **_npz(_vit(seed=5)))
    model, source = _vit(), _timm()
    source.load_pretrained(str(tmp_path / "vit.npz"))
    load_weights(model, tmp_path / "vit.npz")
    torch.testing.assert_close(model(_images()), source(_images()))


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module.", "model of state_dict"])
def test_wrappers(wrapper):
    source, model = _vit(seed=1), _vit(seed=2)
    state_dict = source.state_dict()
    if wrapper == "module.":
        prefix = "module._orig_mod.model.backbone."
        state_dict = {prefix + name: x for name, x in state_dict.items()}
    else:
        for key in wrapper.split(" of "):
            state_dict = {key: state_dict, "epoch": 7}
    _assert_complete(load_weights(model, state_dict))
    _assert_equal_models(model, source)


def test_report_missing_unexpected():
    state_dict = _timm(depth=11).state_dict()
    del state_dict["blocks.0.norm1.bias"], state_dict["head.bias"]
    model = _vit(depth=1, init_values=0.1)
    kept = model.blocks[0].norm1.bias.clone()
    report = load_weights(model, {**state_dict, "mask_token": torch.zeros(1, C)})
    missing = "blocks.0.ls1.gamma", "blocks.0.ls2.gamma", "blocks.0.norm1.bias", "head.bias"
    assert report.missing == missing
    unexpected = report.unexpected  # block 2 before block 10
    assert "mask_token" in unexpected
    assert unexpected.index("blocks.2.norm1.bias") < unexpected.index("blocks.10.norm1.bias")
    assert set(report.loaded) | set(report.missing) == {n for n, _ in model.named_parameters()}
    assert torch.equal(model.blocks[0].norm1.bias, kept)
    text = str(report)
    assert text.startswith(f"loaded {len(report.loaded)} parameters, names of the timm family\n")
    assert f"missing (4): {', '.join(missing)}\n" in text
    assert "resized: none" in text


@pytest.mark.parametrize(
    ("img_size", "reg_tokens"),
    [(64, 0), ((16, 48), 0), ((8, 8), 4), (48, 8)],  # 9 prefix tokens and 16 patches are 5 x 5, too
    ids=str,
)
def test_pos_embed_resize(img_size, reg_tokens):
    source = _timm(reg_tokens=reg_tokens)
    model = _vit(img_size=img_size, reg_tokens=reg_tokens)
    report = load_weights(model, source.state_dict())
    grid, prefix = model.patch_embed.grid_size, 1 + reg_tokens
    expected = resample_abs_pos_embed(source.pos_embed, list(grid), num_prefix_tokens=prefix)
    torch.testing.assert_close(model.pos_embed, expected)
    assert torch.equal(model.pos_embed[:, :prefix], source.pos_embed[:, :prefix])
    old, new = (1, prefix + 16, C), (1, prefix + math.prod(grid), C)
    assert report.resized == {"pos_embed": (old, new)} and f"pos_embed {old} -> {new}" in str(
        report
    )


def test_pos_embed_grid_size():
    source = _vit(seed=2, img_size=(16, 64))  # 2 x 8 patches
    same, other = _vit(img_size=(16, 64)), _vit(img_size=(32, 48))
    _assert_complete(load_weights(same, source.state_dict()))
    _assert_equal_models(same, source)
    for model, new in ((other, [4, 6]), (_vit(), [4, 4])):  # the second of as many patches
        load_weights(model, source.state_dict(), grid_size=(2, 8))
        expected = resample_abs_pos_embed(source.pos_embed, new, [2, 8], num_prefix_tokens=1)
        torch.testing.assert_close(model.pos_embed, expected)
    again = _vit(img_size=(32, 48))
    grid = source.pos_embed[:, 1:].unflatten(1, (2, 8))  # tells its own size
    report = load_weights(again, {**source.state_dict(), "pos_embed": grid})
    assert report.resized == {"pos_embed": ((1, 2, 8, C), (1, 25, C))}
    torch.testing.assert_close(again.pos_embed[:, 1:], other.pos_embed[:, 1:])


def test_pos_embed_class_token():
    with_class, without = _vit(), _vit(seed=2, no_embed_class=True)
    load_weights(without, with_class.state_dict())
    torch.testing.assert_close(without(_images()), with_class(_images()))
    back = _vit(seed=3)
    load_weights(back, without.state_dict())
    assert back.pos_embed[:, 0].eq(0).all()
    torch.testing.assert_close(back(_images()), with_class(_images()))
    alone = {n: x for n, x in with_class.state_dict().items() if n != "cls_token"}
    with pytest.raises(ValueError, match="without a cls_token of its shape there is nothing to"):
        load_weights(without, alone)


def test_patch_matrix():
    source, model = _vit(seed=1, in_chans=1), _vit(seed=2, in_chans=1)
    state_dict = source.state_dict()
    state_dict["patch_embed.proj.weight"] = state_dict["patch_embed.proj.weight"].flatten(1)
    report = load_weights(model, state_dict)
    _assert_equal_models(model, source)
    assert report.resized == {"patch_embed.proj.weight": ((C, 64), (C, 1, 8, 8))}


def test_another_layer_of_the_same_shape_is_not_loaded():
    report = load_weights(_vit(pos_embed="none", global_pool="avg"), _timm().state_dict())
    assert report.missing == ("fc_norm.bias", "fc_norm.weight")
    assert report.unexpected == ("norm.bias", "norm.weight", "pos_embed")


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("blocks.0.mlp", {"w12": "fc1", "w3": "fc2"}),  # DINOv2's own
        ("blocks.0.mlp", {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"}),  # DINOv3's own
        ("encoder.layer.0.mlp", {"weights_in": "fc1", "weights_out": "fc2"}),  # transformers' v2
        ("layer.0.mlp", {"gate_proj": "fc1_g", "up_proj": "fc1_x", "down_proj": "fc2"}),  # v3
        ("layer.0.mlp", {"up_proj": "fc1", "down_proj": "fc2"}),  # without a gate
    ],
)
def test_gated_mlp_names(stem, names):
    """Which half is the gate: g(x) * x is no more itself where they change places."""
    leaves = ("weight", "bias")
    source = {f"{stem}.{name}.{leaf}": torch.rand(2) for name in names for leaf in leaves}
    _, found = to_timm(source)
    assert len(found) == len(source)
    for name, target in names.items():
        for leaf in leaves:
            wanted = source[f"{stem}.{name}.{leaf}"]
            assert torch.equal(found[f"blocks.0.mlp.{target}.{leaf}"], wanted), name


HOSTS = "vit deit dinov2 dinov2_with_registers dinov3_vit vision_model".split()
OLD = "vit.encoder.layer.1."  # of transformers before 5.9
ALIASES = {
    "reg_token": ("register_tokens", "storage_tokens", "dist_token", "reg_token"),
    "blocks.3.ls1.gamma": ("blocks.3.gamma_1", "blocks.3.ls1.gamma"),
    "cls_token": tuple(f"{host}.embeddings.cls_token" for host in HOSTS),
    "blocks.1.attn.q.weight": (f"{OLD}attention.attention.query.weight",),
    "blocks.1.attn.k.weight": (f"{OLD}attention.attention.key.weight",),
    "blocks.1.attn.v.weight": (f"{OLD}attention.attention.value.weight",),
    "blocks.1.attn.proj.weight": (f"{OLD}attention.output.dense.weight",),
    "blocks.1.mlp.fc1.weight": (f"{OLD}intermediate.dense.weight",),
    "blocks.1.mlp.fc2.weight": (f"{OLD}output.dense.weight",),
}


@pytest.mark.parametrize("wanted", ALIASES)
def test_aliases(wanted):
    for name in ALIASES[wanted]:
        x = torch.rand(1, 1, 2)
        assert torch.equal(to_timm({name: x})[1][wanted], x), name


def _changed(name, change):
    state_dict = _timm().state_dict()
    return {**state_dict, name: change(state_dict[name])}


def _keys_of_other_width():
    return {
        name: x[:, 1:] if name.endswith("0.attention.k_proj.weight") else x
        for name, x in _hf().state_dict().items()
    }


PROJ = "patch_embed.proj.weight"
REJECTED = {
    r"head.weight must have shape \(5, 32\), got \(7, 32\); create the model with num_classes=7, "
    "or drop the keys of the head": lambda: _timm(num_classes=7).state_dict(),
    rf"{PROJ} is a matrix \(32, 192\).*permute\(0, 3, 1, 2\)": lambda: _changed(
        PROJ, lambda x: x.flatten(1)
    ),
    r"pos_embed must have shape \(1, 17, 32\), got \(17, 32\)": lambda: _changed(
        "pos_embed", lambda x: x[0]
    ),
    "or the grid given as grid_size, got grid_size=None": lambda: _vit(
        img_size=(16, 48)
    ).state_dict(),
    "create the model with no_embed_class=True": lambda: REGISTERS().state_dict(),
    "blocks.0.attn.k.weight must have the columns of blocks.0.attn.q.weight": _keys_of_other_width,
}


@pytest.mark.parametrize("message", REJECTED)
def test_rejects(message):
    model = _vit(reg_tokens=4) if "no_embed_class" in message else _vit()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_weights(model, REJECTED[message]())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
