"""The way that a swapped module takes, resolved once for each state that it is in.

What a call decides anew, it decides from the module's facts (facts.py), from which parts train,
which tensors they hold and who hooks them, and from its own arguments. The first three are a state:
compared by functions of C. A state that was met before has a plan, and the call runs it at once;
any other call decides part by part, and makes the plan of its state. Where somebody looks on (a
hook, a mode, a tracer, a listener, a checkpoint that remembers a yes) no state is asked.

A plan holds places of modules, no module and no tensor: weights may be replaced between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..runtime import dispatch, recompute
from ..runtime.compat import is_observed
from .facts import Facts, is_there, torch_is_patched

_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_tensors = itemgetter("_parameters", "_buffers")
_training = itemgetter("training")
_memory = attrgetter("layout", "is_nested")
_KINDS = frozenset((Tensor, nn.Parameter, NoneType))
_DENSE = {(torch.strided, False)}

# (the described modules, the input, the other arguments) -> the result
Run = Callable[[list[Any], Any, dict[str, Any]], Any]


class Known(NamedTuple):
    """What is known of a swapped module."""

    facts: Facts
    reason: str | None  # why the host's own forward runs
    plans: dict[Any, Plan]  # by state


class Plan(NamedTuple):
    run: Run
    takes: set[Any]  # kinds of input that the fused forward takes, without other arguments

    def note(self, x: Any, extras: dict[str, Any]) -> None:
        """That a call takes the fused forward."""
        kind = None if extras else kind_of(x)
        if kind is not None and len(self.takes) < MOST:
            self.takes.add(kind)


known: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def state_of(modules: list[Any]) -> Any:
    """What decides besides the facts; None where a part is hooked or holds no dense tensors."""
    try:
        own = [*map(vars, modules)]
        if any(chain.from_iterable(map(_hooks, own[1:]))):
            return None
        dicts = [*chain.from_iterable(map(_tensors, own))]
        tensors = [*chain.from_iterable(map(dict.values, dicts))]
        modes = [*map(_training, own)]
    except (KeyError, TypeError):
        return None  # a module that torch.jit made
    if not _KINDS.issuperset(map(type, tensors)):
        return None
    if not _DENSE.issuperset(map(_memory, filter(is_there, tensors))):
        return None
    return (*modes, *map(is_there, tensors), *chain.from_iterable(dicts))


def kind_of(x: Any) -> Any:
    """What decides whether a fused forward takes x alone; None for what is no plain tensor."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
        return None
    return x.shape, x.dtype, x.device


def plan_of(module: Any) -> tuple[Plan, list[Any]] | None:
    """The plan of the state that a module is in, and its parts; None where there is none."""
    if recompute.noted or dispatch.listeners or is_observed() or torch_is_patched():
        return None
    found = known.get(module)
    if found is None or not found.plans:
        return None
    modules = found.facts.held(module)
    plan = None if modules is None else found.plans.get(state_of(modules))
    return None if plan is None else (plan, modules)  # type: ignore[return-value]


def learn(module: Any, x: Any, extras: dict[str, Any]) -> None:
    """Makes the plan of a module whose verdict was just asked and whose fused forward is to run,
    for calls like this one."""
    found = known.get(module)
    if found is None or found.reason is not None or is_observed() or recompute.noted:
        return
    modules = found.facts.modules(module)  # as described: the verdict compared them
    state = state_of(modules)
    if state is None:
        return
    if state not in found.plans:
        if len(found.plans) >= MOST:
            found.plans.clear()
        places = {id(m): place for place, m in enumerate(modules)}
        try:
            run = module.fused_resolved(lambda part: places[id(part)])
        except KeyError:  # a part inside a module that is only looked through
            run = None
        found.plans[state] = Plan(run or _undecided, set())
    found.plans[state].note(x, extras)


MOST = 64  # states of a module, and kinds of input


def _undecided(modules: list[Any], x: Any, extras: dict[str, Any]) -> Any:
    """The fused forward that decides part by part."""
    return modules[0].fused_forward(x, **extras)
