"""Plants small faults in the package, one at a time, and says which test notices each.

python tests/support/mutate.py [--only ID ...] [--jobs N] [--timeout S] [--record] [--list]
python tests/support/mutate.py --random N --seed S [--files GLOB] [--ran FILE]

A fault is planted in a copy of the package and its tests in a temporary folder; the working tree is
only read, whenever the run ends. The tests of the fault run there until the first failure. Every
test that noticed something then runs without a fault and must pass. Exit status: 0 where all faults
were noticed, else 1. --record writes the first test that noticed each to faults/noticed.csv.
--random draws faults (drawn.py) and shows those that nobody notices, past those that
faults/survivors.py explains. --ran gives each the tests that run its lines: ran.py writes the FILE.
"""

from __future__ import annotations

import argparse
import ast
import csv
import difflib
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from drawn import Drawn, Ran, draw, plant_drawn
from faults import FAULTS, Fault
from faults.fault import path_of
from faults.survivors import SURVIVORS

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = ROOT / "tests" / "support" / "faults" / "noticed.csv"  # fault,outcome,test
NOTICED = ("noticed", "timeout", "crash", "import")


class CannotPlant(ValueError):
    """The fault does not fit the source as it is now."""


@functools.lru_cache(maxsize=64)
def _functions(source: str) -> dict[str, list[tuple[int, int]]]:
    """By name, a method's also "Class.method", where the text of each begins and ends."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            span = starts[node.lineno - 1], starts[node.end_lineno or 0]
            found.setdefault(node.name, []).append(span)
        elif isinstance(node, ast.ClassDef):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef):
                    span = starts[part.lineno - 1], starts[part.end_lineno or 0]
                    found.setdefault(f"{node.name}.{part.name}", []).append(span)
    return found


def _segment(source: str, function: str) -> tuple[int, int]:
    """Where the text of the function, the method, or the method of a class ("Class.method"), begins
    and ends."""
    spans = _functions(source).get(function, [])
    if len(spans) != 1:
        raise CannotPlant(f"there are {len(spans)} functions {function}, wanted 1")
    return spans[0]


def _meaning(code: str) -> str:
    return ast.dump(ast.parse(textwrap.dedent(code)))


def plant(fault: Fault, source: str) -> str:
    """The source with the fault in it."""
    if isinstance(fault, Drawn):
        return plant_drawn(fault, source)
    begin, end = _segment(source, fault.within) if fault.within else (0, len(source))
    segment = source[begin:end]
    if segment.count(fault.old) != 1:
        raise CannotPlant(
            f"{fault.id}: the old text must occur once in {fault.within or fault.file}, "
            f"it occurs {segment.count(fault.old)} times: {fault.old!r}"
        )
    planted = segment.replace(fault.old, fault.new)
    if _meaning(planted) == _meaning(segment):
        raise CannotPlant(f"{fault.id}: the new text changes nothing: {fault.new!r}")
    return source[:begin] + planted + source[end:]


def package_file(fault: Fault, root: Path = ROOT) -> Path:
    return root / path_of(fault.file)


@contextmanager
def project_copy() -> Iterator[Path]:
    """A temporary folder with the package, bench, their tests, pages and pytest's settings."""
    with tempfile.TemporaryDirectory(prefix="fastvit-mutate-") as folder:
        root = Path(folder).resolve()
        for name in ("fastvit_kernels", "bench", "tests", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(".*"))
        pages = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        for name in ("pyproject.toml", *pages):
            shutil.copy(ROOT / name, root)
        yield root


_running: set[BaseProcess] = set()


def _kill(process: BaseProcess) -> None:
    if process.exitcode is None and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
        except ProcessLookupError:  # not yet
            process.kill()


@functools.cache
def _zygote() -> ForkServerContext:
    """Forks processes that have imported what tests import but the package: most of a test's time.

    They run Triton's interpreter, whatever the machine has, with the settings of conftest.py.
    """
    settings = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    settings |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"PYTHONPATH": str(Path(__file__).parent)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zygote"])
    with patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return context


def _in_zygote(root: Path, arguments: Sequence[str]) -> None:
    from zygote import run_pytest  # which imports much

    run_pytest(root, arguments)


@dataclass(frozen=True)
class Run:
    """How pytest ended: its exit status, None after a timeout; the tests that began and failed."""

    status: int | None
    started: list[str]
    failed: list[str]
    output: str


def run_tests(root: Path, tests: Iterable[str], timeout: float, *options: str) -> Run:
    """Run the tests (names under tests/) of the copy at root."""
    arguments = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    arguments += ["-p", "no:hypothesispytest"]  # it imports for 2 s
    arguments += [*options, *(f"tests/{test}" for test in tests)]
    process = _zygote().Process(target=_in_zygote, args=(root, arguments))
    process.start()
    _running.add(process)
    process.join(timeout)
    status = process.exitcode
    _kill(process)
    process.join()
    _running.discard(process)
    output = (root / "output.txt").read_text(errors="replace")
    log = root / "log.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    started = [e["started"] for e in entries if "started" in e]
    failed = [e["failed"] for e in entries if "failed" in e]
    return Run(status, started, failed, output)


