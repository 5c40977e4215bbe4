"""Measures the shipped launch configs at the shapes of a step; one that is wrong cannot win.

1. The step runs once, and each call of a public function is noted: shapes, strides, dtypes, which
   inputs want a gradient, autocast.
2. Each noted call is replayed on random inputs. The operators in it take the decisions that are to
   be tuned, at the very keys of the step.
3. Every config that fits a key is forced. The replay must keep the 2x rule for the output and every
   gradient, twice with equal bits, outputs poisoned; only then are its operators timed.
4. Timings of a config and of the default alternate. The default stays unless the other is better
   by more than 2 % and more than the spread of both.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from ..measure.timer import microseconds as gpu_microseconds
from ..measure.turns import alternate, beats
from ..runtime.backend import backend, gpu
from ..runtime.compat import TorchDispatchMode
from ..runtime.configs import TABLES, Choice, forced, install, recording
from ..runtime.operator import LAUNCHERS
from ..runtime.tables import Key
from ..runtime.tuned_table import Journal
from ..verify.runner import Fault, check, device_lost
from .replay import Call, Replay, noting

ROUNDS = 7  # of a config and the default in turn

Timer = Callable[[Callable[[], object]], float]  # -> microseconds of one call


class Unusable(RuntimeError):
    """A config that left the GPU in a state in which nothing runs any more."""


class OperatorCall(NamedTuple):
    """One launcher's call in a replay, and the decisions that it took."""

    launcher: Callable[..., Any]
    arguments: tuple[Any, ...]
    choices: tuple[Choice, ...]

    def __call__(self) -> None:
        with torch.no_grad():
            self.launcher(*self.arguments)


class _NoteOperators(TorchDispatchMode):
    """Where a dispatch mode looks on, calls go through the registered operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastvit_kernels":
            return func(*args, **(kwargs or {}))
        with recording() as choices:
            result = func(*args, **(kwargs or {}))
        launcher = functools.partial(LAUNCHERS[func.overloadpacket.__name__], **(kwargs or {}))
        self.calls.append(OperatorCall(launcher, args, tuple(choices)))
        return result


def operator_calls(replay: Replay) -> list[OperatorCall]:
    """The operators that a replay calls, in order, those of its backward too."""
    with _NoteOperators() as mode:
        replay.run()
    return mode.calls


@dataclass
class Decision:
    """What was found for one decision."""

    choice: Choice
    default: Any
    winner: Any
    default_us: float  # all its operators in one step
    winner_us: float
    tried: int = 0
    refused: list[tuple[Any, str]] = field(default_factory=list)  # config, why
    complete: bool = True  # False where the time was over before every config was tried
    unchecked: str = ""  # why there is no float64 reference to check with
    left: float = 0.0  # of the work of all decisions, the share that comes after


def _deciding(replays: Sequence[tuple[Replay, int]], choice: Choice) -> list[Any]:
    """[(operator call, count)] of those that take this decision."""
    return [
        (call, count)
        for replay, count in replays
        for call in operator_calls(replay)
        if any(c.table == choice.table and c.key == choice.key for c in call.choices)
    ]


def _step_us(table: str, config: Any, calls: list[Any], timer: Timer) -> float:
    with forced(table, config):
        return sum(count * timer(call) for call, count in calls)


def decide(
    choice: Choice,
    calls: Mapping[Call, int],
    device: torch.device,
    timer: Timer,
    deadline: float,
    journal: Journal,
) -> Decision:
    """Check and time every config that fits this decision.

    `calls` take it; beside each stands how often the step makes it.
    A default that is itself wrong here loses to the fastest config that is right.
    """
    table = TABLES[choice.table]
    default, *others = table.candidates(choice.gpu, *choice.key)
    replays = [(Replay(call, device), count) for call, count in calls.items()]
    found = Decision(choice, default, default, 0.0, 0.0)
    try:
        references = [replay.reference for replay, _ in replays]
    except torch.OutOfMemoryError as error:
        found.unchecked = str(error).split(". ")[0]
        return found

    def refused(config: Any) -> bool:
        if journal.is_fatal(choice.table, config):
            found.refused.append((config, "it ended the process of a former run"))
            return True
        journal.trying(choice.table, config)
        with forced(choice.table, config):
            for reference, (replay, _) in zip(references, replays, strict=True):
                try:
                    check(reference, replay.function)
                except Fault as fault:
                    if lost := device_lost(device):
                        raise Unusable(f"{choice.table} {config}: {lost}") from fault
                    found.refused.append((config, f"{replay.call}: {fault}"))
                    return True
        return False

    default_is_wrong = refused(default)
    with forced(choice.table, default):
        default_calls = _deciding(replays, choice)
    found.default_us = _step_us(choice.table, default, default_calls, timer)
    found.winner_us = found.default_us
    best = None
    for config in others:
        if time.monotonic() > deadline:
            found.complete = False
            break
        found.tried += 1
        if refused(config):
            continue
        with forced(choice.table, config):
            config_calls = _deciding(replays, choice)
        ours, defaults = alternate(
            ROUNDS,
            functools.partial(_step_us, choice.table, config, config_calls, timer),
            functools.partial(_step_us, choice.table, default, default_calls, timer),
        )
        ratio = median(ours) / median(defaults)
        if (default_is_wrong or beats(ours, defaults)) and (best is None or ratio < best):
            best = ratio
            found.winner = config
            found.default_us, found.winner_us = median(defaults), median(ours)
    return found


def tune(
    step: Callable[[], object],
    device: torch.device,
    *,
    timer: Timer = gpu_microseconds,
    seconds: float = float("inf"),
    done: Container[tuple[str, Key]] = (),
) -> Iterator[Decision]:
    """Tune every decision that a step takes, those that take the most time first.

    Args:
        step: runs the model once on `device`, forward alone or backward too.
        timer: microseconds of one call.
        seconds: after these no further config is tried; a Decision says where that cut it short.
        done: (table, key) of those that were decided before.
    Yields: one Decision for each other (table, key) that has more than one config.
    """
    deadline = time.monotonic() + seconds
    here = gpu(device)
    journal = Journal(here)
    install(here, {})  # the shipped defaults are what a tuned config must beat
    try:
        with backend("triton"):
            with noting() as noted:
                step()
            decisions: dict[Choice, dict[Call, int]] = {}
            share: dict[Choice, float] = {}
            for call, count in noted.items():
                replay = Replay(call, device)
                for operator in operator_calls(replay):
                    open_choices = [
                        c
                        for c in operator.choices
                        if (c.table, c.key) not in done
                        and len(TABLES[c.table].candidates(c.gpu, *c.key)) > 1
                    ]
                    us = count * timer(operator) if open_choices else 0.0
                    for choice in open_choices:
                        decisions.setdefault(choice, {})[call] = count
                        share[choice] = share.get(choice, 0.0) + us
                del replay
            work = {
                c: len(TABLES[c.table].candidates(c.gpu, *c.key)) * len(calls)
                for c, calls in decisions.items()
            }
            left = sum(work.values())
            for choice in sorted(decisions, key=lambda c: -share[c]):
                left -= work[choice]
                if time.monotonic() > deadline:
                    default = TABLES[choice.table].default(choice.gpu, *choice.key)
                    us = share[choice]
                    found = Decision(choice, default, default, us, us, complete=False)
                else:
                    found = decide(choice, decisions[choice], device, timer, deadline, journal)
                    journal.survived()
                found.left = left / sum(work.values())
                yield found
    except (Exception, KeyboardInterrupt, GeneratorExit) as error:
        if not isinstance(error, Unusable):
            journal.survived()
        raise
    finally:
        install(here, None)
