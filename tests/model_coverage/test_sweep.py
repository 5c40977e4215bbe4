"""The sweep over all models: how they are made small, run apart, and written down."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastvit_kernels.fuse.report import GraphReport, Left
from tests.model_coverage import model_zoo, shrink, sweep

pytest.importorskip("timm")


def test_a_model_is_a_row_with_its_share():
    row, key = sweep.run_model("nn", "TransformerEncoder", {})
    assert (row.share, row.share_float64, row.graphs) == ("100.0", "100.0", "1")
    assert (row.share_blocks, row.run, row.left) == ("100.0", "same", "")
    other = "TransformerEncoder, ReLU"
    again, _ = sweep.run_model("nn", other, {key: row})
    assert again != row, "it is another model"
    assert sweep.run_model("nn", "TransformerEncoder", {key: again})[0].share == again.share


def test_a_share_is_of_flops_and_reasons_have_theirs():
    lefts = [Left("a", "conv2d", 30, "it overlaps"), Left("b", "matmul", 10, "no softmax")]
    reports = [GraphReport(flops=100, fused_flops=60, left=lefts), GraphReport(flops=100)]
    assert sweep.share_of(reports) == 30.0 and sweep.share_of([]) == 0.0
    assert sweep.reasons_of(reports) == "conv2d: it overlaps (15.0 %); matmul: no softmax (5.0 %)"


def _behave(host, name, known, judged):
    if name == "slow":
        time.sleep(60)
    if name == "dead":
        os._exit(7)
    if name == "raises":
        raise ValueError("half way\nand more")
    return sweep.Row(host, "1", name, run="same"), name


def test_each_model_runs_apart_with_a_limit(monkeypatch):
    monkeypatch.setattr(sweep, "run_model", _behave)
    names = [("nn", name) for name in ("slow", "dead", "raises", "good")]
    found = {row.model: row.run for row in sweep.run_all(names, 2, 3.0)}
    assert found == {
        "slow": "not run: more than 3 s",
        "dead": "not run: the process ended with 7",
        "raises": "WRONG: ValueError: half way",
        "good": "same",
    }


@pytest.mark.parametrize("run", ["same", "WRONG: out0"])
def test_a_run_goes_on_where_it_was(monkeypatch, tmp_path, capsys, run):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = []

    def rows(names, jobs, limit, judged):
        ran.append(names)
        return iter([sweep.Row(h, model_zoo.version_of(h), n, "90.0", run=run) for h, n in names])

    monkeypatch.setattr(sweep, "run_all", rows)
    words = ["--hosts", "nn", "--out", str(tmp_path / "t.csv")]
    wrong = run != "same"
    assert sweep.main([*words, "--models", "TransformerEncoder,"]) == wrong
    assert sweep.main(words) == wrong and sweep.main([*words, "--again"]) == wrong
    assert [len(names) for names in ran] == [4, 1, 5]
    said = capsys.readouterr()
    assert "5 models, 5 wrong" in said.out if wrong else "5 models, 0 wrong" in said.out
    assert "nn: fused 0 all, 5 90 to 100 %, 0 50 to 90 %, 0 less; 0 not run" in said.out
    assert ("TransformerEncoder: WRONG: out0" in said.err) == wrong
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert len(lines) == 6 and lines[0].startswith("host,version,model,share,")


def test_a_sample_is_spread_over_all_and_held_against_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shares, run = iter(()), "same"

    def rows(names, jobs, limit, judged):
        return iter(
            [sweep.Row(h, model_zoo.version_of(h), n, next(shares), run=run) for h, n in names]
        )

    monkeypatch.setattr(sweep, "run_all", rows)
    words = ["--hosts", "nn", "--out", str(tmp_path / "t.csv")]
    shares = iter(["90.0"] * 5)
    assert sweep.main(words) == 0
    table = (tmp_path / "t.csv").read_text()
    for given, failed in ((["90.0", "88.5", "99.0"], 0), (["90.0", "87.5", ""], 2)):
        shares = iter(given)
        assert sweep.main([*words, "--sample", "3"]) == (failed > 0)
        assert f"3 models, {failed} not as the table has them" in capsys.readouterr().out
    shares, run = iter(["90.0"] * 5), "WRONG: out0"
    assert sweep.main([*words, "--sample", "500"]) == 1
    said = capsys.readouterr()
    assert "5 models, 5 not as" in said.out and "Encoder: WRONG: out0, 90.0 share" in said.err
    assert (tmp_path / "t.csv").read_text() == table


def test_a_sample_by_inductor_is_held_against_shares_in_float64(monkeypatch, tmp_path, capsys):
    table = tmp_path / "t.csv"
    row = sweep.Row("nn", model_zoo.version_of("nn"), "TransformerEncoder", "90.0", "50.0")
    sweep.write_table([row], table)

    def rows(names, jobs, limit, judged):
        assert judged is sweep.judge_inductor
        return iter([replace(row, share="", share_float64=shares.pop(0), run="same")])

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sweep, "run_all", rows)
    words = ["--hosts", "nn", "--out", str(table), "--inductor"]
    shares = ["49.0", "47.0"]
    for failed in (0, 1):
        assert sweep.main([*words, "--sample", "1"]) == failed
        assert f"1 models, {failed} not as the table has them" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sweep.main(words)
    assert "--inductor runs a sample" in capsys.readouterr().err


def test_the_command_refuses_what_names_no_model(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--hosts", "timm", "--models", "resnet50_of_nobody"])
    assert "no model's name begins with resnet50_of_nobody" in capsys.readouterr().err


def _row(*kinds):
    """A row of blocks; "w4" is a Linear of width 4 before a norm, "a4" one before a GELU."""
    after = {"w": nn.LayerNorm, "a": lambda width: nn.GELU()}
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(int(k[1:]), int(k[1:])), after[k[0]](int(k[1:]))) for k in kinds)
    )


def _kinds(row):
    names = {nn.LayerNorm: "w", nn.GELU: "a"}
    return " ".join(f"{names[type(block[1])]}{block[0].in_features}" for block in row)


@pytest.mark.parametrize(
    ("kinds_once", "first", "later"),
    [(True, "w4 a4 w4 a4", "w8"), (False, "w4 a4 w4 a4 w4 a4", "w8 w8 a8")],
)
def test_blocks_that_repeat_are_cut(kinds_once, first, later):
    model = nn.Sequential(
        _row("w4", "a4", "w4", "a4", "w4", "a4"),
        nn.Linear(4, 8),
        _row("w8", "w8", "w8", "a8"),
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
    )
    shrink.shrink_repeats(model, kinds_once)
    assert (_kinds(model[0]), _kinds(model[2])) == (first, later)
    assert len(model[3]) == 3, "layers by themselves stay"
    assert model(torch.zeros(2, 4)).shape == (2, 8)


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


def test_models_of_timm_get_narrow_and_only_inside():
    timm = pytest.importorskip("timm")

    def width():
        return timm.create_model("davit_tiny", num_classes=2).num_features

    with shrink.narrower_timm(8):
        assert width() == 768 // 8
    assert width() == 768
    held = shrink._narrow({"model_cfg": {"dims": (64, [32])}, "kernel": 64, "num_heads": 4}, 8)
    assert held == {"model_cfg": {"dims": (8, [4])}, "kernel": 64, "num_heads": 1}


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
    """Widths by the factor, depths to two, of later stages to one, every DropPath on; other
    numbers stay."""
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
    assert config.depths == ((2, 1, 1) if shallow else (3, 1, 9))
    assert (config.image_size, config.num_labels) == (224, 1000)
    assert config.drop_path_rate == shrink.DROP_PATH
