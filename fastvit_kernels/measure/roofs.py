"""The roofs of this GPU: bandwidth of a large copy, rate of a large matmul.

Also what a CUDA graph takes that does next to nothing: no time as a graph can be below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..runtime.dtypes import DTYPES
from .gate import Outcome, failure
from .timer import Step, Timer

COPY_BYTES = 2**30
MATMUL_SIDE = {"bf16": 8192, "fp16": 8192, "fp32": 4096}
SAMPLES = 30
SUSTAINED = ("bf16",)  # dtypes whose matmul also runs for long: clocks fall as the chip warms
WARM_MS, SUSTAINED_MS, MOST_SAMPLES = 500.0, 2000.0, 50_000
COPY, MATMUL, SETTLED, REPLAY = "copy", "matmul", "matmul, sustained", "graph replay"


@dataclass(frozen=True)
class Roof:
    """One roof: what was run, and its times in ms."""

    kind: str
    dtype: str
    size: str
    bytes: float | None = None
    flops: float | None = None
    times: list[float] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True)
class Roofs:
    """What this GPU reached: GB/s of a large copy, TFLOP/s of a large matmul."""

    copy_gbps: float
    matmul_tflops: dict[str, float]  # by dtype

    def share(self, ms: float, flops: float, bytes_: float, dtype: str) -> tuple[str, float | None]:
        """The nearer roof, and the time at it over `ms`."""
        matmul = self.matmul_tflops.get(dtype)
        if not self.copy_gbps or not matmul:
            return "", None
        copy_ms, matmul_ms = bytes_ / self.copy_gbps / 1e6, flops / matmul / 1e9
        return (COPY, copy_ms / ms) if copy_ms >= matmul_ms else (MATMUL, matmul_ms / ms)


def planned() -> list[Roof]:
    """The copy; for each dtype a burst of the matmul, for some where it settles; a replay."""
    found = [Roof(COPY, "uint8", f"{COPY_BYTES // 2**20} MiB", bytes=2.0 * COPY_BYTES)]
    for dtype, side in MATMUL_SIDE.items():
        roof = Roof(MATMUL, dtype, f"{side} x {side} x {side}", flops=2.0 * side**3)
        found += [roof, replace(roof, kind=SETTLED)] if dtype in SUSTAINED else [roof]
    return [*found, Roof(REPLAY, "fp32", "1 element")]


def measure_roof(roof: Roof, device: torch.device, timer: Timer) -> Roof:
    """The roof with its times, or with what went wrong. Raises: DeviceLost."""
    try:
        return replace(roof, times=_times(roof, _work(roof, device, timer), timer))
    except Exception as error:
        return replace(roof, outcome=failure(error, timer))
    finally:
        timer.clear()


def _work(roof: Roof, device: torch.device, timer: Timer) -> Callable[[], Any]:
    if roof.kind == COPY:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if roof.kind == REPLAY:
        x = torch.zeros(1, device=device)
        return timer.capture(Step(lambda: None, lambda _: x.add_(1.0)))
    side = MATMUL_SIDE[roof.dtype]
    a = torch.randn(side, side, device=device).to(DTYPES[roof.dtype])
    return lambda: a @ a


def _times(roof: Roof, work: Callable[[], Any], timer: Timer) -> list[float]:
    if roof.kind == SETTLED:  # the second half of a long run
        times = _run_for(SUSTAINED_MS, work, timer)
        return times[len(times) // 2 :]
    _run_for(WARM_MS, work, timer)  # from idle, clocks take a while to rise
    return timer.sample(work, SAMPLES, flush=False)


def _run_for(ms: float, work: Callable[[], Any], timer: Timer) -> list[float]:
    """Samples that together take so long."""
    times: list[float] = []
    while sum(times) < ms and len(times) < MOST_SAMPLES:
        times += timer.sample(work, 10, flush=False)
    return times
