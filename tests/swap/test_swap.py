"""swap_in changes the class of modules and nothing else, and is never wrong in silence."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import SwapReport, backend, swap_in, swap_out
from fastvit_kernels.commands.coverage import randomize
from fastvit_kernels.commands.zoo import hf_small, timm_small, torchvision_small
from fastvit_kernels.swap.hosts.fused import Fused

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")


@pytest.fixture(autouse=True)
def _torch_backend():
    """These tests are about which code runs, not about the kernels: PyTorch is faster here."""
    with backend("torch"):
        yield


class HandWritten(nn.Module):
    """A ViT of plain torch.nn."""

    def __init__(self, norm_first=True, activation="gelu", dropout=0.0):
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 16, 16)
        self.pos_embed = nn.Parameter(torch.randn(1, 9, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(
            64, 2, 128, dropout, activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), False)
        self.head = nn.Linear(64, 7)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.encoder(x).mean(1))


class TimmLike(nn.Module):
    """Gives a transformers model the call of the others."""

    def __init__(self, name):
        super().__init__()
        self.model, self.inputs = hf_small(name)

    def forward(self, images):
        return self.model(pixel_values=images).last_hidden_state


def timm_model(name="vit_base_patch16_224", **settings):
    model = timm.create_model(
        name, img_size=48, embed_dim=64, depth=2, num_heads=2, num_classes=7, **settings
    )
    return randomize(model)


def images(batch=2):
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)


HOSTS = {
    "timm": timm_model,
    "torchvision": lambda: randomize(torchvision_small()[0]),
    "transformers": lambda: randomize(TimmLike("dinov2")),
    "torch_nn": lambda: randomize(HandWritten()),
}


@pytest.fixture(params=HOSTS)
def model(request):
    torch.manual_seed(0)
    return HOSTS[request.param]().to(DEVICE)


def train_step(model, seed=0):
    """Output and gradients of a training step with this seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(images())
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_step(actual, wanted, tolerance=2e-5):
    torch.testing.assert_close(actual[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert actual[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        if grad is None:
            assert actual[1][name] is None, name
            continue
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(
            actual[1][name], grad, rtol=10 * tolerance, atol=tolerance * scale, msg=name
        )


def classes(model):
    return [type(m) for m in model.modules()]


def test_swap_keeps_parameters_state_and_modes(model):
    model.eval()
    next(model.parameters()).requires_grad_(False)
    parameters = dict(model.named_parameters())
    keys, host_classes = list(model.state_dict()), classes(model)
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    report = swap_in(model)
    assert report.level == "block"
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    assert list(model.state_dict()) == keys
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert not any(m.training for m in model.modules())
    assert not next(model.parameters()).requires_grad
    assert all(issubclass(a, b) for a, b in zip(classes(model), host_classes, strict=True))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held <= {id(p) for p in model.parameters()}
    swap_out(model)
    assert classes(model) == host_classes


def test_swap_is_idempotent(model):
    first = swap_in(model)
    swapped = classes(model)
    assert str(swap_in(model)) == str(first)
    assert classes(model) == swapped


def test_swap_draws_no_random_numbers_and_uses_as_many(model):
    state = torch.get_rng_state()
    host = copy.deepcopy(model)
    swap_in(model)
    assert torch.equal(torch.get_rng_state(), state)
    train_step(model)
    after = torch.get_rng_state()
    train_step(host)
    assert torch.equal(torch.get_rng_state(), after)


def test_swap_gives_the_same_step(model):
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)


def test_swap_out_gives_the_same_bits_as_before(model):
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    swap_out(model)
    actual = train_step(model)
    assert torch.equal(actual[0], wanted[0])


def test_swap_survives_copies(model):
    swap_in(model)
    wanted = train_step(model)
    ema = AveragedModel(model)
    assert torch.equal(ema(images()), wanted[0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert classes(copied) == classes(model)
        assert torch.equal(copied(images()), wanted[0])


def test_swapped_model_unpickles_in_a_new_process(tmp_path):
    model = swap_and_return(timm_model())
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from fastvit_kernels.commands import zoo; zoo.define_torchvision_operators()\n"
        "import torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(type(model.blocks[0]).__mro__[1].__name__, type(model.blocks[0]).__name__)"
    )
    tests = __file__.rpartition("/")[0]
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.pt"), tests],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.stdout.split() == ["Block", "Block"], out.stderr


def swap_and_return(model, **selection):
    swap_in(model, **selection)
    return model


def test_swap_loads_state_dicts_both_ways(model):
    host = copy.deepcopy(model)
    swap_in(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    host.load_state_dict(model.state_dict())
    assert_same_step(train_step(model), train_step(host), 1e-4)


def test_swap_follows_dtype_and_device_moves(model):
    swap_in(model)
    dtypes = {p.dtype for p in model.to(torch.bfloat16).parameters()}
    assert dtypes == {torch.bfloat16}
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert model.double()(images().double()).dtype == torch.float64


def test_swap_before_or_after_the_move():
    model = timm_model()
    before = swap_and_return(copy.deepcopy(model)).to(DEVICE)
    after = swap_and_return(model.to(DEVICE))
    assert torch.equal(before(images()), after(images()))


def test_swap_with_tied_weights():
    model = timm_model()
    model.blocks[1].mlp = model.blocks[0].mlp
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)
    assert model.blocks[1].mlp is model.blocks[0].mlp


def test_frozen_parameters_get_no_gradient(model):
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    actual = train_step(model)
    assert_same_step(actual, wanted)
    assert any(g is None for g in actual[1].values())


def test_gradient_accumulation(model):
    host = copy.deepcopy(model)
    swap_in(model)
    for m in (model, host):
        for seed in (0, 1):
            torch.manual_seed(seed)
            m(images()).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), host.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_torch(use_reentrant):
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    original = model.blocks.forward
    model.blocks.forward = lambda x: checkpoint(original, x, use_reentrant=use_reentrant)
    assert_same_step(train_step(model), wanted)


def test_gradient_checkpointing_by_the_hosts_own_switch():
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    model.set_grad_checkpointing()
    assert_same_step(train_step(model), wanted)

    model = randomize(TimmLike("vit"))
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    model.model.gradient_checkpointing_enable()
    calls = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        inner = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *a, inner=inner: calls.append(1) or inner(*a)
    assert_same_step(train_step(model), wanted)
    assert len(calls) == 2


# Never wrong in silence: what a user put in is called, the result stays the host's, and the report
# says so.


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


class Shift(nn.Module):
    def forward(self, weight):
        return weight + 0.01


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
    for path in ("", "norm1", "attn", "attn.qkv", "attn.proj", "attn.proj_drop", "ls1", "norm2",
                 "drop_path1", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2", "mlp.drop1", "mlp.norm")
}  # fmt: skip


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
        ("another_norm", "blocks.0.norm1", "no fused class for it: the block calls it"),
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
    model.blocks[0].attn.register_full_backward_pre_hook(lambda *a: calls.append("attn"))
    train_step(model)
    assert calls == ["fc2", "attn"]


def test_global_hooks_are_called():
    model, host, names = timm_model(), timm_model(), []
    swap_in(model)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: names.append(getattr(module, "host", type(module)).__name__)
    )
    try:
        model(images())
        swapped, names = names[:], []
        host(images())
    finally:
        handle.remove()
    assert swapped == names


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
        vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, eos_token_id=49,
    )  # fmt: skip
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


