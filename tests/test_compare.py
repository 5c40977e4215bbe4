"""fk.compare and its command: what is run, what is said, and when there is no ratio."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.commands import cli
from fastvit_kernels.measure import compare as module, model_errors as errors_module
from fastvit_kernels.measure.comparison import Comparison, Row
from fastvit_kernels.measure.gate import FAILED
from fastvit_kernels.measure.model_errors import model_errors

MACHINE = {"device": "cpu", "torch": "2.13.0"}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def compare(model=None, x=None, **settings):
    torch.manual_seed(0)
    model = model or Mlp()
    x = torch.randn(2, 5, 16) if x is None else x
    return fk.compare(model, x, seconds=0.01, steps=2, **settings)


def test_compare_says_progress():
    said = []
    compare(say=said.append, name="tiny")
    assert said[0] == "tiny: eager, swapped; 2 first steps of each, then 0 s in turns"
    assert re.fullmatch(r"a step takes \S+ ms in eager: at least \d+ s more; .*", said[3])
    assert re.fullmatch(r"  the first of 2 steps took \d+\.\d s", said[2])
    assert [line for line in said if "turn" in line][-1] == "turn 5 of 5"


def test_compare_without_kernels_has_no_ratio():
    said = []
    with fk.backend("torch"):
        found = compare(ways=["swapped", "backend"], say=said.append)
    assert said[0].startswith("PyTorch runs every way here (the backend is 'torch'): ")
    ours = found.rows[1:]
    assert [r.way for r in found.rows] == ["eager", "swapped", "backend"]
    for row in ours:
        assert row.ms > 0 and row.speedup is None and not row.kernels
        assert row.note == "PyTorch runs it: the backend is 'torch'"
        assert row.loss_gap == pytest.approx(0, abs=1e-6)
    assert "none of our kernels ran" in found.line
    assert not re.search(r"\d\.\d\dx", str(found))


def test_compare_ratio_and_spread():
    with fk.backend("triton"):  # Triton's interpreter
        row = compare(ways="swapped").rows[1]
    assert row.kernels and row.speedup_p20 <= row.speedup <= row.speedup_p80


def test_compare_within_noise():
    fast = Row("swapped", 1.0, speedup=1.5, speedup_p20=1.4, speedup_p80=1.6, kernels=True)
    noise = Row("swapped", 1.0, speedup=1.1, speedup_p20=0.9, speedup_p80=1.3, kernels=True)
    assert fast.ratio == "1.50x (1.40 to 1.60)"
    assert noise.ratio == "within the noise"
    told = Comparison("m", MACHINE, "forward", [Row("eager", 1.5), noise]).line
    assert told == "m, forward: no difference beyond the noise (device cpu, torch 2.13.0)"
    told = Comparison("m", MACHINE, "forward", [Row("eager", 1.5), noise, fast]).line
    assert "swapped 1.50x (1.40 to 1.60) of eager" in told


def test_compare_wrong_numbers_have_no_ratio(monkeypatch):
    def spoiled(model):
        fk.swap_in(model)
        model.fc1.weight.data.mul_(1.5)

    monkeypatch.setattr(module, "model_errors", partial(model_errors, swap=spoiled))
    with fk.backend("triton"):
        row = compare(ways=["swapped"]).rows[1]
    assert row.status == FAILED and row.speedup is None and "2x rule" in row.note


class Hides(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, y > 0, y.argmax(-1)


def test_outputs_of_booleans_and_integers_are_judged():
    errors = model_errors(Hides(16, 16), torch.randn(2, 5, 16))
    assert {e.name for e in errors} >= {"out[0]", "out[1]", "out[2]"}
    assert all(e.passed for e in errors)


def test_compare_failing_way():
    model = Mlp()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(2, 5, 16)

    def loss(run):
        if run is not model and not isinstance(run, Mlp):
            raise RuntimeError("not compiled, please")
        return run(x).square().mean()

    found = compare(model, loss, ways=["compile"])
    assert found.rows[1].status == "error" and "not compiled, please" in found.rows[1].note
    assert "forward" not in vars(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("at", ["swapped", "turns"])
def test_compare_interrupted(monkeypatch, at):
    prepare, timed = module.Race.prepare, module.time_together

    def interrupted(self, model, name):
        if name == at:
            raise KeyboardInterrupt
        prepare(self, model, name)

    def turns(*args, **kwargs):
        if at == "turns":
            raise KeyboardInterrupt
        timed(*args, **kwargs)

    monkeypatch.setattr(module.Race, "prepare", interrupted)
    monkeypatch.setattr(module, "time_together", turns)
    found = compare()
    assert found.interrupted and found.rows[0].ms > 0
    assert len(found.rows) == (1 if at == "swapped" else 2)
    assert found.line.endswith("interrupted")


def test_compare_takes_the_autocast_that_it_is_called_under():
    seen = []

    def batch(model):
        seen.append(torch.is_autocast_enabled("cpu"))
        return model(torch.randn(2, 5, 16)).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        found = fk.compare(Mlp(), batch, steps=1, seconds=0.01)
    assert all(seen) and "bfloat16" in str(found)


def test_compare_rejects():
    with pytest.raises(ValueError, match=r"compare: ways are of eager, .*; got fast"):
        compare(ways=["fast"])
    with pytest.raises(TypeError, match=r"compare: autocast must be a dtype .*, got 'bf16'"):
        compare(autocast="bf16")
    with pytest.raises(TypeError, match=r"compare: model must be an nn\.Module, got list"):
        compare([Mlp()])
    with pytest.raises(ValueError, match="compare: GELU has no parameter"):
        fk.compare(torch.nn.GELU(), torch.randn(2, 5, 16))
    for bad in (dict(steps=0), dict(seconds=0)):
        with pytest.raises(ValueError, match="must be above 0"):
            fk.compare(Mlp(), torch.randn(2, 5, 16), **bad)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        compare(x=torch.randn(2, 5, 3))


def test_compare_command(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("fastvit_kernels.commands.compare.SMALL", "vit_mnist")
    words = ["compare", "--device", "cpu", "--time-budget", "0.01", "--out", str(tmp_path)]
    with fk.backend("torch"):
        assert cli.main(words) == 0
    out, progress = capsys.readouterr()
    assert "[1, 1, 28, 28]" in out and "none of our kernels ran" in out
    assert "PyTorch runs every way here" in progress.splitlines()[0]
    assert "vit_mnist: eager, swapped; 3 first steps" in progress.splitlines()[1]
    assert {p.name for p in tmp_path.iterdir()} == {"compare.csv", "compare.png"}


def test_status_says_host_bound(monkeypatch):
    """By fk.status after swap_in(measure=batch), on a stand-in for a GPU that waits."""
    monkeypatch.setattr("fastvit_kernels.fuse.measure.ROUNDS", 3)
    for share, said in ((0.95, True), (0.5, False)):
        step = lambda *_, share=share: lambda: share  # noqa: E731
        monkeypatch.setattr("fastvit_kernels.fuse.measure._step_of", step)
        monkeypatch.setattr("fastvit_kernels.fuse.measure._spread", lambda times: -1e9)
        model = Mlp()
        fk.swap_in(model, measure=torch.randn(2, 5, 16))
        assert ("use mode='reduce-overhead'" in str(fk.status(model))) == said


def test_own_modules_are_held_against_pytorch(monkeypatch):
    """Oracle and yardstick run our modules by PyTorch, whatever the backend of the user."""
    backends, step = [], errors_module.run_step

    def seen(*given):
        backends.append(fk.get_backend())
        return step(*given)

    monkeypatch.setattr(errors_module, "run_step", seen)
    model = fk.create_vit("vit_mnist", embed_dim=16, num_heads=2, depth=1).eval()
    with fk.backend("triton"):
        errors = model_errors(model, torch.randn(1, 1, 28, 28))
    assert backends == ["torch", "triton", "torch"] and all(e.passed for e in errors)
