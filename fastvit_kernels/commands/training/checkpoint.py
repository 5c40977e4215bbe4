"""The checkpoint of a run, and the states of every random generator."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ...runtime import files
from ...weights.files import read_pickle
from ..console import CommandError, refusing

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
    """Read a checkpoint of `save` onto the CPU; nothing in the file is executed.

    Raises: CommandError where the file is missing, damaged, or something else.
    """
    if not path.is_file():
        raise CommandError(f"there is no checkpoint {path}")
    with refusing(f"{path} cannot be read as a checkpoint", Exception):
        content = read_pickle(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CommandError(f"{path} is not a checkpoint of fastvit-kernels train")
    if lacking := sorted(PARTS - content.keys()):
        raise CommandError(f"{path} cannot be read as a checkpoint: it lacks {lacking[0]}")
    return content
