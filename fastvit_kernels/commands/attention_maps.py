"""Draw where each head of a trained ViT looks, over an image of yours.

Writes one PNG per layer: the image, then each head's attention from the class token to the patches,
or the mean over all patches if the model has no class token.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..models.vit import VisionTransformer
from ..runtime.backend import backend
from ..weights.files import read_file
from ..weights.load import load_weights
from . import figures, options
from .console import CommandError, refusing, require
from .models import build_model, input_shape, read_image
from .train import make_model

UNFIT = (TypeError, ValueError, OSError, RuntimeError)  # where a file does not fit its model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, metavar="IMAGE", help="any file that Pillow reads")
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="weights.safetensors from `train`, or weights for --model",
    )
    options.add(parser, "--model", help=f"{options.NAMES} (not needed for weights from `train`)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_option,
        help="an argument of --model, under its library's name: num_classes=21843",
    )
    options.add(parser, "--out", help="where the PNGs go", default=Path("attention-maps"))


def _option(text: str) -> tuple[str, Any]:
    """An argparse type; a value is JSON or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    with suppress(ValueError):
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    return name, value


def _named_model(name: str, weights: Path, overrides: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    """A model by name with these weights, and the mean and deviation of its pixels."""
    model: Any = build_model(name, **overrides)
    with refusing(f"--weights {weights} does not fit {name}", *UNFIT):
        if isinstance(model, VisionTransformer):
            load_weights(model, weights)
        else:
            model.load_state_dict(read_file(weights))
    config = getattr(model, "pretrained_cfg", {})  # timm's models
    return model, config.get("mean", 0.5), config.get("std", 0.5)


def _trained_model(weights: Path) -> tuple[nn.Module, Any, Any]:
    """What `train` wrote: the file says which model it is of."""
    safetensors: Any = require("safetensors", "safetensors")
    with refusing(f"{weights} is not of `train`; other weights need --model NAME", Exception):
        with safetensors.safe_open(weights, "pt") as file:
            facts = json.loads((file.metadata() or {})["fastvit_kernels"])
        model = make_model(argparse.Namespace(**facts), len(facts["classes"]))
        model.load_state_dict(read_file(weights))
    return model, facts["mean"], facts["std"]


def run(arguments: argparse.Namespace) -> int:
    require("matplotlib.figure", "matplotlib")
    name, weights = arguments.model, arguments.weights
    for path in (arguments.image, weights):
        if not path.is_file():
            raise CommandError(f"there is no file {path}")
    if name is None:
        model, mean, std = _trained_model(weights)
    else:
        model, mean, std = _named_model(name, weights, dict(arguments.option))
    shape = input_shape(model)
    if shape[1] != shape[2]:
        raise CommandError(f"the model takes {shape[1]} x {shape[2]} images; wanted a square")
    pixels = read_image(arguments.image, shape)
    mean, std = (pixels.new_tensor(x).expand(shape[0]).view(-1, 1, 1) for x in (mean, std))
    # One image through PyTorch: the maps are the same, and need no GPU.
    with backend("torch"):
        attention = figures.head_attention(model, ((pixels - mean) / std)[None])
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / arguments.image.stem
    layers = attention.layers
    paths = [Path(f"{stem}-layer{index:02d}.png") for index in range(len(layers))]
    for index, (layer, path) in enumerate(zip(layers, paths, strict=True)):
        title = f"{arguments.image.name}, layer {index}"
        figures.draw_attention(pixels, attention._replace(layers=[layer]), path, title)
    print(f"{len(paths)} layers, {len(layers[0])} heads each: {paths[0]} to {paths[-1]}")
    return 0
