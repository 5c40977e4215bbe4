"""fk.compare: what is put side by side, by the times of a clock that the tests hold."""

from __future__ import annotations

import csv
import importlib

import pytest
import torch
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.commands.cli import main
from fastvit_kernels.swap import choices
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.verify.accuracy import Error
from tests.model_coverage.model_zoo import timm_small

compare = importlib.import_module("fastvit_kernels.swap.compare")


class Clock:
    """1 ms for what is swapped, 2 ms for what is not; 4 ms more where it is compiled."""

    def __init__(self):
        self.seen = []

    def sample(self, run, count, flush):
        runner = run.__self__
        self.seen.append(runner)
        run()
        swapped = any(isinstance(m, Fused) for m in runner.model.modules())
        return [(1.0 if swapped else 2.0) + 4.0 * (runner.forward is not runner.model)] * count

    def peak_mib(self, run):
        return 7.0

    def clear(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(choices, "timer_of", lambda device: made)
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda *args: model(*args))
    with fk.backend("torch"):
        yield made


def vit(depth=1, **settings):
    torch.manual_seed(0)
    return timm_small("vit_base_patch16_224", depth=depth, **settings)


def rows_of(found):
    return {row.way: row for row in found.rows}


def test_ways_stand_beside_eager(clock):
    model, images = vit()
    found = fk.compare(model, images, ways=("swapped", "swapped+compile", "compile"), steps=2)
    rows = rows_of(found)
    assert list(rows) == ["eager", "compile", "swapped", "swapped+compile"]
    assert [rows[way].speedup for way in rows] == [None, 2 / 6, 2.0, 2 / 5]
    assert [rows[way].ms for way in rows] == [2.0, 6.0, 1.0, 5.0]
    assert rows["swapped"].images_per_s == 1e3 * len(images) and rows["eager"].peak_mib == 7.0
    assert rows["swapped"].loss_gap < 1e-5 and rows["eager"].loss_gap is None
    assert "swapped 2.00x of eager" in found.line and "training step, float32" in found.line
    assert str(found).count("\n") == 6


def test_no_speed_up_beside_wrong_numbers(clock, monkeypatch):
    wrong = Error("out0", 1.0, 1.0, 1e-7, 1e-7, 1e-6, 1e-6)
    monkeypatch.setattr(compare, "model_errors", lambda *_, **__: [wrong])
    model, images = vit()
    found = fk.compare(model, images, ways=("swapped", "compile"), steps=1)
    rows = rows_of(found)
    assert rows["swapped"].status == "FAILED" and rows["swapped"].speedup is None
    assert rows["compile"].speedup and "2x rule: out0" in str(found)


def test_the_numbers_are_those_of_the_batch_under_its_autocast(clock, monkeypatch):
    asked = []
    errors = compare.model_errors
    monkeypatch.setattr(
        compare, "model_errors", lambda *a, **k: asked.append((a[1], k)) or errors(*a, **k)
    )
    model, images = vit()
    found = fk.compare(model, (images,), autocast=torch.bfloat16, steps=1)
    assert asked[0][0] is images and asked[0][1] == {"autocast": torch.bfloat16}
    assert rows_of(found)["swapped"].status == "ok" and "bfloat16" in found.mode


def test_the_losses_of_the_first_steps_are_compared(clock, monkeypatch):
    """From the same weights and numbers: with DropPath, too."""
    model, images = vit(depth=3, drop_path_rate=0.5)
    assert rows_of(fk.compare(model, images, steps=4))["swapped"].loss_gap < 1e-5

    def swap(given):
        with torch.no_grad():
            given.norm.weight.mul_(1.5)
        return fk.swap_in(given)

    monkeypatch.setattr(compare, "swap_in", swap)
    assert rows_of(fk.compare(model, images, steps=4))["swapped"].loss_gap > 1e-2


def test_a_step_trains(clock):
    model, images = vit()
    fk.compare(model, images, ways=(), steps=1)
    trained = clock.seen[0].model
    assert any(
        not torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True)
    )
    clock.seen.clear()
    assert "forward, float32" in fk.compare(model.eval(), images, ways=(), steps=1).mode
    assert all(
        torch.equal(a, b)
        for a, b in zip(clock.seen[0].model.parameters(), model.parameters(), strict=True)
    )


def test_the_model_stays_as_it_is(clock):
    model, images = vit()
    fk.swap_in(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    found = fk.compare(model, images, steps=2)
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model.blocks[0], Fused) and all(p.grad is None for p in model.parameters())
    assert rows_of(found)["swapped"].speedup == 2.0  # eager is what it was before the swap


def test_a_way_that_fails_is_a_row(clock, monkeypatch):
    def broken(model, **_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    model, images = vit()
    found = fk.compare(model, images, ways=("compile", "swapped"), steps=1)
    rows = rows_of(found)
    assert rows["compile"].status == "error" and rows["compile"].ms is None
    assert rows["swapped"].speedup == 2.0 and "no compiler here" in str(found)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fk.compare(nn.Linear(3, 3), torch.ones(2, 5))


def test_a_callable_gives_the_loss(clock):
    model, images = vit()
    losses = []

    def loss(given):
        losses.append(given)
        return given(images).sum()

    found = fk.compare(model, loss, steps=3)
    assert len(set(map(id, losses))) == 2 and rows_of(found)["swapped"].images_per_s is None
    assert "numbers not compared" in str(found)
    assert rows_of(fk.compare(model, {"x": images}, steps=1))["swapped"].note[:12] == "PyTorch runs"


def test_our_own_model_needs_no_swap(clock):
    model = fk.create_vit("vit_mnist", depth=1)
    found = fk.compare(model, torch.randn(2, 1, 28, 28), steps=1)
    assert "our own modules" in str(found) and [r.plain for r in clock.seen[:2]] == [True, False]


def test_it_is_saved(clock, tmp_path):
    model, images = vit()
    found = fk.compare(model, images, steps=1, name="vit")
    assert {path.name for path in found.save(tmp_path / "new")} == {"compare.csv", "compare.png"}
    with (tmp_path / "new" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["model"], r["way"], r["speedup"]) for r in rows] == [
        ("vit", "eager", ""), ("vit", "swapped", "2.0"),
    ]  # fmt: skip
    assert (tmp_path / "new" / "compare.png").stat().st_size > 5_000


@pytest.mark.parametrize(("options", "message"), [
    ({"ways": ("faster",)}, "ways are of eager, compile, .*; got faster"),
    ({"steps": 0}, "steps and seconds must be above 0, got 0 and 10.0"),
    ({"seconds": float("nan")}, "got 20 and nan"),
])  # fmt: skip
def test_bad_calls(options, message):
    with pytest.raises(ValueError, match=message):
        fk.compare(nn.Linear(3, 3), torch.ones(2, 3), **options)


def test_the_command(clock, capsys, tmp_path, monkeypatch):
    words = [
        "compare",
        "timm:vit_tiny_patch16_224",
        "--img-size",
        "32",
        "--batch",
        "2",
        "--compile",
    ]
    words += ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--infer"]) == 0
    said = capsys.readouterr().out
    assert "swapped+compile" in said and "forward, float32, [2, 3, 32, 32]" in said
    assert "max-autotune" not in said and (tmp_path / "compare.csv").exists()
    wrong = Error("out0", 1.0, 1.0, 1e-7, 1e-7, 1e-6, 1e-6)
    monkeypatch.setattr(compare, "model_errors", lambda *_, **__: [wrong])
    assert main([*words, "--dtype", "bf16"]) == 1
    assert "training step, bfloat16" in capsys.readouterr().out
