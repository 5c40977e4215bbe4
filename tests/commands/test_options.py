"""One hand wrote every command line: a flag that several commands have means the same in each."""

import argparse
import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastvit_kernels as fk
from bench.__main__ import build_parser as bench_parser
from fastvit_kernels.commands import cli, options, train
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import build_model, fused_model, input_shape, logits_of
from fastvit_kernels.runtime import backend as runtime_backend
from fastvit_kernels.runtime import dtypes

ROOT = Path(__file__).parents[2]
SHARED = {
    "--model", "--img-size", "--batch", "--dtype", "--device", "--seed", "--json", "--out",
    "--train", "--infer", "--time-budget",
}  # fmt: skip
FORMER = {"--image-size", "--batch-size", "--precision"}


def _subparsers(parser):
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices


def _actions():
    """(command, action) of every flag of both programs."""
    for name in cli.COMMANDS:
        for action in _subparsers(cli.build_parser([name]))[name]._actions:
            yield f"fastvit-kernels {name}", action
    for name, parser in _subparsers(bench_parser()).items():
        for action in parser._actions:
            yield f"bench {name}", action


def test_shared_flags_are_defined_in_options_alone():
    files = [*(ROOT / "fastvit_kernels/commands").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            adds = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")
            if adds and file.name != "options.py":
                words = {a.value for a in node.args if isinstance(a, ast.Constant)}
                found += [f"{file.name}:{node.lineno} {w}" for w in words & SHARED]
    assert not found


def test_a_flag_takes_the_same_kind_of_value_everywhere():
    kinds = {}
    for command, action in _actions():
        for flag in SHARED.intersection(action.option_strings):
            kind = (action.nargs, getattr(action.type, "__name__", None))
            kinds.setdefault(flag, {}).setdefault(kind, []).append(command)
    assert {"--model", "--dtype", "--device", "--json", "--out"} <= set(kinds)
    assert all(len(kind) == 1 for flag, kind in kinds.items() if flag not in ("--train", "--infer"))


def test_former_spellings_are_read_and_shown_nowhere(capsys):
    words = ["tune", "--image-size", "32"]
    assert cli.build_parser(words).parse_args(words).img_size == 32
    for command, action in _actions():
        if FORMER.intersection(action.option_strings):
            assert action.help is argparse.SUPPRESS, command


def test_what_serves_ci_alone_is_not_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["compile", "--help"])
    assert "--update" not in capsys.readouterr().out
    assert cli.build_parser(["compile"]).parse_args(["compile", "--gate"]).gate is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "--device", "tpu"], "must be cpu, cuda or cuda:N, got tpu"),
        (["tune", "--batch", "0"], "must be above 0, got 0"),
        (["tune", "--time-budget", "-1"], "must be above 0, got -1"),
        (["compile", "--train", "--infer"], "not allowed with"),
    ],
)
def test_values_that_no_command_takes(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(CommandError, match="--device cuda:3: torch sees no GPU"):
        options.chosen_device(argparse.Namespace(device="cuda:3"))
    assert options.chosen_device(argparse.Namespace(device=None)) == torch.device("cpu")


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
    fused = {type(m).__module__.split(".")[0] for m in model.modules()}
    assert "fastvit_kernels" in fused


def test_a_config_on_disk(tmp_path):
    pytest.importorskip("transformers")
    settings = dict(
        model_type="vit", hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, image_size=16, num_channels=1,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert input_shape(build_model(f"hf:{tmp_path}")) == (1, 16, 16)
    assert input_shape(build_model(f"hf:{tmp_path / 'config.json'}", img_size=32)) == (1, 32, 32)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CommandError, match="is no config of an image classifier"):
        build_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_smal_patch16_224", "near names: vit_small_patch16_224"),
        ("resnet50", "near names: timm:resnet50"),
        ("timm:vit_tiny_patch16_225", "near names: timm:vit_tiny_patch16_224"),
        ("hf:dinov", "near names: hf:dinov2"),
        ("torchvision:vit_b_15", "near names: torchvision:vit_b_16"),
        ("jax:vit", "a prefix is one of timm:, torchvision:, hf:"),
    ],
)
def test_an_unknown_name_gets_the_near_ones(name, message):
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    with pytest.raises(CommandError, match=f"unknown model .*{message}"):
        build_model(name)


def test_a_model_without_a_place_for_the_kernels():
    pytest.importorskip("timm")
    with torch.device("meta"), pytest.raises(CommandError, match="swap_in understands nothing"):
        fused_model("timm:resnet18")
    with pytest.raises(CommandError, match=r"--model timm:resnet18: .*depth"):
        build_model("timm:resnet18", depth=2)
    with pytest.raises(ValueError, match="near names: vit_tiny_patch16_"):
        fk.create_vit("vit_tiny_patch16")


def test_a_step_of_a_host_is_compiled_as_ours_is():
    """`compile` knows the options that `tune` has, and hands them on."""
    words = ["compile", "--model", "vit_mnist", "--img-size", "8", "--batch", "3", "--infer"]
    arguments = cli.build_parser(words).parse_args(words)
    assert (arguments.img_size, arguments.batch, arguments.train) == (8, 3, False)
    assert options.DTYPES is dtypes.DTYPES  # one table


def test_bf16_in_an_interpreter_that_computes_it_wrongly_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(runtime_backend, "INTERPRETED", True)
    monkeypatch.setattr(runtime_backend, "_interprets_bf16", lambda: False)
    settings = SimpleNamespace(backend="triton", precision="bf16")
    for refuse in (
        lambda: options.require_kernels(torch.device("cpu"), "bf16"),
        lambda: train._choose_backend(settings, torch.device("cpu"), None),
    ):
        with pytest.raises(CommandError, match="computes bf16 wrongly"):
            refuse()
    assert cli.main(["check", "--dtype", "bf16", "--device", "cpu"]) == 2
    assert "computes bf16 wrongly" in capsys.readouterr().err

    lines = []
    settings.backend, console = "auto", SimpleNamespace(print=lines.append)
    assert train._choose_backend(settings, torch.device("cpu"), console) == "torch"
    assert "computes bf16 wrongly" in lines[0] and "PyTorch path" in lines[0]
    run = SimpleNamespace(device=torch.device("cpu"), settings=settings)
    assert train._checked(run, SimpleNamespace(check=True), console) == []  # and blames no kernel
