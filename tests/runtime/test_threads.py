"""Several threads at once give the bits of one."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import DEVICE
from tiny_calls import OPS, assert_same_bits, op_and_inputs, step

from fastvit_kernels.runtime import configs
from fastvit_kernels.runtime.backend import INTERPRETED


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """Triton's interpreter keeps its grid in a global: its launches alone take turns."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        lock, run = threading.Lock(), InterpretedFunction.run

        def locked(self, *args, **kwargs):
            with lock:
                return run(self, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", locked)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_bits(one_launch_at_a_time):
    """Every op, forward and backward, in four threads whose caches are empty at first."""

    def all_ops(index):
        results = []
        stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        with torch.cuda.stream(stream):
            for op in OPS:
                results += step(*op_and_inputs(op, seed=index))
        if stream is not None:
            stream.synchronize()
        return results

    wanted = [all_ops(index) for index in range(4)]
    configs._forget()
    barrier, cores = threading.Barrier(4), torch.get_num_threads()

    def at_once(index):
        torch.set_num_threads(cores)  # a new thread has torch's default, and bits depend on it
        barrier.wait()
        return all_ops(index)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(at_once, range(4)))
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits(got, want)
