"""Changes before or after swap_in: the swapped module goes on computing what its host computes."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private import PADDING_OF_MODE, SELF_ATTENTION, NoFunction
from torch import nn

from fastvit_kernels import backend, register_attention, swap_in
from fastvit_kernels.runtime.plain import is_plain
from fastvit_kernels.swap.hosts import swapped_class
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small, timm_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def timm_block(**settings):
    from timm.models.vision_transformer import Block

    return randomize(Block(16, 2, init_values=0.5, qkv_bias=True, **settings))


def hf_layer(name="vit", **settings):
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, **settings}
    model, _ = hf_small(name, **settings)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    return randomize(layers[0]).eval()


def encoder_layer(**settings):
    settings = {"activation": "gelu", "batch_first": True, "norm_first": True, **settings}
    return randomize(nn.TransformerEncoderLayer(16, 2, 32, 0.0, **settings))


def attention(**settings):
    return randomize(nn.MultiheadAttention(16, 2, **{"batch_first": True, **settings}))


def mlp(act=None):
    layers = nn.Linear(16, 32), act or nn.GELU(), nn.Dropout(0.0)
    layers += nn.Linear(32, 16), nn.Dropout(0.0)
    return randomize(nn.Sequential(*layers))


def swapped(module):
    """(the host, a swapped copy)"""
    other = copy.deepcopy(module)
    swap_in(other)
    assert any(
        type(m) is not type(n) for m, n in zip(module.modules(), other.modules(), strict=True)
    )
    return module, other


def tokens(*shape):
    return torch.randn(*(shape or (2, 5, 16)), generator=torch.Generator().manual_seed(0))


def first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def result(module, *args, **kwargs):
    """The output, or the error where there is one."""
    try:
        return first(module(*args, **kwargs))
    except Exception as error:
        return error


def assert_alike(host, other, *args, **kwargs):
    wanted, got = result(host, *args, **kwargs), result(other, *args, **kwargs)
    if isinstance(wanted, Exception):
        assert isinstance(got, Exception)
    else:
        assert not isinstance(got, Exception), got
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# Containers that are edited like lists.


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m[:-1],
        lambda m: m[:-2],
        lambda m: m[:1],
        lambda m: m[:2],
        lambda m: m[1:],
        lambda m: (m.insert(0, nn.LayerNorm(16)), m)[1],
        lambda m: (m.__setitem__(3, nn.Linear(32, 8)), m)[1],
        lambda m: (m.__setitem__(1, nn.Identity()), m)[1],
        lambda m: (m.__setitem__(3, nn.Identity()), m)[1],
        lambda m: (m.append(nn.Linear(16, 16)), m)[1],
        lambda m: (m.append(nn.Tanh()), m)[1],
        lambda m: (m.__delitem__(1), m)[1],
    ],
)
def test_a_sequential_that_was_edited(edit):
    host, other = swapped(mlp())
    torch.manual_seed(1)
    host = edit(host)
    torch.manual_seed(1)
    other = edit(other)
    assert_alike(host, other, tokens())
    assert_alike(host, other, tokens(2, 5, 32))


def test_an_adapter_in_the_mlp_of_torchvision():
    models = pytest.importorskip("torchvision").models.vision_transformer
    block = randomize(models.EncoderBlock(2, 16, 32, 0.0, 0.0))
    host, other = swapped(block)
    adapter = nn.Linear(16, 16)
    for module in (host, other):
        module.mlp.append(adapter)
    assert_alike(host, other, tokens())
    assert other.mlp.fused_verdict() == "it has become another kind of module"
    swap_in(other)
    assert_alike(host, other, tokens())


# Settings.


@pytest.mark.parametrize("axis", ["prune", "is_causal", "scaling", "head_dim"])
def test_attention_of_transformers_after_a_change(axis):
    host, other = swapped(hf_layer())
    for layer in (host, other):
        a = layer.attention
        if axis == "prune":  # the second of two heads
            for p in (a.q_proj, a.k_proj, a.v_proj):
                p.weight = nn.Parameter(p.weight[:16])
                p.bias = nn.Parameter(p.bias[:16])
            a.o_proj.weight = nn.Parameter(a.o_proj.weight[:, :16])
        elif axis == "is_causal":
            a.is_causal = True
        elif axis == "scaling":
            a.scaling = 2.0
        else:
            a.head_dim = 8
    assert_alike(host, other, tokens(2, 5, 32))
    assert_alike(host.attention, other.attention, tokens(2, 5, 32))


@pytest.mark.parametrize(
    ("name", "value"),
    [("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (2, 2)), ("padding_mode", "reflect")],
)
def test_a_patch_convolution_after_a_change(name, value):
    host, other = swapped(nn.Conv2d(3, 8, 4, 4))
    x = tokens(2, 3, 16, 16)
    assert_alike(host, other, x)
    for module in (host, other):
        setattr(module, name, value)
        if name == "padding_mode":
            module.padding = (1, 1)
            setattr(module, PADDING_OF_MODE, [1, 1, 1, 1])
    assert_alike(host, other, x)


def test_multihead_attention_after_a_change():
    def call(module):
        x = tokens()
        return module(x, x, x, need_weights=False)[0]

    for change in (
        lambda m: setattr(m, "batch_first", False),
        lambda m: setattr(m, "add_zero_attn", True),
        lambda m: setattr(m, "num_heads", 4) or setattr(m, "head_dim", 4),
        lambda m: (
            setattr(m, "bias_k", nn.Parameter(torch.ones(1, 1, 16))),
            setattr(m, "bias_v", nn.Parameter(torch.ones(1, 1, 16))),
        ),
    ):
        host, other = swapped(attention())
        torch.testing.assert_close(call(other), call(host), rtol=1e-4, atol=1e-5)
        change(host)
        change(other)
        torch.testing.assert_close(call(other), call(host), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("vit_small_patch16_dinov3", {"num_heads": (1, 2, 4)}),
        ("eva02_tiny_patch14_224", {"num_heads": (1, 2, 4)}),
        ("vit_tiny_patch16_224", {"num_heads": (1, 2, 4), "attn_dim": (32, 64, 65, 66)}),
        ("aimv2_large_patch14_224", {"num_heads": (1, 2, 4), "attn_dim": (32, 64, 65, 66)}),
    ],
)
def test_an_edit_of_an_attention_raises_where_its_hosts_does(name, edits):
    model, x = timm_small(name)
    host = copy.deepcopy(model.eval())
    swap_in(model)
    raised = 0
    for setting, values in edits.items():
        for value in values:
            edited = copy.deepcopy(host), copy.deepcopy(model)
            for m in (m for both in edited for m in both.modules() if hasattr(m, setting)):
                setattr(m, setting, value)
            try:
                wanted = edited[0](x)
            except RuntimeError as error:
                raised += 1
                with pytest.raises(RuntimeError, match=re.escape(str(error))):
                    edited[1](x)
            else:
                torch.testing.assert_close(edited[1](x), wanted, rtol=1e-4, atol=1e-4)
    assert raised


def test_a_norm_of_another_width_raises_as_its_host():
    for norm in (nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(16)):
        host, other = swapped(norm)
        norm.normalized_shape = other.normalized_shape = (8,)
        for width in (8, 16):
            assert_alike(host, other, tokens(2, width))


# Functions of classes and of instances.


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_is_replaced_in_its_class(when, monkeypatch):
    from timm.layers import Attention

    own, block, calls = Attention.forward, timm_block(), []
    host, other = swapped(block) if when == "after" else (block, copy.deepcopy(block))
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "forward", lambda self, x, *a, **k: 2 * own(self, x, *a, **k))
        report = swap_in(other)
        assert_alike(host, other, tokens())
        reason = "Attention.forward was replaced"
        assert ("attn", reason) in [(r.name, r.reason) for r in report.left]
        # the same numbers, and somebody who counts
        patch.setattr(Attention, "forward", lambda *a, **k: calls.append(1) or own(*a, **k))
        other(tokens())
        assert calls == [1]
    assert_alike(host, other, tokens())


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.Linear, nn.GELU, nn.Dropout, nn.Identity])
def test_a_forward_of_torch_that_is_replaced(kind, monkeypatch):
    own = kind.forward
    for make in (timm_block, mlp, encoder_layer, lambda: nn.LayerNorm(16)):
        host, other = swapped(make())
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x, *a: own(self, x, *a) * 1.5)
            assert_alike(host, other, tokens())
            late = copy.deepcopy(host)
            swap_in(late)
            assert_alike(host, late, tokens())
        assert_alike(host, other, tokens())


@pytest.mark.parametrize(
    ("function", "make"),
    [
        ("layer_norm", timm_block),
        ("linear", timm_block),
        ("gelu", timm_block),
        ("scaled_dot_product_attention", timm_block),
        ("silu", lambda: mlp(nn.SiLU())),
        ("conv2d", lambda: nn.Conv2d(3, 8, 4, 4)),
    ],
)
def test_a_function_of_torch_that_is_replaced(function, make, monkeypatch):
    host, other = swapped(make())
    x = tokens(2, 3, 8, 8) if function == "conv2d" else tokens()
    own, calls = getattr(F, function), []
    monkeypatch.setattr(F, function, lambda *a, **k: calls.append(1) or own(*a, **k))
    host(x)
    wanted, calls[:] = len(calls), []
    with backend("auto"):  # kernels call none of them
        other(x)
    assert len(calls) == wanted > 0


def test_an_attention_function_that_is_registered_again():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def other_attention(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return 2 * out, weights

    host, other = swapped(hf_layer())
    AttentionInterface.register("sdpa", other_attention)
    try:
        assert_alike(host, other, tokens(2, 5, 32))
        late = copy.deepcopy(host)
        report = swap_in(late)
        assert "another function is registered as 'sdpa'" in str(report)
        assert_alike(host, late, tokens(2, 5, 32))
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert_alike(host, other, tokens(2, 5, 32))


def test_a_method_that_is_replaced_on_the_instance():
    for when in ("after", "before"):
        host = encoder_layer()
        other: Any = copy.deepcopy(host)
        if when == "after":
            swap_in(other)
        for module in (host, other):
            own = getattr(module, SELF_ATTENTION)
            setattr(module, SELF_ATTENTION, lambda *a, own=own, **k: 3 * own(*a, **k))
        swap_in(other)
        assert_alike(host, other, tokens())


# Weights.


class Doubled(torch.Tensor):
    """A weight that counts twice, by `__torch_function__` alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with NoFunction():
            args = [a.as_subclass(torch.Tensor) * 2 if type(a) is cls else a for a in args]
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_watches_what_is_done_with_it(name):
    host, other = swapped(mlp())
    for module in (host, other):
        watching = getattr(module[0], name).detach().as_subclass(Doubled)
        delattr(module[0], name)
        setattr(module[0], name, watching)
        assert not is_plain(module[0])
    with backend("auto"):  # a kernel would read its memory
        assert_alike(host, other, tokens())


