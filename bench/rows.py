"""A measurement is a `Row`; a run is one CSV in long form, written row by row."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from bench.ops import BASELINE
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.measure.gate import ERROR, FAILED, OK
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.runtime import tuned_table
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.files import unwritten, write_text
from fastvit_kernels.runtime.triton import HAS_TRITON, triton
from tests.check.results_cache import sources_hash

RESULTS = "results.csv"
ELSEWHERE = "results-elsewhere.csv"  # rows of another GPU, driver, torch or triton
TIMEOUT = "not finished"
ROOF = "roof"  # an op of rows
TRYING = "trying.json"  # there while a case is at work
COMMIT = "FASTVIT_KERNELS_COMMIT"  # names the commit where there is no git
Key = tuple[str, str, str, str, str]  # op, provider, shape, dtype, mode


@dataclass(frozen=True)
class Row:
    """One provider on one shape. Times in ms, medians; empty where it does not apply.

    `ms` is the time between two CUDA events around an eager call, `graph_ms` the same through the
    replay of a CUDA graph, without host time.
    """

    op: str
    provider: str
    shape: str
    dtype: str
    mode: str
    T: int = 0
    status: str = OK
    note: str = ""
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    graph_ms: float | None = None
    graph_ms_p20: float | None = None
    graph_ms_p80: float | None = None
    samples: int = 0
    flops: float | None = None
    bytes: float | None = None
    tflops: float | None = None  # TFLOP/s
    gbps: float | None = None  # GB/s
    roof: str = ""  # which roof is nearer: copy or matmul
    roof_share: float | None = None  # time at the roof / time
    peak_mib: float | None = None  # of an op above its inputs; of a model, all of it
    kept_mib: float | None = None  # that a forward leaves for its backward, output included
    images_per_s: float | None = None
    speedup: float | None = None  # eager's time / this one's
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    sources: str = ""  # a hash of what is measured and of what measures it
    tuned: str = ""  # the user's tuned table that was in use: how many decisions

    @property
    def key(self) -> Key:
        return (self.op, self.provider, self.shape, self.dtype, self.mode)

    @property
    def device_ms(self) -> float | None:
        """The time without the host's share, where it was measured."""
        return self.ms if self.graph_ms is None else self.graph_ms

    @property
    def is_ours(self) -> bool:
        return self.provider.startswith(("ours", "swapped", "backend"))

    def timed(self, times: list[float]) -> Row:
        """With median and spread of these samples."""
        ms, p20, p80 = spread(times)
        return replace(self, ms=ms, ms_p20=p20, ms_p80=p80, samples=len(times))

    def rated(self, flops: float | None, bytes_: float | None) -> Row:
        """With its FLOP and bytes, and how many a second, without the host's share."""
        ms = self.device_ms
        if ms is None:
            return self
        return replace(
            self,
            flops=flops,
            bytes=bytes_,
            tflops=None if flops is None else flops / ms / 1e9,
            gbps=None if bytes_ is None else bytes_ / ms / 1e6,
        )

    def like_times(self, other: Row) -> tuple[float, float] | None:
        """Both as graphs, or both as they are called; None if one was not timed."""
        if self.graph_ms is not None and other.graph_ms is not None:
            return self.graph_ms, other.graph_ms
        return None if self.ms is None or other.ms is None else (self.ms, other.ms)

    def with_speedup(self, baseline: Row | None, compared: bool = True) -> Row:
        """With the baseline's time over its own; None unless both were found right."""
        if baseline is None or not compared or (self.status, baseline.status) != (OK, OK):
            return self
        times = self.like_times(baseline)
        return self if times is None else replace(self, speedup=times[1] / times[0])

    def describe(self) -> str:
        where = f"{self.op} {self.shape} {self.dtype} {self.mode}: {self.provider}"
        if self.ms is None or self.status not in (OK, FAILED):
            return f"{where}: {self.status} {self.note}"
        text = f"{where}: {self.ms:.4g} ms"
        if self.graph_ms is not None:
            text += f", {self.graph_ms:.4g} ms as a graph"
        if self.op == ROOF and (self.tflops or self.gbps):
            text += f", {self.tflops:.4g} TFLOP/s" if self.tflops else f", {self.gbps:.4g} GB/s"
        if self.images_per_s is not None:
            text += f", {self.images_per_s:,.0f} images/s"
        if self.status == FAILED:
            return f"{text}, FAILED {self.note}"
        faster = self.speedup is not None and self.provider != BASELINE
        return f"{text}, {self.speedup:.2f}x" if faster else text


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], list[Row]]:
    """By op, shape, dtype and mode, in the order in which these were first measured."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for r in rows:
        found.setdefault((r.op, r.shape, r.dtype, r.mode), []).append(r)
    return found


def least(rows: Iterable[Row], field: str = "device_ms") -> Row | None:
    """The fastest; by another field, of the rows that have it the one with least."""
    found = [r for r in rows if getattr(r, field)]
    return min(found, key=lambda r: getattr(r, field), default=None)


def bad_rows(rows: Sequence[Row]) -> list[Row]:
    """Those that make the exit status 1: a broken 2x rule, and errors of our own kernels."""
    return [r for r in rows if r.status == FAILED or (r.status == ERROR and r.is_ours)]


_KINDS = {field.name: str(field.type) for field in dataclasses.fields(Row)}
FIELDS = tuple(_KINDS)


def as_line(row: Row) -> str:
    text, values = io.StringIO(), (getattr(row, name) for name in FIELDS)
    cells = (f"{x:.6g}" if isinstance(x, float) else x for x in values)
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def as_csv(rows: Iterable[Row]) -> str:
    return "".join([",".join(FIELDS) + "\n", *map(as_line, rows)])


def _parse(name: str, text: str) -> Any:
    kind = _KINDS[name]
    if kind == "str":
        return text
    if not text:
        return None if "None" in kind else 0
    return float(text) if "float" in kind else int(text)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV; a line that a crash has torn is left out, of equal keys the last counts.

    Raises: CommandError where the file is not one of ours.
    """
    path = path / RESULTS if path.is_dir() else path
    found: dict[Key, Row] = {}
    try:
        text = path.read_text(encoding="utf-8")
        lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        if not set(FIELDS[:5]) <= set(lines.fieldnames or ()):
            raise ValueError(f"its columns are {lines.fieldnames}")
        for line in lines:
            if None in line or None in line.values():  # cells too many, or too few
                continue
            with suppress(ValueError):
                row = Row(**{n: _parse(n, text) for n, text in line.items() if n in _KINDS})
                found[row.key] = row
    except (csv.Error, ValueError) as error:
        raise CommandError(f"{path} is no result of this benchmark: {error}") from error
    return list(found.values())


