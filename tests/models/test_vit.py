"""VisionTransformer beside the models whose weights it takes: timm's arguments, torch's,
transformers', one written by hand; layers that are hooked, adapted or replaced."""

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
from numerics import DEVICE, rand
from references import NotebookViT
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from torch import nn
from torch.nn.utils import parametrize
from torchvision.models import VisionTransformer as TorchvisionViT

import fastvit_kernels as fk
from fastvit_kernels import LayerNorm, RmsNorm, VisionTransformer, backend, create_vit, load_weights
from fastvit_kernels.models.modules import DropPath
from fastvit_kernels.models.vit import Block

bf16 = torch.bfloat16


def test_norms_have_the_defaults_of_torch_and_timm():
    x = 1e-3 * rand(2, 5, 16)  # small beside eps
    for ours, theirs in ((LayerNorm, nn.LayerNorm), (RmsNorm, timm.layers.RmsNorm)):
        norm = randomise(ours(16))
        wanted = theirs(16).to(DEVICE)
        wanted.load_state_dict(norm.state_dict())
        with backend("triton"):
            torch.testing.assert_close(norm(x), wanted(x))


# timm's module, ours; of 42 hidden features
GATED = {
    "GluMlp": (partial(GluMlp, act_layer=nn.GELU), partial(fk.GluMlp, act_layer="gelu")),
    "SwiGLUPacked": (
        partial(SwiGLUPacked, bias=False),
        partial(fk.GluMlp, gate_last=False, bias=False),
    ),
    "SwiGLU": (partial(SwiGLU, align_to=8), partial(fk.SwiGLU, align_to=8)),
}


@pytest.mark.parametrize("what", GATED)
def test_gated_mlps_take_timms_weights(what):
    host, own = (make(48, 42) for make in GATED[what])
    own.load_state_dict(randomise(host).state_dict())
    x = rand(2, 9, 48)
    with backend("triton"):
        torch.testing.assert_close(own.to(DEVICE)(x), host(x), rtol=1e-4, atol=1e-5)


def assert_reference(model, host, images, stages, host_stages):
    report = load_weights(model, host.state_dict())
    assert not report.missing and not report.unexpected
    assert_parity(model, host, images, names=timm_names, stages=stages, host_stages=host_stages)


SIZES: dict[str, Any] = dict(num_classes=10, embed_dim=192, depth=2, num_heads=3)


def test_reference_transformers():
    """eps is really 1e-12: of tokens of variance 1e-8, 1e-6 would shrink what LayerNorm gives."""
    sizes = dict(image_size=32, patch_size=16, hidden_size=192, intermediate_size=768)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=3, num_labels=10)
    config = transformers.ViTConfig(**sizes, attn_implementation="eager")
    host = randomise(transformers.ViTForImageClassification(config))
    assert host.config.layer_norm_eps == 1e-12
    with torch.no_grad():
        for p in host.vit.embeddings.parameters():
            p.mul_(1e-4)
    model = VisionTransformer(32, 16, **SIZES, norm_eps=1e-12).to(DEVICE)
    host_stages = {"tokens": "vit.embeddings", "norm": "vit.layernorm"}
    host_stages |= {f"block{i}": f"vit.layers.{i}" for i in range(2)}
    assert_reference(model, host, random_images(1), stages_of(), host_stages)


def test_reference_torchvision():
    host = randomise(TorchvisionViT(32, 16, 2, 3, 192, 768, num_classes=10, representation_size=48))
    model = VisionTransformer(32, 16, **SIZES, representation_size=48).to(DEVICE)
    host_stages = {"tokens": "encoder.dropout", "norm": "encoder.ln"}
    host_stages |= {f"block{i}": f"encoder.layers.encoder_layer_{i}" for i in range(2)}
    assert_reference(model, host, random_images(1), stages_of(), host_stages)


def test_reference_digits():
    host, model = randomise(NotebookViT()), create_vit("vit_mnist").to(DEVICE)
    assert model.pos_embed.shape == (1, 197, 64) and model.blocks[0].attn.head_dim == 32
    # The notebook adds positions in its forward: the first stage to compare is the first block.
    stages = {"block0": "blocks.0", "block1": "blocks.1", "norm": "norm"}
    assert_reference(model, host, random_images(1, 1, 28), stages, stages)


