"""How time and memory of a GPU are taken, on a stand-in for torch.cuda that notes every call."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.measure import timer
from fastvit_kernels.measure.gate import ERROR, FAILED, OK, judging
from fastvit_kernels.measure.timer import MIB, CudaTimer, DeviceLost, Step, Timer, microseconds
from fastvit_kernels.measure.turns import Contender, alternate, beats, time_together


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


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_timer_sample_cold_cache(gpu):
    for flush, before in ((True, ["flush"]), (False, [])):
        gpu.calls.clear()
        assert gpu.timer.sample(lambda: gpu.calls.append("run"), 2, flush) == [2.0, 2.0]
        assert gpu.calls == ["wait", *2 * [*before, "event", "run", "event"], "wait"]
    assert gpu.cold_mib >= 512  # MI300's last cache has 256


def test_timer_memory(gpu):
    """Of a call that takes 7 MiB and leaves 3 behind."""

    def run():
        gpu.take(7)
        gpu.now -= 4

    assert gpu.timer.peak_mib(run) == 7.0


def test_timer_capture(gpu):
    def run(state):
        gpu.calls.append(f"run on {state}")

    def prepare():
        gpu.calls.append("forward")
        return "it"

    replay = gpu.timer.capture(Step(prepare, run))
    warmed = ["streams meet", "side stream", "forward", "run on it", "run on it"]
    captured = ["capture in the pool", "run on it", "end"]
    assert gpu.calls == [*warmed, *captured, "end", "wait", "streams meet"]
    gpu.calls.clear()
    replay()
    assert gpu.calls == ["replay"]


def test_timer_failed_capture(gpu, monkeypatch):
    """As torch leaves it, its pool takes every allocation, and no random number can be drawn."""

    class Generator:
        def __init__(self, device="cuda"):
            self.seed = 7

        def initial_seed(self):
            return self.seed

        def manual_seed(self, seed):
            self.seed = seed

        def graphsafe_get_state(self):
            return f"a fresh state of seed {self.seed}"

        def graphsafe_set_state(self, state):
            gpu.calls.append(state)

    def run(_):
        if "capture in the pool" in gpu.calls:
            raise RuntimeError("operation not permitted when stream is capturing")

    for name in ("end", "release"):
        say = partial(lambda name, device, pool: gpu.calls.append(f"{name} {pool}"), name)
        monkeypatch.setattr(timer, f"{name}_pool", say)
    monkeypatch.setattr(torch.cuda, "default_generators", [Generator()])
    monkeypatch.setattr(torch, "Generator", Generator)
    with pytest.raises(RuntimeError, match="not permitted"):
        gpu.timer.capture(Step(lambda: None, run))
    told = ["end the pool", "release the pool", "a fresh state of seed 7"]
    assert [call for call in gpu.calls if call in told] == told


def test_timer_device_lost(gpu):
    gpu.errors = 1  # of a kernel before: it is reported once
    gpu.timer.clear()
    assert gpu.calls == ["wait", "empty cache"]
    gpu.errors = 2
    with pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access$"):
        gpu.timer.clear()


def test_microseconds():
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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("no room"), OK),
        (RuntimeError("no kernel image"), ERROR),
        (AssertionError("none of our kernels ran"), FAILED),
    ],
)
def test_judging_errors(error, status):
    def judge():
        raise error

    found = judging(judge, Timer())
    wanted = "numbers not compared" if status == OK else str(error)
    assert found.status == status and wanted in found.note


def test_warm_up_not_timed():
    class Warming(Timer):
        turns = 0

        def sample(self, run, count, flush):
            self.turns += 1
            return [9.0 if self.turns <= 2 else 1.0] * count

    contender = Contender("one", lambda: None)
    time_together([contender], Warming(), 10.0, flush=False)
    assert contender.times and {*contender.times} == {1.0}


def test_beats_noise():
    steady = [10.0, 10.1, 9.9, 10.0, 10.1]
    assert beats([9.0] * 5, steady) and not beats([9.9] * 5, steady)  # 1 % is none
    assert not beats([6.0, 9.0, 9.0, 12.0, 12.0], steady)
    assert not beats([9.0] * 5, [6.0, 10.0, 10.0, 12.0, 12.0])
