"""The judge of swapped models: what it passes, stops, and does not judge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.errors import layer_of
from tests.model_coverage import compare, shrink
from tests.model_coverage.compare import difference, randomize


def model():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    return randomize(layer)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def _spoiled(monkeypatch, spoil):
    def swap(model):
        spoil(model)

    monkeypatch.setattr(compare, "swap_in", swap)
    return difference(model(), X.double())


def refuse(x, *args, **kwargs):
    raise ValueError("not this one")


class Refusing(nn.Linear):
    def forward(self, x):
        return refuse(x)


class Restless(nn.Linear):
    calls = 0

    def forward(self, x):
        Restless.calls += 1
        return super().forward(x) * Restless.calls


def test_equal_models_differ_in_nothing():
    assert difference(model(), X.double()) == ""


def test_a_wrong_gradient_alone_is_told(monkeypatch):
    def spoil(model):
        model.linear1.bias.register_hook(lambda d: d * (1 + 1e-6))

    assert _spoiled(monkeypatch, spoil).startswith("dlinear1.bias differs by")


def test_a_missing_gradient_is_told(monkeypatch):
    def spoil(model):
        model.norm1.weight.requires_grad_(False)

    assert _spoiled(monkeypatch, spoil) == "other gradients: ['dnorm1.weight']"


def test_another_draw_is_told(monkeypatch):
    def draw(*_):
        torch.rand(1)

    told = _spoiled(monkeypatch, lambda model: model.register_forward_hook(draw))
    assert told.startswith("the random generator differs")


def test_one_of_both_that_raises_is_told(monkeypatch):
    def ours(model):
        model.linear1.register_forward_pre_hook(refuse)

    assert _spoiled(monkeypatch, ours) == "raises ValueError: not this one"

    def swap(model):
        model.linear1 = nn.Linear(16, 32).double()

    monkeypatch.setattr(compare, "swap_in", swap)
    host = model()
    host.linear1 = Refusing(16, 32)
    assert difference(host, X.double()) == "the host raises not this one"


def test_where_both_raise_nothing_was_judged():
    host = model()
    host.linear1 = Refusing(16, 32)
    with pytest.raises(shrink.NotShrunk, match="the host raises ValueError: not this one"):
        difference(host, X.double())


def test_a_host_that_does_not_repeat_itself_is_not_judged():
    host = model()
    host.linear1 = Restless(16, 32)
    with pytest.raises(shrink.NotShrunk, match="does not repeat a training step"):
        difference(host, X.double())


def test_a_swap_that_raises_is_told(monkeypatch):
    monkeypatch.setattr(compare, "swap_in", refuse)
    assert difference(model(), X.double()) == "swap_in raises ValueError: not this one"


@pytest.mark.parametrize("name", ["linear1.weight", "norm1.bias", "self_attn.in_proj_bias"])
def test_errors_are_of_every_gradient(name):
    def swap(model):
        model.get_parameter(name).register_hook(lambda d: 1.001 * d)

    wrong = [e.name for e in model_errors(model(), X, swap=swap) if not e.passed]
    assert wrong == [f"d{name}"]
    assert all(e.passed for e in model_errors(model(), X, swap=lambda model: None))


def test_a_wrong_gradient_of_the_images_is_told(monkeypatch):
    """Also of a norm, where a gradient of ones would be zero."""

    def spoil(model):
        model.register_forward_pre_hook(lambda m, args: (_scaled(args[0], 1.001),))

    monkeypatch.setattr(compare, "swap_in", spoil)
    for host in (model(), nn.LayerNorm(16)):
        assert difference(host, X.double()).startswith("dinput0 differs by")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


def _scaled(x, factor):
    return _Scaled.apply(x, factor)


def test_dropout_is_compared(monkeypatch):
    monkeypatch.setattr(compare, "swap_in", lambda model: model.eval())
    host = nn.TransformerEncoderLayer(16, 2, 32, 0.5, "gelu", batch_first=True, norm_first=True)
    assert difference(host.eval(), X.double()) != ""


def test_randomize_moves_every_parameter():
    host = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    nn.init.zeros_(host[0].bias)
    before = [p.detach().clone() for p in host.parameters()]
    randomize(host)
    moved = [(p - b).abs() for p, b in zip(host.parameters(), before, strict=True)]
    assert all((m > 0).all() for m in moved) and moved[1].mean() > 2 * moved[0].mean()


def test_a_layer_is_a_block_or_a_module():
    wanted = {
        "dblocks.3.attn.qkv.bias": "dblocks.3",
        "dhead.bias": "dhead",
        "dnorm.weight": "dnorm",
        "dstages.1.blocks.0.mlp.fc1.weight": "dstages.1.blocks.0",
        "dfc.0.weight": "dfc.0",
        "dstem.2.1.bias": "dstem.2",
    }
    assert {name: layer_of(name) for name in wanted} == wanted


def test_errors_are_against_float64_and_the_limit_is_near():
    """A hundred-thousandth too much is too much in fp32, and a part of PyTorch's error in bf16."""

    def swap(model):
        model.get_parameter("linear2.bias").register_hook(lambda d: (1 + 1e-5) * d)

    exact = model_errors(model(), X, swap=lambda model: None)
    assert all(e.passed and 0 < e.torch_max < 1e-5 for e in exact if e.name == "dlinear1.weight")
    assert [e.name for e in model_errors(model(), X, swap=swap) if not e.passed] == [
        "dlinear2.bias"
    ]
    low = model_errors(model(), X, swap=swap, autocast=torch.bfloat16)
    assert all(e.passed for e in low) and max(e.torch_max for e in low) > 1e-3


def test_the_limit_of_a_gradient_is_of_its_own_layer():
    """A thousandth of small gradients is nothing beside those of another layer."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        layers[1].weight *= 1e-5

    def swap(model):
        model[0].bias.register_hook(lambda d: (1 + 1e-3) * d)

    assert [e.name for e in model_errors(layers, X, swap=swap) if not e.passed] == ["d0.bias"]


def test_a_copy_is_swapped_and_the_model_stays():
    host = model()
    swapped = []
    model_errors(host, X, swap=swapped.append)
    assert len(swapped) == 1 and swapped[0] is not host


def test_small_models_of_other_shapes_are_not_the_same():
    prints = [
        compare.fingerprint(m, x)
        for m, x in (
            (nn.Linear(4, 4), X),
            (nn.Linear(4, 4), X[:1]),
            (nn.Linear(4, 5), X),
            (nn.Linear(4, 4, bias=False), X),
            (nn.Linear(4, 4).eval(), X),
            (nn.Sequential(nn.Linear(4, 4)), X),
            (nn.Linear(4, 4), {"x": X[0]}),
        )
    ]
    assert len(set(prints)) == len(prints)
    assert compare.fingerprint(nn.Linear(4, 4), X) == prints[0]
