"""The function that torch.compile is given of a swapped method; blocks that are alike share one.

The first of them has its graphs made, and the others run those, as in torch's regional compilation:
what differs from block to block is an input of the graph, or guarded by Dynamo. All but which block
it is: only graphs of the libraries' own code are shared, which never asks for that.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..runtime.compat import is_dynamo_compiling
from . import dynamo
from .hooks import EmptyHooks
from .report import GraphReport, adding
from .settings import Settings

if TYPE_CHECKING:
    from .swapped import Swapped

REPLICATE = "_replicate_for_data_parallel"
OURS = ("forward", REPLICATE)  # what swap_in puts into a module
PLAIN = (bool, int, float, str, type(None))
_numbers = itertools.count()


def called(swapped: Swapped, *args: Any, **kwargs: Any) -> Any:
    """This file is none of torch's, whose frames Dynamo skips, so that torch's own containers
    compile, too."""
    if not is_dynamo_compiling():  # Dynamo made no graph of it: this runs as Python
        swapped.ran_as_python()
    swapped.empty_hooks.guard()
    return swapped.host(*args, **kwargs)


Running = Callable[[FrameType | None], "Swapped | None"]  # whose call it is


class Made(NamedTuple):
    """A graph; the form of the block that it was made of; who knows that it runs it."""

    report: GraphReport
    form: int | None
    told: weakref.WeakSet[Swapped]


class Graphs:
    """What the backend of an entry knows. Dynamo keeps every backend for good, so this must hold no
    module.

    Attributes:
        users: the swapped methods that run the graphs.
        made: a report of each.
        empty_hooks: the dicts of hooks that were empty when they were made.
        is_private: whether one of them has code that may ask which block it is.
    """

    def __init__(self, settings: Settings, running: Running):
        self.settings, self.running, self.empty_hooks = settings, running, EmptyHooks()
        self.is_private = False
        self.users: list[weakref.ref[Swapped]] = []
        self.made: list[Made] = []

    def compile(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend."""
        from .backend import fastvit_kernels

        dynamo.guard_hooks(self.empty_hooks)
        settings, made_of = self.settings, self.running(sys._getframe())
        if not dynamo.traces_libraries_alone():
            self.is_private = True
            for swapped in self.living():
                if swapped is not made_of:
                    swapped.leave()
        with adding(functools.partial(self.add, made_of)):
            return fastvit_kernels(gm, inputs, mode=settings.mode, options=settings.options())

    def living(self) -> list[Swapped]:
        return [swapped for user in self.users if (swapped := user()) is not None]

    def add(self, made_of: Swapped | None, report: GraphReport, tensors: list[Tensor]) -> None:
        form = None if made_of is None or made_of.is_alone else form_of(made_of.module)
        made = Made(report, form, weakref.WeakSet())
        self.made.append(made)
        for swapped in self.living():
            if made_of in (None, swapped):
                made.told.add(swapped)
                swapped.calls.add(report, tensors)
            else:
                self.tell(swapped)

    def tell(self, swapped: Swapped) -> None:
        """A block is told of graphs made of one that is as it is now; hooks may have come since."""
        if not self.made or swapped.is_alone:
            return
        form = form_of(swapped.module)
        for report, made_of, told in self.made:
            if form == made_of and swapped not in told:
                told.add(swapped)
                swapped.calls.add(report, swapped.module.parameters())


class Entry:
    """`called` with a code object of its own, and what is known of its graphs.

    Dynamo counts recompiles and learns dynamic sizes by code object: blocks with rates or windows
    of their own would share one limit of eight graphs.
    """

    def __init__(
        self, swapped: Swapped, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        name = f"{type(swapped.module).__name__}_{swapped.method}_{next(_numbers)}"
        self.code = called.__code__.replace(co_name=name)
        self.graphs = Graphs(swapped.settings, running)
        if swapped.settings.compiler == "eager":
            dynamo.let_batch_vary(self.code, args, kwargs)
        function = FunctionType(self.code, called.__globals__, name)
        self.run = torch.compile(function, backend=self.graphs.compile, **dynamo.isolated())
        weakref.finalize(self, dynamo.forget, self.code).atexit = False

    @property
    def is_shared(self) -> bool:
        return len(self.graphs.users) > 1

    @property
    def is_open(self) -> bool:
        """Whether other blocks may join: what its first graph has is known."""
        return bool(self.graphs.made) and not self.graphs.is_private

    def join(self, swapped: Swapped) -> None:
        self.graphs.users.append(weakref.ref(swapped))
        self.graphs.empty_hooks.join(swapped.module)
        self.graphs.tell(swapped)

    def leave(self, swapped: Swapped) -> None:
        self.graphs.users.remove(weakref.ref(swapped))


def form_of_call(swapped: Swapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Equal for calls that one graph can serve, as far as one sees. Whether it does serve, Dynamo's
    guards decide."""
    given = [_form(x) for x in tree_leaves((args, kwargs))]
    return hash((swapped.method, form_of(swapped.module), repr(given)))


def form_of(module: nn.Module) -> int:
    """The modules inside with their settings, the forms of their tensors, how many hooks each has.
    Other objects are their identity, since torch does not guard all settings under FSDP. Hashed: it
    must not hold a class, which may close over the model."""
    found = (
        (name, type(m), repr([x for x in _settings(m) if m is not module or x[0] not in OURS]))
        for name, m in module.named_modules()
    )
    return hash(tuple(found))


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, x in vars(module).items():
        if name.endswith("_hooks") and isinstance(x, dict):
            yield name, len(x)
        elif name in ("_parameters", "_buffers"):
            yield from ((name, _form(tensor)) for name, tensor in x.items())
        elif name != "_modules":
            yield name, _form(x)


def _form(x: Any, depth: int = 3) -> Any:
    if type(x) in weakref.ProxyTypes:  # whatever else one asks, it passes on
        return id(x)
    if isinstance(x, Tensor) and not (x.is_nested or is_lazy(x)):
        return x.shape, x.dtype, x.device, x.requires_grad
    if isinstance(x, PLAIN):
        return x
    if isinstance(x, functools.partial):
        x = [x.func, x.args, x.keywords]
    if depth and isinstance(x, dict):
        return [(_form(name, 0), _form(value, depth - 1)) for name, value in x.items()]
    if depth and isinstance(x, (list, tuple, set)):
        return type(x), [_form(value, depth - 1) for value in x]
    return type(x), id(x)
