"""Draw where each head of a trained ViT looks, over an image of yours.

Writes one PNG a layer: the image, then each head's attention over it, from the class token to the
patches, or the mean over all patches where the model has no class token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..models.vit import VisionTransformer
from ..runtime.backend import backend
from . import checkpoint, data, figures, options
from .console import CommandError, make_console, require
from .settings import Settings, named_vit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastvit-kernels attention-maps`."""
    parser.add_argument("image", type=Path, metavar="IMAGE", help="any file that pillow reads")
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE",
        help="checkpoint.pt of `train`, or weights that load_weights reads",
    )  # fmt: skip
    options.add_model(parser, None, "not needed with what `train` wrote")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="an argument of VisionTransformer for --model, such as num_classes=21843",
    )  # fmt: skip
    options.add_out(parser, "where the PNGs go (default attention-maps)", Path("attention-maps"))


def _overrides(options: list[str]) -> dict[str, Any]:
    overrides = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise CommandError(f"--option must be NAME=VALUE, got {option}")
        try:
            overrides[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            overrides[name] = value
    return overrides


def _named_model(
    name: str, weights: Path, overrides: dict[str, Any]
) -> tuple[VisionTransformer, data.Normalization]:
    from ..weights.load import load_weights

    try:
        model = named_vit(name, **overrides)
    except TypeError as error:  # an --option that VisionTransformer does not have
        raise CommandError(str(error)) from error
    try:
        report = load_weights(model, weights)
    except (ValueError, OSError) as error:
        raise CommandError(f"{weights}: {error}") from error
    if any(key not in ("head.weight", "head.bias") for key in report.missing):
        raise CommandError(
            f"{weights} does not fit {name}: {', '.join(report.missing[:5])} missing"
        )
    in_chans = model.patch_embed.proj.in_channels
    # timm's ViTs of the paper: pixels from -1 to 1.
    return model, data.Normalization((0.5,) * in_chans, (0.5,) * in_chans)


def _trained_model(weights: Path) -> tuple[VisionTransformer, data.Normalization]:
    from .training import build_model

    content = checkpoint.load(weights)
    model = build_model(Settings(**content["settings"]), len(content["classes"]))
    model.load_state_dict(content["model"])
    return model, data.Normalization(**content["normalization"])


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    console = make_console()
    require("matplotlib.figure", "matplotlib")
    overrides = _overrides(arguments.option)
    if not arguments.weights.is_file():
        raise CommandError(f"there is no file {arguments.weights}")
    if arguments.model is not None:
        model, normalization = _named_model(arguments.model, arguments.weights, overrides)
    else:
        try:
            model, normalization = _trained_model(arguments.weights)
        except CommandError as error:
            raise CommandError(f"{error}; other weights need --model NAME") from error
    in_chans, (height, width) = model.patch_embed.proj.in_channels, model.patch_embed.img_size
    if height != width:
        raise CommandError(f"the model takes {height} x {width} images; a square one is wanted")
    image = data.read_image(arguments.image, height, in_chans)

    # One image through PyTorch: the maps are the same, and need no GPU.
    with backend("torch"):
        layers, from_cls = figures.sample_attention(model, normalization(image[None]))
    image = figures.seen_pixels(model, image)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        paths = []
        for index, layer in enumerate(layers):
            paths.append(arguments.out / f"{arguments.image.stem}-layer{index:02d}.png")
            title = f"{arguments.image.name}, layer {index}"
            figures.draw_attention_layer(image, layer, from_cls, paths[-1], title)
    except OSError as error:
        raise CommandError(f"--out {arguments.out} cannot be written: {error}") from error
    console.print(
        f"{len(paths)} layers, {layers[0].shape[0]} heads each: {paths[0]} to {paths[-1]}"
    )
    return 0
