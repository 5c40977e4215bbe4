"""A measurement is a `Row`; a run is one CSV in long form, written row by row."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pandas as pd
import torch

from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.measure.gate import ERROR, FAILED, OK
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.runtime.files import unwritten, write_text
from fastvit_kernels.runtime.triton import HAS_TRITON, triton
from tests.check.results_cache import sources_hash

RESULTS = "results.csv"
TIMEOUT = "not finished"
ROOF = "roof"  # an op of rows
TRYING = "trying.json"  # there while a case is at work
COMMIT = "FASTVIT_KERNELS_COMMIT"  # names the commit where there is no git
NAN = math.nan
Frame = Any  # pandas.DataFrame: checkers know no types of its columns
Key = tuple[str, str, str, str, str]  # op, provider, shape, dtype, mode


@dataclass(frozen=True)
class Row:
    """One provider on one shape. Times in ms, medians; NaN where it does not apply.

    `ms` is the time between two CUDA events around an eager call, `graph_ms` the same through the
    replay of a CUDA graph, without host time. What is not right has neither.
    """

    op: str
    provider: str
    shape: str
    dtype: str
    mode: str
    T: int = 0
    status: str = OK
    note: str = ""
    error: float = NAN  # the largest against float64, as a share of what the 2x rule allows
    ms: float = NAN
    ms_p20: float = NAN
    ms_p80: float = NAN
    graph_ms: float = NAN
    graph_ms_p20: float = NAN
    graph_ms_p80: float = NAN
    samples: int = 0
    tflops: float = NAN  # TFLOP/s
    gbps: float = NAN  # GB/s
    roof: str = ""  # which roof is nearer: copy or matmul
    roof_share: float = NAN  # time at the roof / time
    peak_mib: float = NAN  # of an op above its inputs; of a model, all of it
    images_per_s: float = NAN
    speedup: float = NAN  # eager's time / this one's, of the same turns
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    sources: str = ""  # a hash of what is measured and of what measures it

    @property
    def key(self) -> Key:
        return (self.op, self.provider, self.shape, self.dtype, self.mode)

    @property
    def device_ms(self) -> float:
        """The time without the host's share, where it was measured."""
        return self.ms if math.isnan(self.graph_ms) else self.graph_ms

    @property
    def is_ours(self) -> bool:
        return self.provider.startswith(OURS)

    def timed(self, times: list[float]) -> Row:
        """With median and spread of these samples."""
        ms, p20, p80 = spread(times)
        return replace(self, ms=ms, ms_p20=p20, ms_p80=p80, samples=len(times))

    def rated(self, flops: float, bytes_: float) -> Row:
        """With its FLOP and bytes a second, without the host's share."""
        ms = self.device_ms
        return replace(self, tflops=flops / ms / 1e9, gbps=bytes_ / ms / 1e6)

    def with_speedup(self, baseline: Row | None) -> Row:
        """With the baseline's time over its own, graph by graph or call by call; none where one of
        them was not compared with float64."""
        if baseline is None or math.isnan(self.error + baseline.error):
            return self
        speedup = baseline.graph_ms / self.graph_ms
        return replace(self, speedup=baseline.ms / self.ms if math.isnan(speedup) else speedup)

    def describe(self) -> str:
        where = f"{self.op} {self.shape} {self.dtype} {self.mode}: {self.provider}"
        if math.isnan(self.ms):
            return f"{where}: {self.status} {self.note}"
        told = {
            "ms": self.ms,
            "ms as a graph": self.graph_ms,
            "TFLOP/s": self.tflops,
            "GB/s": self.gbps,
            "images/s": self.images_per_s,
            "x eager's speed": self.speedup,
            "of the error allowed": self.error,
        }
        return f"{where}: " + ", ".join(f"{x:.4g} {n}" for n, x in told.items() if x == x)


OURS = ("ours", "swapped", "backend")  # how names of our providers begin
KEY = ["op", "provider", "shape", "dtype", "mode"]
FIELDS = [field.name for field in dataclasses.fields(Row)]
TEXTS = [field.name for field in dataclasses.fields(Row) if field.type == "str"]


def bad_rows(rows: Iterable[Row]) -> list[Row]:
    """Those that make the exit status 1: a broken 2x rule, and errors of our own kernels."""
    return [r for r in rows if r.status == FAILED or (r.status == ERROR and r.is_ours)]


