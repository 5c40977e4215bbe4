"""What a module's forward does, from one run of a small copy: the parts that it calls, on which
values, and the functions of torch that it uses besides.

Values are numbered; a part that gives back its input gives a value of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .copies import CALL


class Value(NamedTuple):
    """Stands for a tensor among the arguments of an event."""

    number: int


class Event(NamedTuple):
    """A call of a part or of a function of torch."""

    part: str  # a part's dotted name, or the Linear that a function has the weight of; or ""
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

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.tensors[number].shape)

    @cached_property
    def made(self) -> dict[int, Event]:
        """The event that gave each value, once the run is over."""
        return {event.output: event for event in self.events}

    def uses(self, number: int) -> int:
        return sum(e.inputs.count(number) for e in self.events)


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
        if tensor is None:
            return
        args, kwargs = self.values(args), {n: self.values(v) for n, v in kwargs.items()}
        inputs = tuple(v.number for v in leaves((args, kwargs), Value))
        if id(tensor) in self.numbers and not new:
            return  # the function gave back its input
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
        """The Linear whose weight a call of F.linear reads; "" for any other call."""
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if name != "linear" or not isinstance(weight, Tensor):
            return ""
        part = self.found.parameters.get(self.number(weight), "").rpartition(".weight")[0]
        return part if isinstance(self.modules.get(part), nn.Linear) else ""

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


def leaves(value: Any, kind: type) -> Iterator[Any]:
    """What is of this class in nested tuples, lists and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from leaves(v, kind)


def observe(
    copy: nn.Module, parts: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Observation:
    """One run of `copy`, which is a copy that nobody else needs.

    Args:
        parts: names of the submodules that count as one event each; the run is seen through all
            others.
    """
    recorder = _Recorder(copy)
    for name in parts:
        recorder.watch(name, copy.get_submodule(name))
    recorder.found.settings = {n: v for n, v in vars(copy).items() if type(v) is int}
    recorder.found.first = len(recorder.found.tensors)
    recorder.values(args)
    for name, argument in kwargs.items():
        if argument is not None:
            recorder.found.extras[name] = recorder.values(argument)
    with torch.no_grad(), recorder:
        result = copy.forward(*args, **kwargs)
    found = recorder.found
    tensor, item = _first_tensor(result)
    if tensor is None:
        raise TypeError(f"its result is a {type(result).__name__}")
    if item is not None:
        found.place = len(result), item
        found.others = [recorder.number(t) for t in result if isinstance(t, Tensor)][1:]
    found.result = recorder.number(tensor)
    return found
