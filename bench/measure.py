"""Measures one op at one shape, all providers in turn, and closes the gate on those that are wrong.

Each provider's output and gradients are held against float64 on the very inputs that are timed, by
the 2x rule (docs/numerics.md). One that breaks it has status FAILED and no speed-up. Timer, turns
and gate are fastvit_kernels/measure's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.ops import Draw, Op
from bench.providers import BASELINE, Function, Inputs, Provider, Shape
from bench.roofs import Roofs
from bench.rows import OK, Row, rated, timed, with_speedup
from fastvit_kernels.measure.gate import Outcome, failure, judge_op, judged
from fastvit_kernels.measure.timer import Step, Timer, samples_in, spread
from fastvit_kernels.measure.turns import Contender, attempt, take_turns
from fastvit_kernels.runtime.dtypes import DTYPES
from fastvit_kernels.verify.accuracy import Reference, convolutions_like_matmuls

WARM_UP = 3
TURN_MS = 25.0  # measured time of a provider in one turn
MIN_SAMPLES, MAX_SAMPLES = 2, 40  # in one turn
SMALL_MS = 2.0  # below it the host's share matters: measured through a CUDA graph too


@dataclass
class Bench:
    """What a run's measurements share."""

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
    """A provider in a case, and what became of it."""

    function: Function = _absent
    provider: Provider = _MODEL
    compared: bool = True
    peak_mib: float | None = None
    kept_mib: float | None = None

    def release(self) -> None:
        """Forget what a mode gave, and what holds its memory."""
        self.run, self.replay = _absent, None
        self.times, self.graph_times = [], []
        self.peak_mib = self.kept_mib = None


def warm_up(
    entry: Entry, timer: Timer, turn_ms: float, least: int, most: int, *, flush: bool
) -> float:
    """Run it, note its memory, count the samples of a turn. Returns: ms."""
    for _ in range(WARM_UP):
        entry.run()
    entry.peak_mib, entry.kept_mib = timer.memory_mib(entry.run)
    ms = min(timer.sample(entry.run, 2, flush))
    entry.count = samples_in(turn_ms, ms, least, most)
    return ms


def failed(rows: Iterable[Row], error: Exception, bench: Bench) -> Iterator[Row]:
    """Rows that say why there are no times."""
    status, note = failure(error, bench.timer)
    return (replace(row, status=status, note=note) for row in rows)


def row_of(op: str, provider: str, shape: Shape, dtype: str, mode: str) -> Row:
    return Row(op, provider, shape.id, dtype, mode, shape.T)


def step_of(function: Function, inputs: Inputs, upstream: Sequence[Tensor], mode: str) -> Step:
    """The timed part of a mode. Forwards are those of training: they save for the backward."""
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]

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


def finish(row: Row, entry: Entry) -> Row:
    """The row with status, memory and times."""
    row = replace(
        row, status=entry.outcome.status, note=entry.outcome.note,
        peak_mib=entry.peak_mib, kept_mib=entry.kept_mib,
    )  # fmt: skip
    if not entry.times or not entry.is_alive:
        return row
    row = timed(row, entry.times)
    if not entry.graph_times:
        return row
    ms, p20, p80 = spread(entry.graph_times)
    return replace(row, graph_ms=ms, graph_ms_p20=p20, graph_ms_p80=p80)


def _entries(providers: list[Provider], bench: Bench) -> list[Entry]:
    entries = []
    if any(provider.compiled for provider in providers):
        torch.compiler.reset()  # once: a second would throw away what the first has compiled
    for p in providers:
        entry = Entry(p.name, _absent, p.context, provider=p)
        with attempt(entry, bench.timer):  # a peer of another version may raise
            entry.function = p.make()
        entries.append(entry)
    return entries


def _judge(entry: Entry, reference: Reference, bench: Bench) -> None:
    """Set the entry's outcome by the 2x rule."""
    provider = entry.provider

    def function(**inputs: Tensor | None) -> Any:
        return entry.function(**provider.takes(inputs))

    bench.at_work(entry.name)
    with attempt(entry, bench.timer), judged(entry.context(), provider.ours):
        entry.outcome = judge_op(function, reference, provider.backward)


