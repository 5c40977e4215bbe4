"""One hand wrote every command line: a flag that several commands have means the same in each."""

import argparse
import json
from pathlib import Path

import pytest
import torch

import fastvit_kernels as fk
from bench.__main__ import build_parser as bench_parser
from fastvit_kernels.commands import cli, options
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import (
    build_model,
    fused_model,
    input_shape,
    logits_of,
    run_step,
)
from fastvit_kernels.models.vit import VisionTransformer
from fastvit_kernels.runtime import backend as runtime_backend, dtypes

ROOT = Path(__file__).parents[2]
SHARED = {
    "--model",
    "--img-size",
    "--batch",
    "--dtype",
    "--device",
    "--seed",
    "--json",
    "--out",
    "--train",
    "--infer",
    "--time-budget",
}


def _subparsers(parser):
    return next(a.choices for a in parser._actions if isinstance(a.choices, dict))


def _actions():
    """(command, action) of every flag of both programs."""
    for name in cli.COMMANDS:
        for action in _subparsers(cli.build_parser([name]))[name]._actions:
            yield f"fastvit-kernels {name}", action
    for name, parser in _subparsers(bench_parser()).items():
        for action in parser._actions:
            yield f"bench {name}", action


def test_a_flag_takes_the_same_kind_of_value_everywhere():
    kinds = {}
    for command, action in _actions():
        for flag in SHARED.intersection(action.option_strings):
            kind = (action.nargs, getattr(action.type, "__name__", None))
            kinds.setdefault(flag, {}).setdefault(kind, []).append(command)
    assert {"--model", "--dtype", "--device", "--json", "--out"} <= set(kinds)
    assert all(len(kind) == 1 for flag, kind in kinds.items() if flag not in ("--train", "--infer"))


# The least and the most that each number takes; everything between is its meaning, all else is a
# mistake. Ints must be whole.
INTS = {
    "--img-size": (1, options.MOST_PIXELS),
    "--batch": (1, options.MOST),
    "--epochs": (1, options.MOST),
    "--workers": (0, options.MOST_PROCESSES),
    "--seed": (0, 2**32 - 1),
    "check --jobs": (0, options.MOST_PROCESSES),
    "warm --jobs": (1, options.MOST_PROCESSES),
}
FLOATS = {
    "--lr": ("1e-12", "1000"),
    "--time-budget": ("0.01", str(options.MOST)),
    "--seconds": ("10", str(options.MOST)),
}
JUNK = (
    "-1",
    "-0.5",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "",
    "two",
    "0x1",
)


def _numbers():
    """(command, flag, int or float) of every number; of flags that commands of bench share, one."""
    of_bench = {}
    for command, action in _actions():
        kind = getattr(action.type, "__name__", "")
        if kind in ("int", "float") and not action.choices:
            flag = max(action.option_strings, key=len)
            if command.startswith("bench "):
                of_bench.setdefault(flag, (command, flag, kind))
            else:
                yield command.removeprefix("fastvit-kernels "), flag, kind
    yield from of_bench.values()


@pytest.mark.parametrize(("command", "flag", "kind"), list(_numbers()))
def test_a_number_out_of_range_is_one_line(command, flag, kind, capsys):
    program = "python -m bench" if command.startswith("bench ") else "fastvit-kernels"
    command = command.removeprefix("bench ")

    def read(value):
        files = ["a", "b"] if program.endswith("bench") else ["a"]
        place = {"attention-maps": ["image", "--weights", "file"], "compare": files}
        words = [command, *place.get(command, []), flag, value]
        parser = bench_parser() if program.endswith("bench") else cli.build_parser(words)
        return vars(parser.parse_args(words))

    limits = INTS.get(f"{command} {flag}", INTS.get(flag)) if kind == "int" else FLOATS[flag]
    assert limits is not None, f"{command} {flag} needs its limits here"
    least, most = limits
    for value in (least, most):
        found = [v[0] if isinstance(v, list) else v for v in read(str(value)).values()]
        assert float(value) in [float(v) for v in found if type(v).__name__ == kind]
    outside = [*JUNK, "1e300"]
    outside += [str(least - 1), str(most + 1), f"{least}.5"] if kind == "int" else []
    outside += [
        x
        for x in ("0", "1", "2")
        if kind == "float" and least != x and not float(least) < float(x) <= float(most)
    ]
    for value in outside:
        with pytest.raises(SystemExit) as stop:
            read(value)
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and line.startswith(f"{program} {command}: argument {flag}")


