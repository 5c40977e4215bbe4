"""Flags that several commands share: each is spelled, checked and explained once, here.

A command takes those it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..runtime.backend import backend, reason_for_torch
from ..runtime.dtypes import DTYPES
from .console import CommandError

MODEL = "vit_base_patch16_224"
NAMES = "a name of create_vit, timm:NAME, torchvision:NAME, hf:TYPE or your own module:callable"
MOST = 2**31 - 1  # what torch takes for a size, and a timer for seconds
MOST_PROCESSES = 1024
MOST_PIXELS = 2**14  # of a side


def _number(
    kind: Callable[[str], Any], fits: Callable[[Any], bool], wanted: str
) -> Callable[[str], Any]:
    """An argparse type. `fits` compares, so that NaN never fits and no integer is too long."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def positive(kind: Callable[[str], Any], most: float = MOST) -> Callable[[str], Any]:
    """An argparse type: a number above 0."""
    return _number(kind, lambda value: 0 < value <= most, f"above 0 and at most {most}")


def within(kind: Callable[[str], Any], least: float, most: float) -> Callable[[str], Any]:
    """An argparse type: a number from least to most."""
    return _number(kind, lambda value: least <= value <= most, f"from {least} to {most}")


share = _number(float, lambda value: 0 <= value < 1, "from 0 to below 1")
part = _number(float, lambda value: 0 < value < 1, "above 0 and below 1")


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text}")
    return text


def add_model(parser: Any, default: str | None = MODEL, help: str = "") -> None:
    """`--model NAME`, a name for `models.build_model`."""
    text = help or (f"default {default}" if default else "")
    text = NAMES + (f" ({text})" if text else "")
    parser.add_argument("--model", metavar="NAME", default=default, help=text)


def add_img_size(parser: Any) -> None:
    parser.add_argument(
        "--img-size", type=positive(int, MOST_PIXELS),
        metavar="PIXELS", help="side of the square images (default: the model's)",
    )  # fmt: skip


def add_batch(parser: Any, default: int | None = None, dest: str = "batch") -> None:
    parser.add_argument(
        "--batch", dest=dest, type=positive(int),
        metavar="IMAGES", default=default,
        help="images a step" + (f" (default {default})" if default else ""),
    )  # fmt: skip


def add_dtype(
    parser: Any, choices: Sequence[str] = tuple(DTYPES), default: str | None = None,
    help: str = "of autocast; fp32: no autocast", dest: str = "dtype", **settings: Any,
) -> None:  # fmt: skip
    """`--dtype`, of autocast where the parameters are fp32."""
    text = help + (f" (default {default})" if default else "")
    parser.add_argument(
        "--dtype", dest=dest, choices=choices, default=default, help=text, **settings
    )


def add_step(parser: Any) -> None:
    """`--train` or `--infer`, in arguments.train."""
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "--train", dest="train", action="store_true", default=True,
        help="forward, loss and backward (default)",
    )  # fmt: skip
    step.add_argument(
        "--infer", dest="train", action="store_false", default=argparse.SUPPRESS,
        help="the forward alone, without gradients",
    )  # fmt: skip


def add_device(parser: Any) -> None:
    parser.add_argument(
        "--device", type=_device, metavar="DEVICE",
        help="cpu, cuda or cuda:N (default cuda where there is one)",
    )  # fmt: skip


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """The device of `--device`."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(arguments.device or ("cuda" if seen else "cpu"))
    if device.type == "cuda" and not seen:
        raise CommandError(f"--device {device}: torch sees no GPU")
    if device.type == "cuda" and (device.index or 0) >= seen:
        raise CommandError(f"--device {device}: torch sees {seen} GPUs, the first is cuda:0")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def kernels_reason(device: torch.device, dtype: str | None = None) -> str | None:
    """Why the kernels cannot run on this device, in this dtype, None where they can."""
    with backend("auto"):
        return reason_for_torch(torch.empty(1, dtype=DTYPES[dtype or "fp32"], device=device))


def require_kernels(device: torch.device, dtype: str | None = None) -> None:
    """Raises: CommandError where the kernels cannot run on this device, in this dtype."""
    if (reason := kernels_reason(device, dtype)) is not None:
        raise CommandError(f"the kernels cannot run here: {reason}")


def add_seed(parser: Any, help: str) -> None:
    parser.add_argument("--seed", type=within(int, 0, 2**32 - 1), metavar="SEED", help=help)


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def add_out(parser: Any, help: str, default: Path | None = None, metavar: str = "DIR") -> None:
    parser.add_argument("--out", type=Path, metavar=metavar, default=default, help=help)


def add_budget(parser: Any, help: str) -> None:
    parser.add_argument("--time-budget", type=positive(float), metavar="SECONDS", help=help)
