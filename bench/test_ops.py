"""`pytest bench`: the host cost of every op here, and with a GPU the ops themselves, one by one.

pytest-benchmark's own options apply: --benchmark-json, --benchmark-compare, -k layer_norm.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")

from bench import host
from bench.ops import OPS, Draw
from bench.providers import vit

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PROVIDERS = ("eager", host.OURS) if HAS_GPU else ("eager", host.NO_LAUNCH, host.TORCH_PATH)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", host.MODES)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPS)
def test_host_cost(benchmark, op, provider, mode):
    ways = host.ways(DEVICE)
    if provider not in ways:
        pytest.skip("Triton is absent, or its interpreter runs in place of the launches")
    benchmark.group = f"host cost of {op}, {mode}"
    call = host.call_of(host.cases(DEVICE)[op], provider, mode)
    with ways[provider]():
        benchmark.pedantic(call, rounds=20, iterations=20, warmup_rounds=2)


@pytest.mark.skipif(not HAS_GPU, reason="needs CUDA: kernel times of a CPU say nothing")
@pytest.mark.parametrize("mode", ["fwd", "both"])
@pytest.mark.parametrize("provider", ["eager", "ours"])
@pytest.mark.parametrize("name", OPS)
def test_op(benchmark, name, provider, mode):
    op = OPS[name]
    shape = next(s for s in op.shapes() if s.model == vit("B", 224).model)
    inputs = op.inputs(shape, torch.bfloat16, Draw(DEVICE, torch.bfloat16))
    chosen = next(p for p in op.providers(shape, "bf16") if p.name == provider)
    function = chosen.make()
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]

    def call():
        out = function(**inputs)
        if mode == "both":
            torch.autograd.grad(out, leaves, upstream)
        torch.cuda.synchronize()

    benchmark.group = f"{name} {shape.id} bf16 {mode}, with the host"
    with chosen.context():
        out = function(**inputs)
        upstream = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]
        benchmark.pedantic(call, rounds=30, iterations=1, warmup_rounds=5)
