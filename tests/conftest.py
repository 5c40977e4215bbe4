"""Without a GPU the tests run in Triton's interpreter, chosen here before triton is imported."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

# Read when torch and numpy are imported: one thread unless you set another number, since the
# suite's own processes share the cores.
os.environ |= dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    os.environ.get("OMP_NUM_THREADS", "1"),
) | dict(os.environ)

# For workers and their processes: glibc hands freed memory back, and each page costs a fault when
# it is taken anew, a tenth of the suite.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))

# torch packs bf16 for a CPU with AMX, as oneDNN says, and then refuses by a narrower
# ATEN_CPU_CAPABILITY: its attention raises.
if os.environ.get("ATEN_CPU_CAPABILITY", "avx512") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# inductor's cache on disk does not tell one ATEN_CPU_CAPABILITY from another: its graphs then give
# garbage. The first process of a run makes a directory that its workers inherit.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "support"))

import pytest
from private import set_deterministic

from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.check.isolated import device_lost

define_torchvision_operators()

if not torch.cuda.is_available():
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from fast_interpreter import make_fast
    from interpreter import mend_interpreter

    mend_interpreter()
    make_fast()


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty gives NaN, so that an output which no kernel wrote cannot look right."""
    set_deterministic(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # past the stack trace, 1 ms, that torch would keep for GPUs to come
        torch.default_generator.manual_seed(0)
    yield
    set_deterministic(False)


@pytest.fixture(autouse=True)
def _device_still_works():
    """After an illegal access every later launch of a process fails: this one ends.

    xdist names the test that was running and starts another worker for those that are left.
    """
    yield
    if not torch.cuda.is_available():
        return
    lost = device_lost(torch.device("cuda", torch.cuda.current_device()))
    if lost is not None:
        end_process(f"the GPU's context is lost: {lost}")


def end_process(why):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(why, returncode=4)
    print(why, file=sys.__stderr__, flush=True)
    os._exit(4)  # no handler that touches the device may run


def pytest_addoption(parser):
    fuzz = parser.getgroup("fuzz", "tests/ops/test_fuzz.py")
    fuzz.addoption("--fuzz-cases", type=int, default=200, help="how many cases are drawn")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="another seed draws other cases")
    amount = parser.getgroup("amount", "how much of the suite runs")
    amount.addoption("--one-in", type=int, default=1, metavar="N", help="run every Nth test alone")
    amount.addoption("--minutes", action="store_true", help="run what takes minutes, too")


# What compares CPU tensors, or takes kernels through the interpreter whatever the machine has.
ON_THE_CPU = ("commands", "fuse", "machine", "model_coverage", "test_bench*.py")
ON_THE_CPU += ("test_quick.py", "test_measure.py", "traffic")


def pytest_collection_modifyitems(config, items):
    """Mark what is for the interpreter alone, and leave out what this machine cannot run."""
    has_gpu, here = torch.cuda.is_available(), Path(__file__).parent
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    on_the_cpu = pytest.mark.skip(reason="runs on the CPU: CUDA_VISIBLE_DEVICES= pytest ...")
    minutes = pytest.mark.skip(reason="minutes, so CI runs it: pytest --minutes")
    seen = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            if seen[item.function] % sampled.kwargs["every"]:
                item.add_marker("minutes")
            seen[item.function] += 1
        if "minutes" in item.keywords and not config.getoption("--minutes"):
            item.add_marker(minutes)
        needs_gpu = "gpu" in item.keywords
        if not needs_gpu and any(
            fnmatch(item.path.relative_to(here).parts[0], name) for name in ON_THE_CPU
        ):
            item.add_marker("interpreter")
        if needs_gpu and not has_gpu:
            item.add_marker(no_gpu)
        elif has_gpu and "interpreter" in item.keywords:
            item.add_marker(on_the_cpu)
    one_in = config.getoption("--one-in")
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % one_in])
    items[:] = items[::one_in]


def pytest_collection_finish(session):
    """What torch, triton and the tests' modules have made stays: no collection walks it again; and
    what Dynamo makes lives as long as its trace, so that few collections are enough."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
