"""Contenders are measured in turn, so that a clock that drifts drifts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .gate import OK, Outcome, failure
from .timer import Timer, samples_in, spread

ROUNDS = 5  # how often the contenders take turns
MIN_GAIN = 0.02  # less is noise, however steady it looks

T = TypeVar("T")


def alternate(rounds: int, *samples: Callable[[], T]) -> list[list[T]]:
    """What each of `samples` gives, called in turn `rounds` times."""
    found: list[list[T]] = [[] for _ in samples]
    for _ in range(rounds):
        for own, sample in zip(found, samples, strict=True):
            own.append(sample())
    return found


@dataclass
class Contender:
    """What is ready to be timed, and the times of its turns."""

    name: str
    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    replay: Callable[[], Any] | None = None  # the same as a CUDA graph
    count: int = 1  # samples in one turn
    outcome: Outcome = field(default_factory=Outcome)
    times: list[float] = field(default_factory=list)  # ms
    graph_times: list[float] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether it runs, with right numbers: nothing else is timed."""
        return self.outcome.status == OK


@contextmanager
def attempt(contender: Contender, timer: Timer) -> Iterator[None]:
    """What is raised inside is the contender's outcome, for the others are still measured. Raises:
    DeviceLost."""
    try:
        yield
    except Exception as error:
        contender.outcome = failure(error, timer)


def take_turns(
    contenders: Sequence[Contender],
    timer: Timer,
    *,
    flush: bool,
    rounds: int = ROUNDS,
    at_work: Callable[[str], Any] = lambda name: None,
) -> None:
    """Time each in turn; one that raises has its outcome and no further turn.

    Args:
        flush: whether each sample begins with a cold cache.
        at_work: is told which comes next, to name it if the process does not survive.
    Raises: DeviceLost.
    """
    for c in [c for _ in range(rounds) for c in contenders]:
        if not c.is_right:
            continue
        at_work(c.name)
        with attempt(c, timer):
            with c.context():
                c.times += timer.sample(c.run, c.count, flush)
            if c.replay is not None:
                c.graph_times += timer.sample(c.replay, c.count, flush)


def time_together(
    contenders: Sequence[Contender],
    timer: Timer,
    ms: float,
    *,
    flush: bool,
    most: int = 100,
    at_work: Callable[[str], Any] = lambda name: None,
) -> None:
    """Time in turns those that run well, for so many ms in all; at most so many samples of each in
    a turn, at least one. Former times are left out; a contender without any runs twice first."""
    take_turns([c for c in contenders if not c.times], timer, flush=flush, rounds=2)
    right = [c for c in contenders if c.is_right]
    for c in right:
        c.count, c.times = samples_in(ms / (len(right) * ROUNDS), c.times[-1], 1, most), []
    take_turns(right, timer, flush=flush, at_work=at_work)


def beats(candidate: list[float], default: list[float]) -> bool:
    """Whether a candidate's times are lower than the default's by more than the noise."""
    new, old = spread(candidate), spread(default)
    gain = 1.0 - new.median / old.median
    return gain > max(MIN_GAIN, *((s.p80 - s.p20) / s.median for s in (new, old)))
