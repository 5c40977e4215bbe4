"""The sweep over all models: how they are made small, and what it takes for a difference."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage import compare, model_zoo, shrink, sweep

timm = pytest.importorskip("timm")


class Noise(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.fc, self.gain = nn.Linear(8, 8), gain

    def forward(self, x):
        return self.gain * self.fc(x)


def _wrong(model):
    model.gain = 1.01


def _raises(model):
    raise RuntimeError("half way")


@pytest.mark.parametrize(
    ("swap", "found"),
    [
        (lambda model: None, ""),
        (_wrong, "out0 differs by"),
        (_raises, "swap_in raises RuntimeError: half way"),
        (lambda model: setattr(model, "gain", None), "raises TypeError"),
        (lambda model: model.fc.bias.requires_grad_(False), "other gradients: ['dfc.bias']"),
    ],
)
def test_a_difference_is_found(swap, found, monkeypatch):
    monkeypatch.setattr(compare, "swap_in", swap)
    said = compare.difference(Noise(1.0), torch.randn(2, 8))
    assert said.startswith(found)
    assert bool(said) == bool(found)


class SwappedNoise(Fused, Noise):
    def forward(self, *args):
        return Noise.forward(self, *args)


@pytest.mark.parametrize(("rounding", "gain"), [(1e-5, 1.0001), (1e-9, 1.000001), (1e-5, 1.000001)])
def test_a_host_that_rounds_to_fp32_is_held_to_that(rounding, gain, monkeypatch):
    def swap(model):
        model.__class__, model.gain = SwappedNoise, gain

    monkeypatch.setattr(compare, "swap_in", swap)
    monkeypatch.setattr(SwappedNoise, "fused_tolerance", rounding)
    found = compare.difference(Noise(1.0), torch.randn(2, 8))
    assert bool(found) == (gain - 1 > rounding)


class Hidden(Noise):
    """Some of its scores are minus infinity."""

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(8) < 4, -torch.inf)


@pytest.mark.parametrize("gain", [1.0, 1.01])
def test_infinities_are_compared_and_hide_nothing(gain, monkeypatch):
    monkeypatch.setattr(compare, "swap_in", lambda model: setattr(model, "gain", gain))
    assert bool(compare.difference(Hidden(1.0), torch.randn(2, 8))) == (gain != 1)


class Centred(Noise):
    """The gradient of its bias is zero but for rounding, that of its weight is large."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class SwappedCentred(Fused, Centred):
    def forward(self, *args):
        return Centred.forward(self, *args)


@pytest.mark.parametrize(
    ("rounding", "error", "told"),
    [(1e-9, 1e-8, False), (1e-9, 1e-4, True), (1e-5, 1e-4, False), (1e-5, 1e4, True)],
)
def test_a_gradient_of_rounding_alone_is_measured_by_its_layer(rounding, error, told, monkeypatch):
    """By the rounding of float64, or by that of a host which rounds to fp32."""

    def swap(model):
        model.__class__ = SwappedCentred
        model.fc.bias.register_hook(lambda grad: grad + error)

    monkeypatch.setattr(compare, "swap_in", swap)
    monkeypatch.setattr(SwappedCentred, "fused_tolerance", rounding)
    found = compare.difference(Centred(1e6), torch.randn(64, 8))
    assert bool(found) == told


def test_a_host_that_refuses_is_no_evidence():
    with pytest.raises(shrink.NotShrunk, match="the host raises"):
        compare.difference(Noise(None), torch.randn(2, 8))


def test_layers_that_repeat_are_cut():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 2), nn.GELU())
    shrink.shrink_repeats(model)
    assert [str(m) for m in model[:2]] == [str(nn.Linear(4, 4))] * 2
    assert len(model) == 4


def test_a_model_of_known_parts_is_not_run_again(monkeypatch):
    verify = sweep.Verifier([])
    rows = [r.verified for r in sweep.rows(("pit_ti_",), verify, ["timm"])]
    assert rows == ["float64", "same parts"]
    verify.parts_of["pit_large"] = frozenset(verify.parts)
    verify.parts_of["pit_other"] = frozenset([*verify.parts, "another"])
    assert [verify.again(f"pit_{n}") for n in ("large", "other", "b")] == ["same parts", "", ""]
    monkeypatch.setattr(sweep, "difference", lambda model, inputs: "something")
    (row, *_) = sweep.rows(("pit_ti_",), sweep.Verifier([]), ["timm"])
    assert row.verified == "WRONG: something"