# Names.


def test_names_of_arguments_are_the_hosts():
    x = tokens()
    for make, call in (
        (lambda: nn.LayerNorm(16), {"input": x}),
        (mlp, {"input": x}),
        (timm_block, {"x": x}),
        (encoder_layer, {"src": x}),
        (lambda: nn.Conv2d(3, 8, 4, 4), {"input": tokens(1, 3, 8, 8)}),
        (attention, {"query": x, "key": x, "value": x, "need_weights": False}),
        (lambda: hf_layer().mlp, {"hidden_states": tokens(2, 5, 32)}),
        (hf_layer, {"hidden_states": tokens(2, 5, 32)}),
    ):
        host, other = swapped(make())
        wanted = result(host, **call)
        assert not isinstance(wanted, Exception)
        assert_alike(host, other, **call)
        for wrong in ((), (x, x, x, x, x, x, x, x, x, x)):
            assert type(result(host, *wrong)) is type(result(other, *wrong)) is TypeError


def test_the_third_argument_of_a_dinov3_layer():
    host, other = swapped(hf_layer("dinov3_vit"))
    angles = tokens(4, 16)
    rope = (angles.cos(), angles.sin())
    assert_alike(host, other, tokens(2, 5, 32), None, rope)
    assert_alike(host, other, tokens(2, 5, 32), position_embeddings=rope)
    assert_alike(host, other, tokens(2, 5, 32))