class WideAttention(timm.layers.Attention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, attn_head_dim=24)


SMALL = dict(img_size=32, patch_size=8, num_classes=7, embed_dim=48, depth=2, num_heads=3)
TIMM: dict[str, dict[str, Any]] = {
    "plain": {},
    "reg4-no_embed_class": dict(no_embed_class=True, reg_tokens=4),
    "pre_norm-eps1e-5-quick_gelu": dict(pre_norm=True, norm_eps=1e-5, act_layer="quick_gelu"),
    "avg": dict(global_pool="avg", reg_tokens=1),
    "avg-no_class_token-silu": dict(global_pool="avg", class_token=False, act_layer="silu"),
    "avg-all_tokens-no_qkv_bias-eps1e-5": dict(
        global_pool="avg", pool_include_prefix=True, qkv_bias=False, norm_eps=1e-5
    ),
    "avg-norm_before": dict(global_pool="avg", fc_norm=False, pool_include_prefix=True),
    "qk_norm": dict(qk_norm=True, reg_tokens=2),
    "token-fc_norm": dict(fc_norm=True),
    "no_pool-no_biases": dict(global_pool="", qkv_bias=False),
    "init_values-mlp_ratio": dict(init_values=0.1, mlp_ratio=3.3),
    # a remainder of 3 rows and 5 columns
    "27x45-gelu_tanh": dict(img_size=(27, 45), act_layer="gelu_tanh"),
    "patch8x4-in_chans1": dict(patch_size=(8, 4), in_chans=1),
    "attn_head_dim24-no_head": dict(num_classes=0, attn_head_dim=24),
    # F = 63
    "SwiGLUPacked": dict(mlp_layer="SwiGLUPacked", mlp_ratio=2.63, act_layer="silu"),
    "GluMlp-gelu": dict(mlp_layer="GluMlp", mlp_ratio=2.0),
    "SwiGLU": dict(mlp_layer="SwiGLU", mlp_ratio=2.7, act_layer="silu", init_values=1),
}


def _timm_pair(**options) -> tuple[Any, Any]:
    """Ours and timm's model of our arguments, of the same weights."""
    model = VisionTransformer(**{**SMALL, **options}).to(DEVICE).eval()
    if "norm_eps" in options:
        options["norm_layer"] = partial(nn.LayerNorm, eps=options.pop("norm_eps"))
    if options.pop("attn_head_dim", None):
        options["attn_layer"] = WideAttention
    if "mlp_layer" in options:
        options["mlp_layer"] = getattr(timm.layers, options["mlp_layer"])
    host = randomise(timm.models.VisionTransformer(**{**SMALL, **options}))
    report = load_weights(model, host.state_dict())
    assert report.family == "timm"
    assert not report.missing and not report.unexpected and not report.resized, str(report)
    return model, host


@pytest.mark.parametrize("what", TIMM)
def test_timm(what):
    model, host = _timm_pair(**TIMM[what])
    patch_embed = model.patch_embed
    images = random_images(2, patch_embed.proj.in_channels, *patch_embed.img_size)
    assert_parity(model, host, images, stages=stages_of(), host_stages=stages_of())


def test_timm_under_bf16_autocast():
    model, host = _timm_pair(**TIMM["init_values-mlp_ratio"])
    assert_parity(
        model, host, random_images(), stages=stages_of(), host_stages=stages_of(), autocast=bf16
    )


@pytest.mark.parametrize("what", ["avg", "token-fc_norm", "no_pool-no_biases"])
def test_forward_features_and_head(what):
    model, host = _timm_pair(**TIMM[what])
    images = random_images()
    features = model.forward_features(images)
    torch.testing.assert_close(features, host.forward_features(images), rtol=1e-4, atol=1e-5)
    pooled = model.forward_head(features, pre_logits=True)
    wanted = host.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.head(pooled), model(images))


REPLACED = {
    "attn.attn_drop attn.proj_drop mlp.drop": nn.Identity,
    "drop_path1 drop_path2": nn.Identity,
    "ls2": nn.Identity,
    "norm1": lambda: nn.LayerNorm(32, 1e-6),
}