def test_models_that_differ_in_sizes_alone_have_one_form():
    def block(width, heads, **flags):
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, **flags)
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(heads)))

    form = sweep.form_of(block(32, 2))
    assert form == sweep.form_of(block(64, 4))
    assert form != sweep.form_of(block(32, 2, norm_first=True))
    assert form != sweep.form_of(block(32, 2, bias=False))
    assert form != sweep.form_of(block(32, 1))  # one head is another case
    names = ("deit_small_patch", "deit_tiny_patch")
    words = [r.verified for r in sweep.rows(names, None, ["timm"], one_of_each=True)]
    assert words == ["", "as deit_small_patch16_224"]


def test_what_is_too_large_or_refuses_is_built_once(monkeypatch):
    monkeypatch.setattr(shrink, "LARGEST", 100)
    built, images = [], {"input": torch.randn(2, 8)}

    def build(kind):
        built.append(kind)
        if kind == "refuses":
            raise ValueError("not this one")
        return nn.Linear(8, 100 if kind == "large" else 4)

    def candidates():
        for width, kind in ((1, "large"), (1, "as large"), (2, "refuses"), (3, "fits")):
            builder = partial(build, kind)
            yield width, builder, {"images": images}  # an argument that it has not
            yield width, builder, images

    ((model, inputs),) = itertools.islice(shrink._built(candidates()), 1)
    assert model.out_features == 4 and inputs is images
    assert built == ["large", "refuses", "fits", "fits"]  # on meta, and to be run


def test_a_configuration_without_defaults_is_not_run(monkeypatch):
    def refuses(cls):
        raise ValueError("it wants an encoder")
        yield

    monkeypatch.setattr(shrink, "_hf_candidates", refuses)
    pytest.importorskip("transformers")
    with pytest.raises(shrink.NotShrunk, match="it wants an encoder"):
        next(shrink.candidates("transformers", "ViTModel"))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("PvtModel", {"pixel_values": (2, 3, 48, 48)}),  # as deep as it is: settings by stage
        ("XCLIPVisionModel", {"pixel_values": (16, 3, 96, 96)}),  # frames in the batch
        (
            "VideoMAEForPreTraining",
            {"pixel_values": (2, 16, 3, 48, 48), "bool_masked_pos": (2, 72)},
        ),
    ],
)
def test_models_with_inputs_or_settings_of_their_own_are_cut(name, shapes):
    pytest.importorskip("transformers")
    _, inputs = next(shrink.candidates("transformers", name))
    assert {key: tuple(value.shape) for key, value in inputs.items()} == shapes


def test_models_of_images_are_found_in_the_sources(tmp_path, monkeypatch):
    """Base models first; no class without a forward, none of texts."""
    transformers = pytest.importorskip("transformers")
    for name in ("bert", "vit"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / f"modeling_{name}.py").write_text('"pixel_values"')
    monkeypatch.setattr(transformers, "__file__", str(tmp_path / "__init__.py"))
    first, *others = model_zoo.hf_names()
    assert first == "ViTModel" and "ViTForImageClassification" in others
    assert all(name.startswith("ViTFor") for name in others)


@pytest.mark.parametrize("name", ["SamVisionModel", "Siglip2VisionModel"])
def test_images_of_cut_models_are_small(name):
    """Also where the model's own are large, or of no one size."""
    transformers = pytest.importorskip("transformers")
    found = shrink._hf_candidates(getattr(transformers, name))
    sizes = [build.args[1] for _, build, _ in found]
    assert sizes and max(sizes) <= shrink.LARGEST_IMAGE


def _row(model, level="block", verified="", reason=""):
    return sweep.Row("timm", model, level, reason, verified)


def test_the_table_has_a_row_for_each_model(tmp_path):
    rows = [
        _row("vit_a", verified="yes"),
        _row("vit_b", "parts", "as vit_a", "why"),
        _row("vit_c", "none"),
        _row("swin", verified="float64"),
        _row("pit", verified="same parts"),
        _row("deit", verified="as pit"),
        _row("cait", verified="WRONG (torch): dx: 3"),
    ]
    sweep.write_table(rows, tmp_path / "coverage.csv")
    lines = (tmp_path / "coverage.csv").read_text().splitlines()
    assert len(lines) == 8
    assert lines[2] == f"timm,{timm.__version__},vit_b,parts,as vit_a,why"
    other = sweep.Row("torchvision", "vit_b_16", "parts", "")
    assert list(sweep.counts([*rows, other])) == [
        "timm: 5 block, 1 parts, 1 none",
        "torchvision: 1 parts",
    ]
    told = "1 yes, 2 as another, 1 not run, 1 float64, 1 same parts, 1 WRONG"
    assert sweep._runs(rows) == told


