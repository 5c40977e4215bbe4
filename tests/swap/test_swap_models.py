"""Whole swapped models beside their hosts, through the kernels and PyTorch, by the 2x rule."""

from __future__ import annotations

import copy
from collections import Counter
from importlib import metadata

import pytest
import torch
from private import cast_operator
from replaced import operators, replace_operator

from fastvit_kernels import backend, swap_in
from fastvit_kernels.runtime.compat import TorchDispatchMode
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import fused
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import (
    HF_MODELS,
    hf_small,
    on_meta,
    timm_names,
    timm_small,
    torchvision_small,
)

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")

# One name for each structure among timm's `vit_*`, and for each family that is swapped by parts.
# `fastvit-kernels coverage --verify` runs every name; docs/coverage.md has its result.
STRUCTURES = {
    "vit_tiny_patch16_224": "block",
    "vit_base_patch14_dinov2": "block",  # LayerScale
    "vit_giant_patch14_reg4_dinov2": "block",  # gated MLP, registers
    "vit_base_patch16_clip_quickgelu_224": "block",
    "vit_base_patch16_siglip_224": "block",  # attention pooling
    "vit_base_patch16_rpn_224": "block",  # norms after the branches
    "vit_base_patch16_xp_224": "block",  # parallel branches, RMSNorm
    "vit_pwee_patch16_reg1_gap_256": "block",  # parallel branches, qk_norm
    "vit_base_patch16_18x2_224": "block",  # two branches side by side
    "vit_dpwee_patch16_reg1_gap_256": "parts",  # differential attention
    "vit_base_patch16_rope_224": "block",
    "vit_7b_patch16_dinov3": "block",  # RoPE, SwiGLU
    "vit_base_patch16_sapiens2": "block",  # grouped key and value heads
    "vit_relpos_base_patch16_224": "block",  # relative position bias
    "deit_tiny_distilled_patch16_224": "block",
    "beit_base_patch16_224": "block",
    "eva02_tiny_patch14_224": "block",
    "swin_tiny_patch4_window7_224": "block",
}


def small(name):
    torch.manual_seed(0)
    if name == "torchvision":
        model, inputs = torchvision_small()
    elif name in HF_MODELS:
        model, inputs = hf_small(name)
    else:
        model, inputs = timm_small(name)
    return randomize(model).eval(), inputs


def assert_swapped_is_accurate(name, **kwargs):
    reports = []
    model, inputs = small(name)
    errors = model_errors(model, inputs, swap=lambda m: reports.append(swap_in(m)), **kwargs)
    failed = [str(e) for e in errors if not e.passed]
    assert not failed, "\n".join(failed)
    return reports[0]


@pytest.mark.parametrize("name", [*STRUCTURES, "torchvision", *HF_MODELS])
def test_models_through_pytorch(name):
    with backend("torch"):
        report = assert_swapped_is_accurate(name)
    assert report.level == STRUCTURES.get(name, "block")


@pytest.mark.parametrize("name", [*STRUCTURES, "torchvision", *HF_MODELS])
def test_each_row_is_proven(name):
    """Where a row computes something else the search may find the same level."""
    described = {"timm": "1.0.31", "torchvision": "0.28.0", "transformers": "5.23.0"}
    host = (dict.fromkeys(STRUCTURES, "timm") | {"torchvision": name}).get(name, "transformers")
    if metadata.version(host).partition("+")[0] != described[host]:
        pytest.skip(f"rows may be refused at another version than {host} {described[host]}")
    model, _ = small(name)
    told = swap_in(model, explain=True).explanation
    tried = [line for line in told if ", by the table of" in line]
    refused = [line for line in tried if not line.endswith(": proven")]
    assert tried and (not refused or STRUCTURES.get(name) == "parts"), refused


@pytest.mark.parametrize("gate_last", [True, False])
@pytest.mark.parametrize("act_layer", [torch.nn.SiLU, torch.nn.Sigmoid])  # one op, and by parts
def test_a_gate_in_either_half_is_fused(gate_last, act_layer):
    from timm.layers import GluMlp

    model = randomize(GluMlp(16, 32, gate_last=gate_last, act_layer=act_layer))
    host, x = copy.deepcopy(model), torch.randn(2, 5, 16)
    assert "mlp, by the table of its library: proven" in str(swap_in(model, explain=True))
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-4)


