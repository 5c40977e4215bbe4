"""Every launch config that ships, forced: by the 2x rule and bit for bit.

Which tables a case asks is found by running it with the launches left out; a table that only
another table's config leads to (a kernel that the default route does not take) is found by forcing
that config.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.accuracy.runner import first_line, poisoned
from fastvit_kernels.ops.attention.configs import LIBRARY_BWD
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.configs import TABLES, Choice, forced, recording

Forced = tuple[tuple[str, Any], ...]  # (table, config) that are in force together


class Fault(AssertionError):
    """What a function does wrong: one line."""


def _bits_differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    return not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _repeats(choice: Choice) -> bool:
    """Whether equal inputs give equal bits: torch's backward adds dq in any order."""
    return TABLES[choice.table].choose(choice.gpu, *choice.key) != LIBRARY_BWD


def check(reference: Reference, function: Callable[..., Any], *, repeats: int = 2) -> float:
    """Run a function `repeats` times with poisoned outputs, by the 2x rule and bit for bit; once,
    where what it takes is known to give other bits each time.

    Returns: the largest error as a share of its limit, over the outputs and every gradient.
    Raises: Fault, also where the function raises.
    """
    try:
        with poisoned():
            with recording() as choices:
                outputs, grads = reference.run(function)
            for _ in range(repeats - 1 if all(map(_repeats, choices)) else 0):
                outputs2, grads2 = reference.run(function)
                for i, (a, b) in enumerate(zip(outputs, outputs2, strict=True)):
                    if _bits_differ(a, b):
                        raise Fault(f"two runs give different bits in output {i}")
                for name, a in grads.items():
                    if _bits_differ(a, grads2[name]):
                        raise Fault(f"two runs give different bits in d{name}")
        errors = reference.judge(outputs, grads)
    except Fault:
        raise
    except Exception as error:  # a launch that fails, a shape that is wrong
        raise Fault(first_line(error)) from error
    for error in errors:
        if not error.passed:
            raise Fault(str(error))
    return max((error.share for error in errors), default=0.0)


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Inside, kernels are not launched: what a call decides depends on no value."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(patch.object(kind, "run", lambda *_, **__: None))
        yield


@contextmanager
def all_forced(settings: Forced) -> Iterator[None]:
    with ExitStack() as stack:
        for table, config in settings:
            stack.enter_context(forced(table, config))
        yield


def choices_of(case: Case, settings: Forced = ()) -> list[Choice]:
    """The decisions that a case takes, forward and backward, without running its kernels."""
    inputs = case.make()
    with backend("triton"), launches_left_out(), all_forced(settings), recording() as choices:
        result = case.function(**inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        if wanted := [x for x in inputs.values() if x is not None and x.requires_grad]:
            upstream = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return list(choices)


@dataclass(frozen=True)
class Reached:
    """A table that a case asks, the keys it asks with, and what must be forced to get there."""

    case: Case
    table: str
    choices: tuple[Choice, ...]
    settings: Forced

    def fits(self, config: Any) -> bool:
        """Whether forcing this config changes what the case runs."""
        fits = TABLES[self.table].fits
        return any(fits(choice.gpu, config, *choice.key) for choice in self.choices)

    def configs(self) -> list[Any]:
        """Those of its table that fit."""
        return [config for config in TABLES[self.table].configs if self.fits(config)]


@dataclass(frozen=True)
class Run:
    """One config forced in one case: the largest error as a share of its limit, or a fault."""

    table: str
    config: Any
    case: str
    share: float
    fault: str | None


def reach(every_case: Sequence[Case]) -> tuple[list[Reached], list[Run]]:
    """How each table is reached by each case, and the cases that raise.

    Where tables are left over, configs that may lead to them are followed.
    """
    found: list[Reached] = []
    faults: list[Run] = []

    def follow(case: Case, settings: Forced) -> list[Reached]:
        try:
            choices = sorted(choices_of(case, settings), key=lambda choice: choice.table)
        except Exception as error:  # whatever an op raises, the others are still checked
            table, config = settings[-1] if settings else ("", None)
            faults.append(Run(table, config, case.name, 0.0, first_line(error)))
            return []
        groups = itertools.groupby(choices, key=lambda choice: choice.table)
        return [Reached(case, table, tuple(group), settings) for table, group in groups]

    for case in every_case:
        found += follow(case, ())
    for start in list(found):
        if {r.table for r in found} == set(TABLES):
            break
        for config in start.configs():
            known = {r.table for r in found if r.case is start.case}
            further = follow(start.case, ((start.table, config),))
            found += [r for r in further if r.table not in known]
    return found, faults


def run_config(reached: Reached, config: Any, *, repeats: int = 2) -> Run:
    """Force a config in a case and check it."""
    case = reached.case
    share, fault = 0.0, None
    try:
        with backend("triton"), all_forced((*reached.settings, (reached.table, config))):
            share = check(case.reference, case.function, repeats=repeats)
    except Fault as error:
        fault = str(error)
    return Run(reached.table, config, case.name, share, fault)
