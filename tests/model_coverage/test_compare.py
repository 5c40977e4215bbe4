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


def model(dropout=0.0):
    settings = dict(activation="gelu", batch_first=True, norm_first=True)
    return randomize(nn.TransformerEncoderLayer(16, 2, 32, dropout, **settings))


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def scale(name, by):
    """What makes a gradient of a model wrong."""

    def spoil(model):
        model.get_parameter(name).register_hook(lambda d: d * (1 + by))

    return spoil


def told(monkeypatch, spoil, host=None, judge=in_float64):
    """What is said of a twin that `spoil` has had in place of our backend."""

    def compiled(model, compiler="eager"):
        spoil(model)
        return model

    monkeypatch.setattr(compare, "compiled", compiled)
    return judge(host or model(), X).wrong


def refuse(x, *args, **kwargs):
    raise ValueError("not this one")


refusing = partial(nn.Module.register_forward_pre_hook, hook=refuse)


class Restless(nn.Linear):
    calls = 0

    def forward(self, x):
        Restless.calls += 1
        return super().forward(x) * Restless.calls


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x)[..., : 4 if x.dtype == torch.float64 else 5]


class Peak(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        self.peak.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (scale("linear1.bias", 1e-6), "dlinear1.bias differs by"),
        (lambda model: model.norm1.weight.requires_grad_(False), "other tensors: ['dnorm1.weight"),
        (
            lambda model: model.register_forward_hook(lambda *_: torch.rand(1) and None),
            "the random generator differs",
        ),
        (refusing, "raises ValueError: not this one"),
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
    found = in_float64(model(), X, two_batches=True)
    assert found.wrong == "" and len(found.reports) == 1, "one graph takes both"

    def swapped(model):
        model.linear2.register_forward_hook(lambda m, x, y: y * (1 + 1e-6 * (len(y) == 3)))
        return model

    monkeypatch.setattr(compare, "swapped", swapped)
    wrong = in_float64(model(), X, two_batches=True).wrong
    assert wrong.startswith("out of a larger batch differs")


def test_eval_mode_is_compared(monkeypatch):
    """Without what training alone draws, and with gradients."""

    def spoil(model):
        model.linear2.bias.register_hook(lambda d: (1 + 1e-5 * (not model.training)) * d)

    judge, host = partial(by_2x_rule, training=False), model(dropout=0.5)
    assert told(monkeypatch, lambda model: model.train(), host, judge).startswith("2x rule")
    assert told(monkeypatch, spoil, host, judge).startswith("2x rule: dlinear2.bias")
    assert told(monkeypatch, lambda model: None, host, judge) == ""
    assert host.training, "the model is copied"


def test_steps_by_block_and_under_autocast_have_the_rule(monkeypatch):
    """Blocks that repeat have a graph each; bf16's limit is bf16's."""
    layer = model()
    host = nn.Sequential(nn.Linear(16, 16), nn.Sequential(layer, copy.deepcopy(layer)))
    found = by_2x_rule(host, X, True, torch.bfloat16)
    assert found.wrong == "" and all(r.fused_flops == r.flops for r in found.reports)
    judge = partial(by_2x_rule, autocast=torch.bfloat16)
    assert told(monkeypatch, scale("linear2.bias", 1e-4), judge=judge) == ""
    wrong = told(monkeypatch, scale("linear2.bias", 0.1), judge=judge)
    assert wrong.startswith("2x rule: dlinear2")


def test_what_is_so_with_one_set_of_parameters_is_rounding(monkeypatch):
    """As a maximum that rounding takes elsewhere."""
    host = model()
    weight = host.linear1.weight.detach().clone()

    def spoil(twin):
        by = 0.5 if torch.equal(twin.linear1.weight, weight) else 0
        twin.linear1.weight.register_hook(lambda d: d * (1 + by))

    assert told(monkeypatch, spoil, host, by_2x_rule) == ""
    assert "2x rule" in told(monkeypatch, scale("linear1.weight", 0.5), host, by_2x_rule)


def test_both_sides_attend_by_torchs_products(monkeypatch):
    """Its flash attention on a CPU rounds more than a softmax in fp32."""
    flash = set()

    def spoil(twin):
        flash.add(torch.backends.cuda.flash_sdp_enabled())

    told(monkeypatch, spoil, judge=by_2x_rule)
    assert flash == {False}


def test_another_shape_is_told(monkeypatch):
    spoil = partial(nn.Module.register_forward_hook, hook=lambda module, args, y: y[:1])
    assert told(monkeypatch, spoil, judge=by_2x_rule) == "tensors of other shapes"
    assert told(monkeypatch, refusing, Rounded(16, 16), by_2x_rule).startswith("raises ValueError")


def test_infinities_are_compared_and_hide_nothing():
    hidden = torch.tensor([1.0, -torch.inf, torch.nan], dtype=torch.float64)
    other = torch.tensor([1.1, -torch.inf, torch.nan], dtype=torch.float64)
    assert compare.difference({"out": hidden}, {"out": hidden}) == ""
    assert compare.difference({"out": hidden}, {"out": other}) != ""
    assert compare.difference({"out": hidden}, {"out": hidden.nan_to_num()}) != ""


def test_a_host_that_raises_or_does_not_repeat_itself_is_not_judged():
    host = model()
    host.linear1.register_forward_pre_hook(refuse)
    with pytest.raises(shrink.NotShrunk, match="the host raises ValueError: not this one"):
        in_float64(host, X)
    with pytest.raises(shrink.NotShrunk, match="does not repeat a step"):
        in_float64(nn.Sequential(Restless(16, 16)), X)
    with pytest.raises(shrink.NotShrunk, match="depend on rounding"):
        by_2x_rule(Rounded(16, 16), X)


def test_small_models_of_other_shapes_are_not_the_same():
    found = [
        (nn.Linear(4, 4), X),
        (nn.Linear(4, 4), X[:1]),
        (nn.Linear(4, 5), X),
        (nn.Linear(4, 4, bias=False), X),
        (nn.Sequential(nn.Linear(4, 4)), X),
        (nn.Linear(4, 4), {"x": X[0]}),
    ]
    prints = [compare.fingerprint(*of) for of in found]
    assert len(set(prints)) == len(prints)
    assert compare.fingerprint(nn.Linear(4, 4), X) == prints[0]


# errors of models, in the package


def _wrong(host, spoil, **options):
    return [e.name for e in model_errors(host, X, swap=spoil, **options) if not e.passed]


@pytest.mark.parametrize("name", ["linear1.weight", "norm1.bias", "self_attn.in_proj_bias"])
def test_the_limit_is_near_for_every_gradient(name):
    """In fp32 a hundred-thousandth is too much; in bf16 it is a part of PyTorch's own error."""
    assert _wrong(model(), lambda model: None) == []
    assert _wrong(model(), scale(name, 1e-4)) == [f"d{name}"]
    assert _wrong(model(), scale(name, 1e-4), autocast=torch.bfloat16) == []


def test_the_limit_of_a_gradient_is_of_its_own_layer():
    """A thousandth of small gradients is nothing beside those of another layer."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        layers[1].weight *= 1e-5
    assert _wrong(layers, scale("0.bias", 1e-3)) == ["d0.bias"]
    wanted = {
        "dblocks.3.attn.qkv.bias": "dblocks.3",
        "dhead.bias": "dhead",
        "dstages.1.blocks.0.mlp.fc1.weight": "dstages.1.blocks.0",
        "dfc.0.weight": "dfc.0",
    }
    assert {name: layer_of(name) for name in wanted} == wanted