@pytest.mark.parametrize("names", REPLACED)
def test_replaced_submodule(names):
    """An nn.Identity for what drops or scales, torch's norm for ours."""
    for rate in (0.0,) if "drop_path" in names else (0.0, 0.5):
        torch.manual_seed(0)
        block = Block(32, 2, init_values=1.0, drop_path=rate, drop_path_mode="skip").to(DEVICE)
        other, x = copy.deepcopy(block), torch.randn(4, 5, 32, device=DEVICE)
        for name in names.split():
            other.set_submodule(name, REPLACED[names]().to(DEVICE))
        results = []
        for module in (block, other):
            torch.manual_seed(1)
            y = module.train()(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), module.mlp.fc1.weight)))
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


WATCHED = ("ls1", "ls2", "drop_path1", "drop_path2", "attn.proj_drop", "mlp.drop")


@pytest.mark.parametrize("mlp_layer", ["Mlp", "GluMlp", "SwiGLU"])
def test_hooks_of_what_has_no_weights(mlp_layer):
    """They run, and what they give counts."""
    settings = dict(mlp_layer=mlp_layer, act_layer="silu", init_values=0.5, drop_path=0.5)
    block, seen = Block(32, 2, **settings).to(DEVICE).train(), []
    x = torch.randn(4, 5, 32, device=DEVICE)

    def drawn():
        torch.manual_seed(1)
        return block(x)

    wanted = drawn()
    for name in WATCHED:
        module = block.get_submodule(name)
        handle = module.register_forward_hook(lambda *_, name=name: seen.append(name))
        torch.testing.assert_close(drawn(), wanted, rtol=1e-5, atol=1e-5)
        handle.remove()
    assert set(seen) == {*WATCHED}
    for name in WATCHED[2:4]:
        block.get_submodule(name).register_forward_hook(lambda _, x, y: torch.zeros_like(y))
    torch.testing.assert_close(block(x), x)


def test_a_drop_path_of_another_library_and_a_dropout_that_stays_on():
    block = Block(32, 2, init_values=0.5).to(DEVICE).eval()
    block.drop_path2 = timm.layers.DropPath(0.5).train()
    x, drawn = torch.randn(8, 5, 32, device=DEVICE), []
    for _ in range(2):
        drawn.append(block(x))
    assert not torch.equal(*drawn)
    block.drop_path2.eval()
    block.mlp.drop = nn.Dropout(0.5).train()
    assert not torch.equal(block(x), block(x))


def test_drop_path_of_one():
    path = DropPath(1.0).train()
    assert path.row_scale(torch.ones(4, 3)).tolist() == [0.0] * 4  # pyright: ignore


DROPOUT = dict(pos_drop_rate=0.2, proj_drop_rate=0.3, drop_rate=0.4)


@pytest.mark.parametrize("rates", [dict(drop_path_rate=0.6), DROPOUT], ids=["path", "dropout"])
def test_dropout_rng_matches_timm(rates):
    model, host = _timm_pair(**rates, depth=3, img_size=16)
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
    assert evaluated != pytest.approx(losses[0], rel=1e-3)  # something was dropped


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


def test_timm_arguments_taken_or_refused():
    instead = "swap_in|load_weights|dynamic_img_size|torch.export"
    timms: dict[str, Any] = {}
    for function in (timm.create_model, timm.models.VisionTransformer):
        timms |= inspect.signature(function).parameters
    known = {"model_name", "kwargs", *inspect.signature(VisionTransformer).parameters}
    for name in timms.keys() - known:
        default = timms[name].default
        if default is None or isinstance(default, (bool, str)):
            create_vit("vit_mnist", depth=1, **{name: default})
        if name not in ("exportable", "no_jit"):
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
    options: Any = dict(**SMALL, weight_init=scheme, fix_init=fix_init)
    options |= dict(reg_tokens=3, init_values=0.1, pre_norm=fix_init, qkv_bias=not fix_init)
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


def test_init_weights_again():
    model: Any = VisionTransformer(**SMALL, weight_init="jax")
    head = model.head
    model.init_weights("jax_nlhb")
    assert head.weight.eq(0).all() and head.bias.tolist() == [pytest.approx(-math.log(7))] * 7
    model.init_weights()
    assert head.bias.eq(0).all()