def measure_op(
    op: Op, shape: Shape, dtype: str, modes: Sequence[str], names: Sequence[str], bench: Bench
) -> Iterator[Row]:
    """Rows of the named providers in the given modes, the baseline's first in each mode.

    The baseline is measured whether it is named or not: every speed-up comes from the same turns.
    """
    with convolutions_like_matmuls():  # of every provider: the yardstick's precision
        providers = [p for p in op.everyone(shape, dtype) if p.name in (*names, BASELINE)]
        entries = _entries(providers, bench)
        try:
            draw = Draw(bench.device, DTYPES.get(dtype, torch.float32))
            inputs = op.inputs(shape, draw.dtype, draw)
            upstream = _compare(op.reference(shape, dtype), inputs, entries, bench)
            bench.timer.clear()
        except Exception as error:
            keys = [(entry.name, mode) for entry in entries for mode in modes]
            rows = (row_of(op.name, name, shape, dtype, mode) for name, mode in keys)
            yield from failed(rows, error, bench)
            return
        for mode in modes:
            yield from _measure_mode(op, shape, dtype, mode, entries, inputs, upstream, bench)
            bench.timer.clear()


def _compare(
    specification: Function, inputs: Inputs, entries: list[Entry], bench: Bench
) -> Sequence[Tensor]:
    """Judge everybody. Returns: the upstream gradients of the timed backwards."""
    try:
        reference = Reference(specification, inputs)
        for entry in entries:
            if entry.is_alive:
                _judge(entry, reference, bench)
        return reference.upstream
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    bench.timer.clear()
    for entry in entries:
        if entry.is_alive:
            entry.compared = False
            entry.outcome = Outcome(OK, "not compared: float64 does not fit")
    out = specification(**inputs)
    return [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]


def _warm_up(entry: Entry, inputs: Inputs, upstream: Any, mode: str, bench: Bench) -> None:
    """Compile, count samples, capture; an outcome on the entry if it fails."""
    timer = bench.timer
    inputs = {  # leaves of its own: their making is not timed
        n: x if x is None else x.detach().requires_grad_(x.requires_grad)
        for n, x in entry.provider.takes(inputs).items()
    }
    step = step_of(entry.function, inputs, upstream, mode)
    bench.at_work(entry.name)
    with attempt(entry, timer), entry.context():
        entry.run = functools.partial(step.run, step.prepare())
        ms = warm_up(entry, timer, TURN_MS, MIN_SAMPLES, MAX_SAMPLES, flush=True)
        if mode != "fwd":
            entry.kept_mib = None
        if ms < SMALL_MS:
            try:
                entry.replay = timer.capture(step)
            except RuntimeError as error:  # not all can be captured; the events still time it
                error.__traceback__ = None
                bench.say(f"{entry.name} {mode}: no graph: {error}".split("\n")[0])
                timer.clear()


def _measure_mode(
    op: Op, shape: Shape, dtype: str, mode: str, entries: list[Entry], inputs: Inputs,
    upstream: Sequence[Tensor], bench: Bench,
) -> Iterator[Row]:  # fmt: skip
    entries = [e for e in entries if e.provider.backward or mode == "fwd"]
    for entry in entries:
        if entry.is_alive:
            _warm_up(entry, inputs, upstream, mode, bench)
    take_turns(entries, bench.timer, flush=True, at_work=bench.at_work)
    baseline = None
    for entry in entries:
        row = finish(row_of(op.name, entry.name, shape, dtype, mode), entry)
        row = with_rates(row, op, shape, bench.roofs)
        baseline = row if entry.name == BASELINE else baseline
        yield with_speedup(row, baseline, entry.compared)
    for entry in entries:
        entry.release()


def with_rates(row: Row, op: Op, shape: Shape, roofs: Roofs) -> Row:
    ms = row.device_ms
    if ms is None:
        return row
    flops, bytes_ = op.flops(shape, row.mode), op.bytes(shape, row.dtype, row.mode)
    roof, share = roofs.share(ms, flops, bytes_, "bf16" if row.dtype == "amp" else row.dtype)
    return replace(rated(row, flops, bytes_), roof=roof, roof_share=share)
