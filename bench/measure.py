"""How one case is measured: the roofs of this GPU, an op's providers in turn. Timer, turns and gate
are fastvit_kernels/measure's.

Each provider's output and gradients are held against float64 on the very inputs that are timed, by
the 2x rule (docs/numerics.md). One that breaks it has status FAILED and no time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.ops import BASELINE, Function, Inputs, Op, Provider, Shape
from bench.rows import OK, ROOF, Row
from fastvit_kernels.accuracy.accuracy import Reference, convolutions_like_matmuls
from fastvit_kernels.accuracy.op import Draw
from fastvit_kernels.measure.gate import Outcome, failure, judged, verdict
from fastvit_kernels.measure.timer import Step, Timer, samples_in, spread
from fastvit_kernels.measure.turns import Contender, attempt, take_turns
from fastvit_kernels.runtime.dtypes import DTYPES

WARM_UP = 3
TURN_MS = 25.0  # measured time of a provider in one turn
MIN_SAMPLES, MAX_SAMPLES = 2, 40  # in one turn
SMALL_MS = 2.0  # below it the host's share matters: measured through a CUDA graph too

# --- roofs: bandwidth of a large copy, rate of a large matmul

COPY_BYTES = 2**30
MATMUL_SIDE = {"bf16": 8192, "fp16": 8192, "fp32": 4096}
WARM_MS, SAMPLES = 1000.0, 30  # a clock takes a while to rise from idle, and falls as a chip warms
COPY, MATMUL = "copy", "matmul"
Roofs = dict[str, float]  # GB/s of COPY, TFLOP/s of the matmul by dtype


def roofs_of(rows: Iterable[Row]) -> Roofs:
    """What this GPU reached by these rows."""
    found = [r for r in rows if r.op == ROOF and r.status == OK]
    matmuls = {r.dtype: r.tflops for r in found if r.mode == MATMUL}
    return matmuls | {r.mode: r.gbps for r in found if r.mode == COPY}


def planned_roofs() -> list[Row]:
    copy = Row(ROOF, BASELINE, f"{COPY_BYTES // 2**20} MiB", "uint8", COPY)
    sides = MATMUL_SIDE.items()
    return [copy, *(Row(ROOF, BASELINE, f"{n} x {n} x {n}", x, MATMUL) for x, n in sides)]


def measure_roof(row: Row, device: torch.device, timer: Timer) -> Row:
    """The row with its times and rates, or with what went wrong. Raises: DeviceLost."""
    try:
        work, spent = _roof_work(row, device), 0.0
        while spent < WARM_MS:
            spent += sum(timer.sample(work, 10, flush=False))
        row = row.timed(timer.sample(work, SAMPLES, flush=False))
        if row.mode == COPY:
            return row.rated(math.nan, 2.0 * COPY_BYTES)
        return row.rated(2.0 * MATMUL_SIDE[row.dtype] ** 3, math.nan)
    except Exception as error:
        return failed(row, error, timer)
    finally:
        timer.clear()


def _roof_work(row: Row, device: torch.device) -> Callable[[], Any]:
    if row.mode == COPY:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    side = MATMUL_SIDE[row.dtype]
    a = torch.randn(side, side, device=device).to(DTYPES[row.dtype])
    return lambda: a @ a


def nearer_roof(
    roofs: Roofs, ms: float, flops: float, bytes_: float, dtype: str
) -> tuple[str, float]:
    """Which roof is nearer, and the time at it over `ms`."""
    if not {COPY, dtype} <= set(roofs):
        return "", math.nan
    copy_ms, matmul_ms = bytes_ / roofs[COPY] / 1e6, flops / roofs[dtype] / 1e9
    return (COPY, copy_ms / ms) if copy_ms >= matmul_ms else (MATMUL, matmul_ms / ms)


# --- one case


@dataclass
class Bench:
    """What measuring needs. `note` is told which provider comes next and whether it compiles."""

    device: torch.device
    timer: Timer
    roofs: Roofs
    say: Callable[[str], None]
    note: Callable[[str, bool], object] = lambda provider, compiles: None
    current: str = ""  # the provider at work

    def at_work(self, provider: str, compiles: bool = False) -> None:
        if provider != self.current:
            self.note(provider, compiles)
        self.current = provider


def _absent(**_: Any) -> Tensor:
    raise AssertionError("a provider that could not be made is not called")


_MODEL = Provider("", lambda: _absent)  # of an entry that runs no op, but a whole model


@dataclass
class Entry(Contender):
    """A provider in a case, or a way to run a model, and what became of it."""

    provider: Provider = _MODEL
    function: Function = _absent
    peak_mib: float | None = None
    rotated: int = 1  # calls in its graph

    def call(self, **inputs: Tensor) -> Any:
        return self.function(**self.provider.takes(inputs))

    def warm_up(self, timer: Timer, turn_ms: float, least: int, most: int, *, flush: bool) -> float:
        """Run it, note its memory, count the samples of a turn. Returns: ms."""
        for _ in range(WARM_UP):
            self.run()
        self.peak_mib = timer.peak_mib(self.run)
        ms = min(timer.sample(self.run, 2, flush))
        self.count = samples_in(turn_ms, ms, least, most)
        return ms

    def finish(self, row: Row) -> Row:
        """The row with the outcome, and with times if that is good."""
        status, note, error = self.outcome
        row = replace(row, status=status, note=note, error=error)
        if not self.times or not self.is_right:
            return row
        row = row.timed(self.times)
        if self.peak_mib is not None:
            row = replace(row, peak_mib=self.peak_mib)
        if not self.graph_times:
            return row
        ms, p20, p80 = spread([ms / self.rotated for ms in self.graph_times])
        return replace(row, graph_ms=ms, graph_ms_p20=p20, graph_ms_p80=p80)

    def release(self) -> None:
        """Forget what a mode gave, and what holds its memory."""
        self.run, self.replay, self.peak_mib = _absent, None, None
        self.times, self.graph_times = [], []


def failed(row: Row, error: Exception, timer: Timer) -> Row:
    status, note, _ = failure(error, timer)
    return replace(row, status=status, note=note)


def step_of(function: Function, inputs: Inputs, upstream: Sequence[Tensor], mode: str) -> Step:
    """The timed part of a mode. Forwards are those of training: they save for the backward."""
    leaves = [x for x in inputs.values() if x.requires_grad]

    def forward(_: Any = None) -> Any:
        return function(**inputs)

    def backward(outputs: Any) -> Any:
        # retain_graph: the same backward is timed again.
        return torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    return Step(lambda: None, forward) if mode == "fwd" else Step(forward, backward)


def all_of(steps: Sequence[Step]) -> Step:
    """One after the other, each on its own inputs: what one left in a cache, no other reads."""
    return Step(
        lambda: [step.prepare() for step in steps],
        lambda states: [step.run(state) for step, state in zip(steps, states, strict=True)],
    )


def row_of(op: str, provider: str, shape: Shape, dtype: str, mode: str) -> Row:
    return Row(op, provider, shape.id, dtype, mode, shape.T)


def with_rates(row: Row, op: Op, shape: Shape, roofs: Roofs) -> Row:
    flops, bytes_ = op.flops(shape, row.mode), op.bytes(shape, row.dtype, row.mode)
    roof, share = nearer_roof(roofs, row.device_ms, flops, bytes_, row.dtype)
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
            inputs = op.inputs(shape, Draw(bench.device, DTYPES[dtype], bench.device))
            upstream = _compare(op.reference(shape), inputs, entries, bench)
            bench.timer.clear()
        except Exception as error:
            for entry in entries:
                for mode in modes:
                    row = row_of(op.name, entry.name, shape, dtype, mode)
                    yield failed(row, error, bench.timer)
            return
        for mode in modes:
            for entry in entries:
                if entry.is_right:
                    _warm_up(entry, inputs, upstream, mode, bench)
            take_turns(entries, bench.timer, flush=True, at_work=bench.at_work)
            baseline = None
            for entry in entries:
                row = entry.finish(row_of(op.name, entry.name, shape, dtype, mode))
                row = with_rates(row, op, shape, bench.roofs)
                baseline = row if entry.name == BASELINE else baseline
                yield row.with_speedup(baseline)
                entry.release()
            bench.timer.clear()


def _compare(
    specification: Function, inputs: Inputs, entries: list[Entry], bench: Bench
) -> Sequence[Tensor]:
    """Judge everybody by the 2x rule. Returns: the upstream gradients of the timed backwards."""
    made = [entry for entry in entries if entry.is_right]
    try:
        reference = Reference(specification, inputs)
        for entry in made:
            bench.at_work(entry.name, entry.provider.compiled)
            with attempt(entry, bench.timer), judged(entry.context(), entry.provider.ours):
                entry.outcome = verdict(reference.errors(entry.call))
        return reference.upstream
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    bench.timer.clear()
    for entry in made:
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
    bench.at_work(entry.name, entry.provider.compiled)
    with attempt(entry, timer), entry.context():
        entry.run = functools.partial(step.run, step.prepare())
        ms = entry.warm_up(timer, TURN_MS, MIN_SAMPLES, MAX_SAMPLES, flush=True)
        if ms < SMALL_MS:
            try:
                entry.replay = timer.capture(all_of(several))
            except RuntimeError as error:  # not all can be captured; the events still time it
                error.__traceback__ = None
                bench.say(f"{entry.name} {mode}: no graph: {error}".split("\n")[0])
                timer.clear()
