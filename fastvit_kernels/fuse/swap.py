"""swap_in: a model runs through torch.compile with our backend, in place.

What is swapped is `forward` in the module's own `__dict__`: class, parameters, names, state_dict,
hooks and checkpoints stay what they are, and hooks of others (FSDP2's, a checkpoint's) run around
it as ever. `swap_out` takes it away again.
"""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from types import FrameType, FunctionType, MethodType
from typing import Any, Literal, get_args

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
from . import dynamo, report, select
from .report import Calls, SwapReport, collecting

Compiler = Literal["eager", "inductor"]
Memory = Literal["default", "low"]
DropPath = Literal["mask", "skip"]

# Entrances of a model besides forward: forward_features, get_intermediate_layers, encode_image, ...
_ENTRANCES = re.compile(r"forward_\w+|encode_\w+|get_intermediate_layers|get_\w+_features")
_REPLICATE = "_replicate_for_data_parallel"
_numbers = itertools.count()
LITTLE = 0.01  # of the FLOPs: less fused than that is worth a warning


@dataclass(frozen=True)
class Settings:
    """How the graphs of a swapped module are made.

    Attributes:
        partial: whether modules inside were left out by only= or skip=, so that a graph around them
            must stay the host's.
        told: the warnings that were given, as (class, text).
    """

    compiler: Compiler = "eager"
    mode: str | None = None
    memory: Memory = "default"
    drop_path: DropPath = "mask"
    partial: bool = False
    told: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)

    def options(self) -> dict[str, Any]:
        return {"compiler": self.compiler, "memory": self.memory, "drop_path": self.drop_path}


def _entry(swapped: Swapped) -> Callable[..., Any]:
    """A call of the host's method with a code object of its own.

    Dynamo counts recompiles and learns dynamic sizes by code object: blocks with rates or windows
    of their own would share one limit of eight graphs. This file is none of torch's, whose frames
    Dynamo skips, so that torch's own containers compile, too.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():  # Dynamo made no graph of it: this runs as Python
            swapped.ran_as_python(code)
        return swapped.host(*args, **kwargs)

    name = f"{type(swapped.module).__name__}_{swapped.method}_{next(_numbers)}"
    code = called.__code__.replace(co_name=name)
    return FunctionType(code, called.__globals__, name, None, called.__closure__)


def _others_look_on() -> bool:
    """Whether an exporter, a tracer, a mode or torch.func wants the host's operators."""
    if not is_observed():
        return torch.compiler.is_exporting()
    tracing = is_jit_tracing() or is_fx_tracing() or in_transform() or in_forward_mode()
    return tracing or has_global_hook() or dynamo.in_foreign_mode()


def _tell_limit(limit: str, frame: FrameType | None) -> None:
    """A function inside of a swapped forward met a limit: whose call it is, the stack says."""
    while frame is not None and frame.f_code is not Swapped.__call__.__code__:
        frame = frame.f_back
    if frame is not None:
        frame.f_locals["self"].met(limit)


