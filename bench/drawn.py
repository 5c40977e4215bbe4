"""What is made of rows that are there: pictures, ratios of two runs, and the lines about them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.compare import newly_failed, ratios, table
from bench.roofs import roofs_of
from bench.rows import Row, conditions, read_rows
from bench.session import describe
from fastvit_kernels.commands.console import CommandError, require
from fastvit_kernels.commands.training.checkpoint import write_text


def draw(rows: Sequence[Row], folder: Path, console: Any) -> None:
    """Every picture that the rows allow, and their names."""
    try:
        drawn = plot.draw_all(rows, roofs_of(rows), folder)
    except CommandError as error:
        console.print(f"no pictures: {error}")
        return
    console.print("drawn: " + (", ".join(str(p) for p in drawn) or "nothing, for want of rows"))


def run_plot(arguments: argparse.Namespace, console: Any) -> int:
    rows = _read(arguments.folder)
    folder = arguments.folder if arguments.folder.is_dir() else arguments.folder.parent
    write_text(folder / report.SUMMARY, report.summary(rows))
    draw(rows, folder, console)
    return 0


def run_compare(arguments: argparse.Namespace, console: Any) -> int:
    a, b = _read(arguments.a), _read(arguments.b)
    found, threshold = ratios(a, b), arguments.threshold
    shown = require("rich.table", "rich").Table(box=None, padding=(0, 1, 0, 0))
    for title in ("row", "A, ms", "B, ms", "B / A", "spread", ""):
        shown.add_column(title, overflow="fold")
    for line in table(found, threshold):
        shown.add_row(*line)
    console.print(f"A: {conditions(a)}\nB: {conditions(b)}", soft_wrap=True)
    console.print(shown)
    lost = newly_failed(a, b)
    for row in lost:
        console.print(describe(row), markup=False, soft_wrap=True)
    slower = sum(r.is_regression(threshold) for r in found)
    console.print(
        f"{len(found)} rows in both; {slower} slower by more than {100 * threshold:.0f}%; "
        f"{len(lost)} that were measured in A and failed in B"
    )
    return 1 if slower or lost else 0


def _read(path: Path) -> list[Row]:
    try:
        return read_rows(path)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
