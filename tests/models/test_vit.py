import copy
import inspect
import math
from functools import partial
from typing import Any

import pytest
import timm
import timm.optim
import torch
import transformers
from model_parity import assert_parity, random_images, randomise, stages_of, timm_names
from numerics import DEVICE, assert_accurate, rand
from references import NotebookViT, ScratchViT, patchify
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from timm.layers.attention import Attention as TimmAttention
from torch import nn
from torch.nn.utils import parametrize
from torchvision.models import VisionTransformer as TorchvisionViT

from fastvit_kernels import (
    LayerNorm,
    PatchEmbed,
    RmsNorm,
    VisionTransformer,
    backend,
    create_vit,
    load_weights,
)
from fastvit_kernels.accuracy.accuracy import measure_all
from fastvit_kernels.models.modules import DropPath
from fastvit_kernels.models.vit import Block

bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64


def test_norms_have_the_defaults_of_torch_and_timm():
    x = 1e-3 * rand(2, 5, 16)  # small beside eps
    for ours, theirs in ((LayerNorm, nn.LayerNorm), (RmsNorm, timm.layers.RmsNorm)):
        norm = randomise(ours(16)).to(DEVICE)
        wanted = theirs(16).to(DEVICE)
        wanted.load_state_dict(norm.state_dict())
        with backend("triton"):
            torch.testing.assert_close(norm(x), wanted(x))


def test_reference_1_from_scratch_mean_pooled():
    host = randomise(ScratchViT(image_size=32, classes=10, depth=2))
    model: Any = VisionTransformer(
        32,
        16,
        num_classes=10,
        global_pool="avg",
        depth=2,
        num_heads=8,
        qkv_bias=False,
        pool_include_prefix=True,
        norm_eps=1e-5,
    ).to(DEVICE)
    report = load_weights(model, host.timm_state_dict())
    assert not report.missing and not report.unexpected
    assert model.blocks[0].attn.head_dim == 96
    host_stages = {"tokens": "drop", "block0": "layers.0", "block1": "layers.1"}
    assert_parity(
        model,
        host,
        random_images(1),
        names=host.timm_names,
        stages=stages_of(norm="fc_norm"),
        host_stages={**host_stages, "norm": "to_classes.0"},
    )


def test_reference_2_patchify_then_linear():
    C, height, width, patch = 512, 64, 32, 16
    weight = rand(C, patch * patch * 3, scale=0.05, seed=1)

    def reference(images, weight, bias):
        return nn.functional.linear(patchify(images, patch, patch), weight, bias)

    embed = PatchEmbed((height, width), patch, 3, C).to(DEVICE)

    def ours(images, weight, bias):
        conv = weight.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2)
        parameters = {"proj.weight": conv, "proj.bias": bias}
        return torch.func.functional_call(embed, parameters, (images,))

    inputs = {"images": rand(2, 3, height, width), "weight": weight, "bias": rand(C, seed=2)}
    with backend("triton"):
        assert_accurate(ours, reference, inputs)


def _hf(**overrides) -> Any:
    arguments = dict(
        image_size=32,
        patch_size=16,
        num_hidden_layers=2,
        num_labels=10,
        attn_implementation="eager",
    )
    config = transformers.ViTConfig(**{**arguments, **overrides})  # pyright: ignore
    return randomise(transformers.ViTForImageClassification(config))


def test_reference_3_transformers():
    host = _hf()
    model: Any = VisionTransformer(32, 16, num_classes=10, depth=2, norm_eps=1e-12).to(DEVICE)
    load_weights(model, host.state_dict())
    host_stages = {"tokens": "vit.embeddings", "norm": "vit.layernorm"}
    host_stages |= {f"block{i}": f"vit.layers.{i}" for i in range(2)}
    assert_parity(
        model, host, random_images(1), names=timm_names, stages=stages_of(), host_stages=host_stages
    )


def test_reference_3_eps_is_really_1e_12():
    small = dict(hidden_size=64, intermediate_size=256, num_attention_heads=2)
    host = _hf(**small)
    assert host.config.layer_norm_eps == 1e-12
    with torch.no_grad():  # tokens of variance 1e-8: eps 1e-6 would shrink what LayerNorm gives
        for p in host.vit.embeddings.parameters():
            p.mul_(1e-4)
    out = {}
    for eps in (1e-12, 1e-6):
        model: Any = VisionTransformer(
            32, 16, num_classes=10, embed_dim=64, depth=2, num_heads=2, norm_eps=eps
        ).to(DEVICE)
        load_weights(model, host.state_dict())
        out[eps] = model.eval()(random_images()).detach()
    expected = host(random_images()).logits.detach()
    torch.testing.assert_close(out[1e-12], expected, rtol=1e-3, atol=1e-4)
    assert (out[1e-6] - expected).abs().max() > 0.1


