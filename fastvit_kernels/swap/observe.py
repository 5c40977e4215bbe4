"""What a module's forward does, from a run of a small copy: the parts that it calls, on which
values, and the functions of torch that it uses besides.

Values are numbered; a part that gives back its input gives a value of its own. The run is on tokens
or on a grid of them, of a length that the module is made for, with the arguments that it wants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .copies import CALL, Copier, numbers_of_heads, shorter_tables, sizes_of, tables_of
from .draws import Foreign, own_draws
from .facts import ClassOf, is_recognised, leaves, level_of
from .hosts.attention import AttentionRoles
from .hosts.fused import HEAVY, arguments_of, example, part, width_of
from .hosts.masks import example_of_mask
from .prove import DTYPES, first_line

TOKENS = 2400  # of a batch in a search
NOT_RUN = "its forward did not run on tokens alone"


class Unsupported(Exception):
    """Why a module is of no kind that has a fused forward."""


class NotACandidate(Unsupported):
    """The same of a module that nobody would take for one; the report does not name it."""


class Value(NamedTuple):
    """Stands for a tensor among the arguments of an event."""

    number: int


class Event(NamedTuple):
    """A call of a part or of a function of torch."""

    part: str  # a part's dotted name, or the Linear or weight that a function reads; or ""
    function: str  # a function's name, or the name of the part's class
    args: tuple[Any, ...]  # with a Value for each tensor
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]  # numbers of the tensors among the arguments
    output: int  # number of the first tensor of the result
    item: int | None  # its place, where the result is a tuple


@dataclass
class Observation:
    """A run: its events in order, its tensors by number, and where its result is."""

    events: list[Event] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)  # number -> name
    first: int = -1  # number of the first argument
    result: int = -1
    place: tuple[int, int] | None = None  # (length, tensor) of a result that is a tuple
    extras: dict[str, Any] = field(default_factory=dict)  # arguments besides the first, by name
    others: list[int] = field(default_factory=list)  # and the numbers of its other tensors
    settings: dict[str, int] = field(default_factory=dict)  # whole numbers that the copy holds
    held: dict[int, str] = field(default_factory=dict)  # and tensors that are no parameters

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.tensors[number].shape)

    @cached_property
    def made(self) -> dict[int, Event]:
        """The event that gave each value, once the run is over."""
        return {event.output: event for event in self.events}


def _first_tensor(result: Any) -> tuple[Tensor | None, int | None]:
    if isinstance(result, Tensor):
        return result, None
    values = enumerate(result if isinstance(result, (tuple, list)) else ())
    return next(((v, place) for place, v in values if isinstance(v, Tensor)), (None, None))


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.found = Observation()
        self.numbers: dict[int, int] = {}  # id of a tensor that is alive -> its number
        self.depth = 0  # parts whose calls are at work
        self.modules = dict(module.named_modules())
        for name, p in (*module.named_parameters(), *module.named_buffers()):
            self.found.parameters[self.number(p)] = name
        own = {**vars(module), **module._buffers}
        self.found.held = {self.number(v): n for n, v in own.items() if isinstance(v, Tensor)}

    def number(self, tensor: Tensor, new: bool = False) -> int:
        if new or id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.found.tensors)
            self.found.tensors.append(tensor)  # alive, so that no other has its id
        return self.numbers[id(tensor)]

    def values(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return Value(self.number(argument))
        if isinstance(argument, (tuple, list)):
            return tuple(map(self.values, argument))
        return argument

    def record(
        self, part: str, function: str, args: Any, kwargs: Any, result: Any, new: bool
    ) -> None:
        tensor, item = _first_tensor(result)
        args, kwargs = self.values(args), {n: self.values(v) for n, v in kwargs.items()}
        inputs = tuple(v.number for v in leaves((args, kwargs), Value))
        if tensor is None or (id(tensor) in self.numbers and not new):
            return  # or the function gave back its input
        number = self.number(tensor, new=True)
        self.found.events.append(Event(part, function, args, kwargs, inputs, number, item))
        for other in result if item is not None else ():
            if isinstance(other, Tensor) and other is not tensor:
                # the parts of a chunk are one value for whoever looks for its origin
                self.numbers[id(other)] = number
                self.found.tensors.append(other)

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.depth:
            name = getattr(func, "__name__", str(func))
            part = self.owner(name, args, kwargs)
            in_place = name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")
            self.record(part, name, args, kwargs, result, in_place)
        return result

    def owner(self, name: str, args: Any, kwargs: dict[str, Any]) -> str:
        """The Linear whose weight a call of F.linear reads, or the module's own weight; "" for any
        other call."""
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if name != "linear" or not isinstance(weight, Tensor):
            return ""
        name = self.found.parameters.get(self.number(weight), "")
        part = name.rpartition(".weight")[0]
        return part if isinstance(self.modules.get(part), nn.Linear) else name * ("." not in name)

    def watch(self, name: str, part: nn.Module) -> None:
        def seen(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            result = part.forward(*args, **kwargs)
            tensor, _ = _first_tensor(result)
            if self.depth == 1 and tensor is not None and id(tensor) in self.numbers:
                result = tensor.view_as(tensor)
            self.depth -= 1
            if not self.depth:
                self.record(name, type(part).__name__, args, kwargs, result, True)
            return result

        part.__dict__[CALL] = seen


def _run(copy: nn.Module, parts: list[str], x: Tensor, kwargs: dict[str, Any]) -> Observation:
    """One run of `copy`, which nobody else needs; `parts` count as one event each, and the run is
    seen through all others."""
    recorder = _Recorder(copy)
    for name in parts:
        recorder.watch(name, copy.get_submodule(name))
    found = recorder.found
    found.settings = {n: v for n, v in vars(copy).items() if type(v) is int}
    found.first = recorder.number(x)
    given = {n: v for n, v in kwargs.items() if v is not None}
    found.extras = {n: recorder.values(v) for n, v in given.items()}
    with torch.no_grad(), own_draws(), recorder:
        result = copy.forward(x, **kwargs)
    tensor, item = _first_tensor(result)
    if tensor is None:
        raise TypeError(f"its result is a {type(result).__name__}")
    if item is not None:
        found.place = len(result), item
        found.others = [recorder.number(t) for t in result if isinstance(t, Tensor)][1:]
    found.result = recorder.number(tensor)
    return found


def open_parts(module: nn.Module, class_of: ClassOf) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a run shows as one event each: those that are planned, leaves of torch, and
    what has weights but no matmul, such as a norm. It sees through all others."""
    for name, child in module.named_children():
        inner = list(child.modules())
        library = type(child).__module__.partition(".")[0]
        is_leaf = len(inner) == 1 and library == "torch"
        heavy = any(isinstance(m, nn.Linear) or level_of(class_of(m)) in HEAVY for m in inner)
        called = type(child).forward is not nn.Module.forward
        owned = next(child.parameters(), next(child.buffers(), None))
        small = called and not heavy and owned is not None
        attention = isinstance(child, (nn.MultiheadAttention, nn.Linear))
        if level_of(class_of(child)) or is_leaf or small or attention:
            yield name, child
        else:
            for rest, m in open_parts(child, class_of):
                yield f"{name}.{rest}", m


