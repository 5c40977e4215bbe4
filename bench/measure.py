"""How one case is measured: the roofs of this GPU, the gate of whole models, an op's providers in
turn. Timer, turns and gate of ops are fastvit_kernels/measure's.

Each provider's output and gradients are held against float64 on the very inputs that are timed, by
the 2x rule (docs/numerics.md). One that breaks it has status FAILED and no speed-up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.ops import BASELINE, Draw, Function, Inputs, Op, Provider, Shape
from bench.rows import OK, ROOF, Row
from fastvit_kernels.accuracy.accuracy import (
    Error,
    Reference,
    Tensors,
    convolutions_like_matmuls,
    measure,
)
from fastvit_kernels.measure.gate import Outcome, failure, judge_op, judged
from fastvit_kernels.measure.timer import Step, Timer, samples_in, spread
from fastvit_kernels.measure.turns import Contender, attempt, take_turns
from fastvit_kernels.runtime.dtypes import DTYPES

WARM_UP = 3
TURN_MS = 25.0  # measured time of a provider in one turn
MIN_SAMPLES, MAX_SAMPLES = 2, 40  # in one turn
SMALL_MS = 2.0  # below it the host's share matters: measured through a CUDA graph too

# --- roofs: bandwidth of a large copy, rate of a large matmul; and what a CUDA graph takes that
# does next to nothing: no time as a graph can be below it

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
    def of(cls, rows: Iterable[Row]) -> Roofs:
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


def planned_roofs() -> list[Row]:
    """What is to be measured: the copy; for each dtype a burst of the matmul, for some where it
    settles; a replay."""
    size = f"{COPY_BYTES // 2**20} MiB"
    found = [Row(ROOF, BASELINE, size, "uint8", COPY, bytes=2.0 * COPY_BYTES)]
    for dtype, side in MATMUL_SIDE.items():
        row = Row(ROOF, BASELINE, f"{side} x {side} x {side}", dtype, MATMUL, flops=2.0 * side**3)
        found += [row, replace(row, mode=SETTLED)] if dtype in SUSTAINED else [row]
    return [*found, Row(ROOF, BASELINE, "1 element", "fp32", REPLAY)]


def measure_roof(row: Row, device: torch.device, timer: Timer) -> Row:
    """The row with its times and rates, or with what went wrong. Raises: DeviceLost."""
    try:
        found = row.timed(_roof_times(row.mode, _roof_work(row, device, timer), timer))
        return found.rated(row.flops, row.bytes)
    except Exception as error:
        return failed(row, error, timer)
    finally:
        timer.clear()


def _roof_work(row: Row, device: torch.device, timer: Timer) -> Callable[[], Any]:
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


def _roof_times(mode: str, work: Callable[[], Any], timer: Timer) -> list[float]:
    """Samples after a while, for clocks take one to rise from idle; or the second half of a long
    run."""
    times: list[float] = []
    while sum(times) < (SUSTAINED_MS if mode == SETTLED else WARM_MS) and len(times) < MOST_SAMPLES:
        times += timer.sample(work, 10, flush=False)
    return times[len(times) // 2 :] if mode == SETTLED else timer.sample(work, SAMPLES, flush=False)


# --- the gate of whole models. The gradients of all parameters are judged as one vector, and each
# by itself with EACH times the limit, so that a small one is not lost. Parameter by parameter is
# what the tests do.

EACH = 4.0


def overall(name: str, errors: Sequence[Error], sizes: Sequence[int]) -> Error:
    """The error of several tensors as of one vector: its maximum, its RMS, its floor."""

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes))

    torch_max, torch_rms = max(e.torch_max for e in errors), mean([e.torch_rms for e in errors])
    floor_max = max(e.limit_max - 2 * e.torch_max for e in errors)
    floor_rms = mean([e.limit_rms - 2 * e.torch_rms for e in errors])
    return Error(
        name,
        max(e.max for e in errors),
        mean([e.rms for e in errors]),
        torch_max,
        torch_rms,
        2 * torch_max + floor_max,
        2 * torch_rms + floor_rms,
    )


def model_errors(actual: Tensors, yardstick: Tensors, oracle: Tensors) -> list[Error]:
    """Of the logits, of the gradients as one vector, and of each with wider limits.

    Each side by name, the logits first, alone in inference. A gradient that only one side lacks
    counts as zeros there; one that the oracle lacks is no part.
    """
    none = {name: torch.zeros_like(wanted) for name, wanted in oracle.items()}
    actual, yardstick = {**none, **actual}, {**none, **yardstick}
    logits, *each = [
        measure(name, actual[name], yardstick[name], wanted, torch.bfloat16)
        for name, wanted in oracle.items()
    ]
    if not each:
        return [logits]
    sizes = [oracle[e.name].numel() for e in each]
    wider = [replace(e, limit_max=EACH * e.limit_max, limit_rms=EACH * e.limit_rms) for e in each]
    return [logits, overall("gradients", each, sizes), *wider]


# --- one case


@dataclass
class Bench:
    device: torch.device
    timer: Timer
    roofs: Roofs
    say: Callable[[str], None]
    note: Callable[[str], object] = lambda provider: None  # of the one that is at work now
    current: str = ""  # the provider at work, to be named if the GPU is lost or the process killed

    def at_work(self, provider: str) -> None:
        if provider != self.current:
            self.note(provider)
        self.current = provider


def _absent(**_: Any) -> Tensor:
    raise AssertionError("a provider that could not be made is not called")


_MODEL = Provider("", lambda: _absent)  # of an entry that runs no op, but a whole model


@dataclass
class Entry(Contender):
    """A provider in a case, or a way to run a model, and what became of it."""

    provider: Provider = _MODEL
    function: Function = _absent
    compared: bool = True
    peak_mib: float | None = None
    kept_mib: float | None = None
    rotated: int = 1  # calls in its graph

    def call(self, **inputs: Tensor) -> Any:
        return self.function(**self.provider.takes(inputs))

    def warm_up(self, timer: Timer, turn_ms: float, least: int, most: int, *, flush: bool) -> float:
        """Run it, note its memory, count the samples of a turn. Returns: ms."""
        for _ in range(WARM_UP):
            self.run()
        self.peak_mib, self.kept_mib = timer.memory_mib(self.run)
        ms = min(timer.sample(self.run, 2, flush))
        self.count = samples_in(turn_ms, ms, least, most)
        return ms

    def finish(self, row: Row) -> Row:
        row = replace(
            row,
            status=self.outcome.status,
            note=self.outcome.note,
            peak_mib=self.peak_mib,
            kept_mib=self.kept_mib,
        )
        if not self.times or not self.is_alive:
            return row
        row = row.timed(self.times)
        if not self.graph_times:
            return row
        ms, p20, p80 = spread([ms / self.rotated for ms in self.graph_times])
        return replace(row, graph_ms=ms, graph_ms_p20=p20, graph_ms_p80=p80)

    def release(self) -> None:
        """Forget what a mode gave, and what holds its memory."""
        self.run, self.replay = _absent, None
        self.times, self.graph_times = [], []
        self.peak_mib = self.kept_mib = None


def failed(row: Row, error: Exception, timer: Timer) -> Row:
    status, note = failure(error, timer)
    return replace(row, status=status, note=note)


def step_of(function: Function, inputs: Inputs, upstream: Sequence[Tensor], mode: str) -> Step:
    """The timed part of a mode. Forwards are those of training: they save for the backward."""
    leaves = [x for x in inputs.values() if x.requires_grad]

    def forward(_: Any = None) -> Any:
        return function(**inputs)

    def backward(outputs: Any) -> Any:
        # retain_graph: the same backward is timed again.
        return torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    if mode == "fwd":
        return Step(lambda: None, forward)
    if mode == "bwd":
        return Step(forward, backward)
    return Step(lambda: None, lambda _: torch.autograd.grad(forward(), leaves, upstream))


def all_of(steps: Sequence[Step]) -> Step:
    """One after the other, each on its own inputs: what one left in a cache, no other reads."""
    return Step(
        lambda: [step.prepare() for step in steps],
        lambda states: [step.run(state) for step, state in zip(steps, states, strict=True)],
    )


def row_of(op: str, provider: str, shape: Shape, dtype: str, mode: str) -> Row:
    return Row(op, provider, shape.id, dtype, mode, shape.T)


def with_rates(row: Row, op: Op, shape: Shape, roofs: Roofs) -> Row:
    ms = row.device_ms
    if ms is None:
        return row
    flops, bytes_ = op.flops(shape, row.mode), op.bytes(shape, row.dtype, row.mode)
    roof, share = roofs.share(ms, flops, bytes_, "bf16" if row.dtype == "amp" else row.dtype)
    return replace(row.rated(flops, bytes_), roof=roof, roof_share=share)


def measure_op(
    op: Op, shape: Shape, dtype: str, modes: Sequence[str], names: Sequence[str], bench: Bench
) -> Iterator[Row]:
    """Rows of the named providers in the given modes, the baseline's first in each mode.

    The baseline is measured whether it is named or not: every speed-up comes from the same turns.
    """
    with convolutions_like_matmuls():  # of every provider: the yardstick's precision
        providers = [p for p in op.providers(shape, dtype) if p.name in (*names, BASELINE)]
        entries = [
            Entry(p.name, _absent, p.context, provider=p, rotated=op.rotated) for p in providers
        ]
        if any(p.compiled for p in providers):
            torch.compiler.reset()  # once: a second would throw away what the first has compiled
        for entry in entries:
            with attempt(entry, bench.timer):  # a peer of another version may raise
                entry.function = entry.provider.make()
        try:
            inputs = op.inputs(shape, Draw(bench.device, DTYPES.get(dtype, torch.float32)))
            upstream = _compare(op.reference(shape, dtype), inputs, entries, bench)
            bench.timer.clear()
        except Exception as error:
            for entry in entries:
                for mode in modes:
                    row = row_of(op.name, entry.name, shape, dtype, mode)
                    yield failed(row, error, bench.timer)
            return
        for mode in modes:
            own = [e for e in entries if e.provider.backward or mode == "fwd"]
            for entry in own:
                if entry.is_alive:
                    _warm_up(entry, inputs, upstream, mode, bench)
            take_turns(own, bench.timer, flush=True, at_work=bench.at_work)
            baseline = None
            for entry in own:
                row = entry.finish(row_of(op.name, entry.name, shape, dtype, mode))
                row = with_rates(row, op, shape, bench.roofs)
                baseline = row if entry.name == BASELINE else baseline
                yield row.with_speedup(baseline, entry.compared)
            for entry in own:
                entry.release()
            bench.timer.clear()


def _compare(
    specification: Function, inputs: Inputs, entries: list[Entry], bench: Bench
) -> Sequence[Tensor]:
    """Judge everybody by the 2x rule. Returns: the upstream gradients of the timed backwards."""
    alive = [entry for entry in entries if entry.is_alive]
    try:
        reference = Reference(specification, inputs)
        for entry in alive:
            bench.at_work(entry.name)
            with attempt(entry, bench.timer), judged(entry.context(), entry.provider.ours):
                entry.outcome = judge_op(entry.call, reference, entry.provider.backward)
        return reference.upstream
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    bench.timer.clear()
    for entry in alive:
        entry.compared = False
        entry.outcome = Outcome(OK, "not compared: float64 does not fit")
    out = specification(**inputs)
    return [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]


def _warm_up(entry: Entry, inputs: Inputs, upstream: Any, mode: str, bench: Bench) -> None:
    """Compile, count samples, capture; an outcome on the entry if it fails."""
    timer = bench.timer
    inputs = {  # leaves of its own: their making is not timed
        n: x.detach().requires_grad_(x.requires_grad)
        for n, x in entry.provider.takes(inputs).items()
    }
    step = step_of(entry.function, inputs, upstream, mode)
    several = [step]
    for _ in range(1, entry.rotated):
        fresh = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in inputs.items()}
        given = [dy.clone() for dy in upstream]
        several.append(step_of(entry.function, fresh, given, mode))
    bench.at_work(entry.name)
    with attempt(entry, timer), entry.context():
        entry.run = functools.partial(step.run, step.prepare())
        ms = entry.warm_up(timer, TURN_MS, MIN_SAMPLES, MAX_SAMPLES, flush=True)
        if mode != "fwd":
            entry.kept_mib = None
        if ms < SMALL_MS:
            try:
                entry.replay = timer.capture(all_of(several))
            except RuntimeError as error:  # not all can be captured; the events still time it
                error.__traceback__ = None
                bench.say(f"{entry.name} {mode}: no graph: {error}".split("\n")[0])
                timer.clear()
