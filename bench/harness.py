"""Measures one op at one shape, all providers in turn, and closes the gate on those that are wrong.

Each provider's output and gradients are held against float64 on the very inputs that are timed, by
the 2x rule (docs/numerics.md). One that breaks it has status FAILED and no speed-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.providers import BASELINE, Function, Provider, with_autotuned
from bench.rows import ERROR, FAILED, MEMORY, OK, Row
from bench.shapes import Shape
from bench.timer import Roofs, Step, Timer, median_p20_p80
from fastvit_kernels.runtime.configs import recording
from fastvit_kernels.runtime.dtypes import DTYPES
from fastvit_kernels.verify.accuracy import (
    Error,
    Reference,
    convolutions_like_matmuls,
    measure,
)

MODES = ("fwd", "bwd", "both")
ROUNDS = 5  # how often the providers take turns
WARM_UP = 3
ROUND_MS = 25.0  # measured time of a provider in one turn
MIN_SAMPLES, MAX_SAMPLES = 2, 40  # in one turn
SMALL_MS = 2.0  # below it the host's share matters: measured through a CUDA graph too


@dataclass(frozen=True)
class Op:
    """What a bench_<op>.py says of its op.

    flops and bytes are those of the mathematics: what any implementation must do and move at
    least, every operand read once and every result written once.
    """

    name: str
    shapes: Callable[[], Iterator[Shape]]
    inputs: Callable[[Shape, torch.dtype, Draw], dict[str, Tensor | None]]
    reference: Callable[[Shape, str], Function]
    providers: Callable[[Shape, str], list[Provider]]
    flops: Callable[[Shape, str], float]
    bytes: Callable[[Shape, str, str], float]  # shape, dtype, mode
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def everyone(self, shape: Shape, dtype: str) -> list[Provider]:
        """Its providers, the compiled ones also as max-autotune finds them."""
        return with_autotuned(self.providers(shape, dtype))


class Draw:
    """Random inputs of a case, the same at every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return x.to(self.dtype).requires_grad_(grad)


@dataclass
class Bench:
    """What a run's measurements share."""

    device: torch.device
    timer: Timer
    roofs: Roofs
    say: Callable[[str], None]
    note: Callable[[str], object] = lambda provider: None  # of the one that is at work now
    _current: str = ""

    @property
    def current(self) -> str:
        """The provider at work, to be named where the GPU is lost or the process is killed."""
        return self._current

    @current.setter
    def current(self, provider: str) -> None:
        if provider != self._current:
            self.note(provider)
        self._current = provider


@dataclass
class Entry:
    """A provider in a case: what became of it."""

    provider: Provider
    function: Function
    status: str = OK
    note: str = ""
    compared: bool = True


def first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]


def failure(error: Exception, timer: Timer) -> tuple[str, str]:
    """(status, note) of what a provider raised. Raises DeviceLost where no other can run now."""
    status = ERROR
    if isinstance(error, torch.OutOfMemoryError):
        status = MEMORY
    elif isinstance(error, AssertionError):
        status = FAILED
    note = first_line(error)
    error.__traceback__ = None  # its frames hold the tensors that did not fit
    timer.clear()
    return status, note


def row_of(op: str, provider: str, shape: Shape, dtype: str, mode: str) -> Row:
    return Row(op, provider, shape.id, dtype, mode, shape.model, shape.B, shape.T)


def verdict(errors: Sequence[Error]) -> tuple[str, str]:
    failed = [e for e in errors if not e.passed]
    if failed:
        return FAILED, "2x rule: " + "; ".join(str(e).replace("  FAILED", "") for e in failed[:2])
    return OK, ""


@contextmanager
def judged(provider: Provider) -> Iterator[None]:
    """The provider's context. Raises: AssertionError at the end where one of ours asked for no
    kernel inside: PyTorch would be compared with itself."""
    with provider.context(), recording() as choices:
        yield
    assert choices or not provider.ours, "it took PyTorch's path: none of our kernels ran"


