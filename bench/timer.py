"""How time and memory are taken: CUDA events with a cold L2, and CUDA graphs without the host.

Every sample of a small op starts with an L2 that holds none of its inputs: a buffer of twice its
size is written first. A graph replays the same kernels without Python, dispatch or launches between
them; it is what the GPU itself needs. Source: triton.testing.do_bench, for the flush.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """What is timed: `run(state)`, the state from `prepare()`, which is not timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


class DeviceLost(Exception):
    """A kernel has left the GPU's context unusable: only a new process can go on."""


class Timer(Protocol):
    def sample(self, run: Callable[[], Any], count: int, flush: bool) -> list[float]:
        """Milliseconds of `count` runs."""
        ...

    def capture(self, step: Step) -> Callable[[], Any]:
        """A replay of the step's kernels. Raises RuntimeError where it cannot be had."""
        ...

    def peak_mib(self, run: Callable[[], Any]) -> float | None:
        """Memory that one run takes at its peak above what is there before it."""
        ...

    def kept_mib(self, forward: Callable[[], Any]) -> float | None:
        """Memory that a forward leaves behind for its backward, its output included."""
        ...

    def clear(self) -> None:
        """Give back memory that nothing refers to; raise DeviceLost where the GPU is gone."""
        ...


class CudaTimer:
    """Times of the current CUDA device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        l2 = getattr(properties, "L2_cache_size", 64 * MIB)
        self._cold = torch.empty(max(2 * l2, 32 * MIB), dtype=torch.uint8, device="cuda")

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

    def capture(self, step: Step) -> Callable[[], Any]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Autograd runs a backward on the stream of its forward: both on the one of capture.
            state = step.prepare()
            for _ in range(2):
                step.run(state)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            kept = step.run(state)
        torch.cuda.synchronize()
        torch.cuda.current_stream().wait_stream(stream)

        def replay(kept: Any = (state, kept)) -> None:  # the graph's inputs and outputs stay alive
            graph.replay()

        return replay

    def peak_mib(self, run: Callable[[], Any]) -> float | None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del result
        return (peak - before) / MIB

    def kept_mib(self, forward: Callable[[], Any]) -> float | None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        kept = forward()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        del kept
        return (after - before) / MIB

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


@dataclass(frozen=True)
class Roofs:
    """What this GPU reached in this run: GB/s of a large copy, TFLOP/s of a large matmul."""

    copy_gbps: float
    matmul_tflops: dict[str, float]  # by dtype

    def share(self, ms: float, flops: float, bytes_: float, dtype: str) -> tuple[str, float | None]:
        """The nearer roof, and the time at it over `ms`."""
        matmul = self.matmul_tflops.get(dtype)
        if not self.copy_gbps or not matmul:
            return "", None
        copy_ms, matmul_ms = bytes_ / self.copy_gbps / 1e6, flops / matmul / 1e9
        return ("copy", copy_ms / ms) if copy_ms >= matmul_ms else ("matmul", matmul_ms / ms)


def median_p20_p80(times: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile, by the nearest sample."""
    ordered = sorted(times)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return at(0.5), at(0.2), at(0.8)
