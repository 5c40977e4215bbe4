"""No speed-up without right numbers: outputs and every gradient against float64 by the 2x rule.

An op is held against its specification on the very inputs that are timed, a model against its host
(model_errors.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from ..accuracy.accuracy import Error
from ..runtime.configs import recording
from .timer import Timer

OK, FAILED, ERROR, MEMORY = "ok", "FAILED", "error", "out of memory"


class Outcome(NamedTuple):
    """What became of a contender: a status, why, and its error.

    error: the largest of its tensors' against float64, as a share of what the 2x rule allows.
    """

    status: str = OK
    note: str = ""
    error: float = math.nan


def failure(error: Exception, timer: Timer) -> Outcome:
    """The outcome of what a contender raised. Raises DeviceLost if no other can run now."""
    status = ERROR
    if isinstance(error, torch.OutOfMemoryError):
        status = MEMORY
    elif isinstance(error, AssertionError):
        status = FAILED
    lines = f"{type(error).__name__}: {str(error).strip()}".split("\n")
    # a compiler says whose error it was in the first line, and the error in the next
    note = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])[:300]
    error.__traceback__ = None  # its frames hold the tensors that did not fit
    timer.clear()
    return Outcome(status, note)


def verdict(errors: Sequence[Error]) -> Outcome:
    failed = [e for e in errors if not e.passed]
    error = max((e.share for e in errors), default=math.nan)
    if not failed:
        return Outcome(error=error)
    worst = "; ".join(str(e).removesuffix("  FAILED") for e in failed[:2])
    return Outcome(FAILED, f"2x rule: {worst}", error)


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
