"""`pytest bench`: each op, and attention at each sequence length next to SDPA's backends.

pytest-benchmark's own options apply (--benchmark-json, --benchmark-compare), and -k T577.
A call is timed with its host, the GPU waited for; on a CPU PyTorch's path of tiny shapes is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.measure import step_of
from bench.ops import OPS, SDPA, Shape, token_sweep
from fastvit_kernels.accuracy.op import Draw
from fastvit_kernels.runtime.dtypes import DTYPES

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark")
HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), "bf16") if HAS_GPU else (torch.device("cpu"), "fp32")


def timed(benchmark, name: str, shape: Shape, provider: str, mode: str) -> None:
    """One call of an op by one provider; skipped where that cannot run here. On a CPU one image,
    a head or two."""
    op, shape = OPS[name], shape if HAS_GPU else replace(shape, B=1, C=64, H=2, F=128)
    inputs = op.inputs(shape, Draw(DEVICE, DTYPES[DTYPE], DEVICE))
    chosen = next(p for p in op.providers(shape, DTYPE) if p.name == provider)
    if not HAS_GPU and chosen.ours:
        pytest.skip("no GPU: our kernels do not run")
    benchmark.group = f"{name} {shape.id} {DTYPE} {mode}"
    with chosen.context():
        function = chosen.make()
        try:
            out = function(**inputs)
        except RuntimeError as error:
            pytest.skip(f"{provider}: {error}".split("\n")[0])
        upstream = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]
        step = step_of(function, inputs, upstream, mode)
        state = step.prepare()

        def call() -> None:
            step.run(state)
            if HAS_GPU:
                torch.cuda.synchronize()

        benchmark.pedantic(call, rounds=30, iterations=1, warmup_rounds=5)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("provider", ["eager", "ours"])
@pytest.mark.parametrize("name", OPS)
def test_op(benchmark, name, provider, mode):
    timed(benchmark, name, next(iter(OPS[name].shapes())), provider, mode)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("provider", ["ours", *(f"sdpa-{name}" for name in SDPA)])
@pytest.mark.parametrize("shape", token_sweep(), ids=lambda shape: f"T{shape.T}")
def test_attention(benchmark, shape, provider, mode):
    if shape.T > 1025 and not HAS_GPU:
        pytest.skip("no GPU: too long")
    timed(benchmark, "attention", shape, provider, mode)