@pytest.mark.parametrize("name", ["left", "branch", "host", "level", "blocked", "draws"])
def test_a_child_of_any_name(name):
    parts = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]
    host = nn.Sequential(OrderedDict(zip((name, "act", "out"), parts, strict=True)))
    host, other = swapped(host)
    assert getattr(other, name) is other[0]
    assert_alike(host, other, tokens())
    block = timm_block()
    swap_in(block)
    block.attn.add_module(name, nn.Linear(3, 3))
    assert type(getattr(block.attn, name)) is nn.Linear
    block(tokens())


@pytest.mark.parametrize("name", ["dinov2_swiglu", "clip", "vit_tiny_patch16_224"])
def test_a_part_that_another_version_names_otherwise(name):
    model = (timm_small if name.startswith("vit_") else hf_small)(name)[0]
    kinds = {type(m): m for m in model.modules() if swapped_class(type(m), None)}
    for host in kinds.values():
        for part in host._modules:
            other = copy.deepcopy(host)
            other._modules["renamed"] = other._modules.pop(part)
            assert str(swap_in(other, explain=True))
            assert type(other) is type(host)


def test_a_child_of_a_name_of_ours():
    norm = nn.LayerNorm(16)
    norm.add_module("fused_host", nn.Linear(2, 2))
    report = swap_in(norm)
    assert "a part of it has a name of ours: fused_host" in str(report)
    assert type(norm.fused_host) is nn.Linear


