"""The suite on a GPU: a lost device ends the worker, what is for the CPU is left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITE = """
import importlib.util, os, sys
import pytest, torch
spec = importlib.util.spec_from_file_location("suite", {conftest!r})
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
lost = []
def synchronize(device=None):
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.synchronize = synchronize
_device_still_works = suite._device_still_works

def test_right(): pass
def test_leaves_the_context_lost(): lost.append(1)
def test_next(): assert not lost
"""


def test_a_worker_ends_where_the_device_is_lost_and_another_goes_on(tmp_path):
    pytest.importorskip("xdist")
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE.format(conftest=str(ROOT / "tests" / "conftest.py")))
    words = ["-q", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(tmp_path), str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_suite.py::test_leaves_the_context_lost'" in done.stdout
