"""How time and memory of a GPU are taken, on a stand-in for torch.cuda that notes every call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from stand_in_gpu import Gpu

from fastvit_kernels.measure import timer
from fastvit_kernels.measure.gate import ERROR, FAILED, OK, judging
from fastvit_kernels.measure.timer import (
    DeviceLost,
    Step,
    Timer,
    microseconds,
)
from fastvit_kernels.measure.turns import Contender, alternate, beats, time_together


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
    """Of a call that takes 7 MiB and leaves 3 behind; its result lives until it is read."""

    def run():
        gpu.take(7)
        gpu.now -= 4

    assert gpu.timer.memory_mib(run) == (7.0, 3.0)


def test_timer_capture(gpu):
    def run(state):
        gpu.calls.append(f"run on {state}")

    def prepare():
        gpu.calls.append("forward")
        return "it"

    replay = gpu.timer.capture(Step(prepare, run))
    assert gpu.calls == [
        "streams meet",
        "side stream",
        "forward",
        "run on it",
        "run on it",
        "capture in the pool",
        "run on it",
        "end",
        "end",
        "wait",
        "streams meet",
    ]
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