# Layouts and modes.


def test_a_patch_convolution_can_be_viewed():
    host, other = swapped(nn.Conv2d(3, 8, 4, 4))
    x = tokens(2, 3, 8, 12)
    with backend("auto"):
        assert other(x).stride() == host(x).stride()
        torch.testing.assert_close(other(x).view(2, -1), host(x).view(2, -1), rtol=1e-3, atol=1e-4)


def test_patches_of_a_vit_are_not_copied():
    from timm.layers import PatchEmbed

    embed = PatchEmbed(img_size=8, patch_size=4, embed_dim=8)
    swap_in(embed)
    with backend("auto"):
        assert embed.proj(tokens(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
    embed.proj.register_forward_hook(lambda m, args, out: out.view(2, -1).view_as(out))
    embed(tokens(2, 3, 8, 8))


def test_samples_dropped_in_relpos_are_the_hosts():
    torch.manual_seed(0)
    model, images = timm_small("vit_relpos_base_patch16_224", drop_path_rate=0.5)
    host, other = swapped(randomize(model).train())
    found = []
    for module in (host, other):
        torch.manual_seed(5)
        found.append(module(images))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_after_multihead_attention_is_the_hosts(norm_first):
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, 0.5, "gelu", batch_first=True, norm_first=norm_first
    )
    layer.self_attn.dropout = 0.0  # attention's own dropout draws in another order
    host, other = swapped(randomize(layer).train())
    found = []
    for module in (host, other):
        torch.manual_seed(5)
        found.append(module(tokens()))
        with torch.no_grad():
            found[-1] = torch.cat((found[-1], module(tokens())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [True, False])
def test_dropout_after_multihead_attention_in_evaluation(gradients):
    """Attention in evaluation, the layer around it in training."""
    host, other = swapped(encoder_layer())
    x = torch.randn(3, 5, 16)
    for module in (host, other):
        module.train().self_attn.eval()
        module.dropout1.p = 0.3
    with torch.set_grad_enabled(gradients):
        outputs = [(torch.manual_seed(1), module(x))[1] for module in (host, other)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def test_a_block_fuses_again_after_hidden_states_were_asked_for():
    model, inputs = hf_small("vit", num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    randomize(model).eval()
    host, other = swapped(model)
    for asked in ({"output_hidden_states": True}, {}, {"output_hidden_states": True}):
        a, b = host(**inputs, **asked), other(**inputs, **asked)
        assert len(a.hidden_states or ()) == len(b.hidden_states or ())
        torch.testing.assert_close(b.last_hidden_state, a.last_hidden_state, rtol=1e-4, atol=1e-5)
    assert other.layers[0].attention._forward_hooks or other.layers[0]._forward_hooks
    assert swap_in(other).level == "block"


def test_attention_sinks_are_refused():
    from fastvit_kernels.swap.hosts.transformers import fastvit_attention

    register_attention()
    q = tokens(1, 2, 3, 8)
    with pytest.raises(ValueError, match="attention sinks"):
        fastvit_attention(nn.Module(), q, q, q, None, s_aux=torch.zeros(2))


# only, skip and the report.


def test_modules_as_selectors_and_names_that_match_nothing():
    model = nn.ModuleList([timm_block(), timm_block()])
    report = swap_in(model, only=model[0])
    assert {s.name for s in report.swapped} == {"0"}
    report = swap_in(model, skip=[model[1].attn])
    assert ("1", "parts") in {(s.name, s.level) for s in report.swapped}
    classes = [type(m) for m in model.modules()]
    for selection in ({"only": "blokcs"}, {"skip": ["0", "blokcs.*"]}, {"skip": nn.Linear(2, 2)}):
        with pytest.raises(ValueError, match="is no module of this model"):
            swap_in(model, **selection)
    assert [type(m) for m in model.modules()] == classes


def test_the_report_names_what_stays_pytorch():
    simple = timm.layers.SimpleNorm
    report = swap_in(timm_small("vit_base_patch16_xp_224", norm_layer=simple)[0])
    norms = [what for what in report.pytorch if "SimpleNorm" in what]
    assert norms and f"{norms[0]}, by PyTorch" in str(report), str(report)
    assert 0 < report.pytorch[norms[0]] < 1


def test_the_report_does_not_count_what_depends_on_the_caller():
    report = swap_in(nn.ModuleList([attention(), mlp()]))
    share = f"{report.depending_flops / report.flops:.1%}"
    assert 0 < report.fused_flops < report.depending_flops < report.flops
    assert f"{share} more where attention is called without a mask" in str(report)


class Counting(timm.layers.Attention):
    """A host's class of a user, which tables do not have."""


def test_the_report_never_fails():
    block = timm_block()
    swap_in(block)
    block.attn.proj = None  # a state that no host has
    report = swap_in(block)
    assert isinstance(str(report), str)
    odd = attention()
    odd.embed_dim = None
    assert isinstance(str(swap_in(odd)), str)


def test_swap_in_changes_nothing_where_it_cannot_finish(monkeypatch):
    from fastvit_kernels.swap import apply

    block = timm_block()
    classes = [type(m) for m in block.modules()]
    calls = []

    def broken(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("nobody foresaw this")
        return None

    monkeypatch.setattr(apply, "refusal", broken)
    with pytest.raises(RuntimeError):
        swap_in(block)
    assert [type(m) for m in block.modules()] == classes


def test_a_lazy_convolution_is_left_alone():
    model = nn.Sequential(nn.LazyConv2d(8, 4, 4), nn.LayerNorm(4))
    swap_in(model)
    model(tokens(1, 3, 16, 16))
