"""Flags that several commands share: each is spelled, checked and explained once, here.

A command takes those it needs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
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

Number = Callable[[str], Any]


def _number(kind: Number, fits: Callable[[Any], bool], wanted: str) -> Number:
    """An argparse type. `fits` compares, so that NaN never fits and no integer is too long."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {what} {wanted}, got {text[:40]!r}")

    parse.__name__ = kind.__name__
    return parse


def positive(kind: Number, most: float = MOST) -> Number:
    """An argparse type: a number above 0."""
    return _number(kind, lambda value: 0 < value <= most, f"above 0 and at most {most}")


def within(kind: Number, least: float, most: float) -> Number:
    """An argparse type: a number from least to most."""
    return _number(kind, lambda value: least <= value <= most, f"from {least} to {most}")


def _device(text: str) -> str:
    with suppress(RuntimeError):
        if torch.device(text).type in ("cpu", "cuda"):
            return text
    raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text}")


def _folder(text: str) -> Path:
    """An argparse type; a command makes the folder once it has something to write."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not writable" if there.is_dir() else "is a file"
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {there} {what}")
    return Path(text)


FLAGS: dict[str, dict[str, Any]] = {
    "--model": dict(metavar="NAME", help=NAMES),
    "--img-size": dict(
        type=positive(int, MOST_PIXELS),
        metavar="PIXELS",
        help="side of the square images (default: the model's)",
    ),
    "--batch": dict(type=positive(int), metavar="IMAGES", help="images per step"),
    "--dtype": dict(choices=tuple(DTYPES), help="autocast dtype; fp32: no autocast"),
    "--train": dict(
        dest="train", action="store_true", default=True, help="forward, loss and backward (default)"
    ),
    "--infer": dict(
        dest="train",
        action="store_false",
        default=argparse.SUPPRESS,
        help="forward only, without gradients",
    ),
    "--device": dict(
        type=_device, metavar="DEVICE", help="cpu, cuda or cuda:N (default cuda if there is one)"
    ),
    "--seed": dict(type=within(int, 0, 2**32 - 1), metavar="SEED"),
    "--json": dict(action="store_true", help="print only JSON"),
    "--out": dict(type=_folder, metavar="DIR"),
    "--time-budget": dict(type=positive(float), metavar="SECONDS"),
}


def add(parser: Any, *flags: str, **changes: Any) -> None:
    """Add these of FLAGS; `changes` stand over what is said there, and help names a default."""
    for flag in flags:
        how = FLAGS[flag] | changes
        if "default" in changes:
            how["help"] += f" (default {changes['default']})"
        parser.add_argument(flag, **how)


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """The device of `--device`."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(arguments.device or ("cuda" if seen else "cpu"))
    if device.type == "cpu":
        return device
    if not seen:
        raise CommandError(f"--device {device}: torch sees no GPU")
    if (device.index or 0) >= seen:
        raise CommandError(f"--device {device}: torch sees {seen} GPUs, the first is cuda:0")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def kernels_reason(device: torch.device, dtype: str | None) -> str | None:
    """Why the kernels cannot run on this device, in this dtype, None where they can."""
    with backend("auto"):
        return reason_for_torch(torch.empty(1, dtype=DTYPES[dtype or "fp32"], device=device))


def require_kernels(device: torch.device, dtype: str | None = None) -> None:
    """Raises: CommandError where the kernels cannot run on this device, in this dtype."""
    if (reason := kernels_reason(device, dtype)) is not None:
        raise CommandError(f"the kernels cannot run here: {reason}")