def test_which_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given, wanted in ((None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu",) * 2):
        assert options.chosen_device(argparse.Namespace(device=given)) == torch.device(wanted)
    with pytest.raises(CommandError, match="--device cuda:2: torch sees 2 GPUs"):
        options.chosen_device(argparse.Namespace(device="cuda:2"))


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "hf:dinov2", "vit_mnist"])
def test_images_of_one_channel_and_of_no_square(name):
    pytest.importorskip({"hf": "transformers", "own": "torch"}.get(_prefix(name), "timm"))
    with torch.device("meta"):
        assert input_shape(build_model(name, in_chans=1, img_size=28))[0] == 1
        if not name.startswith("hf:"):
            assert input_shape(build_model(name, img_size=(32, 48))) == (
                1 if name == "vit_mnist" else 3,
                32,
                48,
            )


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("train", [True, False])
def test_one_step_is_in_its_dtype(dtype, train):
    linear, seen = torch.nn.Linear(4, 3), []
    linear.register_forward_hook(lambda m, x, y: seen.append((y.dtype, y.requires_grad)))
    run_step(linear, torch.randn(2, 4), dtype, train=train)
    assert seen == [(dtypes.DTYPES[dtype], train)] and (linear.weight.grad is not None) == train


def _prefix(name):
    return name.partition(":")[0] if ":" in name else "own"


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "timm:vit_tiny_patch16_224", "torchvision:vit_b_32", "hf:dinov2"],
    ids=_prefix,
)
def test_a_name_of_every_library(name):
    """The options that all have, in each library's own words; fused; logits of what it returns."""
    pytest.importorskip({"hf": "transformers", "own": "torch"}.get(_prefix(name), _prefix(name)))
    size = 28 if name == "hf:dinov2" else 32
    with torch.device("meta"):
        model = fused_model(name, img_size=size, num_classes=5)
        assert input_shape(model) == (3, size, size)
        logits = logits_of(model(torch.empty(2, 3, size, size)))
    assert logits.shape == (2, 5)
    assert isinstance(model, VisionTransformer) or fk.status(model).graphs  # swapped


def test_a_config_on_disk(tmp_path):
    pytest.importorskip("transformers")
    settings = dict(
        model_type="vit",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        num_channels=1,
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert input_shape(build_model(f"hf:{tmp_path}")) == (1, 16, 16)
    assert input_shape(build_model(f"hf:{tmp_path / 'config.json'}", img_size=32)) == (1, 32, 32)


def test_bf16_in_an_interpreter_that_computes_it_wrongly_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime_backend, "INTERPRETED", True)
    monkeypatch.setattr(runtime_backend, "_interprets_bf16", lambda: False)
    with pytest.raises(CommandError, match="computes bf16 wrongly"):
        options.require_kernels(torch.device("cpu"), "bf16")
    assert cli.main(["check", "--dtype", "bf16", "--device", "cpu"]) == 2
    assert "computes bf16 wrongly" in capsys.readouterr().err
    words = ["--epochs", "1", "--batch", "512", "--dtype", "bf16", "--device", "cpu"]
    assert cli.main(["train", *words, "--out", str(tmp_path / "run")]) == 0  # and blames no kernel
    out = capsys.readouterr().out
    assert "The kernels are not checked" in out and "computes bf16 wrongly" in out
