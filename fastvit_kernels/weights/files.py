"""Checkpoint files -> tensors by name, on the CPU, without trusting the file.

No code from a file runs: .pth goes through torch's weights_only unpickler, .npz loads without
pickles. A header alone allocates nothing: an archive may not unpack to far more than its own size,
an array must be as large as its header says, a tensor may not claim more numbers than it stores.
"""

from __future__ import annotations

import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".npz")
ADVICE = (
    "; if you trust it, read it with torch.load(..., weights_only=False) and pass its state dict"
)
MAX_RATIO = 16  # trained weights do not compress; zeros do, a thousandfold
UNPACKED_FREELY = 2**28  # bytes below which the ratio does not matter


def _check_regular(path: Path) -> None:
    """Raise FileNotFoundError unless path leads to a regular file."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return
        reason: Any = "it is no regular file"
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", error)
    raise FileNotFoundError(f"load_weights: there is no file {path}: {reason}")


def _check_archive(path: Path) -> None:
    """Raise ValueError if a zip archive claims to unpack to far more than its own size."""
    size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = sum(m.compress_size for m in members)
    unpacked = sum(m.file_size for m in members)
    if packed > size:
        raise ValueError(f"its directory claims {packed} bytes in a file of {size}")
    if unpacked > max(MAX_RATIO * size, UNPACKED_FREELY):
        raise ValueError(f"its {size} bytes claim to unpack to {unpacked}, more than weights do")


def _read_npz(path: Path) -> dict[str, Any]:
    import numpy as np

    _check_archive(path)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read_header = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read_header(file)
                held = member.file_size - file.tell()
            if dtype.hasobject:
                raise ValueError(f"{member.filename} holds Python objects, which are not read")
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held:
                raise ValueError(
                    f"{member.filename} must hold {held} bytes, its header says {dtype} {shape}"
                )
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def read_pickle(path: Path, advice: str = "") -> Any:
    """What torch.save wrote, read by torch's weights_only unpickler.

    Raises: ValueError with the reason, and `advice` where it holds more than tensors.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        _check_archive(path)
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch's own message advises trusting it, or is a bare number
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if found is None:
            raise ValueError("it is not a checkpoint of torch.save") from error
        raise ValueError(f"it holds more than tensors ({found[1]}){advice}") from error
    for name, x in _tensors(contents):
        if x.layout is torch.strided and not x.is_meta and not x.is_nested:  # else refused later
            held = x.untyped_storage().nbytes() // max(x.element_size(), 1)
            if x.numel() > held:
                raise ValueError(f"{name!r} claims {tuple(x.shape)} and holds {held} numbers")
    return contents


def _tensors(contents: Any) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor in nested mappings, which may contain each other or themselves."""
    seen: set[int] = set()
    waiting = [contents]
    while waiting:
        mapping = waiting.pop()
        if not isinstance(mapping, Mapping) or id(mapping) in seen:
            continue
        seen.add(id(mapping))
        for name, x in mapping.items():
            if isinstance(x, Tensor):
                yield name, x
            else:
                waiting.append(x)


def read_file(path: Path) -> Any:
    """The contents of a checkpoint file.

    Raises: FileNotFoundError; ValueError with the reason if the file cannot be read.
    """
    _check_regular(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        wanted = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise ValueError(f"load_weights: {path} must end in {wanted}")
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        if suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return _read_npz(path) if suffix == ".npz" else read_pickle(path, ADVICE)
    except (ImportError, PermissionError):
        raise
    except Exception as error:  # each format raises its own
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"load_weights: cannot read {path}: {reason}") from error
