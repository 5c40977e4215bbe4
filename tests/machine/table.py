"""resources.csv: what each kernel takes from the chip, written and read; docs/resources.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.machine.aot import TARGETS

from .examine import Examined
from .resources import GATED

Key = tuple[str, str, str, str]  # arch, kernel, config, pointers
COLUMNS = (
    "arch",
    "kernel",
    "config",
    "pointers",
    "registers",
    "spills",
    "shared",
    "warps/SM",
    "tensor cores",
    "async copies",
    "hot loop",
    "waits/HGMMA",
    "useful",
)


def _key(kernel: Examined) -> Key:
    """Elsewhere than on GATED a kernel has one row, of all its configs."""
    if kernel.arch in GATED:
        return kernel.arch, kernel.kernel, kernel.config, kernel.dtypes
    return kernel.arch, kernel.kernel, "", ""


def worst(kernels: Iterable[Examined]) -> dict[Key, Examined]:
    """By row of the table: specialisations that differ in an argument's value alone are one row.

    The hot loop of a row is the longest, in whatever order they were compiled.
    """
    rows: dict[Key, Examined] = {}
    for kernel in sorted(kernels, key=_by_loop, reverse=True):
        row = rows.get(_key(kernel), kernel)
        warps = [w for w in (row.warps_per_sm, kernel.warps_per_sm) if w is not None]
        rows[_key(kernel)] = replace(
            row,
            registers=max(row.registers, kernel.registers),
            spills=max(row.spills, kernel.spills),
            shared=max(row.shared, kernel.shared),
            warps_per_sm=min(warps) if warps else None,
            useful=min((u for u in (row.useful, kernel.useful) if u is not None), default=None),
        )
    order = list(TARGETS)
    return dict(sorted(rows.items(), key=lambda row: (order.index(row[0][0]), row[0])))


def _by_loop(kernel: Examined) -> tuple[float, str, str, str, str]:
    cycles = float(kernel.hot_loop.rpartition(" ")[2] or 0)
    return cycles, kernel.hot_loop, kernel.products, kernel.tensor_cores, kernel.copies


def write_table(kernels: Iterable[Examined], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for key, k in worst(kernels).items():
            warps = "" if k.warps_per_sm is None else k.warps_per_sm
            model = k.hot_loop, k.products, "" if k.useful is None else f"{k.useful:.2f}"
            rows.writerow(
                (*key, k.registers, k.spills, k.shared, warps, k.tensor_cores, k.copies, *model)
            )


def read_table(path: Path) -> dict[Key, dict[str, str]]:
    """The rows by their first four columns. Raises: ValueError for another table."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError(f"it has the columns {', '.join(rows.fieldnames or ())}")
        return {tuple(row[name] for name in COLUMNS[:4]): row for row in rows}  # pyright: ignore


def compare(
    kernels: Iterable[Examined], recorded: dict[Key, dict[str, str]], whole: bool = True
) -> tuple[list[str], list[str]]:
    """(regressions, remarks) of what was compiled for GATED against the rows of a table.

    Args:
        whole: rows of the table that were not compiled are gone.
    """
    regressions, remarks = [], []
    rows = {key: k for key, k in worst(kernels).items() if key[0] in GATED}
    for key, kernel in rows.items():
        name = f"{key[0]} {key[1]} [{key[2]}; {key[3]}]"
        if key not in recorded:
            remarks.append(f"not in the table: {name}")
            continue
        pairs = [(what, int(recorded[key][what]), getattr(kernel, what)) for what in COLUMNS[4:7]]
        changes = [(what, old, new) for what, old, new in pairs if old != new]
        text = ", ".join(f"{what} {old} -> {new}" for what, old, new in changes)
        if any(new > old for _, old, new in changes):
            regressions.append(f"{name}: {text}")
        elif changes:
            remarks.append(f"better than the table: {name}: {text}")
    compiled = {key[0] for key in rows}
    gone = (key for key in recorded if whole and key[0] in compiled and key not in rows)
    remarks += [f"no longer compiled: {' '.join(key)}" for key in gone]
    return regressions, remarks