class Results:
    """The rows of one output folder: those of a run that is resumed, then the new ones."""

    def __init__(self, folder: Path, resume: bool):
        self.folder, self.path = folder, folder / RESULTS
        if self.path.exists() and not resume:
            raise CommandError(
                f"{self.path} exists: --resume adds to it, another --out starts anew"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._trying, self._at_work = folder / TRYING, list[Key]()
        former = read_rows(self.path) if self.path.exists() else []
        self.rows = {row.key: row for row in former if not is_elsewhere(row)}
        # A time of another machine is no peer of this one's, and no roof above it.
        if aside := [row for row in former if is_elsewhere(row)]:
            path = folder / ELSEWHERE
            kept = read_rows(path) if path.exists() else []
            write_text(path, as_csv({row.key: row for row in (*kept, *aside)}.values()))
        # Anew: the columns may have changed, and a crash may have torn the last line.
        write_text(self.path, as_csv(self.rows.values()))
        self._file: TextIO = self.path.open("a", encoding="utf-8", newline="")
        if resume and self._trying.exists():  # a process of a former run ended at these
            note = "the process of a former run ended here"
            for key in self.missing(map(tuple, json.loads(self._trying.read_text()))):
                self.append(Row(*key, status=TIMEOUT, note=note))
        self.tried()

    def append(self, row: Row) -> None:
        """Add a row, on disk before this returns."""
        row = replace(row, **environment())
        self.rows[row.key] = row
        try:
            self._file.write(as_line(row))
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # or Python says at its end that it cannot be
                self._file.close()
            raise unwritten(self.path, error) from error

    @contextmanager
    def trying(self, keys: Iterable[Key]) -> Iterator[None]:
        """These keys are at work: a process that ends inside leaves a note of them."""
        self._at_work = list(keys)
        self.note("")
        yield
        self.tried()

    def note(self, provider: str) -> None:
        """This provider is at work now; it alone is given up if the process ends."""
        if self._at_work:
            keys = [key for key in self._at_work if provider in ("", key[1])] or self._at_work
            write_text(self._trying, json.dumps(keys))

    def tried(self) -> None:
        self._at_work = []
        self._trying.unlink(missing_ok=True)

    def missing(self, rows: Iterable[Key]) -> list[Key]:
        """Those keys that have no row yet, or one of ours that other sources have measured."""
        return [key for key in rows if key not in self.rows or self._is_stale(self.rows[key])]

    def has_given_up(self, key: Key) -> bool:
        """Whether it ended a process, with the sources of today."""
        row = self.rows.get(key)
        return row is not None and row.status == TIMEOUT and not self._is_stale(row)

    @staticmethod
    def _is_stale(row: Row) -> bool:
        return bool(row.sources) and row.is_ours and row.sources != environment()["sources"]

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
    here = Path(__file__).parent
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    commit = _first_line("git", "rev-parse", "--short=10", "HEAD", cwd=here)
    if commit == "unknown":
        return commit
    changes = _first_line("git", "status", "--porcelain", "--", "../fastvit_kernels", cwd=here)
    return commit if changes == "unknown" else f"{commit}+changes"  # no line: nothing changed


def tuned_table_in_use() -> str:
    """How many decisions the user's table makes on this GPU; "" for none."""
    if not torch.cuda.is_available() or not HAS_TRITON:
        return ""
    found = tuned_table.load(gpu(torch.device("cuda", torch.cuda.current_device())))
    return f"{len(found)} decisions" if found else ""


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
        tuned=tuned_table_in_use(),
    )


def machine(about: Mapping[str, Any]) -> str:
    """What two times must have in common to be compared, of a row's fields."""
    names = ("driver", "torch", "triton")
    return ", ".join([about["gpu"], *(f"{n} {about[n] or 'none'}" for n in names)])


def this_machine() -> str:
    return machine(environment())


def is_elsewhere(row: Row) -> bool:
    """Whether another machine has measured it; an old row may not say."""
    return bool(row.gpu) and machine(vars(row)) != this_machine()


def conditions(rows: Iterable[Row]) -> str:
    """One line for a figure or a table: GPU and versions of its rows."""
    seen = {
        f"{machine(vars(r))}, commit {r.commit}"
        + (f", sources {r.sources}" if r.sources else "")
        + (f", tuned: {r.tuned}" if r.tuned else "")
        for r in rows
    }
    return "; ".join(sorted(seen)) or "no rows"
