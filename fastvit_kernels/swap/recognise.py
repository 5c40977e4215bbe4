"""Attentions, MLPs and residual blocks of hosts that no table knows, found by what they do.

observe -> candidates -> roles -> proof: a run of a small copy shows which parts a forward calls on
which values, and where its softmax or its sum stands (observe.py). That gives candidates, roles for
the fused forwards of hosts/, most likely first (candidates.py, steps.py). Each is proven like any
other swap until one holds (prove.py). Names only order the candidates. Equal configurations share
a search.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..runtime.plain import is_watched_everywhere
from . import hosts, observe
from .candidates import attention_roles, drops, mlp_roles
from .facts import ClassOf, Facts, held_weights, host_of, is_rate, level_of, methods
from .hosts import fused
from .hosts.attention import Attention, AttentionRoles, attention_facts, ways_of_rope
from .hosts.block import Block, BlockRoles
from .hosts.fused import HEAVY, NormRoles, PathRoles, ScaleRoles, arguments_of
from .hosts.layers import UNREAD
from .hosts.masks import SHIFTED
from .hosts.mlp import Mlp, MlpRoles
from .hosts.roles import LinearRoles, MaskedLinear
from .observe import NotACandidate, Unsupported
from .prove import in_clean_thread, prove
from .steps import ResidualBlock

BRANCHES = 6  # attentions and MLPs in a block; a module with more is a stack of them
SECONDS = 5.0  # of CPU time, for the candidates of one configuration; the rest stay untried

# How a mask of a kind may be read, by names that hosts/attention.py has.
READINGS = {
    "added, 4 axes": ("",),
    "boolean, 4 axes": ("", "not"),
    "added, 2 axes": ("", "keys"),
    "boolean, 2 axes": ("keys", "not keys", "", "not"),
}
LEARNT = (("learnt, 3 axes", ""), ("learnt, 4 axes", ""))  # a bias of the scores
PROVEN = "proven"
Trial = tuple[str, str]  # a candidate, and how it fared: "proven", or why not


class RmsRoles(NormRoles):
    """The same of an RMSNorm."""


# What computes each kind of roles.
MIXINS: dict[type, Any] = {
    AttentionRoles: Attention,
    BlockRoles: Block,
    LinearRoles: MaskedLinear,
    MlpRoles: Mlp,
    NormRoles: fused.LayerNorm,
    PathRoles: fused.DropPath,
    RmsRoles: fused.RmsNorm,
    ScaleRoles: fused.LayerScale,
}


class Found(NamedTuple):
    """The end of a search."""

    roles: Any = None  # what was proven; None where nothing was
    reason: str = ""  # why nothing was
    unlike: bool = False  # nobody would have expected it
    trials: tuple[Trial, ...] = ()
    absorbed: tuple[str, ...] = ()  # parts that need no class of their own then


_found: dict[Any, Found] = {}
_last: dict[Any, Found] = {}  # the last of those that differ by rates alone


def recognised_class(host: type, roles: Any) -> Any:
    """The swapped class of a host class whose parts have these roles."""
    return hosts.make(_mixin_with(roles), host)


@lru_cache(None, typed=True)  # roles of another kind may be equal
def _mixin_with(roles: Any) -> Any:
    mixin = MIXINS[type(roles)]
    more: dict[str, Any] = {"unread": frozenset(getattr(roles, "unread", ()))}
    more["remade"] = staticmethod(recognised_class)
    if mixin in (Attention, Block):
        more["facts"] = attention_facts
    if mixin is Block:
        more["axes"] = (3, 4)
    return fused.row(mixin, searched=True, roles=roles, **more)


def recognise(module: nn.Module, class_of: ClassOf) -> tuple[Any, Found]:
    """The swapped class for a module that no table knows, None where none was proven; the search.
    Its parts come first: `class_of` gives the class that each has or is to have."""
    search = Search(module, class_of)
    try:
        kind = search.kind()
        if kind is None:
            return None, Found(unlike=True)
        facts = Facts(module, class_of, whole=True)
        key = type(module), facts.key, *facts.rates.values()
        alike = type(module), facts.key_without_rates()
        if key not in _found:
            found = search.again(_last.get(alike))
            _found[key] = found or in_clean_thread(lambda: search.run(kind))
        found = _last[alike] = _found[key]
        return found.roles and recognised_class(type(module), found.roles), found
    except Exception as error:  # a state that we cannot read is the host's business
        return None, Found(reason=f"it could not be read: {error}")


def is_partial(cls: Any) -> bool:
    """Whether it may be a part of a wider one: an attention without its output projection, a block
    of one branch."""
    roles = getattr(cls, "fused_roles", None)
    if isinstance(roles, BlockRoles):
        return sum(step.residual >= 0 for step in roles.steps) == 1
    return isinstance(roles, AttentionRoles) and not roles.out


class Search:
    """The search for the roles of one module; its methods give roles, or raise Unsupported."""

    def __init__(self, module: Any, class_of: ClassOf):
        self.module, self.class_of = module, class_of
        self.trials: list[Trial] = []
        self.absorbed: tuple[str, ...] = ()

    def run(self, kind: Callable[[], Any]) -> Found:
        try:
            return Found(kind(), "", False, tuple(self.trials), self.absorbed)
        except Unsupported as refused:
            unlike = isinstance(refused, NotACandidate)
            return Found(None, str(refused), unlike, tuple(self.trials))

    def again(self, last: Found | None) -> Found | None:
        """The end with the roles of a module that differs by rates alone; None for nothing."""
        if last is None or last.roles is None or last.absorbed:
            return None
        found = Search(self.module, self.class_of)
        found = found.run(partial(found.first, [last.roles]))
        return None if found.roles is None else found

    def first(self, candidates: Iterable[Any], former: Any = None, at_size: bool = True) -> Any:
        """The first of these roles that is proven, else the `former`, which were: so roles for more
        calls than theirs need no proof `at_size`."""
        begin, reason = time.process_time(), ""
        for roles in candidates:
            cls = recognised_class(type(self.module), roles)

            def planned(m: nn.Module, cls: type = cls) -> type:
                return cls if m is self.module else self.class_of(m)

            outcome = prove(self.module, Facts(self.module, planned), planned, at_size)
            self.trials.append((describe(roles), outcome or PROVEN))
            if outcome is None:
                return roles
            reason = reason or outcome
            if time.process_time() - begin > SECONDS:
                reason += f"; the search ended after {SECONDS:.0f} s"
                break
        if former is None:
            raise Unsupported(reason)
        return former

    # What a module may be.

    def kind(self) -> Callable[[], Any] | None:
        """The search for modules of this kind; None where they are certainly none of ours."""
        module, cls = self.module, type(self.module)
        library = cls.__module__.partition(".")[0]
        if level_of(cls) or isinstance(module, torch.jit.ScriptModule) or is_watched_everywhere():
            return None
        if library == __name__.partition(".")[0]:
            return None  # it runs on the kernels as it is
        if isinstance(module, nn.LayerNorm) and cls is not nn.LayerNorm and not module._modules:
            return self.norm
        if cls.forward is nn.Module.forward or (library == "torch" and cls is not nn.Sequential):
            return None
        if isinstance(module, nn.Linear) or not module._modules:
            return self.leaf
        parts = list(observe.open_parts(module, self.class_of))
        classes = [self.class_of(m) for _, m in parts]
        levels = [*map(level_of, classes)]
        if levels.count("attention") + levels.count("mlp") > BRANCHES:
            return None
        if any(level_of(c) == "block" and not is_partial(c) for c in classes):
            return None
        if not set(levels).isdisjoint(HEAVY):
            return self.wider
        held = len(held_weights(module))
        products = held + sum(isinstance(m, nn.Linear) for _, m in parts)
        return self.whole if 1 <= products <= 6 and held + len(parts) > 1 else None

    def wider(self) -> Any:
        """Where parts are planned: first as if the partial ones were not."""
        partial = [n for n, m in self.module.named_modules() if n and is_partial(self.class_of(m))]
        if not partial:
            return self.block()
        apart = {self.module.get_submodule(n) for n in partial}

        def without(m: nn.Module) -> type:
            return host_of(self.class_of(m)) if m in apart else self.class_of(m)

        inner = Search(self.module, without)
        levels = {level_of(without(m)) for _, m in observe.open_parts(self.module, without)}
        try:
            roles = (inner.block if levels & {"attention", "mlp"} else inner.whole)()
        except Unsupported as refused:
            try:
                return self.block()
            except Unsupported:
                self.trials = inner.trials
                raise refused from None
        self.trials, self.absorbed = inner.trials, tuple(partial)
        return roles

    def whole(self) -> Any:
        """Without planned parts: an attention or MLP, or a block with all of it inside."""
        why: list[Unsupported] = []
        for kind in (self.branch, self.block):
            try:
                return kind()
            except Unsupported as refused:
                why.append(refused)
        raise min(why, key=lambda refused: isinstance(refused, NotACandidate))

    def observed(self, training: bool = True, more: Any = None) -> observe.Observation:
        """What its forward does. In evaluation it must draw no dropout: no proof tries that."""
        seen = observe.observed(self.module, self.class_of, training, more)
        if drops(seen):
            if not training:
                raise Unsupported("its attention drops in evaluation, too")
            self.observed(False, more)
        return seen

    def branch(self) -> Any:
        """An attention or an MLP."""
        module, angles = self.module, observe.angle_argument(self.module)
        try:
            seen = self.observed()
        except NotACandidate:
            if angles is None:
                raise
            more = partial(observe.angles_for, name=angles, roles=None)
            seen = self.observed(more=more)
            candidates = attention_roles(module, seen) or ()
            needing = [roles._replace(needs_rope=True) for roles in candidates]
            return self.with_masks(self.with_rope(angles, needing))
        candidates = attention_roles(module, seen)
        if candidates is None:
            return self.first(mlp_roles(module, self.observed(training=False)))
        roles = self.first(candidates)
        return self.with_masks(roles if angles is None else self.with_rope(angles, [roles], roles))

    def with_rope(self, angles: str, known: list[Any], former: Any = None) -> Any:
        """The first of the known candidates that is proven with the host's own rotation, and with
        our kernel in place of that, where it is one that our kernel knows."""
        roles = self.first(self.rotated(angles, known), former)
        ways = () if roles is former else ways_of_rope()
        return self.first((roles._replace(kernel=way) for way in ways), roles)

    def rotated(self, angles: str, known: list[Any]) -> Iterator[Any]:
        """Candidates with RoPE: the host's own methods and functions of such a name may rotate."""
        cls = type(self.module)
        own = [n for n in methods(cls) if re.search("rope|rot", n)]
        functions = (n for n, f in cls.forward.__globals__.items() if isinstance(f, FunctionType))
        others = [n for n in functions if re.search("rope|rotary", n)]
        for roles in known:
            for rotate in (*own, *others):
                spreads = ("", "*", "*0", "each") if rotate in own else ("*", "*0", "", "each")
                for spread, prefix in product(spreads, (1, 0)):
                    more = {"rotate": rotate, "spread": spread, "prefix": prefix}
                    yield roles._replace(rope=angles, **more)

    def with_masks(self, roles: Any) -> Any:
        """The same with the kinds of masks that its forward reads as ours does."""
        names = arguments_of(type(self.module).forward).names[1:]
        for name in filter(observe.is_mask, () if roles.grid else names):
            learnt = "mask" not in name
            if together := LEARNT if learnt else SHIFTED if roles.table else ():
                several = roles._replace(mask=name, masks=together)
                roles = self.first([several], roles, at_size=False)
            known = dict.fromkeys(dict(LEARNT), ("",)) if learnt else READINGS
            for kind, readings in () if roles.mask else known.items():
                more = [(*roles.masks, (kind, reading)) for reading in readings]
                more = [roles._replace(mask=name, masks=masks) for masks in more]
                roles = self.first(more, roles, at_size=False)
            if roles.mask:
                break
        return roles

    def block(self) -> Any:
        """A residual block."""
        roles = self.first(self.blocks())
        names, defaults, others = arguments_of(type(self.module).forward)
        cls: Any = recognised_class(type(self.module), roles)
        taken = (*cls.fused_extra_kwargs, observe.angle_argument(self.module))
        given = [[n] for n in names[1:] if defaults.get(n) is None and n not in taken]
        given += [sorted(UNREAD.difference(names))] * others
        for more in given:  # a caller may give what nothing reads
            unread = roles._replace(unread=(*roles.unread, *more))
            roles = self.first([unread], roles, at_size=False)
        if "list" in type(self.module).forward.__code__.co_names:
            roles = self.first([roles._replace(lists=True)], roles, at_size=False)
        return roles

    def blocks(self) -> Iterator[Any]:
        """Candidates of a residual block, by runs in training, then in evaluation."""
        known: dict[Any, None] = {}
        resting: list[Any] = []  # of evaluation
        why: list[Unsupported] = []  # of runs that give none
        for training in (True, False):
            for more in observe.extras_of_block(self.module, self.class_of):
                try:
                    seen = self.observed(training, more)
                    every = [*ResidualBlock(self.module, self.class_of, seen).candidates()]
                except Unsupported as refused:
                    why.append(refused)
                    continue
                given = [own for s in every[0].steps for _, own in s.context]
                if any(map(observe.is_mask, given)):
                    every += [roles._replace(added=True) for roles in every]
                yield from (roles for roles in every if roles not in known)
                known |= dict.fromkeys(every)
                resting = resting if training else every
        rates = [n for n, v in vars(self.module).items() if is_rate(n, v)]
        sampled = [roles._replace(sampled=name) for name in rates for roles in resting]
        yield from sampled
        known |= dict.fromkeys(sampled)
        yield from (roles._replace(evaluation=True) for roles in known)
        if not known:
            unlike = any(isinstance(refused, NotACandidate) for refused in why)
            raise (NotACandidate if unlike else Unsupported)(str(why[0]))

    # Parts without parts. The report names none of them but norms.

    def norm(self) -> Any:
        if (axes := len(self.module.normalized_shape)) != 1:
            raise Unsupported(f"it normalizes {axes} axes")
        both = (False, True)
        roles = [NormRoles(dtype="input" * fp32, rounded=r) for r in both for fp32 in both]
        return self.first(roles)

    def leaf(self) -> Any:
        try:
            return self.first(_leaf_roles(self.module))
        except Unsupported as refused:
            raise NotACandidate(str(refused)) from None


