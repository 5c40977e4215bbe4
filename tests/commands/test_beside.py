"""The judge of swapped models: what it passes, stops, and does not judge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastvit_kernels.commands import beside, cut
from fastvit_kernels.commands.beside import difference, model_errors, randomize


def model():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    return randomize(layer)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def _spoiled(monkeypatch, spoil):
    def swap(model):
        spoil(model)

    monkeypatch.setattr(beside, "swap_in", swap)
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

    monkeypatch.setattr(beside, "swap_in", swap)
    host = model()
    host.linear1 = Refusing(16, 32)
    assert difference(host, X.double()) == "the host raises not this one"


def test_where_both_raise_nothing_was_judged():
    host = model()
    host.linear1 = Refusing(16, 32)
    with pytest.raises(cut.NotCut, match="the host raises ValueError: not this one"):
        difference(host, X.double())


def test_a_host_that_does_not_repeat_itself_is_not_judged():
    host = model()
    host.linear1 = Restless(16, 32)
    with pytest.raises(cut.NotCut, match="does not repeat a training step"):
        difference(host, X.double())


def test_a_swap_that_raises_is_told(monkeypatch):
    monkeypatch.setattr(beside, "swap_in", refuse)
    assert difference(model(), X.double()) == "swap_in raises ValueError: not this one"


@pytest.mark.parametrize("name", ["linear1.weight", "norm1.bias", "self_attn.in_proj_bias"])
def test_errors_are_of_every_gradient(name):
    def swap(model):
        model.get_parameter(name).register_hook(lambda d: 1.001 * d)

    wrong = [e.name for e in model_errors(model(), X, swap=swap) if not e.passed]
    assert wrong == [f"d{name}"]
    assert all(e.passed for e in model_errors(model(), X, swap=lambda model: None))
