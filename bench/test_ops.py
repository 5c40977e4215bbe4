"""`pytest bench`: the host cost of every op here, and with a GPU the ops themselves, one by one.

pytest-benchmark's own options apply: --benchmark-json, --benchmark-compare, -k layer_norm.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")

from bench import host
from bench.measure import step_of
from bench.ops import OPS, Draw
from bench.plan import shape_of

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PROVIDERS = ("eager", host.OURS) if HAS_GPU else ("eager", host.NO_LAUNCH, host.ON_CPU)


@pytest.mark.parametrize("mode", host.MODES)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPS)
def test_host_cost(benchmark, op, provider, mode):
    ways = host.ways(DEVICE)
    if provider not in ways:
        pytest.skip("Triton is absent, or its interpreter runs in place of the launches")
    benchmark.group = f"host cost of {op}, {mode}"
    call, threads = host.call_of(host.cases(DEVICE)[op], provider, mode), torch.get_num_threads()
    torch.set_num_threads(1)
    with ways[provider]():
        benchmark.pedantic(call, rounds=20, iterations=20, warmup_rounds=2)
    torch.set_num_threads(threads)


@pytest.mark.skipif(not HAS_GPU, reason="needs CUDA: kernel times of a CPU say nothing")
@pytest.mark.parametrize("mode", ["fwd", "both"])
@pytest.mark.parametrize("provider", ["eager", "ours"])
@pytest.mark.parametrize("name", OPS)
def test_op(benchmark, name, provider, mode):
    op, shape = OPS[name], shape_of(name, "ViT-B")
    inputs = op.inputs(shape, Draw(DEVICE, torch.bfloat16))
    chosen = next(p for p in op.providers(shape, "bf16") if p.name == provider)
    benchmark.group = f"{name} {shape.id} bf16 {mode}, with the host"
    with chosen.context():
        function = chosen.make()
        out = function(**inputs)
        upstream = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]
        run = step_of(function, inputs, upstream, mode).run
        call = lambda: (run(None), torch.cuda.synchronize())  # noqa: E731
        benchmark.pedantic(call, rounds=30, iterations=1, warmup_rounds=5)
