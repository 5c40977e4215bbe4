"""The options of `train`: what a run is made of, and the defaults of each data set."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ...runtime.backend import Backend
from .. import options
from ..console import CommandError
from ..models import build_model, input_shape, source_folder
from ..options import MOST, MOST_PROCESSES, part, positive, share, within

# The default model of the digits: T = 17, D = 16.
DIGITS_VIT = dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0)


def _flag(
    help: str | None, default: Any = MISSING, type: Any = None, metavar: Any = None, **how: Any
) -> Any:
    """A field whose flag argparse makes of these; fields without are flags of `options`."""
    if isinstance(default, bool):
        how["action"] = BooleanOptionalAction
    else:
        how |= {"type": type, "metavar": metavar}
    return field(default=default, metadata={"help": help, **how})


DATA = ("digits", "folder", "hf", "mnist", "webdataset")
BACKENDS = ("auto", "triton", "torch")


@dataclass(kw_only=True)
class Settings:
    """What a run is made of: all of it is in the checkpoint, and --resume changes none of it.

    What has no default here gets one from the data set or the device.
    """

    data: str = _flag("default digits; mnist: idx, webdataset: tar files", choices=DATA)
    data_dir: str | None = _flag("the folder of any --data but digits", None, metavar="DIR")
    in_memory: bool = _flag("hold the images of --data folder in memory, not streamed", True)
    in_chans: int = _flag("1 reads grey images, 3 colour (folder)", type=int, choices=(1, 3))
    held_out: float = _flag("where there is no split (default 0.2)", 0.2, part, "SHARE")
    weights: str | None = _flag(
        "pretrained, of --model; timm: and hf: bring their model", None, None, "FILE|timm:|hf:NAME"
    )
    model: str | None  # a name for build_model, None for DIGITS_VIT
    img_size: int = 0  # until make_settings has asked the model
    batch_size: int
    seed: int = 0
    precision: str

    freeze: Sequence[str] = _flag(
        "what stays: 'blocks.0.*'; backbone is all but the head", (), None, "PATTERN", nargs="+"
    )
    lora: int = _flag("train LoRA (peft) of q, k, v, and a head", 0, positive(int, 4096), "RANK")
    epochs: int = _flag(None, type=positive(int))
    lr: float = _flag("peak learning rate of AdamW", type=positive(float, 1e300))
    weight_decay: float = _flag("on matrices alone (default 0.05)", 0.05, share)
    warmup_epochs: int = _flag("linear, before the cosine", MISSING, within(int, 0, MOST), "EPOCHS")
    label_smoothing: float = _flag("default 0.1", 0.1, share)
    drop_path: float = _flag("stochastic depth of the last block (default 0)", 0.0, share)
    augment: bool = _flag("random affine maps or crops (default on)", True)
    crop_scale: float = _flag("least part of an image in a crop (default 0.08)", 0.08, part)
    randaugment: int = _flag("RandAugment of this magnitude", 0, positive(int, 30), "M")
    mixup: float = _flag("mix pairs, by Beta(ALPHA, ALPHA)", 0.0, within(float, 1e-3, 1e3), "ALPHA")
    ema: float = _flag("also average the weights; those are reported", 0.0, share, "DECAY")
    compare: bool = _flag("train plain PyTorch beside it: same weights, same batches", False)
    threads: int | None = _flag("of the CPU", None, positive(int, MOST_PROCESSES))
    backend: Backend = _flag("auto: kernels on a GPU alone", "auto", choices=BACKENDS)  # noqa: RUF009


READ = {"data", "data_dir", "in_memory", "in_chans", "held_out", "weights"}


def add_reading(parser: Any) -> None:
    """The flags that `train` and `probe` share: images, and the model that reads them."""
    add_flags(parser, READ)
    options.add(parser, "--model", help=f"{options.NAMES} (default: by --data or --weights)")
    options.add(parser, "--batch", dest="batch_size")
    options.add(parser, "--seed", help="of all that is drawn (default 0)")
    precision = "of autocast; default bf16 on CUDA, else fp32"
    options.add(parser, "--dtype", choices=("bf16", "fp32"), dest="precision", help=precision)
    options.add(parser, "--img-size", "--device")
    parser.add_argument(
        "--workers",
        type=within(int, 0, MOST_PROCESSES),
        metavar="N",
        help="processes that read streamed images, 0 for none (default: cores less one, 8 at most)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a streamed image that cannot be read (default stop); both name it",
    )


def add_flags(parser: Any, names: set[str]) -> None:
    """The flags of these settings; None stands for "not given"."""
    for f in fields(Settings):
        if f.metadata and f.name in names:
            parser.add_argument(flag_of(f.name), default=None, **f.metadata)


# By data set: what an option that is not given becomes, where Settings has no default.
DEFAULTS: dict[str, dict[str, Any]] = {
    # One thread: the matrices are small, and the bits then do not depend on the number of cores.
    "digits": dict(
        model=None, in_chans=1, epochs=40, batch_size=64, lr=2e-3, warmup_epochs=4, threads=1
    ),
    "mnist": dict(
        model="vit_mnist", in_chans=1, epochs=20, batch_size=256, lr=2e-3, warmup_epochs=2
    ),
    "folder": dict(
        model="vit_tiny_patch16_224",
        in_chans=3,
        epochs=100,
        batch_size=256,
        lr=1e-3,
        warmup_epochs=5,
        in_memory=False,
    ),
}
DEFAULTS |= dict.fromkeys(("webdataset", "hf"), DEFAULTS["folder"])


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


def _refuse(s: Settings, given: dict[str, Any]) -> None:
    """Raises: CommandError for options that do not go together."""
    kind, crops = s.data, [name for name in ("randaugment", "crop_scale") if name in given]
    for refused, why in (
        (s.lora and s.compare, "--lora and --compare: the plain PyTorch model has no LoRA"),
        (s.ema and s.compare, "--ema averages weights, which --compare does not: choose one"),
        (kind != "digits" and s.data_dir is None, f"--data {kind} needs --data-dir"),
        (kind == "digits" and s.data_dir, "--data digits takes no --data-dir"),
        (kind in ("digits", "mnist") and s.in_chans != 1, f"--data {kind} has one channel"),
        (kind in ("webdataset", "hf") and s.in_memory, f"--data {kind} is streamed alone"),
        (s.in_memory and crops, f"{', '.join(map(flag_of, crops))} is for streamed images"),
        (not s.augment and crops, "--no-augment leaves no place for --randaugment, --crop-scale"),
    ):
        if refused:
            raise CommandError(why)


def make_settings(given: dict[str, Any], device: torch.device) -> Settings:
    """The options given, completed by the defaults of the data set and of the device."""
    kind = given.get("data", "digits")
    precision = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(**{"precision": precision, **DEFAULTS[kind], **given, "data": kind})
    source = settings.weights
    if source is not None and source.startswith(("timm:", "hf:")) and "model" not in given:
        settings.model = source if source.startswith("timm:") else f"hf:{source_folder(source)}"
    _refuse(settings, given)
    if not settings.img_size:
        settings.img_size = int(DIGITS_VIT["img_size"])
        if settings.model is not None:
            with torch.device("meta"):
                settings.img_size = input_shape(build_model(settings.model))[1]
    return settings
