"""Plants small faults, drawn by seed, and says which test notices each.

python tests/support/mutate.py --random N [--seed S] [--files GLOB ...] [--ran FILE] [--jobs N]

Each fault (drawn.py) is planted in a copy of the package and its tests in a temporary folder; the
working tree is only read. The tests of its file run there until the first failure; --ran gives the
tests that run its lines instead: ran.py writes the FILE. Every test that noticed something then
runs without a fault and must pass. Exit status: 0 where all faults were noticed, else 1.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from drawn import ROOT, Fault, Ran, draw, path_of, plant


@contextmanager
def project_copy() -> Iterator[Path]:
    """A temporary folder with the package, bench, their tests, pages and pytest's settings."""
    with tempfile.TemporaryDirectory(prefix="fastvit-mutate-") as folder:
        root = Path(folder).resolve()
        for name in ("fastvit_kernels", "bench", "tests", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(".*"))
        for page in (ROOT / "pyproject.toml", *ROOT.glob("*.md")):
            shutil.copy(page, root)
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
    outcome: str  # noticed, timeout, crash, import (no test ran); else "not noticed"
    test: str  # that noticed
    seconds: float

    @property
    def noticed(self) -> bool:
        return self.outcome != "not noticed"

    def __str__(self) -> str:
        by = f" by {self.test}" if self.test else ""
        return f"{self.fault.id}: {self.outcome}{by} ({self.seconds:.0f} s)"


def check(fault: Fault, timeout: float) -> Result:
    """Plant one fault in a copy and run its tests there. Raises: LookupError where there are no
    tests of these names."""
    begun = time.perf_counter()
    with project_copy() as root:
        path = root / path_of(fault.file)
        path.write_text(plant(fault, path.read_text()))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # its time and size may be those of the planted file
        run = run_tests(root, fault.tests, timeout, "-x")
    seconds = time.perf_counter() - begun
    if missing := [line for line in run.output.splitlines() if "ERROR: not found:" in line]:
        raise LookupError(f"{fault.id}: {missing[0]}")
    if run.failed:
        return Result(fault, "noticed", run.failed[0], seconds)
    if run.status == 0:
        return Result(fault, "not noticed", "", seconds)
    if run.started and (run.status is None or run.status < 0):
        outcome = "timeout" if run.status is None else "crash"
        return Result(fault, outcome, run.started[-1], seconds)
    return Result(fault, "import", "", seconds)


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


def _changed_lines(fault: Fault) -> list[str]:
    source = (ROOT / path_of(fault.file)).read_text()
    lines = difflib.unified_diff(source.splitlines(), plant(fault, source).splitlines(), n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _check_all(faults: Sequence[Fault], jobs: int, timeout: float) -> Iterator[Result]:
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(lambda fault: check(fault, timeout), faults)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                _kill(process)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--random", type=int, metavar="N", required=True, help="draw so many")
    parser.add_argument("--seed", type=int, default=0, help="another one draws others")
    parser.add_argument(
        "--files", metavar="GLOB", nargs="+", default=["*"], help="draw in these alone"
    )
    parser.add_argument("--ran", metavar="FILE", type=Path, help="which tests run which lines")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a fault's tests")
    words = parser.parse_args(arguments)
    ran = Ran(words.ran) if words.ran else None
    results = []
    faults = draw(words.random, words.seed, words.files, ran)
    for result in _check_all(faults, words.jobs, words.timeout):
        results.append(result)
        print(result, flush=True)
        if not result.noticed:
            print(*_changed_lines(result.fault), sep="\n", flush=True)
    noticed = [r for r in results if r.noticed]
    wrong = fails_without_a_fault([r.test for r in noticed], words.timeout)
    files = [t for r in noticed if r.outcome == "import" for t in r.fault.tests]
    wrong += fails_without_a_fault(files, words.timeout, "--collect-only")
    for test in wrong:
        print(f"fails without a fault too: {test}")
    print(f"{len(results)} faults planted, {len(noticed)} noticed")
    return int(bool(wrong) or len(noticed) < len(results))


if __name__ == "__main__":
    sys.exit(main())
