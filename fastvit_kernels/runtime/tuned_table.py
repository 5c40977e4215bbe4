"""The user's table of tuned launch configs: one JSON file a GPU, in the user's cache folder.

A config in a file counts only where it is one that ships (`ConfigTable.configs`) and fits its key:
a file can choose between configs that are tested, never bring one of its own. A file that is
damaged or was measured elsewhere is ignored as a whole, with one warning.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .backend import Gpu
from .configs import TABLES, Key, Tuned
from .files import write_text
from .triton import triton
from .version import __version__

FORMAT = 2


class TableError(ValueError):
    """Why a file cannot be used; the text completes "the tuned configs in FILE are ignored: "."""


@dataclass(frozen=True)
class Entry:
    """What was measured for one decision; `config` by field names, as in the file."""

    table: str
    key: Key
    config: Mapping[str, int | str | bool]
    default_us: float
    config_us: float


def table_path(gpu: Gpu) -> Path:
    """Where the table of a GPU is: ~/.cache/fastvit_kernels/nvidia-h200-sm_90.json."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return Path(base) / "fastvit_kernels" / f"{name}-{gpu.arch}.json"


def _origin(gpu: Gpu) -> dict[str, Any]:
    """What must agree between the process that measured and the one that reads."""
    versions = {"fastvit_kernels": __version__, "triton": str(triton.__version__)}
    return {"format": FORMAT, **versions, "gpu": gpu.name, "arch": gpu.arch}


def save(gpu: Gpu, entries: Iterable[Entry]) -> None:
    """Write the table of this GPU."""
    content = {**_origin(gpu), "entries": [asdict(entry) for entry in entries]}
    table_path(gpu).parent.mkdir(parents=True, exist_ok=True)
    write_text(table_path(gpu), json.dumps(content, indent=1))


def entry(gpu: Gpu, raw: Any) -> tuple[Entry, Any]:
    """One entry of a file, checked, and the shipped config that it names."""
    try:
        found = Entry(**{**raw, "key": tuple(raw["key"])})
        table = TABLES[found.table]
        shipped = next(c for c in table.configs if repr(c._asdict()) == repr(found.config))
        assert table.fits(gpu, shipped, *found.key), "it does not fit"
        return found, shipped
    except Exception as error:  # a wrong table or key may raise anything
        raise TableError(f"{str(raw)[:120]} is no entry that ships: {error!r}") from error


def read(gpu: Gpu) -> tuple[list[Entry], Tuned]:
    """The table of this GPU: its entries, and (table, key) -> config; empty where there is none.

    Raises: TableError where the file is damaged or was measured elsewhere.
    """
    if not table_path(gpu).exists():
        return [], {}
    try:
        content = json.loads(table_path(gpu).read_text())
        entries = list(content.pop("entries"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise TableError(f"it cannot be read ({str(error)[:80]})") from error
    if content != _origin(gpu):
        raise TableError(f"it is of {content}, this is {_origin(gpu)}")
    found = [entry(gpu, one) for one in entries]
    return [one for one, _ in found], {(one.table, one.key): config for one, config in found}


def load(gpu: Gpu) -> Tuned:
    """The tuned configs of this GPU; a file that cannot be used is a warning."""
    try:
        return read(gpu)[1]
    except TableError as error:
        text = f"the tuned configs in {table_path(gpu)} are ignored: {error}. Remove the file, or"
        warnings.warn(f"{text} run `fastvit-kernels tune` again.", stacklevel=2)
        return {}