def _leaf_roles(module: Any) -> Iterator[Any]:
    """A Linear with a mask of its bias; RMSNorm, else LayerScale; stochastic depth."""
    own, buffers = vars(module).items(), list(module._buffers)
    parameters = [n for n, p in module._parameters.items() if p is not None]
    if isinstance(module, nn.Linear):
        if len(buffers) == 1 and module.bias is not None:
            yield LinearRoles(buffers[0])
    elif len(parameters) == 1 and not buffers and module._parameters[parameters[0]].ndim == 1:
        eps = [n for n, v in own if isinstance(v, float) and 0 < v < 0.1]
        for rounded, dtype in product((False, True), ("widest", "input")):
            yield from (RmsRoles(parameters[0], "", n, dtype, rounded) for n in eps)
        yield ScaleRoles(parameters[0])
    elif not parameters and not buffers:
        numbers = [n for n, v in own if isinstance(v, (int, float, type(None)))]
        rates = [n for n in numbers if "drop" in n or n in ("p", "prob")]
        for rate, scaled in product(rates, (True, False)):
            yield PathRoles(rate, "bernoulli", scaled)
            yield PathRoles(rate, "rand", scaled)


def describe(roles: Any) -> str:
    """A candidate in a few words."""
    if isinstance(roles, BlockRoles):
        what = [
            s.body or ("an MLP" if isinstance(s.inline, MlpRoles) else "an attention")
            for s in roles.steps
        ]
        what += [f"in windows of {s.window}" for s in roles.steps if s.window]
        what += ["in evaluation"] * roles.evaluation
        what += [f"without {roles.sampled} of the samples"] * bool(roles.sampled)
        what += ["with added masks"] * roles.added
        what += [f"{n} unread" for n in roles.unread]
        return f"block of {', '.join(what)}"
    told = [f"{n}={v}" for n, v in roles._asdict().items() if v not in ("", None, False, ())]
    return f"{level_of(MIXINS[type(roles)])} {' '.join(told)}"


def unused(planned: dict[nn.Module, Any]) -> list[nn.Module]:
    """Attentions that run fused in no block and give their probabilities to their caller."""
    used: set[nn.Module] = set()
    for module, cls in planned.items():
        if cls.fused_level == "block" and cls.fused_searched:
            used |= {module.get_submodule(s.body) for s in cls.fused_roles.steps if s.body}
    giving = [m for m, cls in planned.items() if getattr(cls.fused_roles, "weights", False)]
    return [m for m in giving if m not in used]
