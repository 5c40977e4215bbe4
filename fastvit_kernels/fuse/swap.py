"""swap_in: a model runs through torch.compile with our backend, in place; swap_out undoes it."""

from __future__ import annotations

import inspect
import re
import warnings
import weakref
from collections.abc import Iterable
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch import nn

from . import select
from .batch import check_batch, try_example
from .entry import REPLICATE
from .measure import measure_step
from .report import Calls, SwapReport
from .settings import Compiler, DropPath, Memory, Options, Settings
from .swapped import Swapped, is_swapped, swapped_methods_of

# Entrances of a model besides forward: forward_features, get_intermediate_layers, encode_image, ...
_ENTRANCES = re.compile(r"forward_\w+|encode_\w+|get_intermediate_layers|get_\w+_features")


def _entrances(module: nn.Module) -> list[str]:
    """forward, and the model's other methods that run its blocks."""
    names = {n for c in type(module).__mro__ if c is not nn.Module for n in vars(c)}
    found = [n for n in sorted(names) if _ENTRANCES.fullmatch(n)]
    methods = {n: getattr_static(type(module), n) for n in found}
    return ["forward"] + [n for n, method in methods.items() if _runs_when_called(method)]


def _runs_when_called(method: Any) -> bool:
    """Whether it is a method, and neither a generator nor a coroutine."""
    lazy = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return isinstance(method, FunctionType) and not method.__code__.co_flags & lazy


def _install(model: nn.Module, chosen: dict[str, nn.Module], settings: Settings) -> list[Calls]:
    """Puts what stands for a method into each module: all entrances of the model, else forward."""
    made = [
        Swapped(module, settings, name, method)
        for name, module in chosen.items()
        for method in (_entrances(module) if module is model else ["forward"])
    ]
    for swapped in made:
        swapped.put_into(swapped.module)
    return [swapped.calls for swapped in made]


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
    """Run a model on the fused kernels, in place, by rewriting torch.compile's graph of it.

    Parameters, names, state_dict, hooks and the class do not change, and existing optimizers stay
    valid. A second call replaces the settings of the first. Graphs are made at the first forward;
    hooks added later take effect. Other tracers (export, torch.fx, a dispatch mode, torch.func) see
    the model's original operators.

    Args:
        model: any nn.Module. Call it before DDP, FSDP and torch.compile.
        example: a batch, to make the graph and fill the report right away: a tensor, a tuple of
            arguments, or a dict of keyword arguments.
        only: swap only these: a module name or shell pattern ("blocks.0", "blocks.*.attn"), or
            several. A module includes its submodules.
        skip: do not swap these; as `only`.
        regional: graphs of the repeated blocks instead of one of the model, as FSDP2 needs; blocks
            that are alike share one.
        compiler: "eager" runs the rewritten graph as it is, "inductor" compiles the rest of it.
        mode: of torch.compile, such as "reduce-overhead"; needs compiler="inductor".
        memory: "low": the backward recomputes the norms' outputs instead of saving them.
        drop_path: "skip": in training, samples dropped by DropPath are not computed; their number
            is the same at every step.
        measure: a batch, as `example`: time whole steps of the original and the swapped model in
            turns, and keep the swap only if it is faster by more than the noise. The report has
            the times.
    Returns: a SwapReport: .share, .left, .graphs; print it to read it.
    Raises: TypeError if model is not an nn.Module, or a batch none of these; ValueError for a name
        that the model does not have, an unknown option, or a model already sharded, compiled,
        scripted or quantised; and what the model raises on a batch. The model is then unchanged.
    Warns: once if nothing is fused, and once when Dynamo's recompile limit is reached.
    """
    model = select.unwrapped("swap_in", model)
    settings = Settings(compiler, mode, memory, drop_path, bool(only or skip))
    Options.read(settings.options(), mode, "swap_in: ")
    for argument, batch in (("example", example), ("measure", measure)):
        if batch is not None:
            check_batch("swap_in", argument, batch)
    select.check_untouched(model, regional)
    chosen, left_out = select.select(model, only, skip, regional)
    if not chosen or not any(p.requires_grad or p.numel() for p in model.parameters()):
        warnings.warn(f"swap_in: {type(model).__name__}: nothing to fuse", stacklevel=2)
    swap_out(model)
    calls = _install(model, chosen, settings)
    found = SwapReport(list(chosen), calls, left_out, model=weakref.ref(model))
    if example is not None:
        try_example(model, example, lambda: swap_out(model))
    if measure is not None:
        found.measured = measure_step(model, measure, lambda: swap_out(model))
    return found


def swap_out(model: nn.Module) -> None:
    """Undo swap_in: every module gets its own methods back. Parameters are untouched.

    Raises: TypeError if model is not an nn.Module; ValueError, with nothing undone, if `forward` of
    a swapped module was replaced since: undo that first.
    """
    select.check_model("swap_out", model)
    for name, module in model.named_modules():
        if REPLICATE in vars(module) and not is_swapped(vars(module).get("forward")):
            where = f"{name}.forward" if name else "forward"
            raise ValueError(f"swap_out: {where} was set since swap_in: undo that first")
    for module in model.modules():
        for swapped in swapped_methods_of(module):
            swapped.remove_from(module)