@pytest.mark.parametrize("representation_size", [None, 48])
def test_reference_4_torchvision(representation_size):
    C, heads = (384, 6) if representation_size is None else (192, 3)
    host = randomise(
        TorchvisionViT(
            32, 16, 2, heads, C, 4 * C, num_classes=10, representation_size=representation_size
        )
    )
    model: Any = VisionTransformer(
        32,
        16,
        num_classes=10,
        embed_dim=C,
        depth=2,
        num_heads=heads,
        representation_size=representation_size,
    ).to(DEVICE)
    assert load_weights(model, host.state_dict()).family == "torchvision"
    host_stages = {"tokens": "encoder.dropout", "norm": "encoder.ln"}
    host_stages |= {f"block{i}": f"encoder.layers.encoder_layer_{i}" for i in range(2)}
    assert_parity(
        model, host, random_images(1), names=timm_names, stages=stages_of(), host_stages=host_stages
    )


def _assert_notebook_parity(host, model, images):
    report = load_weights(model, host.timm_state_dict())
    assert not report.missing and not report.unexpected
    # The notebook adds positions in its forward: the first stage to compare is the first block.
    host_stages = {"block0": "blocks.0", "block1": "blocks.1", "norm": "ln"}
    stages = {"block0": "blocks.0", "block1": "blocks.1", "norm": "norm"}
    assert_parity(
        model, host, images, names=host.timm_names, stages=stages, host_stages=host_stages
    )


def test_reference_5_digits():
    host = randomise(NotebookViT())
    model: Any = create_vit("vit_mnist").to(DEVICE)
    assert model.pos_embed.shape == (1, 197, 64) and model.blocks[0].attn.head_dim == 32
    _assert_notebook_parity(host, model, random_images(1, 1, 28))


class WideAttention(TimmAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, attn_head_dim=24)


SMALL = dict(img_size=32, patch_size=8, num_classes=7, embed_dim=48, depth=2, num_heads=3)
eps_1e_5 = partial(nn.LayerNorm, eps=1e-5)
# what -> (arguments of both, timm's own spelling, ours)
TIMM: dict[str, tuple[dict, dict, dict]] = {
    "plain": ({}, {}, {}),
    "reg4": (dict(reg_tokens=4), {}, {}),
    "no_embed_class": (dict(no_embed_class=True, reg_tokens=1), {}, {}),
    "pre_norm-eps1e-5-quick_gelu": (
        dict(pre_norm=True),
        dict(norm_layer=eps_1e_5, act_layer="quick_gelu"),
        dict(norm_eps=1e-5, act_layer="quick_gelu"),
    ),
    "gelu_tanh": ({}, dict(act_layer="gelu_tanh"), dict(act_layer="gelu_tanh")),
    "silu": ({}, dict(act_layer="silu"), dict(act_layer="silu")),
    "avg": (dict(global_pool="avg"), {}, {}),
    "avg-no_class_token": (dict(global_pool="avg", class_token=False), {}, {}),
    "avg-norm_before": (dict(global_pool="avg", fc_norm=False), {}, {}),
    "avg-pool_include_prefix": (dict(global_pool="avg", pool_include_prefix=True), {}, {}),
    "token-fc_norm": (dict(fc_norm=True), {}, {}),
    "no_pool": (dict(global_pool=""), {}, {}),
    "init_values": (dict(init_values=0.1), {}, {}),
    "no_biases": (dict(qkv_bias=False), {}, {}),
    "27x45": (dict(img_size=(27, 45)), {}, {}),  # a remainder of 3 rows and 5 columns
    "patch8x4-in_chans1": (dict(patch_size=(8, 4), in_chans=1), {}, {}),
    "attn_head_dim24": ({}, dict(attn_layer=WideAttention), dict(attn_head_dim=24)),
    "mlp_ratio": (dict(mlp_ratio=3.3), {}, {}),
    "no_head": (dict(num_classes=0), {}, {}),
    "SwiGLUPacked": (  # F = 63
        dict(mlp_ratio=2.63, act_layer="silu"),
        dict(mlp_layer=SwiGLUPacked),
        dict(mlp_layer="SwiGLUPacked"),
    ),
    "GluMlp-gelu": (
        dict(mlp_ratio=2.0),
        dict(mlp_layer=GluMlp),
        dict(mlp_layer="GluMlp"),
    ),
    "SwiGLU-init_values": (
        dict(mlp_ratio=2.7, act_layer="silu", init_values=0.1),
        dict(mlp_layer=SwiGLU),
        dict(mlp_layer="SwiGLU"),
    ),
}


