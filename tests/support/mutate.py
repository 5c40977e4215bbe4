"""Plants small faults, drawn by seed, and says which test notices each.

python tests/support/mutate.py --random N [--seed S] [--files GLOB ...] [--ran FILE]

Each fault (drawn.py) is planted in a copy of the package and its tests in a temporary folder; the
working tree is only read. The tests of its file run there until the first failure; --ran gives the
tests that run its lines instead: ran.py writes the FILE. Every test that noticed something then
runs without a fault and must pass. Exit status: 0 where all faults were noticed, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from drawn import ROOT, Fault, Ran, draw, path_of, plant

FORK = multiprocessing.get_context("fork")
# What nearly every test imports but the package, which each process imports from its copy.
SHARED = ("numpy", "pytest", "torch", "triton.language")
TIMEOUT = 900.0  # seconds for a fault's tests
PEERS = ("timm", "transformers.modeling_utils", "torchvision")


def import_once() -> None:
    """Import what all forks share: most of a test's time. They run Triton's interpreter, whatever
    the machine has."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", **threads}
    for name in SHARED:
        importlib.import_module(name)
    compat = runpy.run_path(str(ROOT / "fastvit_kernels/runtime/compat.py"))
    compat["define_torchvision_operators"]()
    for name in PEERS:
        with suppress(ImportError):  # tests of it are skipped
            importlib.import_module(name)


class _Log:
    """Writes down what started and what failed, which a killed process too leaves behind."""

    def __init__(self, path: Path):
        self.file = path.open("w", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(json.dumps(["started", nodeid]), file=self.file)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            print(json.dumps(["failed", report.nodeid]), file=self.file)


def _run_pytest(root: Path, arguments: Sequence[str]) -> None:
    """Ends this process with pytest's exit status, in a group of its own, in the copy at root."""
    import pytest

    os.setsid()
    os.chdir(root)
    with open("output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "COV_"))]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    inside = [path for path in sys.path if Path(path).resolve().is_relative_to(ROOT)]
    here = [path for path in inside if Path(path).name != "site-packages"]  # of a .venv in it
    sys.path[:] = [str(root), *(path for path in sys.path if path not in here)]
    # as if nobody had forked this process: the tests start some of their own
    sys.modules["__main__"] = ModuleType("__main__")
    multiprocessing.set_start_method(None, force=True)
    # an installed package must not stand in for the copy
    found = importlib.util.find_spec("fastvit_kernels")
    origin = found and found.origin
    assert origin and Path(origin).is_relative_to(root), f"{origin} is not in {root}"
    sys.exit(pytest.main(list(arguments), plugins=[_Log(root / "log.jsonl")]))


class Run(NamedTuple):
    """How pytest ended: its exit status, None after a timeout; the tests that began and failed."""

    status: int | None
    started: list[str]
    failed: list[str]
    output: str

    @property
    def outcome(self) -> str:
        """noticed, timeout, crash, import (no test ran), or "" where nothing was noticed."""
        if self.failed or self.status == 0:
            return "noticed" if self.failed else ""
        if self.started and (self.status is None or self.status < 0):
            return "timeout" if self.status is None else "crash"
        return "import"

    @property
    def test(self) -> str:
        """The one that noticed."""
        return next(iter(self.failed or self.started[-1:]), "") if self.outcome else ""


def run_tests(
    tests: Iterable[str], timeout: float, *options: str, fault: Fault | None = None
) -> Run:
    """Run tests in a copy of the project, with the fault where one is given."""
    with tempfile.TemporaryDirectory(prefix="fastvit-mutate-") as folder:
        root = Path(folder).resolve()
        for name in ("fastvit_kernels", "bench", "tests", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(".*"))
        for page in (ROOT / "pyproject.toml", *ROOT.glob("*.md")):
            shutil.copy(page, root)
        if fault:
            path = root / path_of(fault.file)
            path.write_text(plant(fault, path.read_text()))
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()  # its time and size may be those of the planted file
        arguments = ["-q", "--minutes", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        arguments += ["-p", "no:hypothesispytest"]  # it imports for 2 s
        arguments += [*options, *(f"tests/{test}" for test in dict.fromkeys(tests))]
        process = FORK.Process(target=_run_pytest, args=(root, arguments))
        process.start()
        assert process.pid is not None
        try:
            process.join(timeout)
            status = process.exitcode
        finally:
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
            process.join()
        log = root / "log.jsonl"
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        started = [test for what, test in entries if what == "started"]
        failed = [test for what, test in entries if what == "failed"]
        return Run(status, started, failed, (root / "output.txt").read_text(errors="replace"))


def main() -> int:
    as_it_is = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    add = parser.add_argument
    add("--random", type=int, metavar="N", required=True, help="draw so many")
    add("--seed", type=int, default=0, help="another one draws others")
    add("--files", metavar="GLOB", nargs="+", default=["*"], help="draw in these alone")
    add("--ran", metavar="FILE", type=Path, help="which tests run which lines")
    words = parser.parse_args()
    import_once()
    ran = Ran(words.ran) if words.ran else None
    faults = draw(words.random, words.seed, words.files, ran)
    collected = run_tests((t for f in faults for t in f.tests), TIMEOUT, "--collect-only")
    if collected.status != 0:
        sys.exit(f"tests are missing, or fail to import without a fault:\n{collected.output}")
    noticed_by = []
    for fault in faults:
        begun = time.monotonic()
        run = run_tests(fault.tests, TIMEOUT, "-x", fault=fault)
        by = f" by {run.test}" if run.test else ""
        outcome = run.outcome or "not noticed"
        print(f"{fault.id}: {outcome}{by} ({time.monotonic() - begun:.0f} s)", flush=True)
        if run.outcome:
            noticed_by.append(run.test.removeprefix("tests/"))
        else:
            print(f"  {path_of(fault.file)}:{fault.lines[0]} {fault.new}", flush=True)
    tests = [test for test in noticed_by if test]
    clean = run_tests(tests, 3600) if tests else None
    if clean and clean.status != 0:
        print(f"these fail without a fault too: {clean.failed}\n{clean.output}")
    print(f"{len(faults)} faults planted, {len(noticed_by)} noticed")
    return int(bool(clean and clean.status) or len(noticed_by) < len(faults))


if __name__ == "__main__":
    sys.exit(main())
