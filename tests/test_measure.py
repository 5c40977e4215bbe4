"""How time and memory of a GPU are taken, on a stand-in for torch.cuda that notes every call."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.measure.timer import MIB, CudaTimer, DeviceLost, Step


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
            "Event": Event, "synchronize": self.wait, "current_device": lambda: 0,
            "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=50 * MIB),
            "memory_allocated": lambda: self.now * MIB,
            "max_memory_allocated": lambda: self.peak * MIB,
            "reset_peak_memory_stats": lambda: self.take(0),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "current_stream": lambda: self, "Stream": lambda: self, "CUDAGraph": lambda: self,
            "stream": lambda stream: self.inside("side stream"),
            "graph": lambda graph, stream: self.inside("capture"),
        }.items():  # fmt: skip
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


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_a_sample_is_between_two_events_and_begins_with_a_cold_cache(gpu):
    for flush, before in ((True, ["flush"]), (False, [])):
        gpu.calls.clear()
        assert gpu.timer.sample(lambda: gpu.calls.append("run"), 2, flush) == [2.0, 2.0]
        assert gpu.calls == ["wait", *2 * [*before, "event", "run", "event"], "wait"]
    assert gpu.cold_mib == 2 * 50


def test_memory_is_that_above_what_is_there(gpu):
    """Of a call that takes 7 MiB and leaves 3 behind; its result lives until it is read."""

    def run():
        gpu.take(7)
        gpu.now -= 4

    assert gpu.timer.peak_mib(run) == 7.0
    assert gpu.timer.kept_mib(run) == 3.0


def test_a_graph_is_captured_warm_on_one_stream_and_replayed(gpu):
    def run(state):
        gpu.calls.append(f"run on {state}")

    def prepare():
        gpu.calls.append("forward")
        return "it"

    replay = gpu.timer.capture(Step(prepare, run))
    assert gpu.calls == [
        "streams meet", "side stream", "forward", "run on it", "run on it", "end", "wait",
        "capture", "run on it", "end", "wait", "streams meet",
    ]  # fmt: skip
    gpu.calls.clear()
    replay()
    assert gpu.calls == ["replay"]


def test_a_device_is_lost_where_it_says_so_twice(gpu):
    gpu.errors = 1  # of a kernel before: it is reported once
    gpu.timer.clear()
    assert gpu.calls == ["wait", "empty cache"]
    gpu.errors = 2
    with pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access$"):
        gpu.timer.clear()
