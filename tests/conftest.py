"""Without a GPU the tests run in Triton's interpreter, chosen here before triton is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Read when torch and numpy are imported: the suite's own processes share the cores, and the bits of
# the interpreter's matrix products depend on how many threads compute one.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "support"))

import pytest

from fastvit_kernels.commands.zoo import define_torchvision_operators

define_torchvision_operators()

if not torch.cuda.is_available():
    torch.set_num_threads(1)
    from interpreter import mend_bf16, patch_once_a_launch

    mend_bf16()
    patch_once_a_launch()


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty gives NaN, so that an output which no kernel wrote cannot look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser):
    fuzz = parser.getgroup("fuzz", "tests/ops/test_fuzz.py")
    fuzz.addoption("--fuzz-cases", type=int, default=300, help="how many cases are drawn")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="another seed draws other cases")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