def _gate(entry: Entry, reference: Reference, bench: Bench) -> None:
    """Set the entry's status by the 2x rule."""
    bench.current = entry.provider.name
    try:
        with judged(entry.provider):
            if entry.provider.backward:
                errors = reference.errors(entry.function)
            else:
                out = entry.function(**reference.inputs)
                yardstick, oracle = reference.yardstick[0], reference.oracle[0]
                errors = [measure("out", out, yardstick, oracle, out.dtype)]
        entry.status, entry.note = verdict(errors)
    except Exception as error:  # whatever a provider raises, the others are still measured
        entry.status, entry.note = failure(error, bench.timer)


def _step(
    function: Function, inputs: dict[str, Tensor | None], upstream: Sequence[Tensor], mode: str
) -> Step:
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
    return Step(
        lambda: None,
        lambda _: torch.autograd.grad(forward(), leaves, upstream),
    )


@dataclass
class Timed:
    """A provider that is ready for its turns, and what they gave."""

    entry: Entry
    run: Callable[[], Any]
    replay: Callable[[], Any] | None
    count: int
    peak_mib: float | None
    kept_mib: float | None = None
    times: list[float] = field(default_factory=list)
    graph_times: list[float] = field(default_factory=list)


def _captured(step: Step, timer: Timer) -> Callable[[], Any] | None:
    try:
        return timer.capture(step)
    except RuntimeError as error:  # not everything can be captured; the events still time it
        error.__traceback__ = None
        timer.clear()
        return None


def _warm(entry: Entry, step: Step, bench: Bench, forward_alone: bool) -> Timed | None:
    """Compile, count samples, capture; None and a status on the entry where it fails."""
    timer, bench.current = bench.timer, entry.provider.name
    try:
        with entry.provider.context():
            state = step.prepare()
            run = functools.partial(step.run, state)
            for _ in range(WARM_UP):
                run()
            peak = timer.peak_mib(run)
            kept = timer.kept_mib(run) if forward_alone else None
            ms = min(timer.sample(run, 2, flush=True))
            replay = _captured(step, timer) if ms < SMALL_MS else None
    except Exception as error:
        entry.status, entry.note = failure(error, timer)
        return None
    count = min(MAX_SAMPLES, max(MIN_SAMPLES, int(ROUND_MS / max(ms, 1e-3))))
    return Timed(entry, run, replay, count, peak, kept)


def interleave(timed: list[Timed], bench: Bench, flush: bool) -> None:
    """ROUNDS turns of every provider, so that a clock that drifts drifts for all."""
    timer = bench.timer
    for _ in range(ROUNDS):
        for t in timed:
            if t.entry.status not in (OK, FAILED):
                continue
            bench.current = t.entry.provider.name
            try:
                with t.entry.provider.context():
                    t.times += timer.sample(t.run, t.count, flush)
                if t.replay is not None:
                    t.graph_times += timer.sample(t.replay, t.count, flush)
            except Exception as error:
                t.entry.status, t.entry.note = failure(error, timer)


def finish(row: Row, entry: Entry, times: list[float], graph_times: list[float]) -> Row:
    """The row with status and times."""
    row = replace(row, status=entry.status, note=entry.note)
    if not times or entry.status not in (OK, FAILED):
        return row
    ms, p20, p80 = median_p20_p80(times)
    graph_ms = median_p20_p80(graph_times)[0] if graph_times else None
    return replace(row, ms=ms, ms_p20=p20, ms_p80=p80, graph_ms=graph_ms, samples=len(times))


def with_speedup(row: Row, baseline: Row | None, compared: bool) -> Row:
    """The row with its speed-up, where it has been found right. Like is compared with like."""
    if row.status != OK or not compared or baseline is None or baseline.status != OK:
        return row
    if row.ms is None or baseline.ms is None:
        return row
    if row.graph_ms is not None and baseline.graph_ms is not None:
        return replace(row, speedup=baseline.graph_ms / row.graph_ms)
    return replace(row, speedup=baseline.ms / row.ms)


def _absent(**_: Any) -> Tensor:
    raise AssertionError("a provider that could not be made is not called")


