"""The user's table of tuned launch configs: one JSON file a GPU, in the user's cache folder.

A config in a file counts only where it is one that ships (`ConfigTable.configs`) and fits its key:
a file can choose between configs that are tested, never bring one of its own. A file that is
damaged or was measured elsewhere is ignored as a whole, with one warning.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .backend import Gpu
from .files import write_text
from .tables import TABLES, Key, Tuned
from .triton import triton
from .version import __version__

FORMAT = 2
MAX_BYTES = 4 * 2**20
MAX_MICROSECONDS = 1e9


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
    date: str  # ISO 8601, UTC
    complete: bool = True  # False: the time was over before every config was tried


def cache_folder() -> Path:
    """The platform's folder for what a program may lose: XDG, Library/Caches or LOCALAPPDATA."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the specification: a relative path is to be ignored
            base = os.path.expanduser("~/.cache")
    return Path(base) / "fastvit_kernels"


def table_path(gpu: Gpu) -> Path:
    """Where the table of a GPU is: "nvidia-h200-sm_90.json"."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return cache_folder() / f"{name}-{gpu.arch}.json"


def fields(config: Any) -> dict[str, int | str | bool]:
    """A config, which is a NamedTuple, by its field names."""
    return config._asdict()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _origin(gpu: Gpu) -> dict[str, str]:
    """What must agree between the process that measured and the one that reads."""
    return {
        "fastvit_kernels": __version__,
        "triton": str(triton.__version__),
        "gpu": gpu.name,
        "arch": gpu.arch,
    }


def driver_version() -> str:
    """Of the GPU's driver, for the record; "unknown" where nothing says it."""
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def save(gpu: Gpu, entries: Iterable[Entry]) -> Path:
    """Write the table whole."""
    content = {
        "format": FORMAT,
        **_origin(gpu),
        "torch": torch.__version__,
        "driver": driver_version(),
        "entries": [asdict(entry) for entry in entries],
    }
    path = table_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1))
    return path


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TableError("it is not a regular file")
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        raise TableError(f"it belongs to another user (uid {status.st_uid})")
    if status.st_size > MAX_BYTES:
        raise TableError(f"it has {status.st_size} bytes, at most {MAX_BYTES} are read")


def _text(path: Path) -> str | None:
    """The file's text, None where there is no file."""
    try:
        # O_NONBLOCK: a named pipe in the file's place must not wait for a writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            _check_file(os.fstat(handle))
            content = bytearray()
            while len(content) <= MAX_BYTES and (part := os.read(handle, MAX_BYTES)):
                content += part
        finally:
            os.close(handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TableError(f"it cannot be read ({error.strerror})") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TableError("it is not UTF-8 text") from error


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _content(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise TableError(f"it is not whole JSON ({str(error)[:80]})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise TableError(f"its format is {str(found)[:40]}, wanted {FORMAT}")
    return content


def entry(gpu: Gpu, raw: Any) -> tuple[Entry, Any]:
    """One entry of a file, checked, and the shipped config that it names."""
    names = set(Entry.__dataclass_fields__)
    if not isinstance(raw, dict) or set(raw) != names:
        raise TableError(f"an entry must have {', '.join(sorted(names))}")
    table = TABLES.get(raw["table"]) if isinstance(raw["table"], str) else None
    if table is None:
        raise TableError(f"there is no table {str(raw['table'])[:60]!r}")
    key = raw["key"]
    if not isinstance(key, (list, tuple)) or not all(type(k) in (int, str) for k in key):
        raise TableError(f"a key of {table.name} must be a list of integers and strings")
    wanted = json.dumps(raw["config"], sort_keys=True)  # as text, where 1 is not true
    shipped = [c for c in table.configs if json.dumps(fields(c), sort_keys=True) == wanted]
    if not shipped:
        raise TableError(f"{table.name} has no config {wanted[:120]}")
    try:
        fits = table.fits(gpu, shipped[0], *key)
    except Exception as error:  # whatever a key that is none does to the op's own function
        raise TableError(f"{str(key)[:80]} is no key of {table.name}") from error
    if not fits:
        raise TableError(f"{wanted[:120]} of {table.name} does not fit {str(key)[:80]}")
    for name in ("default_us", "config_us"):
        value = raw[name]
        if type(value) not in (int, float) or not 0 < value < MAX_MICROSECONDS:
            raise TableError(f"{name} must be positive microseconds, got {str(value)[:40]}")
    if not (isinstance(raw["date"], str) and isinstance(raw["complete"], bool)):
        raise TableError("date must be text and complete true or false")
    return Entry(**{**raw, "key": tuple(key)}), shipped[0]


def read(gpu: Gpu) -> tuple[list[Entry], Tuned]:
    """The table of this GPU: its entries, and (table, key) -> config; empty where there is none.

    Raises: TableError where the file is damaged or was measured elsewhere.
    """
    text = _text(table_path(gpu))
    if text is None:
        return [], {}
    content = _content(text)
    for name, here in _origin(gpu).items():
        if content.get(name) != here:
            raise TableError(f"it is of {name} {str(content.get(name))[:60]!r}, this is {here!r}")
    if not isinstance(content.get("entries"), list):
        raise TableError("it has no list of entries")
    entries: list[Entry] = []
    tuned: dict[tuple[str, Key], Any] = {}
    for raw in content["entries"]:
        one, config = entry(gpu, raw)
        if (one.table, one.key) in tuned:
            raise TableError(f"{one.table} has two entries for {str(one.key)[:80]}")
        entries.append(one)
        tuned[one.table, one.key] = config
    return entries, tuned


class Journal:
    """What is being tried, on disk: a config that ends the process is left out next time."""

    def __init__(self, gpu: Gpu):
        self.path = table_path(gpu).with_suffix(".trying")
        self.fatal: list[str] = []
        try:
            text = _text(self.path) or ""
        except TableError:
            text = ""
        self.fatal = [line for line in text.splitlines() if line]

    @staticmethod
    def _line(table: str, config: Any) -> str:
        return json.dumps([table, fields(config)])

    def _write(self, lines: list[str]) -> None:
        if not lines:
            self.path.unlink(missing_ok=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "\n".join(lines))

    def is_fatal(self, table: str, config: Any) -> bool:
        """Whether the process ended while this config was tried."""
        return self._line(table, config) in self.fatal

    def trying(self, table: str, config: Any) -> None:
        """Write down what comes next."""
        self._write([*self.fatal, self._line(table, config)])

    def survived(self) -> None:
        """What was written down last did no harm."""
        self._write(self.fatal)


def load(gpu: Gpu) -> Tuned:
    """The tuned configs of this GPU.

    Warns: where there is a file that cannot be used; the shipped configs are then in force.
    """
    try:
        return read(gpu)[1]
    except TableError as error:
        warnings.warn(
            f"the tuned configs in {table_path(gpu)} are ignored: {error}. The shipped ones are "
            "used; `fastvit-kernels tune` measures anew, `fastvit-kernels tune --clear` removes "
            "the file.",
            stacklevel=2,
        )
        return {}
