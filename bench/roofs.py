"""The roofs of this GPU: bandwidth of a large copy, rate of a large matmul.

Also what a CUDA graph takes that does next to nothing: no time as a graph can be below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.providers import BASELINE
from bench.rows import OK, ROOF, Row, rated, timed
from fastvit_kernels.measure.gate import failure
from fastvit_kernels.measure.timer import Step, Timer
from fastvit_kernels.runtime.dtypes import DTYPES

COPY_BYTES = 2**30
MATMUL_SIDE = {"bf16": 8192, "fp16": 8192, "fp32": 4096}
SAMPLES = 30
SUSTAINED = ("bf16",)  # dtypes whose matmul also runs for long: clocks fall as the chip warms
WARM_MS, SUSTAINED_MS, MOST_SAMPLES = 500.0, 2000.0, 50_000
COPY, MATMUL, SETTLED, REPLAY = "copy", "matmul", "matmul, sustained", "graph replay"


@dataclass(frozen=True)
class Roofs:
    """What this GPU reached: GB/s of a large copy, TFLOP/s of a large matmul."""

    copy_gbps: float
    matmul_tflops: dict[str, float]  # by dtype

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Roofs:
        """Those that these rows have measured; zero if there is none."""
        found = [r for r in rows if r.op == ROOF and r.status == OK]
        copy = next((r.gbps for r in found if r.mode == COPY and r.gbps), 0.0)
        return cls(copy, {r.dtype: r.tflops for r in found if r.mode == MATMUL and r.tflops})

    def share(self, ms: float, flops: float, bytes_: float, dtype: str) -> tuple[str, float | None]:
        """The nearer roof, and the time at it over `ms`."""
        matmul = self.matmul_tflops.get(dtype)
        if not self.copy_gbps or not matmul:
            return "", None
        copy_ms, matmul_ms = bytes_ / self.copy_gbps / 1e6, flops / matmul / 1e9
        return (COPY, copy_ms / ms) if copy_ms >= matmul_ms else (MATMUL, matmul_ms / ms)


def planned() -> list[Row]:
    """The copy; for each dtype a burst of the matmul, for some where it settles; a replay."""
    size = f"{COPY_BYTES // 2**20} MiB"
    found = [Row(ROOF, BASELINE, size, "uint8", COPY, bytes=2.0 * COPY_BYTES)]
    for dtype, side in MATMUL_SIDE.items():
        size = f"{side} x {side} x {side}"
        row = Row(ROOF, BASELINE, size, dtype, MATMUL, flops=2.0 * side**3)
        found += [row, replace(row, mode=SETTLED)] if dtype in SUSTAINED else [row]
    return [*found, Row(ROOF, BASELINE, "1 element", "fp32", REPLAY)]


def measure_roof(row: Row, device: torch.device, timer: Timer) -> Row:
    """The row with its times and rates, or with what went wrong. Raises: DeviceLost."""
    try:
        found = timed(row, _times(row.mode, _work(row, device, timer), timer))
        return rated(found, row.flops, row.bytes)
    except Exception as error:
        status, note = failure(error, timer)
        return replace(row, status=status, note=note)
    finally:
        timer.clear()


def _work(row: Row, device: torch.device, timer: Timer) -> Callable[[], Any]:
    if row.mode == COPY:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if row.mode == REPLAY:
        x = torch.zeros(1, device=device)
        return timer.capture(Step(lambda: None, lambda _: x.add_(1.0)))
    side = MATMUL_SIDE[row.dtype]
    a = torch.randn(side, side, device=device).to(DTYPES[row.dtype])
    return lambda: a @ a


def _times(mode: str, work: Callable[[], Any], timer: Timer) -> list[float]:
    if mode == SETTLED:  # the second half of a long run
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
