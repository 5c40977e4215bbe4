"""ran.csv: what `python -m tests.machine device --record` ran last, and of which sources."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import fastvit_kernels
from fastvit_kernels.runtime.triton import triton

TABLE = Path(__file__).with_name("ran.csv")


class Ran(NamedTuple):
    target: str
    precision: str
    kind: str  # of kernels.py
    passed: int
    failed: int
    launches: int
    accesses: int  # to global memory, each looked at
    triton: str
    sources: str  # digest of the package's ops

    @property
    def place(self) -> tuple[str, str, str]:
        return self[:3]


def digest() -> str:
    """Of the kernels, their configs and launchers."""
    ops = Path(fastvit_kernels.__file__).parent / "ops"
    text = b"".join(path.read_bytes() for path in sorted(ops.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def versions() -> tuple[str, str]:
    return triton.__version__, digest()


def read(path: Path = TABLE) -> list[Ran]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        found = list(csv.reader(file))[1:]
    return [Ran(*row[:3], *map(int, row[3:7]), *row[7:]) for row in found]  # pyright: ignore


def write(rows: Iterable[Ran], path: Path = TABLE) -> None:
    """Put these rows in the place of former ones."""
    by_place = {row.place: row for row in [*read(path), *rows]}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Ran._fields)
        writer.writerows(sorted(by_place.values()))
