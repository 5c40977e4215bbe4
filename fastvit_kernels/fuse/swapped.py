"""What stands for a module's forward: a call through torch.compile with our backend.

It lies in the module's own `__dict__`: class, parameters, names, state_dict, hooks and checkpoints
stay what they are, and hooks of others (FSDP2's, a checkpoint's) run around it as ever.
"""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
from collections.abc import Callable
from inspect import getattr_static
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from ..runtime.compat import (
    constant_when_traced,
    has_global_hook,
    in_forward_mode,
    in_transform,
    is_dynamo_compiling,
    is_fx_tracing,
    is_jit_tracing,
    is_observed,
)
from . import dynamo
from .entry import REPLICATE, Entry, form_of_call
from .hooks import EmptyHooks
from .report import NO_GRAPH, Calls, adding
from .settings import Settings

# What Dynamo raises while it traces; the first words it adds to the host's own errors, too.
TRACING = ("\nfrom user code:", "Guard failed on the same frame it was created")
TWICE = "in this call what comes before that ran twice"
LITTLE = 0.01  # of the FLOPs: less fused than that is worth a warning


def _others_look_on() -> bool:
    """Whether an exporter, a tracer, a mode or torch.func wants the host's operators."""
    if torch.compiler.is_exporting() or not is_observed():
        return torch.compiler.is_exporting()
    tracing = is_jit_tracing() or is_fx_tracing() or in_transform() or in_forward_mode()
    return tracing or has_global_hook() or dynamo.in_foreign_mode()


def running(frame: FrameType | None) -> Swapped | None:
    """Whose call it is: the stack says."""
    while frame is not None and frame.f_code is not Swapped.__call__.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _tell_limit(limit: str, frame: FrameType | None) -> None:
    """A function inside of a swapped forward met a limit."""
    if (swapped := running(frame)) is not None:
        swapped.met(limit)


