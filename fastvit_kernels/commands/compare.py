"""Measure a model eager, compiled and swapped, side by side in one run on this machine.

fastvit-kernels compare timm:vit_base_patch16_224 --batch 256 --dtype bf16 --compile --out compare

Time a step in turns, peak memory, the 2x rule against float64, and how far the losses of the first
steps are apart. `fk.compare` does the same in Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from ..runtime.dtypes import DTYPES
from ..swap.compare import WAYS, compare
from . import options
from .console import CommandError, refusing
from .models import build_model, input_shape, read_image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", default=options.MODEL, help=options.NAMES)
    options.add(parser, "--batch", default=64)
    options.add(parser, "--img-size", "--dtype", "--device")
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")
    add("--compile", action="store_true", help="torch.compile beside both")
    add("--max-autotune", action="store_true", help="its mode max-autotune beside both; minutes")
    add("--data", type=Path, metavar="DIR", help="images of this folder, instead of random ones")
    options.add(parser, "--time-budget", help="for the turns of all ways", default=10.0)
    options.add(parser, "--out", help="write a CSV and a picture there")


def images_of(arguments: argparse.Namespace, shape: tuple[int, int, int]) -> Tensor:
    """Random images, or the first in --data and the folders inside it: fp32, normalised.

    Raises: CommandError where there are fewer, or one cannot be read.
    """
    count, folder = arguments.batch, arguments.data
    if folder is None:
        return torch.randn(count, *shape)
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)[:count]
    if len(files) < count:
        raise CommandError(f"--data {folder} holds {len(files)} images; --batch wants {count}")
    images = torch.stack([read_image(file, shape) for file in files])
    return (images - images.mean((0, 2, 3), True)) / images.std((0, 2, 3), keepdim=True)


def run(arguments: argparse.Namespace) -> int:
    """The command: 1 where the swapped model breaks the 2x rule or a way fails."""
    device = options.chosen_device(arguments)
    dtype = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    torch.manual_seed(0)
    model = build_model(arguments.model, img_size=arguments.img_size).to(device)
    model.train(arguments.train)
    images = images_of(arguments, input_shape(model, arguments.img_size)).to(device)
    modes = [None] + ["default"] * arguments.compile + ["max-autotune"] * arguments.max_autotune
    with refusing(f"{arguments.model} does not run", torch.OutOfMemoryError):
        found = compare(
            model,
            images,
            ways=[way for way, mode in WAYS.items() if mode in modes],
            autocast=None if dtype == "fp32" else DTYPES[dtype],
            seconds=arguments.time_budget,
            name=arguments.model,
        )
    print(found)
    if arguments.out is not None:
        with refusing(f"--out {arguments.out} cannot be written", OSError):
            print("written:", *found.save(arguments.out))
    return int(any(row.status != "ok" for row in found.rows))
