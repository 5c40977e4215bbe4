"""Long training: the curves of swapped models, and memory.

Thousands of steps are `python tests/support/long_run.py`; here are a few of them through
the kernels in the interpreter, and all of them on a GPU.
"""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from numerics import DEVICE, rand

import fastvit_kernels as fk
from fastvit_kernels.runtime.configs import recording

pytest.importorskip("timm")
pytest.importorskip("sklearn")

import long_run

PACKAGE = Path(fk.__file__).parent
FEW = 5
SEEDS = 5


@pytest.mark.parametrize("precision", long_run.PRECISIONS)
def test_a_few_steps_through_the_kernels(precision):
    """At every step nearer to the host's loss than another seed's would be; memory stays."""
    size = replace(long_run.SIZES["tiny"], batch=4)
    hosts = [
        long_run.train(partial(long_run.build, size, seed), size, seed, precision, FEW, False)
        for seed in range(SEEDS)
    ]

    def swapped():
        model = long_run.build(size, 0)
        fk.swap_in(model)
        return model

    with fk.backend("triton"), recording() as choices:
        outcome = long_run.train(swapped, size, 0, precision, FEW, False)
    assert choices  # of launch configs: our kernels ran
    assert outcome.tensors_grown <= 0
    for step, loss in enumerate(outcome.losses):
        at_this_step = [host.losses[step] for host in hosts]
        limit = 1e-4 if precision == "fp32" else long_run.spread(at_this_step) / 4
        assert abs(loss - at_this_step[0]) <= limit, f"step {step}: {loss}, {at_this_step}"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", long_run.PRECISIONS)
def test_five_hundred_steps(precision):
    size, hosts, swaps = long_run.SIZES["digits"], [], []
    for seed in range(SEEDS):
        host, swapped = long_run.pair(size, seed, precision, 500, "auto")
        hosts.append(host.accuracy)
        swaps.append(swapped.accuracy)
        assert swapped.tensors_grown <= 0 and swapped.bytes_grown <= 2**20
    difference = abs(sum(hosts) - sum(swaps)) / SEEDS
    assert difference <= max(long_run.spread(hosts), long_run.spread(swaps)), (hosts, swaps)


def test_steps_leave_nothing_in_the_memory_of_python():
    """What the package's own lines hold does not grow with every six steps."""

    def steps(count):
        for _ in range(count):
            qkv = rand(1, 3, 3, 1, 8)
            y = fk.layer_norm(fk.attention(qkv, dropout_p=0.1))
            torch.autograd.grad(y.square().sum(), qkv)
        gc.collect()
        ours = tracemalloc.Filter(True, str(PACKAGE / "*"))
        trace = tracemalloc.take_snapshot().filter_traces([ours])
        return sum(s.size for s in trace.statistics("filename"))

    tracemalloc.start()
    try:
        held = [steps(2), *(steps(6) for _ in range(5))]
    finally:
        tracemalloc.stop()
    grown = [after - before for before, after in pairwise(held)]
    assert min(grown) < 1200, f"{grown} bytes in 6 steps"  # what leaks grows each time


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the outcome's bytes are those of the GPU there")
def test_the_long_run_measures_this_process():
    assert long_run.used_bytes() == 0 or long_run.used_bytes() > 2**20
    kept = [torch.zeros(3)]
    before = long_run.live_tensors()
    kept.append(torch.zeros(3))
    assert long_run.live_tensors() == before + 1