class Swapped:
    """What stands for a method in a module's `__dict__`; its copies compile themselves.

    Attributes:
        module, method: what it stands for, such as a block and "forward".
        own: what the instance had in that place before, or None.
        calls: what became of its calls.
        entry: what torch.compile was given of it, before that None.
        is_alone: whether that is its own: of the model itself, of a block with a forward of its
            own, of what a CUDA graph runs, which reads the parameters of one block, and of a block
            that is alike no more.
        empty_hooks: the dicts of hooks that its graphs found empty.
    """

    def __init__(
        self, module: nn.Module, settings: Settings, name: str = "", method: str = "forward"
    ):
        self.module, self.settings, self.name, self.method = module, settings, name, method
        self.own = vars(module).get(method)
        self._start()

    def _start(self) -> None:
        where = self.name if self.method == "forward" else f"{self.name}.{self.method}".strip(".")
        self.calls = Calls(where, self.name)
        self.empty_hooks = EmptyHooks()
        self.compiled: Callable[..., Any] | None = None
        self.entry: Entry | None = None
        self.is_alone = not self.name or self.own is not None or self.settings.mode is not None
        self.lock = threading.RLock()
        self.tracing_errors: tuple[type[Exception], ...] = ()
        self.looked = False
        found = getattr_static(type(self.module), self.method)
        is_unbound = isinstance(found, (staticmethod, classmethod))
        self.takes_module = not is_unbound and hasattr(type(found), "__get__")

    def __getstate__(self) -> dict[str, Any]:
        return {k: vars(self)[k] for k in ("module", "settings", "name", "method", "own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The host's method; inspect.signature reads it."""
        method = getattr(type(self.module), self.method)
        return self.own or (MethodType(method, self.module) if self.takes_module else method)

    @property
    def __code__(self) -> Any:  # torch.export reads it
        return self.__wrapped__.__code__

    def host(self, *args: Any, **kwargs: Any) -> Any:
        """The host's method, in a form that Dynamo traces."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        method = getattr(type(self.module), self.method)
        return (
            method(self.module, *args, **kwargs) if self.takes_module else method(*args, **kwargs)
        )

    def __getattr__(self, name: str) -> Any:
        hint = "for what reads its source, as torch.jit.script does, call swap_out first"
        raise AttributeError(f"a swapped method has no {name}; {hint}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # accelerate's unwrap_model binds what it unwraps
            args = args[1:]
        if is_dynamo_compiling():
            self.join_outer_compile()
            return self.host(*args, **kwargs)
        if _others_look_on():
            return self.host(*args, **kwargs)
        self.empty_hooks.look()
        try:
            out = (self.compiled or self.first_call)(*args, **kwargs)
        except Exception as error:
            text = str(error).strip()
            if not isinstance(error, self.tracing_errors) and not any(w in text for w in TRACING):
                raise
            failure = f"{type(error).__name__}: {' '.join(text.split())[:200]}"
            if begun := self.has_begun(error):
                failure += f"; {TWICE}"
        else:
            if not self.looked:
                self.look()
            return out
        try:
            out = self.host(*args, **kwargs)
        except Exception:  # wrong shapes, by the host's own words
            if begun:
                self.warn(TWICE)
            raise
        self.run_host(f"torch._dynamo cannot trace it ({failure})")
        return out

    def first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Threads that come at once wait: each would make a graph of its own."""
        with self.lock:
            compiled = self.compiled or self.compile(args, kwargs)
            entry = self.entry
            out = compiled(*args, **kwargs)
            if self.entry is entry:  # it has not left that one
                self.compiled = compiled
        return out

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """torch.compile of the host's method, before its first call, with these arguments."""
        try:
            from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

            dynamo.watch_limits(_tell_limit)
            self.tracing_errors = (InternalTorchDynamoError, TorchRuntimeError)
            self.entry = self.join(args, kwargs)
            return functools.partial(self.entry.run, self)
        except (ImportError, AttributeError) as error:
            self.run_host(f"torch {torch.__version__} lacks an interface ({error})")
            return self.host

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """The entry of blocks like this one, if its graphs can serve; else one of its own."""
        form = None if self.is_alone else form_of_call(self, args, kwargs)
        found = self.settings.entries.get(form)
        if self.entry is not None and self.entry is found:  # its first call raised
            return found
        if found is not None and not found.is_open:
            found = None
        if self.entry is not None:
            self.entry.leave(self)
        found = found or Entry(self, running, args, kwargs)
        if form is not None:
            self.settings.entries[form] = found
        found.join(self)
        self.empty_hooks = found.graphs.empty_hooks
        return found

    def leave(self) -> None:
        """The graphs of blocks like this one serve it no more."""
        self.entry.leave(self)
        self.compiled = self.entry = None

    def has_begun(self, error: Exception) -> bool:
        """Whether parts of the forward, before a graph break, had run when a later one failed."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        name = self.entry and self.entry.code.co_name  # of the code that Dynamo made of it, too
        return any(frame.f_code.co_name == name for frame in frames)

    def run_host(self, why: str) -> None:
        """From now on, and say so."""
        self.compiled = self.host
        self.looked = True
        self.calls.note(f"runs its host's forward: {why}")
        self.warn(f"it runs its host's forward: {why}")

    def ran_as_python(self) -> None:
        self.calls.as_python += 1
        if self.entry is not None and (limit := dynamo.limit_met(self.entry.code)):
            self.met(limit)

    def met(self, limit: str) -> None:
        if self.entry is not None and self.entry.is_shared:
            self.is_alone = True
            self.leave()
        elif not self.calls.limit:
            self.calls.limit = limit
            self.warn(
                f"torch._dynamo has made as many graphs of it as it may ({limit}): calls of new "
                "kinds run the host's forward"
            )

    def look(self) -> None:
        """After the first call: say if there is no graph, or if hardly a product is fused."""
        self.looked = self.calls.called = True
        every = (self, *swapped_methods(self.module))  # itself may be in a wrapper there
        if not any(each.calls.graphs for each in every):
            self.warn(f"nothing is fused: {NO_GRAPH}")
        if self.method != "forward":
            return
        flops = sum(g.flops for g in self.calls.graphs)
        fused = sum(g.fused_flops for g in self.calls.graphs)
        if fused >= LITTLE * flops:
            return
        declined = [g.declined for g in self.calls.graphs if g.declined]
        left = max((row for g in self.calls.graphs for row in g.left), key=lambda row: row.flops)
        why = declined[0] if declined else f"{left.op}: {left.reason}"
        share = f"{100 * fused / flops:.1f} %" if fused else "nothing"
        self.warn(f"{share} of its matmul and attention FLOPs is fused: {why}")

    def warn(self, what: str) -> None:
        """Once for modules of a class."""
        cls = type(self.module).__name__
        if (cls, what) not in self.settings.told:
            self.settings.told.add((cls, what))
            where = f"{cls} ({self.name})" if self.name else cls
            warnings.warn(f"swap_in: {where}: {what}", RuntimeWarning, stacklevel=4)

    @constant_when_traced
    def join_outer_compile(self) -> bool:
        """While somebody's own torch.compile traces the module: its Inductor gets our graph.

        Only the compile under way changes. Another compiler than Inductor gets the host's graph.
        """
        outer = dynamo.outer_compile()
        if outer is None or getattr(outer.output, "fastvit_kernels", False):
            return True
        if torch.compiler.is_exporting():
            return True
        if outer.inductor is None:
            return True  # our own compile, or a compiler that does not know our operators
        if self.settings.partial:
            self.calls.note("torch.compile around it gets the host's graph: only= or skip= is set")
            return True
        from .backend import fastvit_kernels

        settings = {**self.settings.options(), "compiler": "inductor"}
        if settings.pop("memory") == "low":
            self.calls.note(
                "torch.compile around it decides what is kept: memory='low' is not used"
            )

        def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with adding(self.calls.add):
                return fastvit_kernels(gm, inputs, options={**outer.inductor.config, **settings})

        outer.output.compiler_fn, outer.output.fastvit_kernels = compile_graph, True
        return True

    def replicate(self) -> nn.Module:
        """DataParallel's copy, with its host's methods: ours would call the original."""
        replica = getattr(type(self.module), REPLICATE)(self.module)
        for swapped in swapped_methods_of(self.module):
            swapped.remove_from(replica)
        return replica

    def put_into(self, module: nn.Module) -> None:
        vars(module)[self.method] = self
        self.calls.undone = False
        if self.method == "forward":
            vars(module)[REPLICATE] = self.replicate

    def remove_from(self, module: nn.Module) -> None:
        own = vars(module)
        own.pop(self.method, None)
        self.calls.undone = self.calls.undone or module is self.module
        if self.own is not None:
            own[self.method] = self.own
        own.pop(REPLICATE, None)


def swapped_methods_of(module: nn.Module) -> list[Swapped]:
    return [
        x.__func__ if type(x) is MethodType else x for x in vars(module).values() if is_swapped(x)
    ]


def is_swapped(x: Any) -> bool:
    """By types: a weak proxy passes on what it is asked."""
    return type(x.__func__ if type(x) is MethodType else x) is Swapped


def swapped_methods(model: nn.Module) -> list[Swapped]:
    return [x for m in model.modules() for x in swapped_methods_of(m)]
