"""fk.compare: what is put side by side, by the times of a clock that the tests hold."""

from __future__ import annotations

import csv
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from stand_in_gpu import Gpu as StandIn
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.commands import sweep
from fastvit_kernels.commands.cli import main
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import build_model
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

    def memory_mib(self, run):
        return 7.0, 0.0

    def clear(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(compare, "timer_of", lambda device: made)
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda *args: model(*args))
    with fk.backend("torch"):
        yield made


def vit(depth=1, **settings):
    torch.manual_seed(0)
    return timm_small("vit_base_patch16_224", depth=depth, **settings)


def rows_of(found):
    return {row.way: row for row in found.rows}


def test_a_model_in_eval_mode_saves_nothing_for_a_backward(clock, monkeypatch):
    asked, step = [], compare._Runner.loss
    monkeypatch.setattr(
        compare._Runner, "loss", lambda self: asked.append(torch.is_grad_enabled()) or step(self)
    )
    model, images = vit()
    fk.compare(model.eval(), images, ways=("swapped",), steps=1)
    assert asked and not any(asked)


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


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (AssertionError("other gradients: ['dx']"), "FAILED", "other gradients: ['dx']"),
        (torch.OutOfMemoryError("full"), "ok", "numbers not compared: float64 does not fit"),
    ],
)
def test_numbers_that_cannot_be_had_end_nothing(clock, monkeypatch, error, status, said):
    def raising(*_, **__):
        raise error

    monkeypatch.setattr(compare, "model_errors", raising)
    model, images = vit()
    found = fk.compare(model, images, steps=1)
    assert rows_of(found)["swapped"].status == status and said in str(found)


def test_the_numbers_of_several_arguments_are_compared(clock):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x, y):
            return self.norm(x + y)

    found = fk.compare(Sum(), (torch.randn(2, 8), torch.randn(2, 8)), steps=1)
    assert rows_of(found)["swapped"].speedup and "numbers not" not in str(found)


def test_the_numbers_are_those_of_the_batch_under_its_autocast(clock, monkeypatch):
    asked = []
    errors = compare.model_errors
    monkeypatch.setattr(
        compare, "model_errors", lambda *a, **k: asked.append((a[1], k)) or errors(*a, **k)
    )
    model, images = vit()
    found = fk.compare(model, (images,), autocast=torch.bfloat16, steps=1)
    assert asked[0][0][0] is images and asked[0][1] == {"autocast": torch.bfloat16}
    assert rows_of(found)["swapped"].status == "ok" and "bfloat16" in found.mode


def test_the_losses_of_the_first_steps_are_compared(clock, monkeypatch):
    """From the same weights and numbers: with DropPath, too."""
    model, images = vit(depth=3, drop_path_rate=0.5)
    assert rows_of(fk.compare(model, images, steps=4))["swapped"].loss_gap < 1e-5

    for factor in (1.5, 0.5):  # above and below

        def swap(given, factor=factor):
            with torch.no_grad():
                given.norm.weight.mul_(factor)
            return fk.swap_in(given)

        monkeypatch.setattr(compare, "swap_in", swap)
        assert rows_of(fk.compare(model, images, steps=4))["swapped"].loss_gap > 1e-2


def test_a_swapped_model_is_held_against_its_host(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "model_errors", lambda host, *_, **__: asked.append(host) or [])
    model, images = vit()
    fk.swap_in(model)
    fk.compare(model, images, steps=1)
    assert not any(isinstance(m, Fused) for m in asked[0].modules())


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
        ("vit", "eager", ""),
        ("vit", "swapped", "2.0"),
    ]
    assert (tmp_path / "new" / "compare.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": ("faster",)}, "ways are of eager, compile, .*; got faster"),
        ({"steps": 0}, "steps and seconds must be above 0, got 0 and 10.0"),
        ({"seconds": float("nan")}, "got 20 and nan"),
    ],
)
def test_bad_calls(options, message):
    with pytest.raises(ValueError, match=message):
        fk.compare(nn.Linear(3, 3), torch.ones(2, 3), **options)


WORDS = ["compare", "timm:vit_tiny_patch16_224", "--img-size", "32", "--batch", "2"]
WORDS += ["--device", "cpu"]


def test_the_command(clock, capsys, tmp_path, monkeypatch):
    words = [*WORDS, "--compile", "--out", str(tmp_path)]
    assert main([*words, "--infer"]) == 0
    said = capsys.readouterr().out
    assert "swapped+compile" in said and "forward, float32, [2, 3, 32, 32]" in said
    assert "max-autotune" not in said and (tmp_path / "compare.csv").exists()
    wrong = Error("out0", 1.0, 1.0, 1e-7, 1e-7, 1e-6, 1e-6)
    monkeypatch.setattr(compare, "model_errors", lambda *_, **__: [wrong])
    assert main([*words, "--dtype", "bf16"]) == 1
    assert "training step, bfloat16" in capsys.readouterr().out


