"""The folder of a run: the names of its files, which folder is free, and which one goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..console import CommandError
from . import checkpoint
from .settings import Settings, flag_of, make_settings, read_settings

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.csv"
WEIGHTS, SUMMARY = "weights.pth", "summary.json"
CURVES, CONFUSION, ATTENTION = "curves.png", "confusion.png", "attention.png"
WRITTEN = (CHECKPOINT, METRICS, WEIGHTS, SUMMARY, CURVES, CONFUSION, ATTENTION)


def _latest_folder(name: str) -> Path:
    def number(folder: Path) -> int:
        return int(folder.name.removeprefix(name).lstrip("-") or 1)

    pattern = re.compile(rf"{name}(-\d+)?")
    found = [
        path for path in Path("runs").glob("*")
        if pattern.fullmatch(path.name) and (path / CHECKPOINT).exists()
    ]  # fmt: skip
    if not found:
        raise CommandError(f"there is no run of --data {name} in runs/; name its folder with --out")
    return max(found, key=number)


def _resumed_settings(folder: Path, given: dict[str, Any]) -> Settings:
    settings = read_settings(checkpoint.load(folder / CHECKPOINT), folder / CHECKPOINT)
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
    """The run folder and its settings.

    Args:
        given: the settings that the command line gives.
        out: the folder that it names, if any; else the first of runs/NAME, runs/NAME-2, ... that is
            free, or the last that holds a run where one goes on.
    """
    name = given.get("data", "digits")
    if resume:
        folder = out or _latest_folder(name)
        return folder, _resumed_settings(folder, given)
    settings = make_settings(given, device)
    folder, number = out or Path("runs") / name, 1
    while out is None and folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    if taken := [n for n in WRITTEN if (folder / n).exists()]:
        raise CommandError(
            f"{folder} holds a run already ({taken[0]}); go on with it with --resume --out "
            f"{folder}, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--out {folder} is not a folder")
    return folder, settings
