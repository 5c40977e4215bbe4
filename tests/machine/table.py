"""resources.csv: what each kernel takes from the chip, written and read; docs/resources.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.machine.aot import TARGETS

from .examine import Examined
from .resources import GATED

COLUMNS = (
    *("arch", "kernel", "config", "pointers", "registers", "spills", "shared", "warps/SM"),
    *("tensor cores", "async copies", "hot loop", "waits/HGMMA", "useful", "digest"),
)
Row = dict[str, str]  # by column


def row_of(k: Examined) -> Row:
    warps = "" if k.warps_per_sm is None else k.warps_per_sm
    useful = "" if k.useful is None else f"{k.useful:.2f}"
    values = k.arch, k.kernel, k.config, k.dtypes, k.registers, k.spills, k.shared, warps
    values += k.tensor_cores, k.copies, k.hot_loop, k.products, useful, k.digest
    return dict(zip(COLUMNS, map(str, values), strict=True))


def write_table(kernels: Iterable[Examined], path: Path, kept: Iterable[Row] = ()) -> None:
    """A row for each specialisation, with those of another table that are kept."""
    rows, order = [*map(row_of, kernels), *kept], list(TARGETS)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (order.index(row["arch"]), *row.values())))


def read_table(path: Path) -> dict[str, Row]:
    """The rows by their digests. Raises: ValueError for another table."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError(f"it has the columns {', '.join(rows.fieldnames or ())}")
        return {row["digest"]: row for row in rows}


def _worst(rows: Iterable[Row]) -> dict[tuple[str, ...], dict[str, int]]:
    """Of GATED, by kernel and config: specialisations differ in an argument's value alone."""
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        if row["arch"] in GATED:
            taken = found.setdefault(tuple(row[name] for name in COLUMNS[:4]), {})
            for what in COLUMNS[4:7]:
                taken[what] = max(taken.get(what, 0), int(row[what]))
    return found


def compare(
    kernels: Iterable[Examined], recorded: Iterable[Row], whole: bool = True
) -> tuple[list[str], list[str]]:
    """(regressions, remarks) of what was compiled against the rows of a table; where it is the
    `whole`, rows that were not compiled are gone."""
    regressions, remarks = [], []
    rows, former = _worst(map(row_of, kernels)), _worst(recorded)
    for key, new in rows.items():
        name = f"{key[0]} {key[1]} [{key[2]}; {key[3]}]"
        old = former.get(key)
        if old is None:
            remarks.append(f"not in the table: {name}")
            continue
        text = ", ".join(f"{w} {old[w]} -> {new[w]}" for w in COLUMNS[4:7] if old[w] != new[w])
        if any(new[what] > old[what] for what in COLUMNS[4:7]):
            regressions.append(f"{name}: {text}")
        elif text:
            remarks.append(f"better than the table: {name}: {text}")
    compiled = {key[0] for key in rows}
    gone = (key for key in former if whole and key[0] in compiled and key not in rows)
    remarks += [f"no longer compiled: {' '.join(key)}" for key in gone]
    return regressions, remarks


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a table in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
