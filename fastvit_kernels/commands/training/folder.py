"""The folder of a run: which one is free, which one goes on, and the names of its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..console import CommandError
from . import checkpoint, sharded
from .settings import Settings, flag_of, make_settings, read_settings

CHECKPOINT, METRICS = checkpoint.NAME, "metrics.csv"
WEIGHTS, SUMMARY = "weights.pth", "summary.json"
CURVES, CONFUSION, ATTENTION = "curves.png", "confusion.png", "attention.png"
WRITTEN = (CHECKPOINT, METRICS, WEIGHTS, SUMMARY, CURVES, CONFUSION, ATTENTION)


def read_run(folder: Path) -> tuple[dict[str, Any], Path]:
    """The newer checkpoint of a run folder without its shards, and its path: checkpoint.pt of one
    process, or the folder of several."""
    found = sharded.latest(folder)
    if found is None:
        return checkpoint.load(folder / CHECKPOINT), folder / CHECKPOINT
    content = checkpoint.load(found / sharded.RUN)
    if (folder / CHECKPOINT).is_file():
        alone = checkpoint.load(folder / CHECKPOINT)
        if len(alone["history"]) > len(content["history"]):
            return alone, folder / CHECKPOINT
    return content, found


def _free_folder(name: str) -> Path:
    """runs/<name>, or the first of runs/<name>-2, -3, ... that holds no run."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _latest_folder(name: str) -> Path:
    def number(folder: Path) -> int:
        return int(folder.name.removeprefix(name).lstrip("-") or 1)

    pattern = re.compile(rf"{name}(-\d+)?")
    found = [
        path for path in Path("runs").glob("*")
        if pattern.fullmatch(path.name) and ((path / CHECKPOINT).exists() or sharded.latest(path))
    ]  # fmt: skip
    if not found:
        raise CommandError(f"there is no run of --data {name} in runs/; name its folder with --out")
    return max(found, key=number)


def _resumed_settings(path: Path, content: dict[str, Any], given: dict[str, Any]) -> Settings:
    settings = read_settings(content, path)
    if "data_dir" in given:
        given = {**given, "data_dir": str(Path(given["data_dir"]).resolve())}
    for name, value in given.items():
        if value != getattr(settings, name):
            raise CommandError(
                f"{flag_of(name)} {value} differs from the {getattr(settings, name)} of the run "
                f"in {path.parent}; --resume keeps a run's settings, --out starts another run"
            )
    return settings


def open_run(
    given: dict[str, Any], out: Path | None, resume: bool, device: torch.device
) -> tuple[Path, Settings, Path | None]:
    """The run folder, its settings, and the path of the checkpoint where the run goes on.

    Args:
        given: the settings that the command line gives.
        out: the folder that it names, if any.
    """
    name = given.get("data", "digits")
    if resume:
        folder = out or _latest_folder(name)
        content, path = read_run(folder)
        return folder, _resumed_settings(path, content, given), path
    settings = make_settings(given, device)
    folder = out or _free_folder(name)
    taken = [n for n in WRITTEN if (folder / n).exists()]
    if (shards := sharded.latest(folder)) is not None:
        taken.append(shards.name)
    if taken:
        raise CommandError(
            f"{folder} holds a run already ({taken[0]}); go on with it with --resume --out "
            f"{folder}, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--out {folder} is not a folder")
    return folder, settings, None
