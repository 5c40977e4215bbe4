"""Whether a module's fused forward may run, decided once for each state that a module is in.

A verdict is None, or the reason why the host's own forward runs. It is kept for the module and
holds as long as its facts do; then the module is looked at again, and proven again where its
configuration is new.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .facts import ClassOf, Facts, host_of, replaced_method, shadowed_method, swapped_of
from .plans import Known, known
from .prove import TRUSTED, prove

ANOTHER = "it has become another kind of module"


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
        if name and hasattr(type(inner), "fused_level"):
            inner: Any
            if inner.fused_blocked() is not None:
                continue  # it is called
            reason = refusal(inner, type(inner))
            if reason is None:
                reason = inner.fused_verdict()
            if reason is not None:
                return f"{name}: {reason or ANOTHER}"
    return prove(module, facts, swapped_of)


def patched(module: nn.Module, cls: Any) -> str | None:
    """Which method of a module that would run the fused forward of `cls` somebody replaced."""
    name = shadowed_method(module)
    if name is not None and (name != "forward" or not hasattr(type(module), "fused_level")):
        return f"its {name} was replaced on the instance"
    name = replaced_method(host_of(cls))
    if name is not None:
        return f"{host_of(cls).__name__}.{name} was replaced"
    return None


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
    if unknown:
        return f"it has a part that we do not know: {', '.join(unknown)}"
    return cls.fused_reject(module)


def unproven(module: nn.Module, class_of: ClassOf) -> str | None:
    """Why a module may not become `class_of(module)`: the two are not known to compute the same."""
    try:
        return prove(module, Facts(module, class_of), class_of)
    except Exception as error:
        return f"its state could not be read: {error}"
