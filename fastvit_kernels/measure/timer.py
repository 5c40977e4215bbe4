"""Time and memory of a GPU: CUDA events with a cold cache, CUDA graphs without the host.

Each sample of a small op starts with a cache that holds none of its inputs: a buffer larger than
every cache is written first. A graph replays the same kernels without Python, dispatch or launches
between them: the GPU's own time. Source: triton.testing.do_bench, for the flush.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..runtime.compat import end_pool, release_pool

MIB = 2**20
COLD = 512 * MIB  # larger than every cache: an H200's L2 has 50 MiB, MI300's last cache 256
BURST_MS, MOST_BURST = 10.0, 1000  # how long one figure of `microseconds` takes


@dataclass(frozen=True)
class Step:
    """What is timed: `run(state)`, with the state from `prepare()`, which is not timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


class DeviceLost(Exception):
    """A kernel has left the GPU's context unusable: only a new process can go on."""


class Spread(NamedTuple):
    median: float
    p20: float
    p80: float


def spread(times: list[float]) -> Spread:
    """Median, 20th and 80th percentile, by the nearest sample."""
    ordered = sorted(times)
    return Spread(*(ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.2, 0.8)))


def samples_in(turn_ms: float, ms: float, least: int, most: int) -> int:
    """How many samples of `ms` fill a turn."""
    return min(most, max(least, int(turn_ms / max(ms, 1e-3))))


class Timer:
    """Times of what a CPU computes: nothing is captured or counted."""

    def stream(self) -> AbstractContextManager[Any]:
        """Inside, work is queued where `capture` captures: autograd runs a backward on the stream
        of its forward, and meets a leaf on the one where it was first used."""
        return nullcontext()

    def sample(self, run: Callable[[], Any], count: int, flush: bool) -> list[float]:
        """Milliseconds of `count` runs; with `flush` each begins with a cold cache, on a GPU."""
        found = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - start))
        return found

    def capture(self, step: Step) -> Callable[[], Any]:
        """A replay of the step's kernels. Raises: RuntimeError if they cannot be captured."""
        raise RuntimeError("a CPU has no graphs to capture")

    def peak_mib(self, run: Callable[[], Any]) -> float | None:
        """What one run takes at its peak, above what was there; None on a CPU."""
        return None

    def clear(self) -> None:
        """Free memory that nothing refers to. Raises: DeviceLost if the GPU is gone."""
        gc.collect()


class CudaTimer(Timer):
    """Times of the current CUDA device."""

    def __init__(self) -> None:
        self._cold = torch.empty(COLD, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()
        # One pool for all graphs: they are replayed in turn, and what one leaves is read at once.
        self._pool = torch.cuda.graph_pool_handle()

    def sample(self, run: Callable[[], Any], count: int, flush: bool) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda.synchronize()
        for start, end in events:
            if flush:
                self._cold.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def capture(self, step: Step) -> Callable[[], Any]:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with self.stream():
            state = step.prepare()
            for _ in range(2):
                step.run(state)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    kept = step.run(state)
            except RuntimeError:
                self._give_up_capture()
                raise
        torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay(kept: Any = (state, kept)) -> None:  # the graph's inputs and outputs stay alive
            graph.replay()

        return replay

    def _give_up_capture(self) -> None:
        """End what torch leaves on: its pool has every allocation, random numbers are a graph's."""
        device = torch.cuda.current_device()
        end_pool(device, self._pool)
        release_pool(device, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        generator, fresh = torch.cuda.default_generators[device], torch.Generator("cuda")
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def peak_mib(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def clear(self) -> None:
        gc.collect()
        for attempt in range(2):
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                return
            except RuntimeError as error:  # a lost context says so every time
                if attempt:
                    raise DeviceLost(str(error).strip().split("\n")[0]) from error


@functools.lru_cache(maxsize=1)
def timer_of(device: torch.device) -> Timer:
    """The timer of a device; a GPU's has a buffer, which is allocated once."""
    if device.type != "cuda":
        return Timer()
    with torch.cuda.device(device):
        return CudaTimer()


def microseconds(function: Callable[[], Any], timer: Timer | None = None) -> float:
    """Median of a burst of calls on the current device, each with a cold cache."""
    timer = timer or timer_of(torch.device("cuda", torch.cuda.current_device()))
    first = spread(timer.sample(function, 3, flush=True)).median
    count = samples_in(BURST_MS, first, 3, MOST_BURST)
    return 1e3 * spread(timer.sample(function, count, flush=True)).median
