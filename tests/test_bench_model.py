"""`python -m bench vit --model NAME`: what is planned, and a run of it on the CPU."""

from __future__ import annotations

import json

import pytest
import torch
from test_bench import _few_rounds, bench  # noqa: F401, the fixture is used by its name

from bench import bench_vit
from bench.__main__ import main
from bench.models import NamedCase, Runner, Way
from bench.plan import Wanted, tasks
from bench.rows import OK
from fastvit_kernels import get_backend
from fastvit_kernels.commands.console import CommandError

CPU = torch.device("cpu")


def planned(**wanted):
    return tasks(Wanted(ops=("vit",), **wanted), CPU)


def test_one_model_takes_the_place_of_the_plans():
    found = planned(model="vit_mnist", batch=4, providers=("swapped", "compile"))
    assert [task.keys for task in found] == [
        (("vit", "eager", "vit_mnist-28-B4", "amp", "train"),
         ("vit", "swapped", "vit_mnist-28-B4", "amp", "train")),
        (("vit", "compile", "vit_mnist-28-B4", "amp", "train"),),
    ]  # fmt: skip
    modes = planned(model="vit_mnist", dtypes=("bf16",), modes=("train", "infer"))
    assert {key[3:] for task in modes for key in task.keys} == {
        ("bf16", "train"),
        ("bf16", "infer"),
    }


def test_names_of_timm_take_an_image_size():
    pytest.importorskip("timm")
    name = "timm:vit_tiny_patch16_224"
    case = NamedCase("timm", name, 32, 2)
    assert (case.id, case.image, case.tokens) == (f"{name}-32-B2", (3, 32, 32), 4)
    C, T, depth = 192, 5, 12
    block = 2 * T * C * (4 * C + 8 * C) + 4 * T * T * C
    assert case.flops == 3 * 2 * (depth * block + 2 * 4 * C * 3 * 256 + 2 * C * 1000)
    with pytest.raises(CommandError, match="near names: timm:vit_tiny_patch16_224"):
        planned(model="timm:vit_tiny_patch16_225")
    with pytest.raises(CommandError, match=r"--model timm:vit_tiny_patch16_224: .*size"):
        planned(model=name, img_size=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "3"], "--batch and --img-size need --model"),
        (["--model", "vit_mnist", "--mode", "fwd"], "--mode train or infer, got fwd"),
        (["--model", "vit_mnist", "--dtype", "fp32"], "--dtype amp or bf16 and"),
        (["--model", "vit_mnist", "--device", "cpu"], "torch sees no GPU to measure vit_mnist on"),
    ],
)
def test_mistakes(capsys, words, message):
    assert main(["vit", *words]) == 2
    assert message in capsys.readouterr().err


def _config(folder):
    settings = dict(
        model_type="vit", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, image_size=8, patch_size=4, num_channels=3,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return f"hf:{folder / 'config.json'}"


def test_a_model_of_transformers_is_measured_and_compared(tmp_path):
    pytest.importorskip("transformers")
    case = NamedCase("hf", _config(tmp_path), 0, 2, "bf16", "train")
    rows = list(bench_vit.measure_vit(case, ("swapped",), bench()))
    assert [(r.provider, r.status, r.note) for r in rows] == [
        ("eager", OK, ""),
        ("swapped", OK, ""),
    ]
    assert all(r.images_per_s == 2000.0 and r.flops == case.flops for r in rows)
    assert rows[0].model == case.model


@pytest.mark.parametrize("swapped", [False, True])
def test_our_own_model_is_held_against_its_pytorch_path(monkeypatch, swapped):
    runner = Runner(NamedCase("", "vit_mnist", 8, 1, "bf16", "infer"), Way(swapped=swapped), CPU)
    seen = []
    monkeypatch.setattr(runner, "forward", lambda images: seen.append(get_backend()) or images)
    runner.step()
    assert seen == ["auto" if swapped else "torch"] and get_backend() == "auto"