def _timm_pair(common=None, timm_own=None, ours_own=None, **more) -> tuple[Any, Any]:
    arguments = {**SMALL, **(common or {}), **more}
    host = randomise(timm.models.VisionTransformer(**arguments, **(timm_own or {})))
    model: Any = VisionTransformer(**arguments, **(ours_own or {})).to(DEVICE).eval()
    report = load_weights(model, host.state_dict())
    assert report.family == "timm"
    assert not report.missing and not report.unexpected and not report.resized, str(report)
    return model, host


@pytest.mark.parametrize("what", TIMM)
def test_timm(what):
    model, host = _timm_pair(*TIMM[what])
    patch_embed = model.patch_embed
    images = random_images(2, patch_embed.proj.in_channels, *patch_embed.img_size)
    assert_parity(model, host, images, stages=stages_of(), host_stages=stages_of())


@pytest.mark.parametrize("what", ["init_values"])
def test_timm_under_bf16_autocast(what):
    model, host = _timm_pair(*TIMM[what])
    assert_parity(
        model, host, random_images(), stages=stages_of(), host_stages=stages_of(), autocast=bf16
    )


def test_timm_whole_model_in_bf16():
    model, host = _timm_pair()
    oracle = host.double()(random_images().double())
    images = random_images().to(bf16)
    with backend("triton"):
        found = {"logits": model.to(bf16)(images)}
    host.to(bf16)
    (error,) = measure_all(found, lambda: {"logits": host(images)}, {"logits": oracle}, bf16)
    assert error.passed, str(error)


@pytest.mark.parametrize("what", ["avg", "token-fc_norm", "no_pool"])
def test_forward_features_and_head(what):
    model, host = _timm_pair(*TIMM[what])
    images = random_images()
    features = model.forward_features(images)
    torch.testing.assert_close(features, host.forward_features(images), rtol=1e-4, atol=1e-5)
    pooled = model.forward_head(features, pre_logits=True)
    wanted = host.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.head(pooled), model(images))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drop_path_rates_are_timms(depth):
    arguments = {**SMALL, "depth": depth, "drop_path_rate": 0.3, "img_size": 8}
    rates = [
        [getattr(getattr(b, name), "drop_prob", 0.0) for name in ("drop_path1", "drop_path2")]
        for make in (VisionTransformer, timm.models.VisionTransformer)
        for b in make(**arguments).blocks  # pyright: ignore
    ]
    assert rates[:depth] == [pytest.approx(pair) for pair in rates[depth:]]


REPLACED = {
    "attn.attn_drop": nn.Identity,
    "attn.proj_drop": nn.Identity,
    "mlp.drop": nn.Identity,
    "drop_path1": nn.Identity,
    "ls2": nn.Identity,
    "norm1": lambda: nn.LayerNorm(32, 1e-6),
}


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("name", REPLACED)
def test_replaced_submodule(name, drop_path):
    """An nn.Identity for what drops or scales, torch's norm for ours."""
    kind = name.partition(".")[0]
    if drop_path and kind == "drop_path1":
        drop_path = 0.0
    torch.manual_seed(0)
    block = Block(32, 2, init_values=1.0, drop_path=drop_path, drop_path_mode="skip").to(DEVICE)
    other, x = copy.deepcopy(block), torch.randn(4, 5, 32, device=DEVICE)
    other.set_submodule(name, REPLACED[name]().to(DEVICE))
    results = []
    for module in (block, other):
        torch.manual_seed(1)
        y = module.train()(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), module.mlp.fc1.weight)))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_drop_path_of_one():
    path = DropPath(1.0).train()
    assert path.row_scale(torch.ones(4, 3)).tolist() == [0.0] * 4  # pyright: ignore


def test_drop_path_rng_matches_timm():
    model, host = _timm_pair(drop_path_rate=0.6, depth=3, img_size=16)
    images, labels = random_images(8, height=16), torch.arange(8, device=DEVICE) % 7
    losses = []
    for vit in (host, model):
        vit.train()
        torch.manual_seed(5)
        loss = nn.functional.cross_entropy(vit(images), labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), host.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    evaluated = nn.functional.cross_entropy(host.eval()(images), labels).item()
    assert evaluated != pytest.approx(losses[0], rel=1e-3)  # some path was dropped


