"""Files that are either whole or not there, and the states of every random generator."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...weights.files import read_pickle
from ..console import CommandError, refusing

FORMAT = 2
PARTS = {"settings", "classes", "normalization", "data_digest", "history"}


def unwritten(path: Path, error: BaseException) -> OSError:
    """That `path` cannot be written, in one line: torch.save raises a RuntimeError where the disk
    is full, with the system's own error under it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = getattr(cause, "strerror", None) or str(cause or error).split("\n")[0]
    return OSError(f"{path} cannot be written: {reason}")


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call write(file) on a temporary file beside `path`, which then takes the place of `path`.

    Whatever interrupts it, `path` holds either the old content or the new.
    Raises: OSError that names `path`, where it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):
            raise unwritten(path, error) from error
        raise


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


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
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **content}, file))


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
