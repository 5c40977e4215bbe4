"""The judge of fused models: what it passes, stops, and does not judge."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fastvit_kernels.measure.model_errors import layer_of, model_errors
from tests.model_coverage import compare, shrink
from tests.model_coverage.compare import by_2x_rule, in_float64, randomize


def model():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    return randomize(layer)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def told(monkeypatch, spoil, host=None, judge=in_float64):
    """What is said of a twin that `spoil` has had in place of our backend."""

    def compiled(model, compiler="eager"):
        spoil(model)
        return model

    monkeypatch.setattr(compare, "compiled", compiled)
    return judge(host or model(), X).wrong


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


class Peak(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        self.peak.add_(1)
        return super().forward(x)


def test_a_fused_model_differs_in_nothing_and_has_its_reports():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model()

        def forward(self, x):
            return self.layer(x)

    for judge in (in_float64, by_2x_rule):
        found = judge(Tower(), X)
        assert found.wrong == "" and len(found.reports) == 1 and found.reports[0].share == 1


def _scale_a_gradient(model):
    model.linear1.bias.register_hook(lambda d: d * (1 + 1e-6))


def _freeze(model):
    model.norm1.weight.requires_grad_(False)


def _draw(model):
    model.register_forward_hook(lambda *_: torch.rand(1) and None)


def _refuse(model):
    model.linear1.register_forward_pre_hook(refuse)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_scale_a_gradient, "dlinear1.bias differs by"),
        (_freeze, "other tensors: ['dnorm1.weight']"),
        (_draw, "the random generator differs"),
        (_refuse, "raises ValueError: not this one"),
        (lambda model: model.half(), "out is torch.float16"),
    ],
)
def test_a_difference_is_told(monkeypatch, spoil, said):
    assert told(monkeypatch, spoil).startswith(said)


def test_a_buffer_that_is_not_written_is_told(monkeypatch):
    def spoil(model):
        model.forward = lambda x: nn.Linear.forward(model, x)

    assert told(monkeypatch, spoil, Peak()) == "buffer peak differs by 1.0e+00 in float64"


def test_a_larger_batch_is_compared(monkeypatch):
    def swapped(model, scale=1.0):
        model.linear2.register_forward_hook(lambda m, x, y: y * scale if len(y) == 3 else None)
        return model

    for scale, said in ((1 + 1e-6, "out of a larger batch differs"), (1.0, "")):
        monkeypatch.setattr(compare, "swapped", partial(swapped, scale=scale))
        assert in_float64(model(), X, two_batches=True).wrong.startswith(said)
    monkeypatch.undo()
    found = in_float64(model(), X, two_batches=True)
    assert found.wrong == "" and len(found.reports) == 1, "one graph takes both"


def test_eval_mode_is_compared(monkeypatch):
    """Without what training alone draws, and with gradients."""
    host = nn.TransformerEncoderLayer(16, 2, 32, 0.5, "gelu", batch_first=True, norm_first=True)

    def spoil(model):
        model.linear2.bias.register_hook(lambda d: (1 + 1e-5 * (not model.training)) * d)

    judge = partial(by_2x_rule, training=False)
    assert told(monkeypatch, lambda model: model.train(), host, judge).startswith("2x rule")
    assert told(monkeypatch, spoil, host, judge).startswith("2x rule: dlinear2.bias")
    assert told(monkeypatch, lambda model: None, host, judge) == ""
    assert host.training, "the model is copied"


def test_steps_by_block_and_under_autocast_have_the_rule(monkeypatch):
    """Blocks that repeat have a graph each; bf16's limit is bf16's."""
    layer = model()
    host = nn.Sequential(nn.Linear(16, 16), nn.Sequential(layer, copy.deepcopy(layer)))
    found = by_2x_rule(host, X, True, torch.bfloat16)
    assert found.wrong == "" and [report.share for report in found.reports] == [1, 1]

    def spoil(model, scale):
        model.linear2.bias.register_hook(lambda d: (1 + scale) * d)

    judge = partial(by_2x_rule, autocast=torch.bfloat16)
    assert told(monkeypatch, partial(spoil, scale=1e-4), judge=judge) == ""
    assert told(monkeypatch, partial(spoil, scale=0.1), judge=judge).startswith("2x rule: dlinear2")


def test_dropout_is_compared(monkeypatch):
    host = nn.TransformerEncoderLayer(16, 2, 32, 0.5, "gelu", batch_first=True, norm_first=True)
    assert told(monkeypatch, lambda model: model.eval(), host) != ""


def test_fp32_is_held_to_the_2x_rule(monkeypatch):
    def spoil(model):
        model.linear2.bias.register_hook(lambda d: (1 + 1e-5) * d)

    assert told(monkeypatch, spoil, judge=by_2x_rule).startswith("2x rule: dlinear2.bias")


def test_infinities_are_compared_and_hide_nothing():
    hidden = torch.tensor([1.0, -torch.inf, torch.nan], dtype=torch.float64)
    other = torch.tensor([1.1, -torch.inf, torch.nan], dtype=torch.float64)
    assert compare.difference({"out": hidden}, {"out": hidden}) == ""
    assert compare.difference({"out": hidden}, {"out": other}) != ""
    assert compare.difference({"out": hidden}, {"out": hidden.nan_to_num()}) != ""
    assert compare.difference({"out": hidden}, {"out": hidden.float()}).startswith("out is torch.f")


def test_a_host_that_raises_is_not_judged():
    host = model()
    host.linear1 = Refusing(16, 32)
    with pytest.raises(shrink.NotShrunk, match="the host raises ValueError: not this one"):
        in_float64(host, X)


def test_a_host_that_does_not_repeat_itself_is_not_judged():
    host = nn.Sequential(Restless(16, 16))
    with pytest.raises(shrink.NotShrunk, match="does not repeat a step"):
        in_float64(host, X)


@pytest.mark.parametrize("name", ["linear1.weight", "norm1.bias", "self_attn.in_proj_bias"])
def test_errors_are_of_every_gradient(name):
    def swap(model):
        model.get_parameter(name).register_hook(lambda d: 1.001 * d)

    wrong = [e.name for e in model_errors(model(), X, swap=swap) if not e.passed]
    assert wrong == [f"d{name}"]
    assert all(e.passed for e in model_errors(model(), X, swap=lambda model: None))


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
