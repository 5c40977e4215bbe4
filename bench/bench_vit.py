"""Whole models: a step of training or inference of timm, torchvision and HF ViTs, in several ways.

The gate holds logits and the gradient of all parameters, as one vector, against the host's model in
float64 on the very batch that is timed; and each gradient by itself with EACH times the limit, so
that a small one is not lost in the vector. (Parameter by parameter is what the tests do.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.harness import (
    WARM_UP,
    Bench,
    Entry,
    Timed,
    failure,
    finish,
    interleave,
    judged,
    verdict,
    with_speedup,
)
from bench.models import WAYS, Case, Runner, Way, build
from bench.providers import BASELINE, Provider, ours, plain
from bench.rows import MEMORY, OK, Row
from bench.timer import Step, Timer
from fastvit_kernels.verify.accuracy import Error, measure

OP, OP_BATCH = "vit", "max_batch"
TURN_MS = 300.0
MIN_STEPS, MAX_STEPS = 2, 20
ORACLE_TOKENS = 3200  # a float64 forward and backward holds so many at once
EACH = 4.0
INTERLEAVED = ("Ti", "S", "B")  # larger models are measured one after the other: memory


def row_of(case: Case, provider: str, op: str = OP, mode: str | None = None) -> Row:
    return Row(
        op, provider, case.id, case.dtype, mode or case.mode, case.preset,
        case.batch, case.tokens,
    )  # fmt: skip


def overall(name: str, errors: Sequence[Error], sizes: Sequence[int]) -> Error:
    """The error of several tensors as of one vector: its maximum, its RMS, its floor."""
    total = sum(sizes)

    def largest(field: str) -> float:
        return max(getattr(e, field) for e in errors)

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v * n for v, n in zip(values, sizes, strict=True)) / total)

    torch_rms = mean([e.torch_rms for e in errors])
    floor_max = max(e.limit_max - 2 * e.torch_max for e in errors)
    floor_rms = mean([e.limit_rms - 2 * e.torch_rms for e in errors])
    return Error(
        name, largest("max"), mean([e.rms for e in errors]), largest("torch_max"), torch_rms,
        2 * largest("torch_max") + floor_max, 2 * torch_rms + floor_rms,
    )  # fmt: skip


class Oracle:
    """The host's model in float64 and in the precision that is measured, on the whole batch."""

    def __init__(self, case: Case, device: torch.device):
        eager = Runner(case, Way(), device)
        self.upstream = torch.randn(
            (case.batch, 1000), generator=torch.Generator(device).manual_seed(2), device=device
        )
        # The oracle differentiates what the others do: an upstream gradient in their own dtype.
        low = torch.bfloat16 if case.dtype in ("amp", "bf16") else torch.float32
        self.upstream = self.upstream.to(low)
        self.logits, self.grads = self._float64(case, eager.images, device)
        self.torch_logits, self.torch_grads = eager.results(self.upstream)

    def _float64(
        self, case: Case, images: Tensor, device: torch.device
    ) -> tuple[Tensor, list[Tensor | None]]:
        dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
        model = build(case, device).to(device, dtype).double().train(case.mode == "train")
        logits = []
        rows = max(1, ORACLE_TOKENS // case.tokens)
        pairs = zip(images.split(rows), self.upstream.split(rows), strict=True)
        with torch.set_grad_enabled(case.mode == "train"):
            for part, upstream in pairs:
                out = model(part.double())
                out = out if isinstance(out, Tensor) else out.logits
                if case.mode == "train":
                    out.backward(upstream.double())
                logits.append(out.detach())
        grads = [p.grad for p in model.parameters()] if case.mode == "train" else []
        return torch.cat(logits), grads

    def errors(self, runner: Runner, timer: Timer) -> list[Error]:
        """Of the runner's logits, of its gradients as one vector, and of each with wider limits; of
        a graph, of its replay."""
        if runner.way.graph:
            logits, grads = _replayed(lambda: runner.results(self.upstream), timer)
        else:
            logits, grads = runner.results(self.upstream)
        dtype = torch.bfloat16
        errors = [measure("logits", logits, self.torch_logits, self.logits, dtype)]
        each, sizes = [], []
        names = [name for name, _ in runner.model.named_parameters()][: len(grads)]
        for name, a, y, o in zip(names, grads, self.torch_grads, self.grads, strict=True):
            if o is not None:
                a = torch.zeros_like(o) if a is None else a
                y = torch.zeros_like(o) if y is None else y
                each.append(measure(f"d{name}", a, y, o, dtype))
                sizes.append(o.numel())
        errors += [overall("gradients", each, sizes)] if each else []
        return errors + [
            replace(e, limit_max=EACH * e.limit_max, limit_rms=EACH * e.limit_rms) for e in each
        ]


def _replayed(run: Callable[[], Any], timer: Timer) -> Any:
    """What a replay of `run`'s kernels has written."""
    results: list[Any] = [None]

    def keep(_: Any) -> None:
        results[0] = run()  # at the capture: tensors that each replay writes anew

    replay = timer.capture(Step(lambda: None, keep))
    logits, grads = results[0]
    for tensor in (logits, *grads):
        if tensor is not None:
            tensor.fill_(float("nan"))  # what the replay does not write stays wrong
    replay()
    return results[0]


def provider_of(name: str) -> Provider:
    """The harness's view of a way to run a model."""
    run = ours if WAYS[name].swapped else plain
    return run(name, lambda: torch.empty(0))


def _ready(entry: Entry, case: Case, oracle: Oracle | None, bench: Bench) -> Timed | None:
    """Build, hold against the oracle, warm up; None and a status where it fails."""
    way = WAYS[entry.provider.name]
    timer, bench.current = bench.timer, entry.provider.name
    why = "its dropped samples are random" if case.drop_path else "float64 does not fit"
    try:
        with judged(entry.provider):
            runner = Runner(case, way, bench.device)
            if oracle is None:
                entry.compared, entry.note = False, f"not compared: {why}"
            else:
                entry.status, entry.note = verdict(oracle.errors(runner, timer))
            run = runner.step
            if way.graph:
                run = timer.capture(Step(lambda: None, lambda _: runner.step()))
            for _ in range(WARM_UP):
                run()
            peak = timer.peak_mib(run)
            # A graph's memory is taken when it is captured, once for all replays; max-autotune's
            # graphs keep theirs in a pool of Inductor's.
            hidden = way.graph or way.compile_mode == "max-autotune"
            peak = None if hidden or peak is None else peak + runner.resident_mib()
            trains = case.mode == "train" and not hidden
            kept = timer.kept_mib(runner.loss) if trains else None
            ms = min(timer.sample(run, 2, flush=False))
    except Exception as error:
        entry.status, entry.note = failure(error, timer)
        return None
    count = min(MAX_STEPS, max(MIN_STEPS, int(TURN_MS / max(ms, 1e-3))))
    return Timed(entry, run, None, count, peak, kept)


def measure_vit(case: Case, names: Sequence[str], bench: Bench) -> Iterator[Row]:
    """Rows of the named ways, the baseline's first; it is measured whether it is named or not."""
    names = [BASELINE, *(n for n in WAYS if n in names and n != BASELINE)]
    entries = [Entry(provider_of(name), torch.empty) for name in names]
    oracle: Oracle | None = None
    try:
        oracle = None if case.drop_path else Oracle(case, bench.device)
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    except Exception as error:
        status, note = failure(error, bench.timer)
        for name in names:
            yield replace(row_of(case, name), status=status, note=note)
        return
    bench.timer.clear()
    baseline: Row | None = None
    groups = [entries] if case.model in INTERLEAVED else [[e] for e in entries]
    for group in groups:
        rows = _measure_group(case, group, oracle, bench)
        for row, entry in zip(rows, group, strict=True):
            if entry.provider.name == BASELINE:
                baseline = row
            yield with_speedup(row, baseline, entry.compared)
        bench.timer.clear()


def _measure_group(
    case: Case, group: list[Entry], oracle: Oracle | None, bench: Bench
) -> list[Row]:
    timed = {}
    if any(WAYS[entry.provider.name].compile_mode is not None for entry in group):
        torch.compiler.reset()  # once: a second would throw away what the group has compiled
    for entry in group:
        ready = _ready(entry, case, oracle, bench)
        if ready is not None:
            timed[entry.provider.name] = ready
        bench.timer.clear()
    interleave(list(timed.values()), bench, flush=False)
    rows = []
    for entry in group:
        row = row_of(case, entry.provider.name)
        t = timed.get(entry.provider.name)
        row = finish(row, entry, t.times if t else [], [])
        if t is not None and row.ms is not None:
            tflops = case.flops / row.ms / 1e9
            roof = bench.roofs.matmul_tflops.get("bf16")
            row = replace(
                row, peak_mib=t.peak_mib, kept_mib=t.kept_mib, flops=case.flops, tflops=tflops,
                images_per_s=1e3 * case.batch / row.ms, roof="matmul",
                roof_share=tflops / roof if roof else None,
            )  # fmt: skip
        rows.append(row)
    return rows


def fits(case: Case, way: Way, bench: Bench) -> bool:
    """Whether one step at this batch has the memory it needs."""
    try:
        Runner(case, way, bench.device).step()
        bench.timer.clear()
        return True
    except Exception as error:
        status, note = failure(error, bench.timer)
        if status != MEMORY:
            raise RuntimeError(note) from None
        return False


def largest_batch(case: Case, name: str, bench: Bench, limit: int = 16384) -> Row:
    """The largest batch of which a step fits, to an eighth: powers of two, then three halvings."""
    row = row_of(case, name, op=OP_BATCH)
    attempt = functools.partial(fits, way=WAYS[name], bench=bench)
    best, bad = 0, case.batch
    try:
        with provider_of(name).context():
            while bad <= limit and attempt(replace(case, batch=bad)):
                best, bad = bad, 2 * bad
            for _ in range(3):
                middle = (best + bad) // 2
                if best < middle < bad and bad <= limit:
                    if attempt(replace(case, batch=middle)):
                        best = middle
                    else:
                        bad = middle
    except RuntimeError as error:
        return replace(row, status="error", note=str(error))
    return replace(row, status=OK, batch=best)