# DropPath, dropout and LayerScale as the host has them: with the same seed, the same numbers.


@pytest.mark.parametrize(
    "settings",
    [
        dict(drop_path_rate=0.5),
        dict(drop_path_rate=0.5, init_values=0.3),
        dict(proj_drop_rate=0.3),
        dict(proj_drop_rate=0.3, drop_path_rate=0.5, init_values=0.3),
        dict(pos_drop_rate=0.3, patch_drop_rate=0.4),
    ],
    ids=str,
)
def test_timm_randomness_is_the_hosts(settings):
    model = timm_model(**settings).train()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_transformers_randomness_is_the_hosts(rate):
    model, inputs = hf_small("dinov2", drop_path_rate=rate)
    randomize(model).train()
    host = copy.deepcopy(model)
    swap_in(model)
    outputs = []
    for m in (model, host):
        torch.manual_seed(5)
        outputs.append(m(**inputs).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    model, inputs = hf_small("vit", hidden_dropout_prob=0.3)
    randomize(model).train()
    host = copy.deepcopy(model)
    swap_in(model)
    outputs = []
    for m in (model, host):
        torch.manual_seed(5)
        outputs.append(m(**inputs).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_torchvision_dropout_stands_where_the_hosts_does(monkeypatch):
    from torchvision.models import VisionTransformer

    # torch's mask follows the strides of what it drops, which differ after nn.MultiheadAttention.
    monkeypatch.setattr(nn.Dropout, "forward", lambda m, x: x.relu() * (1 + m.p))
    torch.manual_seed(0)
    model = randomize(VisionTransformer(48, 16, 2, 2, 64, 128, dropout=0.3)).train()
    wanted = train_step(copy.deepcopy(model))
    report = swap_in(model)
    assert any("dropout p=0.3" in row.reason for row in report.left)
    assert_same_step(train_step(model), wanted)


def test_attention_dropout_drops_in_training_only():
    model = swap_and_return(timm_model(attn_drop_rate=0.5))
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


# only, skip, the report, bad arguments.


def levels(report):
    return {(s.name, s.level) for s in report.swapped}


def test_only_and_skip():
    report = swap_in(timm_model(), only="blocks.0")
    assert levels(report) == {("blocks.0", "block")}
    assert {r.reason for r in report.left if r.name == "blocks.1"} == {"not in only="}
    report = swap_in(timm_model(), only="blocks.*.attn")
    assert levels(report) == {("blocks.0.attn", "attention"), ("blocks.1.attn", "attention")}
    report = swap_in(timm_model(), only=[nn.Conv2d, "norm"])
    assert levels(report) == {("patch_embed.proj", "patch_embed"), ("norm", "layer_norm")}
    report = swap_in(timm_model(), skip=timm.layers.Attention)
    assert ("blocks.0", "parts") in levels(report)
    assert {r.reason for r in report.left if r.name == "blocks.0.attn"} == {"in skip="}
    report = swap_in(timm_model(), only="blocks", skip=lambda name, module: "1" in name)
    assert levels(report) == {("blocks.0", "block")}
    with pytest.raises(TypeError, match="names, classes, a predicate"):
        swap_in(timm_model(), only=3)


@pytest.mark.parametrize("skip", [nn.LayerNorm, timm.layers.Attention, timm.layers.Mlp, nn.Conv2d])
def test_skipped_parts_run_the_hosts_forward(skip, monkeypatch):
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model, skip=skip)
    calls = []
    for module in model.modules():
        if isinstance(module, skip):
            assert not isinstance(module, Fused)
    original = skip.forward
    monkeypatch.setattr(skip, "forward", lambda *a, **k: calls.append(1) or original(*a, **k))
    if skip is not nn.LayerNorm:  # timm's LayerNorm has a forward of its own
        model(images())
        assert calls
    assert_same_step(train_step(model), wanted)


def test_report_prints_a_table():
    report = swap_in(timm_model())
    assert isinstance(report, SwapReport)
    text = str(report)
    assert "block        Block                            2" in text
    assert "Linear                                        1  a plain product" in text
    assert "% of the matmul FLOPs run fused (10 tokens)" in text
    assert report.fused_flops / report.flops > 0.99
    assert "nothing" in str(swap_in(nn.Linear(3, 3)))
    assert swap_in(nn.Linear(3, 3)).level == "none"


def test_report_counts_the_flops_of_a_vit_b():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", num_classes=0)
    report = swap_in(model)
    # 12 blocks of 24 C^2 + 4 T C a token, and the patches; docs/swap.md
    T, C = 197, 768
    assert report.flops == 12 * T * (24 * C * C + 4 * T * C) + 2 * C * C * T
    assert report.fused_flops == report.flops


def test_swap_rejects():
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
        swap_in([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
        swap_out([])  # type: ignore[arg-type]
    model = swap_and_return(timm_model())
    parametrize.register_parametrization(model.blocks[0].norm1, "weight", Shift())
    with pytest.raises(ValueError, match=r"blocks\.0\.norm1 has become a"):
        swap_out(model)


def test_unknown_part_keeps_a_known_class_alone():
    model = timm_model()
    model.blocks[0].attn.adapter = nn.Linear(64, 64)
    report = swap_in(model)
    reason = "it has a part that we do not know: adapter"
    assert ("blocks.0.attn", reason) in {(r.name, r.reason) for r in report.left}


def test_names_of_classes_stay_for_wrap_policies(model):
    names = [m.__class__.__name__ for m in model.modules()]
    swap_in(model)
    assert [m.__class__.__name__ for m in model.modules()] == names
    assert "Fused" in repr(model)


def test_other_head_dims_take_the_unpacked_path():
    for heads, dim in ((2, 24), (1, 264), (4, 40)):  # D = 12, 264, 10
        model = randomize(
            timm.create_model(
                "vit_base_patch16_224", img_size=48, embed_dim=dim, depth=1, num_heads=heads
            )
        )
        wanted = train_step(copy.deepcopy(model))
        swap_in(model)
        assert_same_step(train_step(model), wanted)


def test_symbolic_tracing_sees_the_hosts_forward():
    from torch.fx import Tracer

    model = swap_and_return(timm_model())
    graph = Tracer().trace(model.blocks[0])
    assert any(node.op == "call_module" and node.target == "attn.qkv" for node in graph.nodes)


def test_timm_small_is_deterministic():
    a, b = (randomize(timm_small("vit_tiny_patch16_224")[0]) for _ in range(2))
    assert list(a.state_dict()) == list(b.state_dict())


def test_a_frozen_projection_among_trained_ones():
    model, inputs = hf_small("vit")
    randomize(model)
    model.layers[0].attention.q_proj.requires_grad_(False)
    model.layers[1].attention.k_proj.bias.requires_grad_(False)
    host = copy.deepcopy(model)
    swap_in(model)
    for m in (model, host):
        m(**inputs).last_hidden_state.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), host.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_gradients_of_frozen_weights_are_not_computed():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Matmuls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names = ("aten::mm", "aten::addmm", "aten::bmm")
            self.count += func._schema.name in names
            return func(*args, **(kwargs or {}))

    counts = {}
    for kind in ("trained", "frozen"):
        model = timm_model()
        swap_in(model)
        for p in model.blocks.parameters():
            p.requires_grad_(kind == "trained")
        with Matmuls() as matmuls:
            model(images().requires_grad_()).sum().backward()
        counts[kind] = matmuls.count
    assert counts["trained"] - counts["frozen"] == 2 * 4  # qkv, proj, fc1, fc2 of two blocks
