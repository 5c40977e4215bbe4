"""swap_in is never wrong in silence: what a user put in is called, and the report says so."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from swapped_models import (
    HandWritten,
    Shift,
    assert_same_step,
    images,
    swap_and_return,
    timm_model,
    train_step,
)
from torch import nn
from torch.nn.utils import parametrize

from fastvit_kernels import backend, swap_in
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small


@pytest.fixture(autouse=True)
def _torch_backend():
    """These tests are about which code runs, not about the kernels: PyTorch is faster here."""
    with backend("torch"):
        yield


class LoRA(nn.Module):
    """What peft puts in the place of a Linear: it has `weight` and `bias`, but means more."""

    def __init__(self, base):
        super().__init__()
        self.base, self.calls = base, 0
        self.down, self.up = nn.Linear(base.in_features, 4), nn.Linear(4, base.out_features)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        self.calls += 1
        return self.base(x) + self.up(self.down(x))


def _lora(path):
    def change(model):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, randomize(LoRA(getattr(owner, name))))

    return change


def _replace(path, make):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make())

    return change


def _parametrize(path):
    def change(model):
        parametrize.register_parametrization(model.get_submodule(path), "weight", Shift())

    return change


def _forward(path):
    def change(model):
        module = model.get_submodule(path)
        former = module.forward
        module.forward = lambda *args, **kwargs: 2 * former(*args, **kwargs)

    return change


def _scale_output(module, args, output):
    return output * 1.5


def _hook(path):
    def change(model):
        model.get_submodule(path).register_forward_hook(_scale_output)

    return change


def _pre_hook(path):
    def change(model):
        model.get_submodule(path).register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))

    return change


CHANGES = {
    "lora_qkv": _lora("blocks.0.attn.qkv"),
    "lora_proj": _lora("blocks.0.attn.proj"),
    "lora_fc1": _lora("blocks.0.mlp.fc1"),
    "lora_fc2": _lora("blocks.0.mlp.fc2"),
    "parametrized_qkv": _parametrize("blocks.0.attn.qkv"),
    "parametrized_norm": _parametrize("blocks.0.norm1"),
    "another_norm": _replace("blocks.0.norm1", lambda: nn.RMSNorm(64)),
    "another_activation": _replace("blocks.0.mlp.act", nn.ReLU),
    "another_mlp": _replace("blocks.0.mlp", lambda: nn.Linear(64, 64)),
    "another_attention": _replace("blocks.0.attn.q_norm", lambda: nn.LayerNorm(32)),
    "no_layer_scale": _replace("blocks.0.ls1", lambda: nn.Hardtanh()),
    "instance_forward_attn": _forward("blocks.0.attn"),
    "instance_forward_block": _forward("blocks.0"),
    "instance_forward_fc1": _forward("blocks.0.mlp.fc1"),
} | {
    f"{kind.__name__[1:]}_{path}": kind(f"blocks.0{path and '.' + path}")
    for kind in (_hook, _pre_hook)
    for path in (
        "",
        "norm1",
        "attn",
        "attn.qkv",
        "attn.proj",
        "attn.proj_drop",
        "ls1",
        "norm2",
        "drop_path1",
        "mlp",
        "mlp.fc1",
        "mlp.act",
        "mlp.fc2",
        "mlp.drop1",
        "mlp.norm",
    )
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_put_in_is_respected(change, when):
    plain = timm_model(init_values=0.5)
    host = copy.deepcopy(plain)
    torch.manual_seed(3)
    CHANGES[change](host)
    wanted = train_step(host)
    unchanged = train_step(copy.deepcopy(plain))
    assert not torch.allclose(wanted[0], unchanged[0]), "the change changes nothing"
    if when == "after":
        swap_in(plain)
    torch.manual_seed(3)
    CHANGES[change](plain)
    swap_in(plain)
    assert_same_step(train_step(plain), wanted)


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ("lora_qkv", "blocks.0.attn.qkv", "it is a LoRA, not an nn.Linear"),
        ("parametrized_qkv", "blocks.0.attn.qkv", "it is a ParametrizedLinear, not an nn.Linear"),
        ("parametrized_norm", "blocks.0.norm1", "no fused class for it: the block calls it"),
        ("another_norm", "blocks.0.norm1", "its eps depends on the dtype"),
        ("another_activation", "blocks.0.mlp.act", "no kernel for this activation"),
        ("another_mlp", "blocks.0.mlp", "no fused class for it: the block calls it"),
        ("instance_forward_block", "blocks.0", "its forward was replaced on the instance"),
        ("hook_mlp.fc1", "blocks.0.mlp.fc1", "it is hooked"),
        ("hook_attn", "blocks.0.attn", "it is hooked"),
        ("hook_norm1", "blocks.0.norm1", "it is hooked"),
        ("hook_mlp.act", "blocks.0.mlp.act", "it is hooked"),
    ],
)
def test_report_says_what_was_left_and_why(change, name, reason):
    model = timm_model(init_values=0.5)
    CHANGES[change](model)
    report = swap_in(model)
    assert (name, reason) in {(row.name, row.reason) for row in report.left}, str(report)


def test_hooks_are_called_once_with_the_hosts_tensors():
    model, seen = timm_model(), {"host": [], "swapped": []}

    def watch(key, m):
        for name, module in m.named_modules():
            module.register_forward_hook(
                lambda module, args, out, name=name: seen[key].append((name, out.clone()))
            )

    host = copy.deepcopy(model)
    watch("host", host)
    swap_in(model)
    watch("swapped", model)
    host(images())
    model(images())
    assert [n for n, _ in seen["swapped"]] == [n for n, _ in seen["host"]]
    for (name, a), (_, b) in zip(seen["swapped"], seen["host"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_backward_hooks_are_called():
    model, calls = swap_and_return(timm_model()), []
    model.blocks[0].mlp.fc2.register_full_backward_hook(lambda *a: calls.append("fc2"))
    model.blocks[0].mlp.fc1.register_full_backward_pre_hook(lambda *a: calls.append("fc1"))
    model.blocks[0].attn.register_full_backward_pre_hook(lambda *a: calls.append("attn"))
    train_step(model)
    assert calls == ["fc2", "fc1", "attn"]


@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
def test_global_hooks_are_called(kind):
    model, host, names = timm_model(), timm_model(), []
    swap_in(model)
    handle = getattr(nn.modules.module, f"register_module_{kind}")(
        lambda module, *_: names.append(getattr(module, "host", type(module)).__name__)
    )
    try:
        train_step(model)
        swapped, names = names[:], []
        train_step(host)
    finally:
        handle.remove()
    assert "Linear" in names and swapped == names


def test_masks_and_causality_are_respected():
    model = timm_model()
    host = copy.deepcopy(model)
    swap_in(model)
    x = torch.randn(2, 10, 64)
    mask = torch.rand(2, 1, 10, 10) > 0.3
    for kwargs in ({"attn_mask": mask}, {"is_causal": True}):
        torch.testing.assert_close(
            model.blocks[0](x, **kwargs), host.blocks[0](x, **kwargs), rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(host.blocks[0](x, **kwargs), host.blocks[0](x))
    layer = randomize(HandWritten()).encoder.layers[0]
    host = copy.deepcopy(layer)
    swap_in(layer)
    padding = torch.zeros(2, 10).bool()
    padding[:, 7:] = True
    causal = torch.ones(10, 10).triu(1).bool()
    for kwargs in ({"src_key_padding_mask": padding}, {"src_mask": causal}):
        torch.testing.assert_close(layer(x, **kwargs), host(x, **kwargs), rtol=1e-4, atol=1e-5)


def test_timm_attention_that_forms_scores_stays():
    model = timm_model()
    model.blocks[0].attn.fused_attn = False
    maps = []
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda m, a, out: maps.append(out))
    report = swap_in(model)
    assert any(r.name == "blocks.0.attn" and "fused_attn" in r.reason for r in report.left)
    assert [s.level for s in report.swapped if s.name.startswith("blocks")] == ["parts", "block"]
    model(images())
    assert maps[0].shape == (2, 2, 10, 10)
    model.blocks[1].attn.fused_attn = False  # after the swap
    model.blocks[1].attn.attn_drop.register_forward_hook(lambda m, a, out: maps.append(out))
    model(images())
    assert len(maps) == 3


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "siglip", "dinov3_vit", "beit"])
def test_transformers_probabilities(name):
    model, inputs = hf_small(name, attn_implementation="eager")
    randomize(model).eval()
    host = copy.deepcopy(model)
    report = swap_in(model)
    if not any(hasattr(type(m), "fused_roles") for m in model.modules()):  # 5.17's DINOv2 has some
        assert any("attn_implementation='eager' is set" in row.reason for row in report.left)
    a = model(**inputs, output_attentions=True, output_hidden_states=True)
    b = host(**inputs, output_attentions=True, output_hidden_states=True)
    assert len(a.attentions) == len(b.attentions) == 2
    pairs = zip((*a.attentions, *a.hidden_states), (*b.attentions, *b.hidden_states), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation("sdpa")  # chosen after the swap
    torch.testing.assert_close(
        model(**inputs).last_hidden_state, b.last_hidden_state, rtol=1e-4, atol=1e-5
    )


def test_transformers_masks_and_selected_outputs():
    model, inputs = hf_small("siglip2")
    randomize(model).eval()
    host = copy.deepcopy(model)
    swap_in(model)
    inputs["pixel_attention_mask"][:, 6:] = 0
    inputs["spatial_shapes"][:] = torch.tensor([2, 3])
    a = model(**inputs, output_hidden_states=True)
    b = host(**inputs, output_hidden_states=True)
    for x, y in zip(a.hidden_states, b.hidden_states, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert model(**inputs, return_dict=False)[0].shape == b.last_hidden_state.shape


def test_causal_text_layers_stay_causal():
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        eos_token_id=49,
    )
    model = randomize(CLIPTextModel(config)).eval()
    ids = torch.arange(10)[None]
    wanted = model(ids).last_hidden_state
    swap_in(model)
    torch.testing.assert_close(model(ids).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)


def test_multihead_attention_as_torch_calls_it():
    torch.manual_seed(0)
    attention = randomize(nn.MultiheadAttention(64, 2, batch_first=True))
    host = copy.deepcopy(attention)
    report = swap_in(attention)
    assert "need_weights=False" in str(report)
    x, y = torch.randn(2, 10, 64), torch.randn(2, 7, 64)
    for args, kwargs in (
        ((x, x, x), {}),
        ((x, x, x), {"need_weights": False}),
        ((x, y, y), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "attn_mask": torch.ones(10, 10).triu(1).bool()}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
    ):
        a, b = attention(*args, **kwargs), host(*args, **kwargs)
        torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-5)
        assert (a[1] is None) == (b[1] is None)


@pytest.mark.parametrize(
    "settings",
    [dict(norm_first=False), dict(activation="relu"), dict(activation=F.silu), dict(dropout=0.1)],
    ids=["post_norm", "relu", "silu", "dropout"],
)
def test_torch_encoder_layers(settings):
    model = randomize(HandWritten(**settings)).eval()
    host = copy.deepcopy(model)
    swap_in(model)
    torch.testing.assert_close(model(images()), host(images()), rtol=1e-4, atol=1e-5)
