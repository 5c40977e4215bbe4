"""The options of `train`: what a run is made of, and the defaults of each data set."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ...runtime.backend import Backend
from ..console import CommandError, refusing
from ..models import build_model, input_shape, source_folder

# The default model of the digits: T = 17, D = 16.
DIGITS_VIT = dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0)


@dataclass(kw_only=True)
class Settings:
    """What a run is made of: all of it is in the checkpoint, and --resume changes none of it."""

    data: str
    data_dir: str | None = None
    model: str | None  # a name for build_model, None for DIGITS_VIT
    img_size: int = 0  # until make_settings has asked the model
    in_chans: int
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 0.05
    warmup_epochs: int
    label_smoothing: float = 0.1
    drop_path: float = 0.0
    augment: bool = True
    held_out: float = 0.2
    seed: int = 0
    precision: str
    threads: int | None = None  # of PyTorch on the CPU, None for its own choice
    backend: Backend = "auto"
    compare: bool = False
    in_memory: bool = True
    crop_scale: float = 0.08
    randaugment: int = 0
    mixup: float = 0.0
    ema: float = 0.0
    weights: str | None = None
    freeze: list[str] = field(default_factory=list)
    lora: int = 0


# By data set: what an option that is not given becomes, where Settings has no default.
DEFAULTS: dict[str, dict[str, Any]] = {
    # One thread: the matrices are small, and the bits then do not depend on the number of cores.
    "digits": dict(
        model=None, in_chans=1, epochs=40, batch_size=64, lr=2e-3, warmup_epochs=4, threads=1
    ),
    "mnist": dict(
        model="vit_mnist", in_chans=1, epochs=20, batch_size=256, lr=2e-3, warmup_epochs=2
    ),
}
for _kind in ("folder", "webdataset", "hf"):
    DEFAULTS[_kind] = dict(
        model="vit_tiny_patch16_224", in_chans=3, epochs=100, batch_size=256, lr=1e-3,
        warmup_epochs=5, in_memory=False,
    )  # fmt: skip


def flag_of(setting: str) -> str:
    """The flag that gives this field of Settings."""
    named = {"batch_size": "--batch", "precision": "--dtype"}
    return named.get(setting, f"--{setting.replace('_', '-')}")


def given_options(arguments: object) -> dict[str, Any]:
    """What the command line gives of Settings, with paths that any folder finds."""
    names = {f.name for f in fields(Settings)}
    given = {k: v for k, v in vars(arguments).items() if k in names and v is not None}
    for name in given.keys() & {"data_dir", "weights"}:
        if not given[name].startswith(("timm:", "hf:")):
            given[name] = str(Path(given[name]).resolve())
    return given


def read_settings(content: dict[str, Any], path: Path) -> Settings:
    """The settings of a checkpoint's content.

    Raises: CommandError where they are those of another version.
    """
    with refusing(f"{path} cannot be read as a checkpoint", TypeError):
        return Settings(**content["settings"])


def _check_reading(settings: Settings, given: dict[str, Any]) -> None:
    """Raises: CommandError for options of another way to read the images."""
    kind = settings.data
    if given.get("in_memory") and kind in ("webdataset", "hf"):
        raise CommandError(f"--data {kind} is streamed; --in-memory is for --data folder")
    if settings.in_memory:
        for name in ("randaugment", "crop_scale"):
            if name in given:
                raise CommandError(
                    f"{flag_of(name)} is for streamed images: --data folder without --in-memory, "
                    f"webdataset or hf; --data {kind} is held in memory here"
                )
    elif not settings.augment and (given.get("randaugment") or "crop_scale" in given):
        raise CommandError("--no-augment leaves no place for --randaugment and --crop-scale")
    if settings.ema and settings.compare:
        raise CommandError("--ema averages weights, which --compare does not: choose one of them")


def make_settings(given: dict[str, Any], device: torch.device) -> Settings:
    """The options given, completed by the defaults of the data set and of the device."""
    kind = given.get("data", "digits")
    precision = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(**{"precision": precision, **DEFAULTS[kind], **given, "data": kind})
    source = settings.weights
    if source is not None and source.startswith(("timm:", "hf:")) and "model" not in given:
        # the model that the weights are of
        timm = source.startswith("timm:")
        settings.model = source if timm else f"hf:{source_folder(source)}"
    if settings.lora and settings.compare:
        raise CommandError("--lora and --compare: the plain PyTorch model has no LoRA; choose one")
    if kind != "digits" and settings.data_dir is None:
        raise CommandError(f"--data {kind} needs --data-dir")
    if kind == "digits" and settings.data_dir is not None:
        raise CommandError("--data digits comes with scikit-learn and takes no --data-dir")
    if kind in ("digits", "mnist") and settings.in_chans != 1:
        raise CommandError(f"--data {kind} has one channel; --in-chans is for --data folder")
    _check_reading(settings, given)
    if not settings.img_size:
        settings.img_size = int(DIGITS_VIT["img_size"])
        if settings.model is not None:
            with torch.device("meta"):
                settings.img_size = input_shape(build_model(settings.model))[1]
    return settings
