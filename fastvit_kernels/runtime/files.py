"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def unwritten(path: Path, error: BaseException) -> OSError:
    """That `path` cannot be written, in one line: torch.save raises a RuntimeError where the disk
    is full, with the system's own error under it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = getattr(cause, "strerror", None) or str(cause or error).split("\n")[0]
    return OSError(f"{path} cannot be written: {reason}")


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call write(file) on a temporary file next to `path`, which then takes the place of `path`.

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