def test_each_dropout_that_is_called_is_reported():
    from timm.layers import GluMlp

    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, 0.1, "gelu", batch_first=True)
    mlp = GluMlp(16, 32, drop=0.1)
    for module, wanted in (layer, ["dropout", "dropout1", "dropout2"]), (mlp, ["drop1", "drop2"]):
        report = swap_in(module)
        assert sorted(r.name for r in report.left if "a kernel of its own" in r.reason) == wanted


def test_a_gate_of_attention_is_fused():
    from timm.layers import Attention

    model = randomize(Attention(32, num_heads=2, gated=True, qkv_bias=True))
    host, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    report = str(swap_in(model, explain=True))
    assert "by the table of its library: proven" in report and "gate of attention" in report
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-4)


KERNEL_RUNS = (
    "vit_tiny_patch16_224",
    "vit_base_patch14_dinov2",
    "vit_base_patch16_xp_224",
    "vit_base_patch16_rope_224",
    "beit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "torchvision",
    "vit",
    "dinov2_with_registers",
    "siglip",
    "clip",
    "dinov3_vit",
)


@pytest.mark.parametrize("name", KERNEL_RUNS)
def test_models_through_the_kernels(name):
    assert_swapped_is_accurate(name)


@pytest.mark.parametrize("name", ["vit_base_patch14_dinov2", "torchvision", "dinov2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_models_under_autocast(name, dtype):
    """fp32 parameters, the host under the same autocast as the yardstick."""
    assert_swapped_is_accurate(name, autocast=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_stay_fp32_under_autocast_with_a_grad_scaler(dtype):
    model, images = small("vit_tiny_patch16_224")
    swap_in(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", dtype):
        loss = model(images).float().square().mean()
    scaler.scale(loss).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])


class Casts(TorchDispatchMode):
    """Counts casts of tensors of activations, (B, T, ...)."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cast = func is cast_operator and "dtype" in (kwargs or {})
        if cast and args[0].ndim >= 3 and args[0].dtype is not kwargs["dtype"]:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_block_casts_no_activation_under_autocast(monkeypatch):
    model, _ = small("vit_tiny_patch16_224")
    x = torch.randn(2, 10, 64, requires_grad=True)
    counts = {}
    for kind in ("host", "swapped"):
        if kind == "swapped":
            swap_in(model)
            monkeypatch.setattr(fused, "is_traced", lambda: False)  # our mode knows our operators
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            y = model.blocks[0](x)
            y.square().mean().backward()
        counts[kind] = casts.count
    assert counts["host"] > 0
    assert counts["swapped"] == 0, counts


@pytest.mark.parametrize(
    "launcher", ["layer_norm_fwd", "layer_norm_bwd", "attention_fwd", "attention_and_bias_bwd"]
)
def test_an_error_in_one_kernel_is_noticed(launcher, monkeypatch):
    """The tests above can fail: a kernel's result is bent by 1%, and the 2x rule breaks."""
    model, images = small("vit_tiny_patch16_224")
    original = operators()[launcher].registered

    def bent(*args, **kwargs):
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(r * 1.01 for r in result)
        return result * 1.01

    replace_operator(monkeypatch, launcher, registered=bent)
    monkeypatch.setattr(fused, "is_traced", lambda: False)
    with Casts():  # watched calls go through the operators, where the bent one stands
        errors = model_errors(model, images)
    assert sum(not e.passed for e in errors) > 3


def test_timm_lists_its_vits_at_block_level():
    """timm's `vit_*` are understood as blocks, at their own sizes; two blocks stand for all."""
    names = [n for n in timm_names() if n.startswith("vit_")][::25]
    levels = Counter()
    for name in names:
        with on_meta():
            model = timm.create_model(name)
        model.blocks = model.blocks[:2]
        levels[swap_in(model).level] += 1
    assert levels["block"] / len(names) > 0.9, levels