def test_dropout_rng_matches_timm():
    model, host = _timm_pair(pos_drop_rate=0.2, proj_drop_rate=0.3, drop_rate=0.4)
    out = []
    for vit in (host, model):
        torch.manual_seed(5)
        out.append(vit.train()(random_images()))
    torch.testing.assert_close(out[1], out[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(host.eval()(random_images()), out[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("called", [False, True], ids=["fused", "called"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
def test_attn_drop_in_training_only(qk_norm, called):
    model, host = _timm_pair(attn_drop_rate=0.5, depth=1, img_size=16, qk_norm=qk_norm)
    if called:
        model.blocks[0].attn.qkv.register_forward_hook(lambda _m, _i, y: None)
    images, out = random_images(1, height=16), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out.append(model.train()(images))
    assert torch.equal(out[0], out[1]) and not torch.equal(out[0], out[2])
    torch.testing.assert_close(model.eval()(images), host(images), rtol=1e-4, atol=1e-5)


def _timms_arguments():
    """(name, default) of each argument of timm's."""
    by_name = {}
    for function in (timm.create_model, timm.models.VisionTransformer):
        by_name |= inspect.signature(function).parameters
    return [(p.name, p.default) for p in by_name.values() if p.kind is not p.VAR_KEYWORD]


def test_timm_arguments_taken_or_refused():
    instead = "swap_in|load_weights|dynamic_img_size|torch.export"
    for name, default in _timms_arguments()[1:]:  # the first is the model's name
        taken = name in inspect.signature(VisionTransformer).parameters
        if not taken and (default is None or isinstance(default, (bool, str))):
            create_vit("vit_mnist", depth=1, **{name: default})
        if not taken and name not in ("exportable", "no_jit"):
            with pytest.raises(TypeError, match=f"{name} is timm's alone, got 'x'; .*({instead})"):
                create_vit("vit_mnist", **{name: "x"})


@pytest.mark.parametrize(
    ("scheme", "fix_init", "mlp_layer"),
    [
        ("", False, timm.layers.Mlp),
        ("", True, GluMlp),
        ("reset", False, SwiGLU),
        ("skip", True, timm.layers.Mlp),
        ("jax", False, GluMlp),
        ("jax_nlhb", True, SwiGLU),
        ("moco", False, timm.layers.Mlp),
        ("moco", True, SwiGLU),
    ],
    ids=str,
)
def test_init_schemes_are_timms(scheme, fix_init, mlp_layer):
    torch.manual_seed(0)
    options: Any = dict(
        img_size=16,
        patch_size=8,
        num_classes=9,
        embed_dim=96,
        depth=3,
        num_heads=2,
        reg_tokens=3,
        weight_init=scheme,
        fix_init=fix_init,
        init_values=0.1,
        pre_norm=fix_init,
        qkv_bias=not fix_init,
    )
    model = VisionTransformer(**options, mlp_layer=mlp_layer.__name__)
    wanted = timm.models.VisionTransformer(**options, mlp_layer=mlp_layer).state_dict()
    skipped = ("pos_embed", "cls_token", "reg_token") if scheme == "skip" else ()
    for name, ours in model.state_dict().items():
        theirs = wanted[name]
        if name in skipped:  # timm's has what was in memory
            assert (ours == 0).all()
        elif theirs.min() == theirs.max():
            torch.testing.assert_close(ours, theirs, msg=name)
        else:
            few = 1 + 4 * ours.numel() ** -0.5  # samples spread
            for measure in (torch.std, lambda x: x.abs().mean()):
                assert 1 / few < measure(ours) / measure(theirs) < few, name
            assert ours.abs().max() < 1.5 * theirs.abs().max() * few, name


@pytest.mark.parametrize("scheme", ["", "jax", "skip"])
def test_init_weights_again(scheme):
    model: Any = VisionTransformer(**SMALL, weight_init=scheme, fix_init=True)
    head, proj = model.head, model.blocks[1].attn.proj.weight
    model.init_weights("jax_nlhb")
    assert head.weight.eq(0).all() and head.bias.tolist() == [pytest.approx(-math.log(7))] * 7
    bound = proj.abs().max().item()
    assert 0.1 < bound < (6 / 96) ** 0.5 / 2  # Xavier's, and fixed: the second block's by 2
    model.init_weights()
    if scheme == "skip":  # as drawn
        assert head.bias.lt(-1).all() and proj.abs().max() < bound
    else:
        std = 0.02 if scheme == "" else (6 / 96 / 3) ** 0.5
        assert head.bias.eq(0).all() and head.weight.eq(0).all() == (scheme == "jax")
        assert proj.std().item() == pytest.approx(std / 2, rel=0.1)


def test_vit_dtype_device():
    model = VisionTransformer(16, 8, depth=1, device="meta", dtype=bf16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", bf16)}
    model = VisionTransformer(16, 8, depth=1, dtype=bf16)
    assert {p.dtype for p in model.parameters()} == {bf16}


def _step(model, images, upstream):
    model.zero_grad()
    out = model(images)
    out.backward(upstream)
    return [out.detach()] + [p.grad.clone() for p in model.parameters()]


def test_compiled_model_under_autocast_and_drop_path():
    model, _ = _timm_pair(depth=2, drop_path_rate=0.5, img_size=16)
    model.train()
    images, upstream = random_images(4, height=16), torch.randn(4, 7).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE.type, dtype=bf16):
        torch.manual_seed(1)
        eager = _step(model, images, upstream.bfloat16())
        torch.manual_seed(1)
        out = _step(compiled, images, upstream.bfloat16())
    for a, b in zip(eager, out, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_linear_forward_hook(layer):
    model, host = _timm_pair(init_values=0.5, depth=1, img_size=16)
    plain = model(random_images(height=16))
    calls = []

    def double(_module, _inputs, y):
        calls.append(y.shape)
        return 2 * y

    for vit in (model, host):
        vit.blocks[0].get_submodule(layer).register_forward_hook(double)
    torch.testing.assert_close(
        model(random_images(height=16)), host(random_images(height=16)), rtol=1e-4, atol=1e-5
    )
    assert len(calls) == 2 and calls[0] == calls[1]
    assert not torch.allclose(model(random_images(height=16)), plain, rtol=1e-2, atol=1e-2)


def test_patch_proj_forward_hook():
    model, host = _timm_pair(reg_tokens=2, no_embed_class=True, depth=1, img_size=16)
    for vit in (model, host):
        vit.patch_embed.proj.register_forward_hook(lambda _m, _i, y: 2 * y)
    torch.testing.assert_close(
        model(random_images(height=16)), host(random_images(height=16)), rtol=1e-4, atol=1e-5
    )


class _LowRank(nn.Linear):
    """A Linear with an adapter, the way LoRA makes one."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.down = nn.Parameter(rand(2, linear.in_features, seed=3, grad=False))
        self.up = nn.Parameter(rand(linear.out_features, 2, seed=4, grad=False))
        self.to(DEVICE)

    def forward(self, input):
        return super().forward(input) + input @ self.down.t() @ self.up.t()


class _Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("layer", ["attn.qkv", "mlp.fc2"])
@pytest.mark.parametrize("kind", ["subclass", "parametrized", "forward"])
def test_linear_subclass_forward(layer, kind):
    model, host = _timm_pair(init_values=0.5, depth=1, img_size=16)
    plain = model(random_images(height=16))
    for vit in (model, host):
        block = vit.blocks[0]
        linear = block.get_submodule(layer)
        if kind == "subclass":
            block.set_submodule(layer, _LowRank(linear))
        elif kind == "parametrized":
            parametrize.register_parametrization(linear, "weight", _Halved())
        else:
            linear.forward = lambda x, own=linear.forward: -own(x)
    out = model(random_images(height=16))
    torch.testing.assert_close(out, host(random_images(height=16)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, plain, rtol=1e-2, atol=1e-2)
    out.sum().backward()
    if kind == "subclass":
        assert model.blocks[0].get_submodule(layer).up.grad.abs().sum() > 0


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_dynamic_img_size_pos_embed(no_embed_class):
    model, host = _timm_pair(reg_tokens=2, no_embed_class=no_embed_class, dynamic_img_size=True)
    images = random_images(2, 3, 24, 40)
    torch.testing.assert_close(model(images), host(images), rtol=1e-4, atol=1e-5)


def test_img_size_rejects():
    with pytest.raises(ValueError, match=r"images must be \(32, 32\) \(height, width\), got"):
        _timm_pair()[0](random_images(height=40))
    with pytest.raises(ValueError, match=r"images must be at least \(8, 8\) .*, got \(7, 40\)"):
        _timm_pair(dynamic_img_size=True)[0](random_images(2, 3, 7, 40))


def test_no_weight_decay():
    """timm's optimizers ask the model for them: tokens and positions are no matrices to shrink."""
    options = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, reg_tokens=1)
    model = VisionTransformer(**options)
    host = timm.models.VisionTransformer(**options)
    mine, theirs = (
        {n for n, _ in m.named_parameters()} & m.no_weight_decay() for m in (model, host)
    )
    assert mine == theirs == {"cls_token", "reg_token", "pos_embed"}
    groups = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    decayed = {n for n, p in model.named_parameters() if decays[id(p)]}
    assert decayed and all(n.endswith(".weight") for n in decayed)