def test_vit_dtype_device():
    model = VisionTransformer(16, 8, depth=1, device="meta", dtype=bf16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", bf16)}
    model = VisionTransformer(16, 8, depth=1, dtype=bf16)
    assert {p.dtype for p in model.parameters()} == {bf16}


def test_compiled_model_under_autocast_and_drop_path():
    model, _ = _timm_pair(depth=2, drop_path_rate=0.5, img_size=16)
    images, upstream = random_images(4, height=16), torch.randn(4, 7).to(DEVICE, bf16)
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    results = []
    for call in (model, compiled):
        torch.manual_seed(1)
        with torch.autocast(DEVICE.type, dtype=bf16):
            out = call(images)
            results.append([out, *torch.autograd.grad(out, [*model.parameters()], upstream)])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


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


def _change(kind: str, model: nn.Module, layer: str) -> None:
    module = model.get_submodule(layer)
    if kind == "hook":
        module.register_forward_hook(lambda _m, _i, y: 2 * y + 1)
    elif kind == "subclass":
        model.set_submodule(layer, _LowRank(module))  # pyright: ignore
    elif kind == "parametrized":
        parametrize.register_parametrization(module, "weight", _Halved())
    elif kind == "forward":
        module.forward = lambda x, own=module.forward: -own(x)
    else:  # norms of queries and keys, each with an eps of its own
        module.eps = 0.5  # pyright: ignore


CHANGES = [
    ("hook", "patch_embed.proj", "Mlp"),
    *(("hook", f"blocks.0.attn.{name}", "Mlp") for name in ("qkv", "q_norm", "k_norm", "proj")),
    *(("hook", f"blocks.0.mlp.{name}", "Mlp") for name in ("fc1", "fc2")),
    *(("hook", "blocks.0.mlp.fc1", mlp) for mlp in ("GluMlp", "SwiGLUPacked")),
    *(("hook", f"blocks.0.mlp.{name}", "SwiGLU") for name in ("fc1_g", "fc1_x")),
    *((kind, "blocks.0.attn.qkv", "Mlp") for kind in ("subclass", "parametrized", "forward")),
    *((kind, "blocks.0.mlp.fc2", "Mlp") for kind in ("subclass", "parametrized", "forward")),
    ("eps", "blocks.0.attn.k_norm", "Mlp"),
]


@pytest.mark.parametrize(("kind", "layer", "mlp"), CHANGES)
def test_changed_layer(kind, layer, mlp):
    """It is called, as timm's is."""
    options: dict = dict(img_size=16, depth=1, init_values=0.5, reg_tokens=2, no_embed_class=True)
    options |= dict(qk_norm="_norm" in layer, act_layer="gelu" if mlp == "Mlp" else "silu")
    model, host = _timm_pair(mlp_layer=mlp, **options)
    images = random_images(height=16)
    plain = model(images)
    for vit in (model, host):
        _change(kind, vit, layer)
    out = model(images)
    torch.testing.assert_close(out, host(images), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(out, plain, rtol=1e-2, atol=1e-2)
    out.sum().backward()
    if kind == "subclass":
        assert model.get_submodule(layer).up.grad.abs().sum() > 0


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_dynamic_img_size_pos_embed(no_embed_class):
    model, host = _timm_pair(reg_tokens=2, no_embed_class=no_embed_class, dynamic_img_size=True)
    images = random_images(2, 3, 24, 40)
    torch.testing.assert_close(model(images), host(images), rtol=1e-4, atol=1e-5)
    assert model.to(bf16).forward_features(images.to(bf16)).dtype is bf16


def test_no_weight_decay():
    """timm's optimizers ask the model for them: tokens and positions are no matrices to shrink."""
    options = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, reg_tokens=1)
    model = VisionTransformer(**options)
    host = timm.models.VisionTransformer(**options)
    for vit in (model, host):
        spared = {n for n, _ in vit.named_parameters()} & vit.no_weight_decay()
        assert spared == {"cls_token", "reg_token", "pos_embed"}
    groups = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    decayed = {n for n, p in model.named_parameters() if decays[id(p)]}
    assert decayed and all(n.endswith(".weight") for n in decayed)