# (copy, tokens) -> arguments besides the first; None for no others
Extras = Callable[[Any, int], dict[str, Any]] | None


def observed(
    module: nn.Module, class_of: ClassOf, training: bool, more: Extras = None
) -> Observation:
    """A run of the module's own forward on a copy: on tokens, else on a grid of tokens.

    Raises: Unsupported where it takes neither.
    """
    parts = [name for name, _ in open_parts(module, class_of)]
    names, defaults, _ = arguments_of(type(module).forward)
    if not names:
        raise NotACandidate("its forward names no argument")
    wanted, failure = {n: None for n in names[1:] if n not in defaults}, None
    every = [(d, s) for d in DTYPES for s in sizes_of(list(module.modules()))]

    @cache
    def copied(place: int) -> tuple[Copier, Any]:
        dtype, sizes = every[place]
        copier = Copier(sizes, class_of, whole=True, dtype=dtype, quick=True)
        return copier, copier.copy(module).train(training)

    tokens = [(shape, False) for shape in (*_lengths(module), (3, 5), (2, 3, 4))]
    for (shape, channels), place in product((*tokens, ((2, 3, 4), True)), range(len(every))):
        copier, copy = copied(place)
        x = example(copier.generator, *shape, width_of(copy)).detach().to(copier.dtype)
        x = x.movedim(-1, 1).contiguous() if channels else x
        try:
            extras = {} if more is None else more(copy, shape[1])
            return _run(copy, parts, x, wanted | extras)
        except Foreign as error:
            raise Unsupported(str(error)) from error
        except Exception as error:
            failure = failure or first_line(error)
    raise NotACandidate(f"{NOT_RUN}: {failure}")