def test_images_of_a_folder_are_the_batch(clock, capsys, tmp_path):
    for i, name in enumerate(("a.png", "deeper/b.png", "c.txt")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels = np.full((40, 50, 3), 100 * i, np.uint8)
        Image.fromarray(pixels).save(tmp_path / name, format="png")
    assert main([*WORDS, "--data", str(tmp_path)]) == 0
    given = clock.seen[0].batch
    assert given.shape == (2, 3, 32, 32) and given.dtype == torch.float32
    assert given.mean().abs() < 1e-5 and (given[0] < 0).all() and (given[1] > 0).all()
    assert main([*WORDS, "--data", str(tmp_path), "--batch", "3"]) == 2
    assert "holds 2 images; --batch wants 3" in capsys.readouterr().err


def test_a_model_of_the_users_own(clock, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models_of_mine.py").write_text(
        "import torch\nfrom fastvit_kernels import create_vit\n"
        "def small(img_size=32): return create_vit('vit_tiny_patch16_224', img_size=img_size)\n"
        "def plain(): return torch.nn.Conv2d(3, 4, 8, 8)\n"
        "def none(): return 3\n"
    )
    words = [WORDS[0], "models_of_mine:plain", *WORDS[2:]]
    assert main(words) == 0
    assert "models_of_mine:plain, training step" in capsys.readouterr().out
    assert clock.seen[0].batch.shape == (2, 3, 32, 32)  # img_size is of the images alone
    path = list(sys.path)
    assert isinstance(build_model("models_of_mine:small", img_size=48), fk.VisionTransformer)
    assert sys.path == path
    for name, message in (
        ("models_of_mine:none", "models_of_mine:none gave a int, wanted a model"),
        ("models_of_mine:other", "models_of_mine has no callable 'other'"),
        ("no_module:build", "a prefix is one of timm:, torchvision:, hf: or a module of yours"),
    ):
        assert main([WORDS[0], name, *WORDS[2:]]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(CommandError, match="unexpected keyword argument 'num_classes'"):
        build_model("models_of_mine:plain", num_classes=3)


def test_rehearsed_on_a_stand_in_device(monkeypatch):
    """The timer of a GPU and its memory; a way that does not fit is a row."""
    device = StandIn(monkeypatch)
    monkeypatch.setattr(compare, "timer_of", lambda _: device.timer)
    step = compare._Runner.step

    def stepping(runner):
        swapped = any(isinstance(m, Fused) for m in runner.model.modules())
        device.calls += ["kernel"] * (4 if swapped else 9)
        device.take(300 if swapped else 500)
        device.now -= 300 if swapped else 500
        if runner.forward is not runner.model:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(runner)

    monkeypatch.setattr(compare._Runner, "step", stepping)
    monkeypatch.setattr(torch, "compile", lambda model, **_: nn.Sequential(model))
    model, images = vit()
    with fk.backend("torch"):
        found = fk.compare(model, images, ways=("swapped", "swapped+compile"), steps=2)
    rows = rows_of(found)
    assert (rows["eager"].ms, rows["swapped"].ms, rows["swapped"].speedup) == (10.0, 5.0, 2.0)
    assert (rows["eager"].peak_mib, rows["swapped"].peak_mib) == (500.0, 300.0)
    assert rows["swapped+compile"].status == "out of memory"


def test_the_sweep_draws_ours_over_the_best_sdpa(capsys, tmp_path, monkeypatch):
    flushed, made = set(), sweep.contender
    clock = SimpleNamespace(clear=lambda: None)
    clock.sample = lambda run, count, flush: flushed.add(flush) or [run()] * count
    monkeypatch.setattr(sweep, "timer_of", lambda device: clock)

    def contender(name, qkv, mode, timer):
        found = made(name, qkv, mode, timer)
        run, ms = found.run, {"ours": 1.0, "flash": 3.0, "math": 2.0}.get(name, 9.0)
        found.run = lambda: (run(), ms * (2 if mode == "backward" else 1))[1]
        return found

    monkeypatch.setattr(sweep, "contender", contender)
    words = ["compare", "--sweep-tokens", "5,9", "--batch", "1", "--device", "cpu", "--out"]
    with fk.backend("torch"):
        assert main([*words, str(tmp_path)]) == 0 and flushed == {True}
    said = capsys.readouterr().out
    assert said.count("math") == 4 and [
        line.split("  PyTorch")[0].split()[-1] for line in said.splitlines()[1:5]
    ] == 4 * ["2"]
    assert said.count("PyTorch runs it: the backend is 'torch'") == 4
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["T"], r["mode"], r["ours_ms"], r["sdpa"], r["sdpa_ms"]) for r in rows[1:3]] == [
        ("5", "backward", "2.0", "math", "4.0"),
        ("9", "forward", "1.0", "math", "2.0"),
    ]
    assert (tmp_path / "sweep.png").stat().st_size > 5_000
    wrong = sweep.attention
    monkeypatch.setattr(sweep, "attention", lambda qkv: 1.01 * wrong(qkv))
    assert main(words[:-1]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: 2x rule: out") == 4 and said.count(" - ") == 4


def test_a_length_that_does_not_fit_is_a_row(capsys, monkeypatch):
    def full(qkv):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sweep, "attention", full)
    words = ["compare", "--sweep-tokens", "5", "--batch", "1", "--device", "cpu"]
    assert main([*words, "--time-budget", "0.1"]) == 1
    said = capsys.readouterr().out
    assert said.count("out of memory: OutOfMemoryError: CUDA out of memory") == 2
    for text in ("5,x", "0", "", "5,,9"):
        with pytest.raises(SystemExit):
            main(["compare", "--sweep-tokens", text])
