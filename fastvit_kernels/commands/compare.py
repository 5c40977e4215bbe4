"""Measure a model eager, compiled and on our kernels, side by side in one run on this machine.

fastvit-kernels compare timm:vit_base_patch16_224 --batch 256 --dtype bf16 --out compare

Reports step time (measured in turns), peak memory, the 2x rule against float64, and how much the
losses of the first steps differ. Ctrl-C keeps what is done. `fk.compare` is the same in Python.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..measure.compare import WAYS, compare
from ..runtime.dtypes import DTYPES
from . import options
from .console import CommandError, refusing
from .models import build_model, input_shape, read_image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
SMALL, SMALL_BATCH, BATCH = "vit_tiny_patch16_224", 1, 64  # a CPU's, and a GPU's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = f"(default {options.MODEL}; on a CPU {SMALL})"
    add("model", metavar="MODEL", nargs="?", help=f"{options.NAMES} {default}")
    more = f"images a step (default {BATCH}; on a CPU {SMALL_BATCH})"
    options.add(parser, "--batch", help=more)
    options.add(parser, "--img-size", "--device")
    dtypes = "autocast dtype; fp32: no autocast (default bf16 on a GPU, else fp32)"
    options.add(parser, "--dtype", help=dtypes)
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")
    ways = f"of {', '.join(WAYS)} (default: the first five; on a CPU eager and swapped)"
    add("--ways", nargs="+", choices=tuple(WAYS), metavar="WAY", help=ways)
    add("--max-autotune", action="store_true", help="max-autotune too, which takes minutes")
    add("--data", type=Path, metavar="DIR", help="use images from this folder, not random ones")
    options.add(parser, "--time-budget", help="for timing all ways together", default=10.0)
    options.add(parser, "--out", help="write a CSV and a picture there")


def image_files(folder: Path, count: int) -> list[Path]:
    """The first images in a folder and the folders inside it."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)[:count]
    if len(files) < count:
        what = f"holds {len(files)} images" if folder.is_dir() else "is not a folder"
        raise CommandError(f"--data {folder} {what}; --batch wants {count} images")
    return files


def images_of(files: Sequence[Path], count: int, shape: tuple[int, int, int]) -> Tensor:
    """These images, normalised, or random ones: fp32."""
    if not files:
        return torch.randn(count, *shape)
    images = torch.stack([read_image(file, shape) for file in files])
    return (images - images.mean((0, 2, 3), True)) / images.std((0, 2, 3), keepdim=True)


def progress() -> Callable[[str], None]:
    """Prints lines to the standard error with the seconds since now."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def run(arguments: argparse.Namespace) -> int:
    """The command: 1 where a way fails or breaks the 2x rule, 130 after Ctrl-C."""
    device = options.chosen_device(arguments)
    on_gpu = device.type == "cuda"
    dtype = arguments.dtype or ("bf16" if on_gpu else "fp32")
    name = arguments.model or (options.MODEL if on_gpu else SMALL)
    batch = arguments.batch or (BATCH if on_gpu else SMALL_BATCH)
    files = image_files(arguments.data, batch) if arguments.data is not None else []
    torch.manual_seed(0)
    model = build_model(name, img_size=arguments.img_size).to(device)
    model.train(arguments.train)
    shape = input_shape(model, arguments.img_size)
    images = images_of(files, batch, shape).to(device)
    with refusing(f"{name} does not run on images {[batch, *shape]}", Exception):
        found = compare(
            model,
            images,
            ways=arguments.ways,
            max_autotune=arguments.max_autotune,
            autocast=None if dtype == "fp32" else DTYPES[dtype],
            seconds=arguments.time_budget,
            name=name,
            say=progress(),
        )
    print(found)
    if arguments.out is not None:
        print("written:", *found.save(arguments.out))
    failed = any(row.status != "ok" for row in found.rows)
    return 130 if found.interrupted else int(failed)
