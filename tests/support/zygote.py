"""What nearly every test imports, imported once: mutate.py forks its processes from here.

The package is not among it: each process imports the copy that it is given.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy  # noqa: F401
import pytest
import torch  # noqa: F401
import triton.language  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ("timm", "transformers.modeling_utils", "torchvision")

runpy.run_path(str(ROOT / "fastvit_kernels/runtime/compat.py"))["define_torchvision_operators"]()
for name in PEERS:
    with suppress(ImportError):  # tests of it are skipped
        importlib.import_module(name)


class _Log:
    """Writes down what started and what failed, which a killed process too leaves behind."""

    def __init__(self, path: Path):
        self.file = path.open("w", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(json.dumps({"started": nodeid}), file=self.file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(json.dumps({"failed": report.nodeid}), file=self.file)


def run_pytest(root: Path, arguments: Sequence[str]) -> None:
    """Ends this process with pytest's exit status, in a group of its own, in the copy at root."""
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
