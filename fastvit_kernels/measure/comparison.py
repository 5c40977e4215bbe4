"""What fk.compare found: a table, a line to quote, a CSV and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..runtime.files import write_atomically, write_text
from .gate import OK


@dataclass(frozen=True)
class Row:
    """What one way of running the model gave. Times are medians of a step, in ms.

    Attributes:
        images_per_s: of the first tensor's first axis.
        peak_mib: memory at the peak of a step above what stays; None on a CPU.
        host_ms: until the host has queued a step; None on a CPU.
        speedup: eager's time over this one's; None with wrong numbers, where a way of ours ran no
            kernel, or where one has no time. `speedup_p20` and `speedup_p80` are its spread.
        loss_gap: the largest difference from eager's loss over the first steps.
        kernels: whether any of our kernels ran.
        status, note: "ok", or what went wrong.
    """

    way: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    images_per_s: float | None = None
    peak_mib: float | None = None
    host_ms: float | None = None
    speedup: float | None = None
    speedup_p20: float | None = None
    speedup_p80: float | None = None
    loss_gap: float | None = None
    kernels: bool = False
    status: str = OK
    note: str = ""

    @property
    def within_noise(self) -> bool:
        """Whether the spread of the ratio holds 1."""
        low, high = self.speedup_p20, self.speedup_p80
        return low is not None and high is not None and low <= 1 <= high

    @property
    def ratio(self) -> str:
        """ "1.31x (1.28 to 1.35)", "within the noise", or "-"."""
        if self.speedup is None:
            return "-"
        if self.within_noise:
            return "within the noise"
        return f"{self.speedup:.2f}x ({self.speedup_p20:.2f} to {self.speedup_p80:.2f})"


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured. Prints as a table, then a line to quote."""

    model: str
    machine: Mapping[str, str]
    mode: str
    rows: list[Row]
    interrupted: bool = False

    def __str__(self) -> str:
        titles = ("", "ms", "images/s", "peak MiB", "against eager", "loss gap to eager")
        table = [titles, *map(self._cells, self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(titles))]
        lines = []
        for cells, row in zip(table, [None, *self.rows], strict=True):
            line = "  ".join(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))
            said = [row.status] * (row.status != OK) + [row.note] * bool(row.note) if row else []
            lines.append(f"{cells[0]:{widths[0]}}  {line}  {': '.join(said)}".rstrip())
        return "\n".join([*lines, "", self.line])

    @staticmethod
    def _cells(row: Row) -> tuple[str, ...]:
        def cell(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        ms = cell(row.ms, ".4g")
        if row.ms_p20 is not None:
            ms += f" ({row.ms_p20:.4g} to {row.ms_p80:.4g})"
        rate, peak = cell(row.images_per_s, ",.0f"), cell(row.peak_mib, ",.0f")
        return row.way, ms, rate, peak, row.ratio, cell(row.loss_gap, ".1e")

    @property
    def line(self) -> str:
        """One line that says what was measured, where: to paste into an issue."""
        where = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        what = f"{self.model}, {self.mode}: {self._told()} ({where})"
        return f"{what}; interrupted" if self.interrupted else what

    def _told(self) -> str:
        clear = [r for r in self.rows if r.speedup and not r.within_noise]
        best = max(clear, key=lambda r: r.speedup or 0, default=None)
        if best is not None:
            return f"{best.way} {best.ratio} of eager"
        if not any(r.kernels for r in self.rows):
            return "none of our kernels ran, so nothing of ours is compared"
        return "no difference beyond the noise"

    def save(self, folder: str | Path) -> list[Path]:
        """Write compare.csv and, where matplotlib is installed, compare.png into a folder."""
        about = {"model": self.model, "mode": self.mode, **self.machine}
        rows = [{**about, **asdict(row)} for row in self.rows]
        path, text = Path(folder) / "compare.csv", io.StringIO()
        path.parent.mkdir(parents=True, exist_ok=True)
        table = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(path, text.getvalue())
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            return [path]
        figure = Figure((8, 1.6 + 0.5 * len(rows)), layout="constrained")
        picture = path.with_suffix(".png")
        self.draw(figure.subplots())
        write_atomically(picture, lambda file: figure.savefig(file, format="png", dpi=150))
        return [path, picture]

    def draw(self, axes: Any) -> None:
        """A bar a way with its spread and its label."""
        rows = [row for row in self.rows if row.ms is not None]
        times = [row.ms for row in rows]
        spreads = [(r.ms - r.ms_p20, r.ms_p80 - r.ms) for r in rows]  # type: ignore[operator]
        bars = axes.barh([r.way for r in rows], times, xerr=list(zip(*spreads, strict=True)))
        labels = [f"{r.ms:.4g} ms" + (f", {r.ratio}" if r.speedup else "") for r in rows]
        axes.bar_label(bars, labels, padding=6)
        axes.margins(x=0.45)  # room for the labels
        axes.invert_yaxis()
        axes.set(xlabel="ms a step: median, p20 to p80; less is better")
        ran = any(r.kernels for r in rows)
        told = "" if ran else "\nPyTorch runs all of it here: none of our kernels ran"
        axes.set_title(f"{self.model}: {self.mode}\n{self.machine['device']}{told}", fontsize=10)
