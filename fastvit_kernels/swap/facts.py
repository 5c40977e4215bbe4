"""What a proof stands on, compared again at every call: children and their classes, settings, and
the functions of the classes.

`Facts` describes a module and what its fused forward may bypass. Its `key` tells two configurations
apart by classes, settings, shapes and functions; values of weights, devices, dtypes and modes play
no part, nor those of probabilities between 0 and 1; where they may, `rates` has them. `hold` asks
in a few microseconds whether a module is still the one that was described.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain, compress
from operator import attrgetter, is_not, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.compat import REPLICA
from ..runtime.plain import is_plain
from .activations import is_activation
from .rates import Asked, answers_hold

ClassOf = Callable[[nn.Module], type]  # the class that a module has, or is to have

PRIVATE = frozenset(vars(nn.Module()))  # nn.Module's own: hooks, parameters, children, training
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PLAIN = (nn.Linear, nn.Identity, nn.Dropout, *CONTAINERS)
# Methods that no forward depends on.
_RESETS = ("reset_parameters", "_reset_parameters", "init_weights")
IDLE = frozenset(("extra_repr", "set_window_size", "train", "eval", *_RESETS))
# Packages whose decorators a library puts around its own methods.
DECORATORS = frozenset(("torch", "functools", "contextlib", "abc", "typing"))
# Functions of C: what is asked at every call costs no call of Python.
_deref: Any = ref.__call__
_get: Any = itemgetter.__call__
_get_attribute: Any = attrgetter.__call__
_children = itemgetter("_modules")
is_there = partial(is_not, None)
# Functions of torch that our ops stand for: a patch or a counter in their place wants the calls.
_functionals = attrgetter(
    "linear", "layer_norm", "gelu", "silu", "conv2d", "scaled_dot_product_attention"
)
_AS_IMPORTED = _functionals(F)


def torch_is_patched() -> bool:
    """Whether somebody replaced one of torch's functions that our ops stand for."""
    return _functionals(F) != _AS_IMPORTED


def leaves(value: Any, kind: type) -> Iterator[Any]:
    """What is of this class in nested tuples, lists and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from leaves(v, kind)


def held_weights(module: Any) -> list[Tensor]:
    """What a module multiplies by without a Linear, by its names, as `in_proj_weight`."""
    own = module._parameters.items()
    return [p for n, p in own if n.endswith("_weight") and p is not None and p.ndim == 2]


def host_of(cls: type) -> type:
    """The host's class under a swapped one; any other class itself."""
    return getattr(cls, "fused_host", cls)


def level_of(cls: Any) -> str:
    """At which level a swapped class computes; "" for any other class, and for none."""
    return getattr(cls, "fused_level", "")


def swapped_of(module: nn.Module) -> type:
    """The class that swap_in gave a module, also where torch.distributed has made another of it
    (fully_shard): such a class computes the same, and cannot be made of nothing."""
    cls = type(module)
    if not level_of(cls):
        return cls
    homes = ((base, str(vars(base).get("__module__"))) for base in cls.__mro__)
    return next(base for base, home in homes if not home.startswith("torch.distributed."))


@cache
def methods(cls: type) -> tuple[str, ...]:
    """Names of the methods that a host class or its parents below nn.Module define."""
    found: dict[str, None] = {}
    for parent in cls.__mro__:
        if parent is nn.Module:
            break
        for name, value in vars(parent).items():
            wanted = not name.startswith("__") or name == "__call__"
            if isinstance(value, FunctionType) and wanted and name not in IDLE:
                found[name] = None
    return tuple(found)


@cache
def lineage(cls: type) -> tuple[type, ...]:
    """A host's class and its parents of which it overrides a method, which it may call."""
    own = {name: getattr(cls, name) for name in methods(cls)}
    parents = cls.__mro__[1 : cls.__mro__.index(nn.Module)] if nn.Module in cls.__mro__ else ()
    above = (p for p in parents if not p.__module__.startswith("torch."))
    return cls, *(p for p in above if any(own.get(n, f) is not f for n, f in vars(p).items()))


@cache
def _globals_of(cls: type) -> tuple[tuple[dict[str, Any], tuple[str, ...]], ...]:
    """The functions and simple values of its module that a class's methods read, by name."""
    found: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    for name in methods(cls):
        function = getattr(cls, name)
        home = getattr(function, "__globals__", {})
        names = found.setdefault(id(home), (home, {}))[1]
        code = getattr(function, "__code__", None)
        inner = [c for c in code.co_consts if hasattr(c, "co_names")] if code else []
        read = [n for c in (code, *inner) if c for n in c.co_names]
        names |= {
            n: None for n in read if n in home and isinstance(home[n], (FunctionType, *SIMPLE))
        }
    return tuple((home, tuple(names)) for home, names in found.values() if names)