def _entries(providers: list[Provider], bench: Bench) -> list[Entry]:
    entries = []
    if any(provider.compiled for provider in providers):
        torch.compiler.reset()  # once: a second would throw away what the first has compiled
    for provider in providers:
        try:
            entries.append(Entry(provider, provider.make()))
        except Exception as error:  # a peer of another version, most likely
            status, note = failure(error, bench.timer)
            entries.append(Entry(provider, _absent, status, note))
    return entries


def measure_op(
    op: Op, shape: Shape, dtype: str, modes: Sequence[str], names: Sequence[str], bench: Bench
) -> Iterator[Row]:
    """Rows of the named providers in the given modes, the baseline's first in each mode.

    The baseline is measured whether it is named or not: every speed-up comes from the same turns.
    """
    with convolutions_like_matmuls():  # of every provider: the yardstick's precision
        yield from _measure(op, shape, dtype, modes, names, bench)


def _measure(
    op: Op, shape: Shape, dtype: str, modes: Sequence[str], names: Sequence[str], bench: Bench
) -> Iterator[Row]:
    providers = [p for p in op.everyone(shape, dtype) if p.name in (*names, BASELINE)]
    entries = _entries(providers, bench)
    try:
        draw = Draw(bench.device, DTYPES.get(dtype, torch.float32))
        inputs = op.inputs(shape, draw.dtype, draw)
        reference = None
        try:
            reference = Reference(op.reference(shape, dtype), inputs)
            upstream = reference.upstream
            for entry in entries:
                if entry.status == OK:
                    _gate(entry, reference, bench)
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None
            bench.timer.clear()
            for entry in entries:
                entry.compared, entry.note = False, "not compared: float64 does not fit"
            out = op.reference(shape, dtype)(**inputs)
            upstream = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]
            del out
        reference = None
        bench.timer.clear()
    except Exception as error:
        status, note = failure(error, bench.timer)
        for entry in entries:
            for mode in modes:
                row = row_of(op.name, entry.provider.name, shape, dtype, mode)
                yield replace(row, status=status, note=note)
        return

    for mode in modes:
        yield from _measure_mode(op, shape, dtype, mode, entries, inputs, upstream, bench)
        bench.timer.clear()


def _measure_mode(
    op: Op, shape: Shape, dtype: str, mode: str, entries: list[Entry],
    inputs: dict[str, Tensor | None], upstream: Sequence[Tensor], bench: Bench,
) -> list[Row]:  # fmt: skip
    entries = [e for e in entries if e.provider.backward or mode == "fwd"]
    timed: dict[str, Timed] = {}
    for entry in entries:
        if entry.status in (OK, FAILED):
            step = _step(entry.function, inputs, upstream, mode)
            warm = _warm(entry, step, bench, mode == "fwd")
            if warm is not None:
                timed[entry.provider.name] = warm
    interleave(list(timed.values()), bench, flush=True)
    rows: list[Row] = []
    for entry in entries:
        row = row_of(op.name, entry.provider.name, shape, dtype, mode)
        t = timed.get(entry.provider.name)
        if t is None:
            row = finish(row, entry, [], [])
        else:
            row = replace(row, peak_mib=t.peak_mib, kept_mib=t.kept_mib)
            row = finish(row, entry, t.times, t.graph_times)
        row = _rates(row, op, shape, bench.roofs)
        baseline = row if entry.provider.name == BASELINE else rows[0] if rows else None
        rows.append(with_speedup(row, baseline, entry.compared))
    return rows


def _rates(row: Row, op: Op, shape: Shape, roofs: Roofs) -> Row:
    ms = row.device_ms
    if ms is None:
        return row
    flops, bytes_ = op.flops(shape, row.mode), op.bytes(shape, row.dtype, row.mode)
    roof, share = roofs.share(ms, flops, bytes_, "bf16" if row.dtype == "amp" else row.dtype)
    return replace(
        row, flops=flops, bytes=bytes_, tflops=flops / ms / 1e9, gbps=bytes_ / ms / 1e6,
        roof=roof, roof_share=share,
    )  # fmt: skip


def itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize
