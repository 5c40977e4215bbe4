"""Attentions, MLPs and residual blocks of hosts that no table knows, found by what they do.

One run of a small copy (runs.py) shows which parts a forward calls on which values, and where its
softmax or its sum stands (observe.py). That gives candidates, roles for the fused forwards of
hosts/searched.py, most likely first; each is proven like any other swap until one holds. Names
only order the candidates. Equal configurations share a search.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..runtime.plain import is_watched_everywhere
from .candidates import Refused, Unlike, attention_roles, mlp_roles
from .copies import Copier
from .facts import ClassOf, Facts, host_of, is_rate, methods
from .hosts import searched
from .hosts.fused import arguments_of
from .prove import aside, prove
from .runs import (
    angle_argument,
    angles_for,
    extras_of_block,
    is_mask,
    level_of,
    observed,
    open_parts,
)
from .steps import block_roles

BRANCHES = 6  # attentions and MLPs in a block; a module with more is a stack of them
SECONDS = 5.0  # of CPU time, for the candidates of one configuration; the rest stay untried

# How a mask of a kind may be read, by names that hosts/attention.py has.
READINGS = {
    "added, 4 axes": ("",),
    "boolean, 4 axes": ("", "not"),
    "added, 2 axes": ("", "keys"),
    "boolean, 2 axes": ("keys", "not keys", "", "not"),
}
LEARNT = ("learnt, 3 axes", "learnt, 4 axes")  # kinds of a bias of the scores
PROVEN = "proven"
Trial = tuple[str, str]  # a candidate, and how it fared: "proven", or why not


class Found(NamedTuple):
    """The end of a search."""

    mixin: Any = None  # with the roles: what was proven; None where nothing was
    roles: Any = None
    reason: str = ""  # why nothing was
    unlike: bool = False  # nobody would have expected it
    trials: tuple[Trial, ...] = ()
    absorbed: tuple[str, ...] = ()  # parts that need no class of their own then


_found: dict[Any, Found] = {}
_last: dict[Any, Found] = {}  # the last of those that differ by rates alone


def recognise(module: nn.Module, class_of: ClassOf) -> tuple[Any, Found]:
    """The swapped class for a module that no table knows, None where none was proven; the search.

    Args:
        class_of: the class that a module has or is to have; the parts of `module` come first.
    """
    search = _search(module, class_of)
    if search is None:
        return None, Found(unlike=True)
    try:
        facts = Facts(module, class_of, whole=True)
        key = type(module), facts.key, *facts.rates.values()
        alike = type(module), facts.at_rest()
        if key not in _found:
            _found[key] = _as_one_like_it(module, class_of, _last.get(alike)) or aside(
                lambda: search(module, class_of)
            )
        found = _last[alike] = _found[key]
        if found.mixin is None:
            return None, found
        return searched.recognised_class(found.mixin, type(module), found.roles), found
    except Exception as error:  # a state that we cannot read is the host's business
        return None, Found(reason=f"it could not be read: {error}")


def _as_one_like_it(module: nn.Module, class_of: ClassOf, last: Found | None) -> Found | None:
    """What is found with the roles of a module that differs by rates alone; None for nothing."""
    if last is None or last.mixin is None or last.absorbed:
        return None
    found = _try(module, class_of, last.mixin, [last.roles], [])
    return found if found.mixin is not None else None


def is_partial(cls: Any) -> bool:
    """Whether a wider module may have all of this class in one of its parts: an attention without
    its output projection, a block of one branch."""
    roles = getattr(cls, "fused_roles", None)
    if isinstance(roles, searched.BlockRoles):
        return sum(step.residual >= 0 for step in roles.steps) == 1
    return isinstance(roles, searched.AttentionRoles) and not roles.out


# Which search suits a module.


def _search(module: Any, class_of: ClassOf) -> Callable[[Any, ClassOf], Found] | None:
    """The search for modules of this kind; None where they are certainly none of ours."""
    cls = type(module)
    library = cls.__module__.partition(".")[0]
    if level_of(cls) or isinstance(module, torch.jit.ScriptModule) or is_watched_everywhere():
        return None
    if library == __name__.partition(".")[0]:
        return None  # it runs on the kernels as it is
    if isinstance(module, nn.LayerNorm) and cls is not nn.LayerNorm and not module._modules:
        return _norm
    if cls.forward is nn.Module.forward or (library == "torch" and cls is not nn.Sequential):
        return None
    if isinstance(module, nn.Linear):
        return _linear if len(module._buffers) == 1 and module.bias is not None else None
    if not module._modules:
        own = [p for p in module._parameters.values() if p is not None]
        if len(own) == 1 and own[0].ndim == 1 and not module._buffers:
            return _scale
        rates = [n for n, v in vars(module).items() if "drop" in n or n in ("p", "prob")]
        return _path if not own and not module._buffers and rates else None
    parts = list(open_parts(module, class_of))
    levels = [level_of(class_of(m)) for _, m in parts]
    if levels.count("attention") + levels.count("mlp") > BRANCHES:
        return None
    if any(level_of(class_of(m)) == "block" and not is_partial(class_of(m)) for _, m in parts):
        return None
    if {"attention", "mlp", "block"} & set(levels):
        return _wider
    linears = sum(isinstance(m, nn.Linear) for _, m in parts)
    if linears > 6:
        return None
    return _whole if linears >= 1 and len(parts) > 1 else None


def _wider(module: nn.Module, class_of: ClassOf) -> Found:
    """The search where parts are planned: first as if the partial ones were not."""
    partial = {m: name for name, m in module.named_modules() if name and is_partial(class_of(m))}

    def without(m: nn.Module) -> type:
        return host_of(class_of(m)) if m in partial else class_of(m)

    first = None
    if partial:
        levels = {level_of(without(m)) for _, m in open_parts(module, without)}
        first = (_block if levels & {"attention", "mlp"} else _whole)(module, without)
        if first.mixin is not None:
            return first._replace(absorbed=tuple(partial.values()))
    found = _block(module, class_of)
    return first if first is not None and found.mixin is None else found


def _whole(module: nn.Module, class_of: ClassOf) -> Found:
    """A module without planned parts: an attention or MLP, or a block with all of it inside."""
    found = _branch(module, class_of)
    if found.mixin is not None:
        return found
    wider = _block(module, class_of)
    trials = found.trials + wider.trials
    better = wider.mixin is not None or (found.unlike and not wider.unlike)
    return (wider if better else found)._replace(trials=trials)


# Trying candidates.


def _try(
    module: nn.Module, class_of: ClassOf, mixin: Any, candidates: Any, trials: list[Trial],
    former: Found | None = None, at_size: bool = True,
) -> Found:  # fmt: skip
    """The first candidate that is proven.

    Args:
        former: a search that was successful; it stands where no candidate is proven.
        at_size: at full size, too. Roles for more calls need none: their own proof was at full
            size, and what a caller may hand on besides does not depend on that.
    """
    begin, reason = time.process_time(), ""
    for roles in candidates:
        cls = searched.recognised_class(mixin, type(module), roles)

        def planned(m: nn.Module, cls: type = cls) -> type:
            return cls if m is module else class_of(m)

        outcome = prove(module, Facts(module, planned), planned, at_size)
        trials.append((describe(mixin, roles), outcome or PROVEN))
        if outcome is None:
            return Found(mixin, roles, "", False, tuple(trials))
        reason = reason or outcome
        if time.process_time() - begin > SECONDS:
            reason += f"; the search ended after {SECONDS:.0f} s"
            break
    return former or Found(None, None, reason, False, tuple(trials))


def describe(mixin: Any, roles: Any) -> str:
    """A candidate in a few words."""
    if mixin is searched.Block:
        what = [
            s.body or ("an MLP" if isinstance(s.inline, searched.MlpRoles) else "an attention")
            for s in roles.steps
        ]
        what += [f"in windows of {s.window}" for s in roles.steps if s.window]
        what += ["in evaluation"] * roles.evaluation
        what += [f"without {roles.sampled} of the samples"] * bool(roles.sampled)
        what += [f"{n} unread" for n in roles.unread]
        return f"block of {', '.join(what)}"
    told = [f"{n}={v}" for n, v in roles._asdict().items() if v not in ("", None, False, ())]
    return f"{level_of(mixin)} {' '.join(told)}"


def unused(planned: dict[nn.Module, Any]) -> list[nn.Module]:
    """Attentions that run fused in no block and give their probabilities to their caller."""
    used: set[int] = set()
    for module, cls in planned.items():
        if cls.fused_level == "block" and cls.fused_searched:
            bodies = (s.body for s in cls.fused_roles.steps if s.body)
            used |= {id(module.get_submodule(n)) for n in bodies}
    return [
        m for m, cls in planned.items()
        if getattr(getattr(cls, "fused_roles", None), "weights", False) and id(m) not in used
    ]  # fmt: skip


def _branch(module: nn.Module, class_of: ClassOf) -> Found:
    trials: list[Trial] = []
    try:
        angles = angle_argument(module)
        try:
            seen = observed(module, class_of, training=True)
        except Unlike:
            if angles is None:
                raise
            more = partial(angles_for, name=angles, roles=None)
            candidates = attention_roles(module, observed(module, class_of, True, more))
            needing = [r._replace(needs_rope=True) for r in candidates or ()]
            found = _with_rope(module, class_of, angles, needing, trials)
            return _with_masks(module, class_of, found, trials)
        candidates = attention_roles(module, seen)
        if candidates is None:
            seen = observed(module, class_of, training=False)
            return _try(module, class_of, searched.Mlp, mlp_roles(module, seen), trials)
        found = _try(module, class_of, searched.Attention, candidates, trials)
        if found.mixin is not None and angles is not None:
            found = _with_rope(module, class_of, angles, [found.roles], trials, found)
        return _with_masks(module, class_of, found, trials)
    except Refused as refused:
        return Found(None, None, str(refused), isinstance(refused, Unlike), tuple(trials))


def _with_rope(
    module: Any, class_of: ClassOf, angles: str, known: list[Any], trials: list[Trial],
    former: Found | None = None,
) -> Found:  # fmt: skip
    """The first of the known candidates that is proven with the host's own rotation, and with our
    kernel in place of that, where it is one that our kernel knows."""
    rotated = _rotated(module, angles, known)
    found = _try(module, class_of, searched.Attention, rotated, trials, former)
    if found.mixin is None or found is former:
        return found
    candidates = (found.roles._replace(kernel=way) for way in searched.ways_of_rope())
    return _try(module, class_of, searched.Attention, candidates, trials, found)


def _with_masks(module: Any, class_of: ClassOf, found: Found, trials: list[Trial]) -> Found:
    """The same with the kinds of masks that its forward reads as ours does."""
    names = [n for n in arguments_of(type(module).forward).names[1:] if is_mask(n)]
    for name in names if found.mixin is not None and not found.roles.grid else ():
        if "mask" not in name:
            both = found.roles._replace(mask=name, masks=tuple((k, "") for k in LEARNT))
            found = _try(module, class_of, found.mixin, [both], trials, found, at_size=False)
        if not found.roles.mask:
            for kind in READINGS if "mask" in name else LEARNT:
                masks = found.roles.masks
                more = [
                    found.roles._replace(mask=name, masks=(*masks, (kind, reading)))
                    for reading in READINGS.get(kind, ("",))
                ]
                found = _try(module, class_of, found.mixin, more, trials, found, at_size=False)
        if found.roles.mask:
            break
    return found._replace(trials=tuple(trials))


def _rotated(module: Any, name: str, found: list[Any]) -> Iterator[Any]:
    """Candidates with RoPE: the host's own methods and functions of such a name may rotate."""
    own = [n for n in methods(type(module)) if re.search("rope|rot", n)]
    others = [
        n for n, f in type(module).forward.__globals__.items()
        if re.search("rope|rotary", n) and isinstance(f, FunctionType)
    ]  # fmt: skip
    for roles in found:
        for rotate in (*own, *others):
            for spread in ("", "*", "*0", "each") if rotate in own else ("*", "*0", "", "each"):
                for prefix in (1, 0):
                    yield roles._replace(rope=name, rotate=rotate, spread=spread, prefix=prefix)


def _block(module: nn.Module, class_of: ClassOf) -> Found:
    trials: list[Trial] = []
    why: list[Refused] = []
    found = _try(module, class_of, searched.Block, _blocks(module, class_of, why), trials)
    if not trials:
        return Found(None, None, str(why[0]), any(isinstance(r, Unlike) for r in why))
    if found.mixin is not None:
        found = _with_unread(module, class_of, found, trials)
    if found.mixin is not None and "list" in type(module).forward.__code__.co_names:
        lists = found.roles._replace(lists=True)
        found = _try(module, class_of, found.mixin, [lists], trials, found, at_size=False)
    return found._replace(trials=tuple(trials))


def _blocks(module: nn.Module, class_of: ClassOf, why: list[Refused]) -> Iterator[Any]:
    """Candidates of a residual block, by runs in training, then in evaluation.

    Args:
        why: takes the reasons of runs that give none.
    """
    known: dict[Any, None] = {}
    resting: list[Any] = []  # of evaluation
    for training in (True, False):
        for more in extras_of_block(module, class_of):
            try:
                every = [*block_roles(module, class_of, observed(module, class_of, training, more))]
            except Refused as refused:
                why.append(refused)
                continue
            yield from (roles for roles in every if roles not in known)
            known |= dict.fromkeys(every)
            resting = resting if training else every
    for name in (n for n, v in vars(module).items() if is_rate(n, v)):
        sampled = [roles._replace(sampled=name) for roles in resting]
        yield from sampled
        known |= dict.fromkeys(sampled)
    yield from (roles._replace(evaluation=True) for roles in known)


def _with_unread(module: Any, class_of: ClassOf, found: Found, trials: list[Trial]) -> Found:
    """The same with the arguments that a caller may give and that nothing reads."""
    names, defaults, _ = arguments_of(type(module).forward)
    taken = searched.extras(found.roles)
    for name in names[1:]:
        known = name in taken or is_mask(name) or name == angle_argument(module)
        if name in defaults and defaults[name] is None and not known:
            roles = found.roles._replace(unread=(*found.roles.unread, name))
            found = _try(module, class_of, found.mixin, [roles], trials, found, at_size=False)
    return found


def _norm(module: Any, class_of: ClassOf) -> Found:
    if len(module.normalized_shape) != 1:
        return Found(reason=f"it normalizes {len(module.normalized_shape)} axes")
    candidates = (
        searched.NormRoles(fp32, rounded) for rounded in (False, True) for fp32 in (False, True)
    )  # fmt: skip
    return _try(module, class_of, searched.Norm, candidates, [])


def _linear(module: nn.Module, class_of: ClassOf) -> Found:
    roles = searched.LinearRoles(next(iter(module._buffers)))
    return _try(module, class_of, searched.MaskedLinear, [roles], [])._replace(unlike=True)


def _scale(module: nn.Module, class_of: ClassOf) -> Found:
    """LayerScale, else RMSNorm: a weight for each column."""
    name = next(n for n, p in module._parameters.items() if p is not None)
    small = [n for n, v in vars(module).items() if isinstance(v, float) and 0 < v < 0.1]
    if small:
        kept = _keeps_dtype(module)
        candidates = (
            searched.RmsRoles(name, eps, kept, rounded)
            for rounded in (False, True) for eps in small
        )  # fmt: skip
        found = _try(module, class_of, searched.Rms, candidates, [])
        if found.mixin is not None:
            return found
    found = _try(module, class_of, searched.Scale, [searched.ScaleRoles(name)], [])
    return found._replace(unlike=True)


def _keeps_dtype(module: nn.Module) -> bool:
    """Whether its result has the dtype of its input, where its weights have a wider one."""
    copy: Any = Copier({}, dtype=torch.float32).module(
        module, lambda m: host_of(type(m)), False, {}
    )
    x = torch.ones(2, 2, len(next(copy.parameters())), dtype=torch.bfloat16)
    return copy.forward(x).dtype == x.dtype


def _path(module: nn.Module, class_of: ClassOf) -> Found:
    rates = [
        n for n, v in vars(module).items()
        if ("drop" in n or n in ("p", "prob")) and (v is None or isinstance(v, (int, float)))
    ]  # fmt: skip
    candidates = (
        searched.PathRoles(rate, drawn, scaled)
        for rate in rates for scaled in (True, False) for drawn in ("bernoulli", "rand")
    )  # fmt: skip
    return _try(module, class_of, searched.Path, candidates, [])._replace(unlike=True)