@dataclass(frozen=True)
class Result:
    fault: Fault
    outcome: str  # noticed, timeout, crash; not noticed; broken, of a drawn one import: no test ran
    test: str  # that noticed
    output: str

    def __str__(self) -> str:
        return f"{self.fault.id}: {self.outcome}{f' by {self.test}' if self.test else ''}"


def check(fault: Fault, timeout: float) -> Result:
    """Plant one fault in a copy and run its tests there, first the one that noticed it last."""
    known = [test for _, test in (recorded().get(fault.id, ("", "")),) if test]
    with project_copy() as root:
        path = package_file(fault, root)
        path.write_text(plant(fault, path.read_text()))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # its time and size may be those of the planted file
        run = run_tests(root, known, timeout, "-x") if known else None
        if run is None or not (run.failed or run.status is None or run.status < 0):
            run = run_tests(root, fault.tests, timeout, "-x")
    if run.failed:
        return Result(fault, "noticed", run.failed[0], run.output)
    if run.status == 0:
        return Result(fault, "not noticed", "", run.output)
    if run.started and (run.status is None or run.status < 0):
        outcome = "timeout" if run.status is None else "crash"
        return Result(fault, outcome, run.started[-1], run.output)
    return Result(fault, "import" if isinstance(fault, Drawn) else "broken", "", run.output)


def recorded(path: Path = RECORD) -> dict[str, tuple[str, str]]:
    """By fault, the outcome of its last run and the first test that noticed it."""
    with path.open(newline="") as file:
        return {row["fault"]: (row["outcome"], row["test"]) for row in csv.DictReader(file)}


def record(results: Iterable[Result], path: Path = RECORD) -> None:
    """Write the results into the record; rows of faults that did not run stay."""
    known = recorded(path) | {
        result.fault.id: (result.outcome, result.test.removeprefix("tests/")) for result in results
    }
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("fault", "outcome", "test"))
        rows.writerows((f.id, *known[f.id]) for f in FAULTS if f.id in known)


def fails_without_a_fault(tests: Iterable[str], timeout: float, *options: str) -> list[str]:
    """Those of the tests that fail on the package as it is."""
    names = sorted({test.removeprefix("tests/") for test in tests if test})
    if not names:
        return []
    with project_copy() as root:
        run = run_tests(root, names, timeout, *options)
    if run.failed or run.status == 0:
        return run.failed
    return [f"pytest ended with {run.status}:\n{run.output}"]


def _changed_lines(fault: Drawn) -> list[str]:
    source = package_file(fault).read_text()
    lines = difflib.unified_diff(source.splitlines(), plant(fault, source).splitlines(), n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ID", help="these faults; a prefix* is a group"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a fault's tests")
    parser.add_argument("--record", action="store_true", help="write faults/noticed.csv")
    parser.add_argument("--list", action="store_true", help="list the faults, plant none")
    parser.add_argument("--verbose", action="store_true", help="what pytest said of each fault")
    parser.add_argument("--random", type=int, metavar="N", help="draw so many faults")
    parser.add_argument("--seed", type=int, default=0, help="another one draws others")
    parser.add_argument("--ran", metavar="FILE", type=Path, help="which tests run which lines")
    parser.add_argument("--files", metavar="GLOB", default="*", help="draw in these files alone")
    words = parser.parse_args(arguments)

    ran = Ran(words.ran) if words.ran else None
    faults = FAULTS if words.random is None else draw(words.random, words.seed, words.files, ran)
    explained = [f.id for f in faults if f.id in SURVIVORS]
    faults = [f for f in faults if f.id not in SURVIVORS]
    if words.only:
        unknown = [w for w in words.only if not any(fnmatch(f.id, w) for f in FAULTS)]
        if unknown:
            parser.error(f"no such fault: {', '.join(unknown)}")
        faults = [f for f in FAULTS if any(fnmatch(f.id, w) for w in words.only)]
    problems = []
    for fault in faults:
        try:
            plant(fault, package_file(fault).read_text())
        except CannotPlant as error:
            problems.append(str(error))
    for id in explained:
        print(f"{id}: explained, {SURVIVORS[id]}")
    if words.list:
        for fault in faults:
            print(f"{fault.id:28} {fault.file:40} {fault.what}")
        print(f"{len(faults)} faults")
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    if words.list:
        return 0

    results: list[Result] = []
    with ThreadPoolExecutor(words.jobs) as pool:
        try:
            for result in pool.map(lambda fault: check(fault, words.timeout), faults):
                results.append(result)
                print(result, flush=True)
                if isinstance(result.fault, Drawn) and result.outcome not in NOTICED:
                    print(*_changed_lines(result.fault), sep="\n", flush=True)
                elif words.verbose or result.outcome not in NOTICED:
                    print(result.output, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                _kill(process)
            raise
    noticed = [r for r in results if r.outcome in NOTICED]
    wrong = fails_without_a_fault([r.test for r in noticed], words.timeout)
    files = [t for r in noticed if r.outcome == "import" for t in r.fault.tests]
    wrong += fails_without_a_fault(files, words.timeout, "--collect-only")
    for test in wrong:
        print(f"fails without a fault too: {test}")
    print(f"{len(results)} faults planted, {len(noticed)} noticed", end="")
    print(f", {len(explained)} explained" if explained else "")
    if words.record:
        record(results)
    return int(bool(wrong) or len(noticed) < len(results))


if __name__ == "__main__":
    sys.exit(main())