def as_csv(rows: Iterable[Row], header: bool = True) -> str:
    frame: Frame = pd.DataFrame(list(rows), columns=FIELDS)
    return frame.to_csv(index=False, header=header, float_format="%.6g", lineterminator="\n")


def read_results(path: Path) -> Frame:
    """The rows of a CSV; a line that a crash has torn is left out, of equal keys the last counts.

    Raises: CommandError where the file is not one of ours.
    """
    path = path / RESULTS if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    whole = io.StringIO(text[: text.rfind("\n") + 1])
    try:
        found: Frame = pd.read_csv(whole, dtype=dict.fromkeys(TEXTS, str))
        if missing := set(KEY) - set(found):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except ValueError as error:
        raise CommandError(f"{path} is no result of this benchmark: {error}") from error
    found = found.reindex(columns=FIELDS)
    found[TEXTS] = found[TEXTS].astype(object).fillna("").astype(str)
    return found.drop_duplicates(KEY, keep="last")


def read_rows(path: Path) -> list[Row]:
    lines: Any = read_results(path).to_dict("records")
    return [Row(**line) for line in lines]


class Results:
    """The rows of one output folder: those of a run that is resumed, then the new ones."""

    def __init__(self, folder: Path, resume: bool):
        self.folder, self.path, self._trying = folder, folder / RESULTS, folder / TRYING
        if self.path.exists() and not resume:
            raise CommandError(
                f"{self.path} exists: --resume adds to it, another --out starts anew"
            )
        folder.mkdir(parents=True, exist_ok=True)
        former = read_rows(self.path) if self.path.exists() else []
        # A time of another machine is no peer of this one's, and no roof above it.
        if others := {machine(row) for row in former} - {machine(SimpleNamespace(**environment()))}:
            raise CommandError(f"{self.path} is of {others.pop()}: name another --out")
        self.rows = {row.key: row for row in former}
        # Anew: the columns may have changed, and a crash may have torn the last line.
        write_text(self.path, as_csv(self.rows.values()))
        self._file: TextIO = self.path.open("a", encoding="utf-8", newline="")
        if self._trying.exists():  # a process of a former run ended at these
            note = "the process of a former run ended here"
            for key in self.missing(map(tuple, json.loads(self._trying.read_text()))):
                self.append(Row(*key, status=TIMEOUT, note=note))
        self.tried()

    def append(self, row: Row) -> None:
        """Add a row, on disk before this returns."""
        row = replace(row, **environment())
        self.rows[row.key] = row
        try:
            self._file.write(as_csv([row], header=False))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # or Python says at its end that it cannot be
                self._file.close()
            raise unwritten(self.path, error) from error

    def trying(self, keys: Sequence[Key]) -> None:
        """These are at work now: a process that ends before `tried` leaves a note of them."""
        write_text(self._trying, json.dumps(keys))

    def tried(self) -> None:
        self._trying.unlink(missing_ok=True)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those keys that have no row yet, or one of ours that other sources have measured."""
        here = environment()["sources"]
        return [
            key
            for key in keys
            if (row := self.rows.get(key)) is None or (row.is_ours and row.sources != here)
        ]

    def close(self) -> None:
        self._file.close()


def _first_line(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else "unknown"


def _commit() -> str:
    """By git; where only files have travelled, from the environment."""
    words = ("git", "describe", "--always", "--dirty=+changes", "--exclude=*", "--abbrev=10")
    return os.environ.get(COMMIT) or _first_line(*words, cwd=Path(__file__).parent)


@functools.lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """What a figure depends on besides the code that is measured."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        gpu, driver = f"no GPU, {platform.machine()} CPU", ""
    return dict(
        gpu=gpu,
        driver=driver,
        torch=torch.__version__,
        triton=triton.__version__ if HAS_TRITON else "",
        commit=_commit(),
        sources=sources_hash(),
    )


def machine(row: Any) -> str:
    """What two times must have in common to be compared."""
    names = ("driver", "torch", "triton")
    return ", ".join([row.gpu, *(f"{n} {getattr(row, n) or 'none'}" for n in names)])


def conditions(frame: Frame) -> str:
    """One line for a figure or a table: GPU and versions of its rows."""
    seen = frame[["gpu", "driver", "torch", "triton", "commit", "sources"]].drop_duplicates()
    told = (f"{machine(r)}, commit {r.commit}, sources {r.sources}" for r in seen.itertuples())
    return "; ".join(sorted(told)) or "no rows"
