"""The roofs of this GPU, measured in the run: bandwidth of a large copy, rate of a large matmul.

Also what a CUDA graph takes that does next to nothing: no `graph_ms` can be below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bench.harness import failure
from bench.rows import OK, Row
from bench.timer import Roofs, Step, Timer, median_p20_p80
from fastvit_kernels.runtime.dtypes import DTYPES

OP = "roof"
COPY_BYTES = 2**30
MATMUL_SIDE = {"bf16": 8192, "fp16": 8192, "fp32": 4096}
SAMPLES = 30
SUSTAINED = ("bf16",)  # dtypes whose matmul also runs for long: clocks fall as the chip warms
WARM_MS, SUSTAINED_MS, MOST_SAMPLES = 500.0, 2000.0, 50_000


def measure_roofs(device: torch.device, timer: Timer) -> Iterator[Row]:
    """A row for the copy, one a dtype for a burst of the matmul, one for where it settles."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    step = Step(lambda: None, lambda _, a=source, b=target: b.copy_(a))
    row = Row(OP, "eager", f"{COPY_BYTES // 2**20} MiB", "uint8", "copy", bytes=2.0 * COPY_BYTES)
    yield _timed(row, step, timer)
    del source, target, step
    for dtype, side in MATMUL_SIDE.items():
        a = torch.randn(side, side, device=device).to(DTYPES[dtype])
        step = Step(lambda: None, lambda _, a=a: a @ a)
        row = Row(OP, "eager", f"{side} x {side} x {side}", dtype, "matmul", flops=2.0 * side**3)
        yield _timed(row, step, timer)
        if dtype in SUSTAINED:
            yield _sustained(replace(row, mode="matmul, sustained"), step, timer)
    yield _replay(device, timer)
    timer.clear()


def _replay(device: torch.device, timer: Timer) -> Row:
    """The replay of a graph of one kernel of one thread."""
    row = Row(OP, "eager", "1 element", "fp32", "graph replay")
    x = torch.zeros(1, device=device)
    try:
        replay = timer.capture(Step(lambda: None, lambda _: x.add_(1.0)))
        return _timed(row, Step(lambda: None, lambda _: replay()), timer)
    except Exception as error:
        status, note = failure(error, timer)
        return replace(row, status=status, note=note)


def _run_for(ms: float, step: Step, timer: Timer) -> list[float]:
    """Samples that together take so long."""
    times: list[float] = []
    while sum(times) < ms and len(times) < MOST_SAMPLES:
        times += timer.sample(lambda: step.run(None), 10, flush=False)
    return times


def _sustained(row: Row, step: Step, timer: Timer) -> Row:
    """The second half of a long run."""
    try:
        times = _run_for(SUSTAINED_MS, step, timer)
    except Exception as error:
        status, note = failure(error, timer)
        return replace(row, status=status, note=note)
    return _rated(row, times[len(times) // 2 :])


def _timed(row: Row, step: Step, timer: Timer) -> Row:
    try:
        _run_for(WARM_MS, step, timer)  # from idle, clocks take a while to rise
        times = timer.sample(lambda: step.run(None), SAMPLES, flush=False)
    except Exception as error:
        status, note = failure(error, timer)
        return replace(row, status=status, note=note)
    return _rated(row, times)


def _rated(row: Row, times: list[float]) -> Row:
    ms, p20, p80 = median_p20_p80(times)
    return replace(
        row, ms=ms, ms_p20=p20, ms_p80=p80, samples=len(times),
        tflops=None if row.flops is None else row.flops / ms / 1e9,
        gbps=None if row.bytes is None else row.bytes / ms / 1e6,
    )  # fmt: skip


def roofs_of(rows: Sequence[Row]) -> Roofs:
    """The roofs that these rows have measured; zero where there is none."""
    found = [r for r in rows if r.op == OP and r.status == OK]
    copy = next((r.gbps for r in found if r.mode == "copy" and r.gbps), 0.0)
    return Roofs(copy, {r.dtype: r.tflops for r in found if r.mode == "matmul" and r.tflops})
