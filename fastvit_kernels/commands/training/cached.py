"""Repositories of the Hub that are on the disk already: nothing here opens a connection."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..console import CommandError

_FILES = ("model.safetensors", "pytorch_model.bin")


def snapshot(repository: str) -> Path:
    """The folder of a repository in the cache of huggingface_hub, at its branch main.

    Raises: CommandError where it has not been fetched.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{repository.replace('/', '--')}"
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        found = None
    if found is None or not found.is_dir():
        raise CommandError(
            f"{repository} is not in {cache}, and this command downloads nothing; fetch it first: "
            f"hf download {repository}"
        )
    return found


def source_folder(source: str) -> Path:
    """The folder of hf:NAME: one on the disk, or a repository in the cache."""
    name = source.partition(":")[2]
    return Path(name).resolve() if Path(name).is_dir() else snapshot(name)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a repository's folder, all shards where it has several.

    Raises: CommandError where there are none.
    """
    for name in _FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text())["weight_map"].values())
            return [folder / shard for shard in sorted(shards)]
    raise CommandError(f"{folder} holds none of {', '.join(_FILES)}")
