"""How time and memory of a GPU are taken, on a stand-in for torch.cuda that notes every call."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.measure.timer import (
    MIB,
    CudaTimer,
    DeviceLost,
    Step,
    cold_bytes,
    microseconds,
)
from fastvit_kernels.measure.turns import alternate, beats


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
            "graph_pool_handle": lambda: "the pool",
            "graph": lambda graph, pool, stream: self.inside(f"capture in {pool}"),
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
        "capture in the pool", "run on it", "end", "wait", "streams meet",
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


@pytest.mark.parametrize(("hip", "l2", "mib"), [(None, 50, 100), (None, 6, 32), ("7.0", 4, 512)])
def test_the_cold_buffer_covers_the_last_cache(monkeypatch, hip, l2, mib):
    """ROCm reports the L2; MI300's Infinity Cache behind it has 256 MiB."""
    monkeypatch.setattr(torch.version, "hip", hip)
    assert cold_bytes(l2 * MIB) == mib * MIB


def test_microseconds_are_the_median_of_a_cold_burst():
    asked = []

    class Timer:
        def sample(self, run, count, flush):
            asked.append((count, flush))
            return [0.5] * (count - 1) + [90.0]

    assert microseconds(print, Timer()) == 500.0
    assert asked == [(3, True), (20, True)]  # 10 ms of them


def test_contenders_alternate():
    calls = []
    samples = [lambda name=name: calls.append(name) or len(calls) for name in "ab"]
    assert alternate(3, *samples) == [[1, 3, 5], [2, 4, 6]] and calls == list("ababab")


def test_a_gain_must_be_larger_than_the_noise_of_both():
    steady = [10.0, 10.1, 9.9, 10.0, 10.1]
    assert beats([9.0] * 5, steady) and not beats([9.9] * 5, steady)  # 1 % is none
    assert not beats([6.0, 9.0, 9.0, 12.0, 12.0], steady)
    assert not beats([9.0] * 5, [6.0, 10.0, 10.0, 12.0, 12.0])
