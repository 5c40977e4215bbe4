"""One hand wrote every command line: a flag that several commands have means the same in each."""

import argparse

import pytest
import torch

import fastvit_kernels as fk
from bench.__main__ import build_parser as bench_parser
from fastvit_kernels.commands import cli, options
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import build_model, fused_model, input_shape, logits_of

# The least and the most that each number takes; ints must be whole. "check --jobs" is check's own.
LIMITS = {
    "--img-size": (1, options.MOST_PIXELS),
    "--batch": (1, options.MOST),
    "--epochs": (1, options.MOST),
    "--workers": (0, options.MOST_PROCESSES),
    "--seed": (0, 2**32 - 1),
    "check --jobs": (0, options.MOST_PROCESSES),
    "warm --jobs": (1, options.MOST_PROCESSES),
    "--lr": (1e-12, 1000.0),
    "--time-budget": (0.01, float(options.MOST)),
    "--seconds": (10.0, float(options.MOST)),
}
JUNK = ("-1", "-0.5", "nan", "-nan", "inf", "-inf", "1e400", "9" * 5000, "", "two", "0x1", "1e300")


def _subparsers(parser):
    return next(a.choices for a in parser._actions if isinstance(a.choices, dict))


def _actions():
    """(command, flag, action) of every flag of both programs."""
    parsers = {name: _subparsers(cli.build_parser([name]))[name] for name in cli.COMMANDS}
    for name, parser in [*parsers.items(), *_subparsers(bench_parser()).items()]:
        for action in parser._actions:
            yield name, max(action.option_strings, key=len, default=action.dest), action


def test_the_limits_of_every_number():
    for command, flag, action in _actions():
        kind = getattr(action.type, "__name__", "")
        if kind not in ("int", "float") or action.choices:
            continue
        least, most = LIMITS.get(f"{command} {flag}") or LIMITS[flag]
        assert [action.type(str(x)) for x in (least, most)] == [least, most], (command, flag)
        outside = [*JUNK, str(least - 1), str(most + 1), f"{least}.5" if kind == "int" else "0"]
        for text in outside:
            with pytest.raises(argparse.ArgumentTypeError, match="must be a"):
                pytest.fail(f"{command} {flag} takes {action.type(text)}")


def test_which_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given, wanted in ((None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu",) * 2):
        assert options.chosen_device(argparse.Namespace(device=given)) == torch.device(wanted)
    with pytest.raises(CommandError, match="--device cuda:2: torch sees 2 GPUs"):
        options.chosen_device(argparse.Namespace(device="cuda:2"))


@pytest.mark.parametrize(
    ("library", "name", "size", "channels"),
    [
        ("torch", "vit_mnist", (32, 48), 1),
        ("timm", "timm:vit_tiny_patch16_224", (32, 48), 3),
        ("timm", "timm:vit_tiny_patch16_224", 28, 1),
        ("torchvision", "torchvision:vit_b_32", 32, 3),
        ("transformers", "hf:dinov2", 28, 1),
    ],
)
def test_a_name_of_every_library(library, name, size, channels):
    """The options that all have, in each library's own words; logits of what it returns."""
    pytest.importorskip(library)
    height, width = size if isinstance(size, tuple) else (size, size)
    with torch.device("meta"):
        model = build_model(name, img_size=size, in_chans=channels, num_classes=5)
        assert input_shape(model) == (channels, height, width)
        logits = logits_of(model(torch.empty(2, channels, height, width)))
    assert logits.shape == (2, 5)


def test_models_of_other_libraries_are_swapped():
    pytest.importorskip("timm")
    model = fused_model("timm:vit_tiny_patch16_224", img_size=32, depth=1)
    model(torch.zeros(1, 3, 32, 32))
    assert fk.status(model).graphs
