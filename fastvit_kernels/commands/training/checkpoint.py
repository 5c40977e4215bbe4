"""The folder of a run: its files, its checkpoint, the states of every random generator in it."""

from __future__ import annotations

import random
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from ...runtime import files
from ...weights.files import read_pickle
from ..console import CommandError, refusing
from .settings import Settings, flag_of, make_settings

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.csv"
WEIGHTS, SUMMARY = "weights.pth", "summary.json"
CURVES, CONFUSION, ATTENTION = "curves.png", "confusion.png", "attention.png"
WRITTEN = (CHECKPOINT, METRICS, WEIGHTS, SUMMARY, CURVES, CONFUSION, ATTENTION)
FORMAT = 2
PARTS = {"settings", "classes", "normalization", "data_digest", "history"}


def rng_state() -> dict[str, Any]:
    """The states of every generator that training may draw from: python, numpy, torch, CUDA."""
    import numpy as np

    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`. CUDA states are set only where the number of devices is the same."""
    import numpy as np

    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically: tensors and plain Python values, which `load` reads safely."""
    files.write_atomically(path, lambda file: torch.save({"format": FORMAT, **content}, file))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint of `save` onto the CPU; nothing in the file is executed."""
    if not path.is_file():
        raise CommandError(f"there is no checkpoint {path}")
    with refusing(f"{path} cannot be read as a checkpoint", Exception):
        content = read_pickle(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CommandError(f"{path} is not a checkpoint of fastvit-kernels train")
    if lacking := sorted(PARTS - content.keys()):
        raise CommandError(f"{path} cannot be read as a checkpoint: it lacks {lacking[0]}")
    return content


def read_settings(content: dict[str, Any], path: Path) -> Settings:
    """The settings of a checkpoint's content."""
    with refusing(f"{path} cannot be read as a checkpoint", TypeError):
        return Settings(**content["settings"])


def _resumed_settings(folder: Path, given: dict[str, Any]) -> Settings:
    settings = read_settings(load(folder / CHECKPOINT), folder / CHECKPOINT)
    for name, value in given.items():
        if value != getattr(settings, name):
            raise CommandError(
                f"{flag_of(name)} {value} differs from the {getattr(settings, name)} of the run "
                f"in {folder}; --resume keeps a run's settings, --out starts another run"
            )
    return settings


def open_run(
    given: dict[str, Any], out: Path | None, resume: bool, device: torch.device
) -> tuple[Path, Settings]:
    """The run folder and its settings, some of them given. A new run without `out` gets the first
    of runs/NAME, runs/NAME-2, ... that is free."""
    if resume:
        if out is None:
            raise CommandError("--resume needs --out, the folder of the run")
        return out, _resumed_settings(out, given)
    settings = make_settings(given, device)
    first = Path("runs", settings.data)
    numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
    folder = out or next(f for f in chain([first], numbered) if not f.exists())
    if taken := [n for n in WRITTEN if (folder / n).exists()]:
        raise CommandError(
            f"{folder} holds a run already ({taken[0]}); go on with it with --resume --out "
            f"{folder}, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--out {folder} is not a folder")
    return folder, settings
