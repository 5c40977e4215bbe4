"""Draw where each head of a trained ViT looks, over an image of yours.

Writes one PNG a layer: the image, then each head's attention over it, from the class token to the
patches, or the mean over all patches where the model has no class token.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..runtime.backend import backend
from ..weights.files import read_file
from . import options
from .console import CommandError, make_console, refusing, require
from .models import build_model, input_shape
from .training import checkpoint, data, figures
from .training.checkpoint import CHECKPOINT, WEIGHTS, read_settings
from .training.model import UNFIT, load_into, model_of
from .training.records import Records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, metavar="IMAGE", help="any file that pillow reads")
    parser.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="checkpoint.pt or weights.pth of `train`, or weights of --model",
    )
    options.add(parser, "--model", help=f"{options.NAMES} (not needed with what `train` wrote)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_option,
        help="an argument for --model by its library's own name, such as num_classes=21843",
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


def _named_model(
    name: str, weights: Path, overrides: dict[str, Any]
) -> tuple[nn.Module, data.Normalization]:
    model = build_model(name, **overrides)
    load_into(model, str(weights))
    in_chans = input_shape(model)[0]
    mean = std = (0.5,) * in_chans  # pixels from -1 to 1, as the ViTs of the paper
    settings: dict[str, Any] = getattr(model, "pretrained_cfg", {})  # what timm's weights saw
    if len(settings.get("mean", ())) == in_chans:
        mean, std = settings["mean"], settings["std"]
    return model, data.Normalization(tuple(mean), tuple(std))


def _trained_model(weights: Path) -> tuple[nn.Module, data.Normalization]:
    """The model of a run: from its checkpoint.pt, or its weights.pth with checkpoint.pt beside."""
    run = weights.with_name(CHECKPOINT) if weights.name == WEIGHTS else weights
    content = checkpoint.load(run)
    settings = read_settings(content, run)
    if run != weights:  # weights.pth has LoRA added in
        settings.lora = 0
    model = model_of(settings, len(content["classes"]))
    with refusing(f"{weights} does not fit the run of {run}", KeyError, *UNFIT):
        model.load_state_dict(content["model"] if run == weights else read_file(weights))
    return model, data.Normalization(**content["normalization"])


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    require("matplotlib.figure", "matplotlib")
    if arguments.model is not None:
        overrides = dict(arguments.option)
        model, normalization = _named_model(arguments.model, arguments.weights, overrides)
    else:
        try:
            model, normalization = _trained_model(arguments.weights)
        except CommandError as error:
            raise CommandError(f"{error}; other weights need --model NAME") from error
    in_chans, height, width = input_shape(model)
    if height != width:
        raise CommandError(f"the model takes {height} x {width} images; a square one is wanted")
    image = data.read_image(Records([(arguments.image, "", 0, 0)], [0]), 0, height, in_chans)
    # One image through PyTorch: the maps are the same, and need no GPU.
    with backend("torch"):
        image, layers, from_cls = figures.sample_attention(model, image, normalization)
    with refusing(f"--out {arguments.out} cannot be written", OSError):
        arguments.out.mkdir(parents=True, exist_ok=True)
        paths = []
        for index, layer in enumerate(layers):
            paths.append(arguments.out / f"{arguments.image.stem}-layer{index:02d}.png")
            title = f"{arguments.image.name}, layer {index}"
            figures.draw_attention(image, [layer], from_cls, paths[-1], title)
    console.print(
        f"{len(paths)} layers, {layers[0].shape[0]} heads each: {paths[0]} to {paths[-1]}"
    )
    return 0