@pytest.mark.parametrize("word", ["yes", "", "WRONG: out0"])
def test_the_command_ends_with_1_where_a_model_is_wrong(tmp_path, monkeypatch, capsys, word):
    monkeypatch.setattr(sweep, "rows", lambda *_: iter([_row("a", verified="yes"), _row("b")]))
    monkeypatch.setattr(sweep.Verifier, "again", lambda self, name: word)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--hosts", "timm", "--verify", "--out", str(tmp_path / "t.csv")]
    assert sweep.main(words) == word.startswith("WRONG")
    said = capsys.readouterr()
    assert f"2 models, {int(word.startswith('WRONG'))} wrong" in said.out
    assert ("b: WRONG: out0" in said.err) == word.startswith("WRONG")


def test_the_command_refuses_what_names_no_model(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--hosts", "timm", "--models", "resnet50_of_nobody"])
    assert "no model's name begins with resnet50_of_nobody" in capsys.readouterr().err


def test_parts_that_failed_are_run_again(monkeypatch):
    """Only what passed stands for another model; each small model is run once for equal ones."""
    monkeypatch.setattr(sweep, "swapped_parts", lambda model: frozenset([model]))
    answers = {"wrong": "WRONG: x", "right": "float64"}
    ran = []
    monkeypatch.setattr(sweep.Verifier, "_narrow", lambda *_: None)
    monkeypatch.setattr(
        sweep.Verifier, "_cut", lambda self, host, name: ran.append(name) or answers[name]
    )
    verify = sweep.Verifier([])
    part = nn.Identity()
    assert [verify("timm", n, part) for n in ("wrong", "wrong", "right", "wrong")] == [
        "WRONG: x",
        "WRONG: x",
        "float64",
        "same parts",
    ]
    assert ran == ["wrong", "wrong", "right"]


def test_narrow_models_run_through_each_backend_off_their_first_weights(monkeypatch):
    from fastvit_kernels.runtime.backend import get_backend
    from fastvit_kernels.verify.accuracy import Error

    seen = []

    def errors(model, inputs):
        seen.append((get_backend(), model.training, model[0].bias.abs().min().item() > 0))
        return [Error("dx", share, share, 1.0, 1.0, 1.0, 1.0)]

    def small(host, name):
        model = nn.Sequential(nn.Linear(4, len(name)))
        nn.init.zeros_(model[0].bias)
        return model, torch.randn(2, 4)

    monkeypatch.setattr(model_zoo, "small", small)
    monkeypatch.setattr(sweep, "difference", lambda model, inputs: "")
    monkeypatch.setattr(sweep, "model_errors", errors)
    share, verify = 0.5, sweep.Verifier(["auto", "torch"])
    assert [verify("timm", n, None) for n in ("aa", "bb", "ccc")] == ["yes"] * 3
    assert seen == [("auto", False, True), ("torch", False, True)] * 2, "equal ones once"
    share = 2.0
    assert verify("timm", "dddd", None).startswith("WRONG (auto): dx")


def test_cut_models_drop_paths():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for module in model:
        module.drop_prob = 0.0
    shrink.set_drop_path(model)
    assert all(module.drop_prob == shrink.DROP_PATH for module in model)
    assert 0.1 < shrink.DROP_PATH < 0.9, "some samples of two are dropped"


def test_a_configuration_gets_images_of_a_size_in_its_own_form():
    tower = SimpleNamespace(image_size=[224, 448], patch_size=16, to_dict=None, model_type="inner")
    config = SimpleNamespace(image_size=(224, 224, 8), tower=tower, patch_size=16)
    shrink._resize(config, 64)
    assert (config.image_size, tower.image_size) == ((64, 64, 64), [64, 64])


@pytest.mark.parametrize(("narrow", "shallow"), [(4, True), (4, False), (1, True)])
def test_what_is_cut_of_a_configuration(narrow, shallow):
    """Widths by the factor, depths to two, every DropPath on; other numbers stay."""
    inner = SimpleNamespace(d_model=256, num_layers=6, to_dict=None, model_type="inner")
    config = SimpleNamespace(
        hidden_size=768,
        intermediate_size=3072,
        small_dim=64,
        num_attention_heads=2,
        num_hidden_layers=12,
        depths=(3, 1, 9),
        image_size=224,
        num_labels=1000,
        drop_path_rate=0.0,
        inner=inner,
    )
    shrink._shrink(config, narrow, shallow)
    assert (config.hidden_size, config.intermediate_size) == (768 // narrow, 3072 // narrow)
    assert (config.small_dim, inner.d_model) == (64, 256 // narrow)
    assert config.num_attention_heads == (1 if narrow == 4 else 2)
    assert (config.num_hidden_layers, inner.num_layers) == ((2, 2) if shallow else (12, 6))
    assert config.depths == ((2, 1, 2) if shallow else (3, 1, 9))
    assert (config.image_size, config.num_labels) == (224, 1000)
    assert config.drop_path_rate == shrink.DROP_PATH