def _lengths(module: nn.Module) -> list[tuple[int, ...]]:
    """Batch and tokens that a module may be made for, by the sizes of tables that it has."""
    found: list[tuple[int, ...]] = []
    shorter = shorter_tables(list(module.modules()))
    for m in module.modules():
        tensors = [t for t in (*m._buffers.values(), *vars(m).values()) if isinstance(t, Tensor)]
        own = [t.shape for t in tensors if t.ndim == 2]
        square = [s[0] for s in own if s[0] == s[1]]
        longer = [s[0] + prefix for s in own if s[0] != s[1] for prefix in (1, 0)]
        found += [(2, T) for T in (*square, *longer)] + [(T, 2) for T in square]
        if tables := tables_of(m):
            found.append((2, *((shorter.get(n, n) + 1) // 2 for n in tables)))
    return [*dict.fromkeys(s for s in found if math.prod(s) <= TOKENS)]


def is_mask(name: str) -> bool:
    """Whether an argument may be added to the scores, by its name."""
    return "mask" in name or "bias" in name


def angle_argument(module: Any) -> str | None:
    """The argument with RoPE's angles, by its name: it has no other mark."""
    names = arguments_of(type(module).forward).names[1:]
    return next((n for n in names if re.search("rope|rotary|position_emb", n)), None)


def angles_for(copy: Any, tokens: int, name: str, roles: Any) -> dict[str, Any]:
    """A pair of tables for an attention with these roles, or with heads of which we know less."""
    if roles is None:
        D = width_of(copy) // max(numbers_of_heads(copy), default=1)
    else:
        names = roles.projections
        weight = part(copy, names[0])
        packed = len(getattr(weight, "weight", weight)) // roles.heads
        D, tokens = packed // (3 if len(names) == 1 else 1), tokens - roles.prefix
    generator = torch.Generator().manual_seed(3)
    dtype = next(copy.parameters()).dtype
    return {name: tuple(torch.randn(tokens, D, generator=generator, dtype=dtype) for _ in "sc")}


def extras_of_block(module: Any, class_of: ClassOf) -> list[Extras]:
    """What a block may hand on to its attention: RoPE's tables and a mask, or fewer of them."""
    names = arguments_of(type(module).forward).names[1:]
    masks = [n for n in names if is_mask(n)]
    for inside, m in open_parts(module, class_of):
        cls = class_of(m)
        # Other roles of a table name settings: their block runs without.
        roles = getattr(cls, "fused_masked", None) or (is_recognised(cls) and cls.fused_roles)
        if not isinstance(roles, AttentionRoles):
            continue

        def more(copy: Any, tokens: int, mask: bool, name: str = inside, roles: Any = roles) -> Any:
            angles = angle_argument(module) if roles.rope else None
            inner = copy.get_submodule(name)
            given = angles_for(inner, tokens, angles, roles) if angles else {}
            if mask:
                x = torch.zeros(3, tokens, 1, dtype=next(copy.parameters()).dtype)
                kind, reading = roles.masks[0]
                generator = torch.Generator().manual_seed(3)
                given[masks[0]] = example_of_mask(kind, reading, x, generator, roles.heads)
            return given

        both = [partial(more, mask=True)] if masks and roles.mask else []
        return [*both, partial(more, mask=False)]
    return [None]
