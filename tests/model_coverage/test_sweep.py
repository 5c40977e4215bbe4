"""The sweep over all models: run apart, written down, held against the table."""

from __future__ import annotations

import os
import time

import pytest
from torch import nn

from fastvit_kernels.fuse.report import GraphReport, Left
from tests.model_coverage import model_zoo, shrink, sweep
from tests.model_coverage.compare import Found

pytest.importorskip("timm")


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerEncoder, ReLU"])
def test_a_model_is_a_row_with_its_shares(name):
    row, (key, kind) = sweep.run_model("nn", name, {})
    by_blocks = {sweep.EVAL: "", sweep.BLOCKS: "100.0"}[sweep.way_of(name)]
    assert (row.share, row.share_float64, row.share_blocks) == ("100.0", "100.0", by_blocks)
    assert (row.graphs, row.run, row.left) == ("1", "same", "")
    known = {key: sweep.Row("nn", "", "", "50.0")}
    assert sweep.run_model("nn", name, known)[0].share == "50.0", "run once"
    again, _ = sweep.run_model("nn", name, {kind: row})
    assert (again.share, again.share_blocks, again.run) == ("100.0", "", "same"), "in float64 alone"


@pytest.mark.parametrize("name", ["TransformerEncoder", "TransformerEncoder, ReLU"])
def test_what_is_wrong_beside_float64_is_a_row_too(name, monkeypatch):
    wrong = Found("2x rule: out0", [])
    monkeypatch.setattr(sweep, "by_2x_rule", lambda *_, **__: wrong)
    assert sweep.run_model("nn", name, {})[0].run == f"WRONG {sweep.way_of(name)}: {wrong.wrong}"


def test_a_kind_is_a_model_without_its_sizes_and_depth():
    def model(size, depth=1, bias=True):
        return nn.Sequential(*(nn.Linear(size, size, bias) for _ in range(depth)))

    small, large, deep, other = model(2), model(3), model(2, depth=2), model(2, bias=False)
    assert sweep.kind_of(small) == sweep.kind_of(large) == sweep.kind_of(deep)
    assert sweep.kind_of(small) != sweep.kind_of(other)


def test_a_head_on_a_base_model_is_told_by_its_name():
    pytest.importorskip("transformers")
    heads = {
        "ViTMAEForPreTraining": True,
        "MaskFormerModel": False,
        "VitPoseForPoseEstimation": False,
    }
    assert {name: model_zoo.has_base("transformers", name) for name in heads} == heads
    assert not model_zoo.has_base("timm", "ViTMAEForPreTraining")
    assert "ViTForImageClassification" not in model_zoo.hf_names(), "a linear layer on ViTModel"


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
    return sweep.Row(host, "1", name, run="same"), [name]


def test_each_model_runs_apart_with_a_limit(monkeypatch):
    monkeypatch.setattr(sweep, "run_model", _behave)
    names = [("nn", name) for name in ("slow", "dead", "raises", "good")]
    found = {row.model: row.run for row in sweep.run_all(names, 2, 2.0)}
    assert found == {
        "slow": "not run: more than 2 s",
        "dead": "not run: the process ended with 7",
        "raises": "WRONG: ValueError: half way",
        "good": "same",
    }


@pytest.fixture
def sweeping(monkeypatch, tmp_path):
    """The command on models of torch.nn: (words, shares that are found) -> exit status."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sweep, "judge", lambda *_: None)
    ran = []

    def run(words, *shares, found="same"):
        def rows(names, jobs, limit, judged):
            ran.append(len(names))
            for (host, name), share in zip(names, shares, strict=False):
                version = model_zoo.version_of(host)
                yield sweep.Row(host, version, name, share, share, run=found)

        monkeypatch.setattr(sweep, "run_all", rows)
        return sweep.main(["--hosts", "nn", "--out", str(tmp_path / "t.csv"), *words])

    run.ran = ran
    return run


def test_a_run_goes_on_where_it_was(sweeping, capsys):
    assert sweeping(["--models", "TransformerEncoder,"], *["90.0"] * 4) == 0
    assert sweeping([], "40.0", found="WRONG: out0") == 1
    assert sweeping.ran == [4, 1]
    said = capsys.readouterr()
    assert "5 models, 1 wrong" in said.out and "TransformerEncoder: WRONG: out0" in said.err


def test_a_sample_is_held_against_the_table(sweeping, tmp_path, capsys):
    assert sweeping([], *["90.0"] * 5) == 0
    table = (tmp_path / "t.csv").read_text()
    for words in ([], ["--inductor"], ["--batches"]):
        assert sweeping(["--sample", "3", *words], "90.0", "88.5", "99.0") == 0
        assert sweeping(["--sample", "3", *words], "90.0", "87.5", "") == 1
        assert "3 models, 2 not as the table has them" in capsys.readouterr().out
    assert sweeping(["--sample", "500"], *["90.0"] * 5, found="WRONG: out0") == 1
    assert "5 models, 5 not as" in capsys.readouterr().out
    assert (tmp_path / "t.csv").read_text() == table


def test_cut_models_drop_paths():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for module in model:
        module.drop_prob = 0.0
    shrink.set_drop_path(model)
    assert all(module.drop_prob == shrink.DROP_PATH for module in model)
    assert 0.1 < shrink.DROP_PATH < 0.9, "some samples of two are dropped"
