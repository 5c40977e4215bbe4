"""No speed-up without right numbers: outputs and every gradient against float64 by the 2x rule.

An op is held against its specification on the very inputs that are timed (`judge_op`). A model's
logits and the gradients of all its parameters are held against the host in float64: the gradients
as one vector, and each by itself with EACH times the limit, so that a small one is not lost
(`model_errors`). Whoever fails gets no speed-up (`speedup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..runtime.configs import recording
from ..verify.accuracy import Error, Reference, measure
from .timer import Timer

OK, FAILED, ERROR, MEMORY = "ok", "FAILED", "error", "out of memory"
EACH = 4.0


class Outcome(NamedTuple):
    """What became of a contender: a status, and why."""

    status: str = OK
    note: str = ""


def failure(error: Exception, timer: Timer) -> Outcome:
    """The outcome of what a contender raised. Raises DeviceLost if no other can run now."""
    status = ERROR
    if isinstance(error, torch.OutOfMemoryError):
        status = MEMORY
    elif isinstance(error, AssertionError):
        status = FAILED
    note = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:300]
    error.__traceback__ = None  # its frames hold the tensors that did not fit
    timer.clear()
    return Outcome(status, note)


def verdict(errors: Sequence[Error]) -> Outcome:
    failed = [e for e in errors if not e.passed]
    if not failed:
        return Outcome()
    worst = "; ".join(str(e).removesuffix("  FAILED") for e in failed[:2])
    return Outcome(FAILED, f"2x rule: {worst}")


def judging(judge: Callable[[], Outcome], timer: Timer) -> Outcome:
    """What it says, or what it raised; ok where float64 does not fit."""
    try:
        return judge()
    except Exception as error:
        found = failure(error, timer)
    lacking = Outcome(OK, "numbers not compared: float64 does not fit")
    return lacking if found.status == MEMORY else found


@contextmanager
def judged(context: AbstractContextManager[Any], ours: bool) -> Iterator[None]:
    """The contender's context. Raises: AssertionError at the end if one of ours asked for no
    kernel inside: PyTorch would be compared with itself."""
    with context, recording() as choices:
        yield
    assert choices or not ours, "it took PyTorch's path: none of our kernels ran"


def judge_op(
    function: Callable[..., Any], reference: Reference, *, ours: bool, backward: bool = True,
    context: AbstractContextManager[Any] | None = None,
) -> Outcome:  # fmt: skip
    """Whether the function's output and, with a backward, every gradient keep the 2x rule."""
    with judged(context or nullcontext(), ours):
        if backward:
            return verdict(reference.errors(function))
        out = function(**reference.inputs)
        yardstick, oracle = reference.yardstick[0], reference.oracle[0]
        return verdict([measure("out", out, yardstick, oracle, out.dtype)])


def overall(name: str, errors: Sequence[Error], sizes: Sequence[int]) -> Error:
    """The error of several tensors as of one vector: its maximum, its RMS, its floor."""
    total = sum(sizes)

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v * n for v, n in zip(values, sizes, strict=True)) / total)

    torch_max, torch_rms = max(e.torch_max for e in errors), mean([e.torch_rms for e in errors])
    floor_max = max(e.limit_max - 2 * e.torch_max for e in errors)
    floor_rms = mean([e.limit_rms - 2 * e.torch_rms for e in errors])
    return Error(
        name, max(e.max for e in errors), mean([e.rms for e in errors]), torch_max, torch_rms,
        2 * torch_max + floor_max, 2 * torch_rms + floor_rms,
    )  # fmt: skip


class Results(NamedTuple):
    """A model's logits and the gradient of each parameter by name; no gradients in inference."""

    logits: Tensor
    grads: Mapping[str, Tensor | None]


def model_errors(actual: Results, yardstick: Results, oracle: Results) -> list[Error]:
    """Of the logits, of the gradients as one vector, and of each with wider limits.

    A gradient that only one side lacks counts as zeros there; one that the oracle lacks is no part.
    """
    dtype = torch.bfloat16
    errors = [measure("logits", actual.logits, yardstick.logits, oracle.logits, dtype)]
    wanted = {name: grad for name, grad in oracle.grads.items() if grad is not None}
    if not wanted:
        return errors

    def of(side: Results, name: str) -> Tensor:
        grad = side.grads[name]
        return torch.zeros_like(wanted[name]) if grad is None else grad

    each = [
        measure(f"d{name}", of(actual, name), of(yardstick, name), grad, dtype)
        for name, grad in wanted.items()
    ]
    errors.append(overall("gradients", each, [grad.numel() for grad in wanted.values()]))
    return errors + [
        replace(e, limit_max=EACH * e.limit_max, limit_rms=EACH * e.limit_rms) for e in each
    ]


class Measured(Protocol):
    @property
    def status(self) -> str: ...
    @property
    def ms(self) -> float | None: ...
    @property
    def graph_ms(self) -> float | None: ...


def like_times(one: Measured, other: Measured) -> tuple[float, float] | None:
    """Both as graphs, or both as they are called; None if one was not timed."""
    if one.graph_ms is not None and other.graph_ms is not None:
        return one.graph_ms, other.graph_ms
    return None if one.ms is None or other.ms is None else (one.ms, other.ms)


def speedup(one: Measured, baseline: Measured | None) -> float | None:
    """The baseline's time over this one's; None unless both were found right."""
    if baseline is None or one.status != OK or baseline.status != OK:
        return None
    times = like_times(one, baseline)
    return None if times is None else times[1] / times[0]