class Swapped:
    """What stands for a method in a module's `__dict__`; its copies compile themselves.

    Attributes:
        module, method: what it stands for, such as a block and "forward".
        own: what the instance had in that place before, or None.
        calls: what became of its calls.
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
        self.compiled: Callable[..., Any] | None = None
        self.lock = threading.RLock()
        self.tracing_errors: tuple[type[Exception], ...] = ()
        self.looked = self.method != "forward"

    def __getstate__(self) -> dict[str, Any]:
        return {k: vars(self)[k] for k in ("module", "settings", "name", "method", "own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The host's method; inspect.signature reads it."""
        return self.own or MethodType(getattr(type(self.module), self.method), self.module)

    @property
    def __code__(self) -> Any:  # torch.export reads it
        return self.__wrapped__.__code__

    def host(self, *args: Any, **kwargs: Any) -> Any:
        """The host's method, in a form that Dynamo traces."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)

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
        try:
            out = (self.compiled or self.first_call)(*args, **kwargs)
        except Exception as error:
            # What Dynamo raises while it traces; it adds these words to the host's own errors, too.
            text = str(error).strip()
            if not isinstance(error, self.tracing_errors) and "\nfrom user code:" not in text:
                raise
            failure = f"{type(error).__name__}: {' '.join(text.split())[:200]}"
        else:
            if not self.looked:
                self.look()
            return out
        out = self.host(*args, **kwargs)  # wrong shapes raise here, by the host's own words
        self.run_host(f"torch._dynamo cannot trace it ({failure})")
        return out

    def first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Threads that come at once wait: each would make a graph of its own."""
        with self.lock:
            compiled = self.compiled or self.compile()
            out = compiled(*args, **kwargs)
            self.compiled = compiled
        return out

    def compile(self) -> Callable[..., Any]:
        try:
            from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

            dynamo.watch_limits(_tell_limit)
            self.tracing_errors = (InternalTorchDynamoError, TorchRuntimeError)
            return torch.compile(_entry(self), backend=self.backend)
        except (ImportError, AttributeError) as error:
            self.run_host(f"torch {torch.__version__} lacks an interface ({error})")
            return self.host

    def run_host(self, why: str) -> None:
        """From now on, and say so."""
        self.compiled = self.host
        self.looked = True
        self.calls.note(f"runs its host's forward: {why}")
        self.warn(f"it runs its host's forward: {why}")

    def backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from .backend import fastvit_kernels

        options, mode = self.settings.options(), self.settings.mode
        with collecting(self.calls):
            return fastvit_kernels(gm, inputs, mode=mode, options=options)

    def ran_as_python(self, code: Any) -> None:
        self.calls.as_python += 1
        if limit := dynamo.limit_met(code):
            self.met(limit)

    def met(self, limit: str) -> None:
        if not self.calls.limit:
            self.calls.limit = limit
            self.warn(
                f"torch._dynamo has made as many graphs of it as it may ({limit}): calls of new "
                "kinds run the host's forward"
            )

    def look(self) -> None:
        """After the first call: say if hardly a product is fused."""
        self.looked = True
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
            with collecting(self.calls):
                return fastvit_kernels(gm, inputs, options={**outer.inductor.config, **settings})

        outer.output.compiler_fn, outer.output.fastvit_kernels = compile_graph, True
        return True

    def replicate(self) -> nn.Module:
        """DataParallel's copy, with its host's methods: ours would call the original."""
        replica = getattr(type(self.module), _REPLICATE)(self.module)
        for swapped in swapped_methods_of(self.module):
            swapped.remove_from(replica)
        return replica

    def put_into(self, module: nn.Module) -> None:
        vars(module)[self.method] = self
        if self.method == "forward":
            vars(module)[_REPLICATE] = self.replicate

    def remove_from(self, module: nn.Module) -> None:
        own = vars(module)
        own.pop(self.method, None)
        if self.own is not None:
            own[self.method] = self.own
        own.pop(_REPLICATE, None)


def swapped_methods_of(module: nn.Module) -> list[Swapped]:
    return [
        x.__func__ if isinstance(x, MethodType) else x
        for x in vars(module).values()
        if _is_swapped(x)
    ]


def _is_swapped(x: Any) -> bool:
    return isinstance(x.__func__ if isinstance(x, MethodType) else x, Swapped)


def swapped_methods(model: nn.Module) -> list[Swapped]:
    return [x for m in model.modules() for x in swapped_methods_of(m)]


def _entrances(module: nn.Module) -> list[str]:
    """forward, and the model's other methods that run its blocks."""
    names = {n for c in type(module).__mro__ if c is not nn.Module for n in vars(c)}
    found = [n for n in sorted(names) if _ENTRANCES.fullmatch(n)]
    cls = type(module)
    return ["forward"] + [n for n in found if isinstance(getattr_static(cls, n), FunctionType)]


