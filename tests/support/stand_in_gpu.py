"""A stand-in for torch.cuda, under the timer of a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from fastvit_kernels.measure.timer import MIB, CudaTimer


class Gpu:
    """Calls in order; an event's time is the number of calls before it, memory is in MiB."""

    def __init__(self, monkeypatch):
        self.calls: list[str] = []
        self.now, self.peak, self.errors = 100, 500, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = len(gpu.calls)
                gpu.calls.append("event")

            def elapsed_time(self, end):
                return float(end.at - self.at)

        def empty(size, dtype, device):
            assert (dtype, device) == (torch.uint8, "cuda")
            self.cold_mib = size / MIB
            return SimpleNamespace(zero_=lambda: self.calls.append("flush"))

        for name, stand_in in {
            "Event": Event,
            "synchronize": self.wait,
            "current_device": lambda: 0,
            "memory_allocated": lambda: self.now * MIB,
            "max_memory_allocated": lambda: self.peak * MIB,
            "reset_peak_memory_stats": lambda: self.take(0),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "current_stream": lambda: self,
            "Stream": lambda: self,
            "CUDAGraph": lambda: self,
            "stream": lambda stream: self.inside("side stream"),
            "graph_pool_handle": lambda: "the pool",
            "graph": lambda graph, pool, stream: self.inside(f"capture in {pool}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            self.timer = CudaTimer()

    def wait(self):
        if self.errors:
            self.errors -= 1
            raise RuntimeError("CUDA error: an illegal memory access\nmore of it")
        self.calls.append("wait")

    def take(self, mib):
        self.now += mib
        self.peak = self.now if mib <= 0 else max(self.peak, self.now)

    def wait_stream(self, stream):
        self.calls.append("streams meet")

    def replay(self):
        self.calls.append("replay")

    @contextmanager
    def inside(self, name):
        self.calls.append(name)
        yield
        self.calls.append("end")