def patched(module: nn.Module, cls: Any) -> str | None:
    """Which method of a module that would run the fused forward of `cls` somebody replaced."""
    own, host = vars(module), host_of(cls)
    name = next((n for n in methods(host_of(type(module))) if callable(own.get(n))), None)
    if name is not None and (name != "forward" or not level_of(type(module))):
        return f"its {name} was replaced on the instance"
    for kind, name in ((c, n) for c in lineage(host) for n in methods(c)):
        function = getattr(kind, name, None)
        owner = next((c for c in kind.__mro__ if name in vars(c)), kind)
        home = str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]
        if home not in DECORATORS and home != owner.__module__.partition(".")[0]:
            return f"{kind.__name__}.{name} was replaced"  # by another package
    return None


def _is_simple(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_simple(v) for v in value)
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, (*SIMPLE, *FUNCTIONS))


def is_rate(name: str, value: Any) -> bool:
    """Whether a setting is a probability: all values between 0 and 1 take the same path."""
    named = "drop" in name or name in ("p", "prob")
    return named and isinstance(value, float) and 0 < value < 1


def is_recognised(cls: type) -> bool:
    """Whether a swapped class was found by structure: nothing was known of its host before."""
    return getattr(cls, "fused_searched", False)


def keeps_rates(module: nn.Module) -> bool:
    """Whether a probability on this module may decide what it does, as it may in a host that nobody
    read: one with children. In a leaf it is the probability of what the leaf does."""
    return any(child is not None for child in module._modules.values())


def _inside(value: Any) -> dict[Any, Any] | None:
    """What a setting holds that is no simple value: of a dict, and of a function with what is bound
    to it, the simple values; of a configuration object all."""
    if isinstance(value, partial):
        own = {"": value.func, **dict(enumerate(value.args)), **value.keywords}
    elif isinstance(value, MethodType):
        own = {"": value.__func__}
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = {"": repr(value.__code__)} | {name: cell.cell_contents for name, cell in cells}
    elif isinstance(value, dict):
        own = value
    else:
        return None if isinstance(value, (Tensor, type)) else getattr(value, "__dict__", None)
    return {n: v for n, v in own.items() if _is_simple(v)}


def _hashable(name: str, value: Any, whole: bool) -> Any:
    """What the key has of a setting; of one that is no simple value what is inside, where all
    counts."""
    if isinstance(value, (tuple, list)):
        return tuple(_hashable(name, v, whole) for v in value)
    if is_rate(name, value):
        return "a rate"
    if _is_simple(value):
        return type(value), value  # 1, 1.0 and True are equal, and are not the same setting
    own = (_inside(value) if whole else None) or {}
    return type(value), tuple((n, repr(v)) for n, v in own.items() if _is_simple(v))


def _describe(module: nn.Module, cls: type, whole: bool) -> tuple[Any, ...]:
    """The part of the key for one module; of what is recognised as a `whole` all counts."""
    own, tensors = vars(module), {**module._parameters, **module._buffers}
    if REPLICA in own:
        tensors |= {n: v for n, v in own.items() if isinstance(v, Tensor)}
        own = {n: v for n, v in own.items() if n not in tensors and n != REPLICA}
    settings = tuple((n, _hashable(n, v, whole)) for n, v in own.items() if n not in PRIVATE)
    tensors = tuple((n, None if t is None else tuple(t.shape)) for n, t in sorted(tensors.items()))
    plain = cls is not nn.Linear or is_plain(module)
    absent = tuple(n for n, c in module._modules.items() if c is None)
    return host_of(cls), bool(level_of(cls)), settings, tensors, plain, absent


def _drops(known: Any) -> bool:
    """Whether a leaf that is described so is a DropPath, a dropout, or nothing in their place."""
    host, _, settings, tensors, *_ = known
    return not tensors and (
        host is nn.Identity or any("drop" in n or n == "p" for n, _ in settings)
    )


