"""Which backend a call takes: the choice of each thread, and what makes it PyTorch's."""

import asyncio
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from numerics import rand
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.runtime import backend as backend_module
from fastvit_kernels.runtime.backend import Gpu, get_backend, reason_for_torch, use_triton


def test_backend_context():
    assert get_backend() == "auto"
    with pytest.raises(KeyError), fk.backend("torch"):  # noqa: PT012
        assert get_backend() == "torch"
        raise KeyError
    assert get_backend() == "auto"
    with fk.backend("torch"):
        with fk.backend("triton"):
            assert get_backend() == "triton"
        assert get_backend() == "torch"


def _uses_kernels(x):
    return "NormFunction" in str(fk.layer_norm(x).grad_fn)


def in_a_process(program, **variables):
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)


WITHOUT = {
    "triton": ("import sys; sys.modules['triton'] = None", "triton is not installed"),
    "interpreter": ("import os; os.environ.pop('TRITON_INTERPRET', 0)", "the tensor is on the CPU"),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_works_without(what):
    first, why = WITHOUT[what]
    program = (
        f"{first}\n"
        "import torch, fastvit_kernels as fk\n"
        "from fastvit_kernels import *\n"
        "assert not torch.cuda.is_initialized()\n"
        "model = fk.create_vit('vit_mnist', depth=1, embed_dim=16)\n"
        "model(torch.randn(1, 1, 28, 28)).sum().backward()\n"
        "try:\n"
        "    with fk.backend('triton'): fk.layer_norm(torch.ones(2, 8))\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = in_a_process(program)
    assert done.returncode == 0, done.stderr
    assert why in done.stdout


def test_backend_env_variable():
    done = in_a_process("from fastvit_kernels import linear", FASTVIT_KERNELS_BACKEND="tpu")
    assert "backend must be one of" in done.stderr


@pytest.mark.interpreter
def test_unmended_interpreter_rejects_bf16():
    """Triton's own multiplies raw bits; that of the tests is mended."""
    program = (
        "import torch, fastvit_kernels as fk\n"
        "from fastvit_kernels.accuracy.cases import check_cases\n"
        "from fastvit_kernels.accuracy.op import SMALL\n"
        "cpu, bf16, x = torch.device('cpu'), torch.bfloat16, torch.randn(4, 16)\n"
        "def autocast(): return torch.autocast('cpu', bf16)(fk.linear)(x, x)\n"
        "calls = [lambda c=c: c.function(**c.make()) for c in check_cases(SMALL, cpu, bf16)]\n"
        "calls += [autocast, lambda: fk.layer_norm(x, out_dtype=bf16)]\n"
        "calls += [lambda: fk.linear(x, x, residual=torch.ones(4, 4, dtype=bf16))]\n"
        "for call in calls:\n"
        "    try:\n"
        "        with fk.backend('triton'): print('a kernel ran', call())\n"
        "    except RuntimeError as error:\n"
        "        if 'computes bf16 wrongly' not in str(error): print(error)\n"
        "assert torch.allclose(autocast().float(), x @ x.T, rtol=0.02, atol=0.1)\n"
        "with fk.backend('triton'): fk.linear(x, x)\n"
        "print('all', len(calls))\n"
    )
    done = in_a_process(program, TRITON_INTERPRET="1")
    assert done.stdout.startswith("all "), done.stdout + done.stderr


def _in_a_thread(function):
    """What `function` gives in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_backend_per_thread():
    """Two that overlap leave nothing behind, and no third thread sees either."""
    inside, leave = threading.Barrier(3), threading.Event()
    seen = []

    def run():
        with fk.backend("torch"):
            inside.wait(10)
            seen.append(get_backend())
            leave.wait(10)
        seen.append(get_backend())

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(run)
        inside.wait(10)
        seen.append((get_backend(), _uses_kernels(rand(2, 8))))
        leave.set()
    assert seen.count("torch") == seen.count("auto") == 2 and ("auto", True) in seen
    assert get_backend() == "auto" == _in_a_thread(get_backend)


def test_backend_of_tasks_that_overlap():
    """The first to begin ends first; a backward runs in this thread until the last has ended."""
    in_autograds_threads = torch._C._is_multithreading_enabled
    seen = []

    async def run(name, turns):
        with fk.backend(name):
            for _ in range(turns):
                await asyncio.sleep(0)  # the other's turn
            seen.append((get_backend(), in_autograds_threads()))

    async def both():
        await asyncio.gather(run("torch", 1), run("triton", 3))

    asyncio.run(both())
    assert seen == [("torch", False), ("triton", False)]
    assert get_backend() == "auto" and in_autograds_threads()


def test_set_backend_all_threads():
    with fk.backend("auto"):
        fk.set_backend("torch")
        try:
            assert get_backend() == "auto" and _in_a_thread(get_backend) == "torch"
        finally:
            fk.set_backend("auto")


def test_backend_of_recomputation():
    """That of the call, of a block within and of one around; on a GPU autograd has threads of its
    own, which know no block."""
    weight, found = rand(8, seed=1), []

    def forward(x):
        with fk.backend("torch"):
            y = fk.layer_norm(x, weight)
        z = fk.layer_norm(x, weight)
        found.append([get_backend(), *("NormFunction" in str(t.grad_fn) for t in (y, z))])
        return (y + z).square()  # whose save comes last: a recomputation ends there

    for name in ("auto", "torch"):
        with fk.backend(name):
            checkpoint(forward, rand(2, 8), use_reentrant=False).sum().backward()
    assert found == [["auto", False, True]] * 2 + [["torch", False, False]] * 2


def test_compiled_call_backend_per_thread():
    x = rand(2, 8)
    graphs = []

    def counting(graph, inputs):
        graphs.append(str(graph.code))
        return graph

    torch.compiler.reset()
    compiled = torch.compile(fk.layer_norm, backend=counting, fullgraph=True)
    compiled(x)
    with fk.backend("torch"):
        compiled(x)
        _in_a_thread(lambda: compiled(x))
    compiled(x)
    assert ["torch.nn.functional.layer_norm" in g for g in graphs] == [False, True]


def _on_gpu(arch, monkeypatch, dtype=torch.float32):
    """A tensor of a GPU that is not there, as far as a choice looks at it."""
    found = Gpu(arch, num_sms=64, shared_limit=2**16, name="stand-in")
    monkeypatch.setattr(backend_module, "INTERPRETED", False)
    monkeypatch.setattr(backend_module, "_gpu", lambda device: found)
    for cached in (backend_module._capability_reason, backend_module._say_once):
        cached.cache_clear()
    return SimpleNamespace(dtype=dtype, is_cuda=True, device=torch.device("cuda:0"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_110", "sm_120", "gfx942"])
def test_kernels_run_from_sm_80_on(arch, monkeypatch):
    monkeypatch.setattr(backend_module, "VERSION", (3, 6, 0))
    reason = reason_for_torch(_on_gpu(arch, monkeypatch))
    wanted = {"sm_75": "sm_75, and the kernels need sm_80", "sm_110": "sm_110, whose code triton"}
    assert (reason or "").startswith(f"cuda:0 is {wanted[arch]}") if arch in wanted else not reason
    backend_module._capability_reason.cache_clear()


def test_fallback_warns_once(monkeypatch):
    x = _on_gpu("sm_90", monkeypatch, torch.float64)
    too_wide = x.__class__(**{**vars(x), "dtype": torch.float32})

    def said():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert not use_triton("linear", x)
            assert not use_triton("mlp", x)
            assert not use_triton("linear", too_wide, "K is odd")
        return [str(warning.message).removeprefix("fastvit_kernels.") for warning in found]

    with fk.backend("torch"):
        assert not said()
    with fk.backend("triton"), pytest.raises(RuntimeError, match=r"no kernel for torch\.float64"):
        said()
    assert said() == [
        "linear takes the PyTorch path: there is no kernel for torch.float64",
        "mlp takes the PyTorch path: there is no kernel for torch.float64",
        "linear takes the PyTorch path: K is odd",
    ]
    assert not said()
    backend_module._say_once.cache_clear()
