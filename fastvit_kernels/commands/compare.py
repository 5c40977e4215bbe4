"""Measure a model eager, compiled and swapped, side by side in one run on this machine.

fastvit-kernels compare timm:vit_base_patch16_224 --batch 256 --dtype bf16 --compile --out compare

Time a step in turns, peak memory, the 2x rule against float64, and how far the losses of the first
steps are apart. Random weights and images; `fk.compare` does the same for a model of yours.
"""

from __future__ import annotations

import argparse

import torch

from ..runtime.dtypes import DTYPES
from ..swap.compare import WAYS, compare
from . import options
from .console import refusing
from .models import build_model, input_shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastvit-kernels compare`."""
    add = parser.add_argument
    names = "a name of create_vit, timm:NAME, torchvision:NAME or hf:TYPE"
    add("model", metavar="MODEL", nargs="?", default=options.MODEL, help=names)
    options.add_batch(parser, 64)
    options.add_img_size(parser)
    options.add_dtype(parser)
    options.add_step(parser)
    add("--compile", action="store_true", help="torch.compile beside both")
    add("--max-autotune", action="store_true", help="its mode max-autotune beside both; minutes")
    options.add_budget(parser, "for the turns of all ways (default 10)")
    options.add_device(parser)
    options.add_out(parser, "write compare.csv and compare.png there")


def run(arguments: argparse.Namespace) -> int:
    """The command: 1 where the swapped model breaks the 2x rule or a way fails."""
    device = options.chosen_device(arguments)
    torch.manual_seed(0)
    model = build_model(arguments.model, img_size=arguments.img_size).to(device)
    model.train(arguments.train)
    images = torch.randn(arguments.batch, *input_shape(model), device=device)
    modes = [None] + ["default"] * arguments.compile + ["max-autotune"] * arguments.max_autotune
    dtype = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    with refusing(f"{arguments.model} does not run", torch.OutOfMemoryError):
        found = compare(
            model, images, ways=[way for way, mode in WAYS.items() if mode in modes],
            autocast=None if dtype == "fp32" else DTYPES[dtype],
            seconds=arguments.time_budget or 10.0, name=arguments.model,
        )  # fmt: skip
    print(found)
    if arguments.out is not None:
        with refusing(f"--out {arguments.out} cannot be written", OSError):
            print("written:", *found.save(arguments.out))
    return int(any(row.status != "ok" for row in found.rows))