class Facts:
    """What is known of a module and of what its fused forward may bypass; `whole`: of all below, as
    where it was recognised by structure. Holds no module."""

    def __init__(self, root: nn.Module, class_of: ClassOf = type, whole: bool = False):
        places, names, wholes = [0], [""], [whole or is_recognised(class_of(root))]
        modules: list[Any] = [root]
        self.children: list[str] = []  # names in their parents, of those that are None too
        self.known: list[int] = []  # places of the modules that are looked at
        self.set: list[int] = []  # indices in known of those with settings
        self.getters: list[Callable[[Any], Any]] = []  # of their settings
        self.values: list[Any] = []
        self.settings: list[list[str]] = []  # their names
        self.asked: Asked | None = None  # of rates by the proof; None: these rates were tried alone
        # Settings that are no simple values: index in known, name, id, what is inside.
        self.objects: list[tuple[int, str, int, dict[Any, Any] | None]] = []
        self.rates: dict[tuple[int, str], float] = {}  # that may decide something: place, setting
        key: list[Any] = []
        for place in places:  # grows as we go
            module, cls, within = modules[place], class_of(modules[place]), wholes[place]
            looked_into = within or level_of(cls) or cls in PLAIN or is_activation(cls)
            if not looked_into:  # it is only ever called
                sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
                key.append((names[place], cls, sizes))
                continue
            key.append((names[place], _describe(module, cls, within)))
            own = vars(module)
            if within and keeps_rates(module):
                self.rates |= {(place, n): v for n, v in own.items() if is_rate(n, v)}
            settings = [n for n, v in own.items() if n not in PRIVATE and _is_simple(v)]
            if settings:
                self.set.append(len(self.known))
                self.getters.append(itemgetter(*settings, settings[0]))  # a tuple, of one too
                self.values.append(copy.deepcopy(self.getters[-1](own)))  # lists may change
                self.settings.append(settings)
            for n, v in own.items() if within else ():
                if n not in PRIVATE and not _is_simple(v):
                    self.objects.append((len(self.known), n, id(v), copy.copy(_inside(v))))
            self.known.append(place)
            self.children += module._modules
            children = [n for n, c in module._modules.items() if c is not None]
            prefix = f"{names[place]}." if names[place] else ""
            names += [prefix + n for n in children]
            modules += [module._modules[n] for n in children]
            wholes += [within or is_recognised(cls)] * len(children)
            places += range(len(places), len(modules))
        self.inner = [ref(m) for m in modules[1:]]
        self.types = [type(m) for m in modules]
        self.names = names
        self.lengths = [len(vars(modules[place])) for place in self.known]
        planned: list[Any] = [class_of(m) for m in modules]
        classes = dict.fromkeys(c for p in self.known for c in lineage(host_of(planned[p])))
        self.classes = [c for c in classes if methods(c)]
        self.methods = [attrgetter(*methods(c)) for c in self.classes]
        self.functions = [*map(_get_attribute, self.methods, self.classes)]
        read = (host_of(planned[p]) for p in self.known if wholes[p])
        unread = dict.fromkeys(c for host in read for c in lineage(host))
        self.globals = [(home, itemgetter(*n)) for c in unread for home, n in _globals_of(c)]
        self.readers = [c for c in unread for _ in _globals_of(c)]
        self.read: list[Any] = [get(home) for home, get in self.globals]
        self.asking = [p for p in self.known if getattr(planned[p], "fused_facts", None)]
        self.answers = [planned[place].fused_facts(modules[place]) for place in self.asking]
        self.key = (tuple(key), tuple(self.functions), tuple(self.answers), tuple(self.read))

    def key_without_rates(self) -> Any:
        """The key with all leaves alike that only drop: a smaller proof has shown what they do."""
        described = [(name, known) for name, known, *_ in self.key[0] if isinstance(known, tuple)]
        above = {name.rpartition(".")[0] for name, _ in described}
        drops = {name: known[0] for name, known in described if name not in above and _drops(known)}
        key = [(n, "drops" if n in drops else known, *more) for n, known, *more in self.key[0]]
        answers = tuple(a for a in self.answers if a is not None)
        functions = compress(self.functions, [c not in drops.values() for c in self.classes])
        read = compress(self.read, [c not in drops.values() for c in self.readers])
        return tuple(key), tuple(functions), answers, tuple(read)

    def hold(self, root: nn.Module) -> bool:
        """Whether `root` is still as it was described."""
        return self.held(root) is not None

    def held(self, root: nn.Module) -> list[Any] | None:
        """The modules that were described, the root first, where all is still as it was."""
        modules: list[Any] = [root, *map(_deref, self.inner)]
        if [*map(type, modules)] != self.types:  # one that is gone is None
            return None
        own: list[Any] = [*map(vars, map(modules.__getitem__, self.known))]
        children = [*map(_children, own)]
        there = filter(is_there, chain.from_iterable(map(dict.values, children)))
        if [*chain.from_iterable(children)] != self.children or [*there] != modules[1:]:
            return None
        if [*map(len, own)] != self.lengths:
            return None
        try:
            values = [*map(_get, self.getters, map(own.__getitem__, self.set))]
            read = [get(home) for home, get in self.globals] if self.globals else []
        except KeyError:
            return None
        if (
            (values == self.values or self._hold_but_for_rates(values))
            and read == self.read
            and [*map(_get_attribute, self.methods, self.classes)] == self.functions
        ):
            for index, name, found, inner in self.objects:
                value = own[index].get(name)
                if id(value) != found or (inner is not None and _inside(value) != inner):
                    return None
            if self.asking and [modules[p].fused_facts() for p in self.asking] != self.answers:
                return None
            return modules
        return None

    def _hold_but_for_rates(self, values: list[Any]) -> bool:
        """Whether nothing changed but rates on which the verdict does not depend."""
        rates = dict(self.rates)
        changed = [i for i, value in enumerate(values) if value != self.values[i]]
        for i in changed:
            names, place = self.settings[i], self.known[self.set[i]]
            for name, now, then in zip(names, values[i], self.values[i], strict=False):
                if now != then and not (is_rate(name, now) and is_rate(name, then)):
                    return False
                if (place, name) in rates:
                    rates[place, name] = now
        if rates != self.rates:
            if self.asked is None or not answers_hold(self.asked, rates):
                return False
            self.rates = rates
        for i in changed:
            self.values[i] = copy.deepcopy(values[i])
        return True

    def modules(self, root: nn.Module) -> list[Any]:
        """The modules that were described, the root first, in the order of `names`."""
        return [root, *map(_deref, self.inner)]
