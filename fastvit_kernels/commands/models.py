"""`--model NAME`: ours, or one of timm, torchvision or transformers. Random weights, no download.

vit_base_patch16_224                 a name of create_vit
timm:vit_small_patch14_dinov2        a name of timm.create_model
torchvision:vit_b_16                 a name of torchvision.models.get_model
hf:dinov2    hf:folder/config.json   a model type of transformers at its default size, or a file
my_models:build                      a callable of your own that gives a model
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fuse.swap import swap_in
from ..models.presets import create_vit, preset_names
from ..models.vit import VisionTransformer
from ..runtime.compat import define_torchvision_operators
from ..runtime.dtypes import DTYPES
from .console import CommandError, refusing, require
from .options import NAMES

_RENAMED = {  # our (and timm's) name -> the library's own
    "torchvision": {"img_size": "image_size"},
    "hf": {"img_size": "image_size", "in_chans": "num_channels", "num_classes": "num_labels"},
}


def _timm(name: str, **overrides: Any) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise _unknown(f"timm:{name}", timm.list_models(), "a name of timm.list_models()")
    return timm.create_model(name, pretrained=False, **overrides)


def _torchvision(name: str, **overrides: Any) -> nn.Module:
    from torchvision import models

    names = models.list_models(models)
    if name not in names:
        wanted = "a name of torchvision.models.list_models()"
        raise _unknown(f"torchvision:{name}", names, wanted)
    if overrides.pop("in_chans", 3) != 3:
        raise CommandError(f"torchvision:{name} takes images of 3 channels")
    return models.get_model(name, weights=None, **overrides)


def _transformers(name: str, **overrides: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageClassification
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
    )

    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if file.is_file():
        with refusing(f"{file} is no config of an image classifier of transformers", ValueError):
            content = json.loads(file.read_text())
            found = content.get("model_type") if isinstance(content, dict) else None
            if found not in CLASSIFIERS:
                raise ValueError(f"its model_type is {found}")
        config = AutoConfig.for_model(**{**content, **overrides})
    elif name in CLASSIFIERS:
        config = AutoConfig.for_model(name, **overrides)
    else:
        wanted = "a type of transformers' image classifiers, or a config.json"
        raise _unknown(f"hf:{name}", CLASSIFIERS, wanted)
    return AutoModelForImageClassification.from_config(config)


_HOSTS = {"timm": _timm, "torchvision": _torchvision, "hf": _transformers}


def _unknown(name: str, names: Iterable[str], wanted: str) -> CommandError:
    """`names` are those of the same host, without its prefix."""
    host, colon, rest = name.rpartition(":")
    near = [host + colon + n for n in difflib.get_close_matches(rest, list(names), 4, 0.5)]
    hint = f"; near names: {', '.join(near)}" if near else ""
    return CommandError(f"unknown model {name!r}; wanted {wanted}{hint}")


def _own(name: str, **overrides: Any) -> VisionTransformer:
    if name not in preset_names():
        names = [*preset_names()]
        if find_spec("timm") is not None:
            define_torchvision_operators()
            import timm

            names += [f"timm:{n}" for n in timm.list_models()]
        raise _unknown(name, names, NAMES)
    return create_vit(name, **overrides)


def _yours(module: str, name: str, **overrides: Any) -> nn.Module:
    """What a callable of the user's gives; its module may lie in the working directory."""
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # something that the module itself imports
        why = f"no module named {module}, here or installed"
        raise CommandError(f"unknown model '{module}:{name}': {why}; wanted {NAMES}") from None
    finally:
        sys.path.remove(os.getcwd())
    if "img_size" not in inspect.signature(build).parameters:
        overrides.pop("img_size", None)
    model = build(**overrides)
    if not isinstance(model, nn.Module):
        raise CommandError(f"{module}:{name} gave {type(model).__name__}, wanted torch.nn.Module")
    return model


def build_model(name: str, **overrides: Any) -> nn.Module:
    """A model by name, as its library builds it, with random weights.

    Args:
        name: as this module's first lines show.
        overrides: img_size, in_chans and num_classes for every library; any other argument by the
            library's own name. img_size=None is the model's own. A callable of the user's gets
            img_size where it takes one, and the others.
    Raises: CommandError for another name, with the near ones, and for what the model refuses.
    """
    host, colon, rest = name.partition(":")
    if overrides.get("img_size") is None:
        overrides.pop("img_size", None)
    with refusing(f"model {name}", Exception):  # a callable of the user's may raise anything
        if not colon:
            return _own(name, **overrides)
        if host not in _HOSTS:
            return _yours(host, rest, **overrides)
        package = "transformers" if host == "hf" else host
        define_torchvision_operators()  # timm and transformers import torchvision too
        require(package, package)
        names = _RENAMED.get(host, {})
        return _HOSTS[host](rest, **{names.get(k, k): v for k, v in overrides.items()})


def fused_model(name: str, **overrides: Any) -> nn.Module:
    """`build_model`, a host's model after swap_in."""
    model = build_model(name, **overrides)
    if not isinstance(model, VisionTransformer):
        swap_in(model)
    return model


def input_shape(model: nn.Module, img_size: int | None = None) -> tuple[int, int, int]:
    """(channels, height, width) of the images that a model of `build_model` takes.

    Args:
        img_size: what it was built with, where its user said so.
    """
    found: Any = model
    config = getattr(found, "config", None)  # transformers
    if config is not None and hasattr(config, "image_size"):
        size, channels = config.image_size, getattr(config, "num_channels", 3)
    elif hasattr(found, "image_size"):  # torchvision
        size, channels = found.image_size, 3
    elif hasattr(getattr(found, "patch_embed", None), "img_size"):
        size = found.patch_embed.img_size
        channels = next(p for p in found.patch_embed.parameters() if p.ndim == 4).shape[1]
    else:  # timm's other families
        channels, *size = getattr(found, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    size = size if img_size is None else img_size
    height, width = (size, size) if isinstance(size, int) else size
    return channels, height, width


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned; transformers wraps them."""
    return output if isinstance(output, Tensor) else output.logits


def open_image(path: str | Path, mode: str = "RGB") -> Any:
    """A PIL image of 8 bits a channel, turned upright.

    Raises: CommandError that names the file, where pillow cannot read it.
    """
    pillow, ops = require("PIL.Image", "pillow"), require("PIL.ImageOps", "pillow")
    broken = (OSError, ValueError, SyntaxError, KeyError, pillow.DecompressionBombError)
    with refusing(f"{path} cannot be read as an image", *broken), pillow.open(path) as opened:
        image = ops.exif_transpose(opened)
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"mode {image.mode}; 8 bits a channel are wanted")
        return image.convert(mode)


def read_image(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """An image turned upright, cropped about its centre and resized to (channels, height, width):
    fp32 from 0 to 1."""
    pillow, ops = require("PIL.Image", "pillow"), require("PIL.ImageOps", "pillow")
    channels, height, width = shape
    image = open_image(path, "L" if channels == 1 else "RGB")
    image = ops.fit(image, (width, height), pillow.Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).permute(2, 0, 1) / 255


def run_step(forward: Callable[[Tensor], Any], images: Tensor, dtype: str, *, train: bool) -> None:
    """One step of a model whose parameters are fp32, under autocast of another dtype: forward, and
    in training loss and backward."""
    precision = torch.autocast(images.device.type, DTYPES[dtype], enabled=dtype != "fp32")
    with torch.set_grad_enabled(train), precision:
        logits = logits_of(forward(images))
        if train:
            labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
            loss = F.cross_entropy(logits, labels)
    if train:
        loss.backward()