def _install(name: str, module: nn.Module, settings: Settings, methods: list[str]) -> list[Calls]:
    made = [Swapped(module, settings, name, method) for method in methods]
    for swapped in made:
        swapped.put_into(module)
    return [swapped.calls for swapped in made]


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is given to a model: a tensor, a tuple of arguments, or keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def swap_in(
    model: nn.Module,
    *,
    example: Any = None,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    regional: bool = False,
    compiler: Compiler = "eager",
    mode: str | None = None,
    memory: Memory = "default",
    drop_path: DropPath = "mask",
    measure: Any = None,
) -> SwapReport:
    """Make a model run on the fused kernels, in place, by torch.compile's own graph.

    Parameters, names, state_dict, hooks and the class stay what they are; optimizers made before
    stay valid. A second call sets everything anew. Graphs are made at the first call; hooks that
    come later are seen. Wherever a call is traced by others (export, torch.fx, a dispatch mode,
    torch.func), they see the host's operators.

    Args:
        model: any nn.Module. Call it before DDP, FSDP and torch.compile.
        example: a batch, so that the graph is made and the report filled at once: a tensor, a tuple
            of arguments, or a dict of keyword arguments.
        only: swap these alone: a module's name or a shell pattern ("blocks.0", "blocks.*.attn"), or
            several. A module stands for all that is inside it.
        skip: leave these alone; the same kinds.
        regional: a graph for each repeated block instead of one for the model: the way with FSDP2.
        compiler: "eager" runs the rewritten graph as it is, "inductor" compiles the rest of it.
        mode: of torch.compile, such as "reduce-overhead"; for compiler="inductor".
        memory: "low": the backward makes the norms' outputs again instead of keeping them.
        drop_path: "skip": in training, samples that DropPath drops are not computed, and there are
            as many of them at every step.
        measure: a batch, as `example`: run the whole step of host and swapped model in turns, and
            keep the swap only if it is faster by more than the noise. The report says the times.
    Returns: a SwapReport: .share, .left, .graphs; text by print.
    Raises: TypeError for another model; ValueError for a name that the model does not have, another
        choice, and a model that is sharded, compiled, scripted or quantised already. What the model
        raises on an example. The model is then as it was.
    Warns: once if nothing is fused, and once where Dynamo's limit of graphs is met.
    """
    model = select.unwrapped("swap_in", model)
    _check_choice("compiler", compiler, Compiler)
    _check_choice("memory", memory, Memory)
    _check_choice("drop_path", drop_path, DropPath)
    if mode is not None and compiler != "inductor":
        raise ValueError(f"swap_in: mode={mode!r} is Inductor's: give compiler='inductor' too")
    if memory == "low" and compiler == "inductor":
        raise ValueError("swap_in: memory='low' is for compiler='eager' alone")
    select.check_untouched(model, regional)
    chosen, left_out = select.select(model, only, skip, regional)
    if not chosen or not any(p.requires_grad or p.numel() for p in model.parameters()):
        warnings.warn(f"swap_in: {type(model).__name__}: nothing to fuse", stacklevel=2)
    settings = Settings(compiler, mode, memory, drop_path, bool(only or skip))
    swap_out(model)
    calls = []
    for name, module in chosen.items():
        methods = _entrances(module) if module is model else ["forward"]
        calls += _install(name, module, settings, methods)
    found = SwapReport(list(chosen), calls, left_out, model=report.weakly(model))
    if example is not None:
        select.try_example(model, *arguments_of(example), undo=lambda: swap_out(model))
    if measure is not None:
        from .measure import measure_step

        found.measured = measure_step(model, *arguments_of(measure))
    return found


def _check_choice(argument: str, given: Any, choices: Any) -> None:
    if given not in get_args(choices):
        raise ValueError(f"swap_in: {argument} must be one of {get_args(choices)}, got {given!r}")


def swap_out(model: nn.Module) -> None:
    """Undo swap_in: every module has its own methods again. Parameters stay untouched.

    Raises: TypeError for another model; ValueError, with nothing undone, where `forward` of a
    swapped module was set again since: undo that first.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_out: model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if _REPLICATE in vars(module) and not _is_swapped(vars(module).get("forward")):
            where = f"{name}.forward" if name else "forward"
            raise ValueError(f"swap_out: {where} was set since swap_in: undo that first")
    for swapped in swapped_methods(model):
        swapped.remove_from(swapped.module)
