"""What is known of a swapped module: whether its fused forward may run, and the way that takes.

A verdict is None, or the reason why the host's own forward runs. It is kept for the module and
holds as long as its facts do (facts.py); then the module is looked at again, and proven again where
its configuration is new.

The way is resolved once for each state: the facts, which parts train, which tensors they hold and
who hooks them, compared by functions of C. A state that was met before has a plan, and the call
runs it at once; any other call makes the plan and runs it. Where somebody looks on (a hook, a mode,
a tracer, a listener, a checkpoint that remembers a yes) no state is asked, and no plan kept. A plan
holds places of modules, no module and no tensor: weights may be replaced between calls.
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
from .facts import ClassOf, Facts, is_there, level_of, patched, swapped_of, torch_is_patched
from .prove import TRUSTED, prove

_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_tensors = itemgetter("_parameters", "_buffers")
_training = itemgetter("training")
_memory = attrgetter("layout", "is_nested")
_KINDS = frozenset((Tensor, nn.Parameter, NoneType))
_DENSE = {(torch.strided, False)}

MOST = 64  # states of a module, and kinds of input
ANOTHER = "it has become another kind of module"
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
    found: dict[str, Any]  # what else was asked of this state

    def note(self, x: Any, extras: dict[str, Any]) -> None:
        """That a call takes the fused forward."""
        kind = None if extras else kind_of(x)
        if kind is not None and len(self.takes) < MOST:
            self.takes.add(kind)


known: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


# Whether the fused forward may run.


def verdict(module: Any) -> str | None:
    """Why the host's own forward runs on `module`, a swapped one; None: the fused one may."""
    found = known.get(module)
    if found is not None and found.facts.hold(module):
        return found.reason
    if module in TRUSTED:
        return None
    try:
        blocked = module.fused_blocked()
        if blocked is not None:
            return blocked or ANOTHER  # by a mode or a hook: of this call alone
        facts = Facts(module)
        reason = _judge(module, facts)
    except Exception as error:  # a state that we cannot read is the host's business
        return f"its state could not be read: {error}"
    known[module] = Known(facts, reason, {})
    return reason


def _judge(module: Any, facts: Facts) -> str | None:
    reason = refusal(module, type(module))
    if reason is not None:
        return reason or ANOTHER
    for name, inner in zip(facts.names, facts.modules(module), strict=True):
        if name and level_of(type(inner)):
            inner: Any
            if inner.fused_blocked() is not None:
                continue  # it is called
            reason = refusal(inner, type(inner))
            if reason is None:
                reason = inner.fused_verdict()
            if reason is not None:
                return f"{name}: {reason or ANOTHER}"
    return prove(module, facts, swapped_of)


def refusal(module: nn.Module, cls: Any) -> str | None:
    """Why a module must not run the fused forward of `cls`, from what it is and has; "" where it is
    of no kind of ours. Whether the two compute the same is prove's question."""
    reason = patched(module, cls)
    if reason is not None:
        return reason
    present = {n for n, m in module._modules.items() if m is not None}
    present |= {n for n, p in module._parameters.items() if p is not None}
    ours = sorted(n for n in present if n.startswith("fused_") and hasattr(cls, n))
    if ours:
        return f"a part of it has a name of ours: {', '.join(ours)}"
    parts = cls.fused_known()
    unknown = sorted(present - parts) if parts else []
    try:
        if (reason := cls.fused_reject(module)) is not None:
            return reason
    except Exception as error:  # of another version: what the row names is not there
        if not unknown:
            return f"its state could not be read: {error}"
    return f"it has a part that we do not know: {', '.join(unknown)}" if unknown else None


def unproven(module: nn.Module, class_of: ClassOf) -> str | None:
    """Why a module may not become `class_of(module)`: the two are not known to compute the same."""
    try:
        return prove(module, Facts(module, class_of), class_of)
    except Exception as error:
        return f"its state could not be read: {error}"


# The way that it takes.


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
        found.plans[state] = Plan(run or _undecided, set(), {})
    found.plans[state].note(x, extras)


def _undecided(modules: list[Any], x: Any, extras: dict[str, Any]) -> Any:
    """The fused forward, which makes a plan at each call."""
    return modules[0].fused_forward(x, **extras)
