"""Which modules of a model swap_in takes: the whole, its repeated blocks, or what only= names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.compat import is_compiled_in_place
from .report import NOT_A_MODEL, Left, SwapReport


def check_model(what: str, model: Any) -> None:
    """Raises: TypeError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        hint = f": {NOT_A_MODEL}" if isinstance(model, SwapReport) else ""
        raise TypeError(f"{what}: model must be an nn.Module, got {type(model).__name__}{hint}")


def unwrapped(what: str, model: Any) -> nn.Module:
    """The model inside of DDP or DataParallel. Raises: as `check_model`."""
    check_model(what, model)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel):
        model = model.module
    return model


def check_untouched(model: nn.Module, regional: bool) -> None:
    """Raises: ValueError for a model that is compiled, scripted, quantised or sharded already."""
    for name, module in model.named_modules():
        where = f" ({name})" if name else ""
        kinds = {c.__name__ for c in type(module).__mro__}
        if "OptimizedModule" in kinds or is_compiled_in_place(module):
            raise ValueError(f"swap_in: already compiled{where}: call swap_in before torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"swap_in: already scripted{where}: call swap_in before torch.jit")
        if re.match(r"torch\.(ao\.)?nn\.(intrinsic\.)?quantized\.", type(module).__module__):
            raise ValueError(
                f"swap_in: already quantised{where}: call swap_in before quantising, or skip this "
                "model: its layers are int8"
            )
        if "FullyShardedDataParallel" in kinds:
            raise ValueError(
                f"swap_in: already sharded{where}: call swap_in(..., regional=True) before FSDP"
            )
        if "FSDPModule" in kinds and not regional:
            raise ValueError(
                f"swap_in: already sharded{where}: give regional=True, or call swap_in before "
                "fully_shard"
            )


def names_of(argument: str, patterns: str | Iterable[str], model: nn.Module) -> list[str]:
    """The names of the modules that the patterns match.

    Raises: TypeError for what is no pattern; ValueError, with near names, for one without a match.
    """
    every = [patterns] if isinstance(patterns, str) else patterns
    names = [name for name, _ in model.named_modules()]
    found: set[str] = set()
    for pattern in every if isinstance(every, Iterable) else [every]:
        if not isinstance(pattern, str):
            raise TypeError(
                f"swap_in: {argument} takes names of modules or shell patterns of them, got "
                f"{type(pattern).__name__}"
            )
        matched = {n for n in names if fnmatchcase(n, pattern)}
        if not matched:
            raise ValueError(
                f"swap_in: {argument}={pattern!r} is no module of this model{near(pattern, names)}"
            )
        found |= matched
    return [n for n in names if n in found]


def near(pattern: str, names: list[str]) -> str:
    """ "; near: 'blocks.*'": names as they are, or with a star for a number where it has one."""
    known = [re.sub(r"\d+", "*", n) for n in names] if "*" in pattern else names
    found = get_close_matches(pattern, list(dict.fromkeys(known)), n=3)
    return f"; near: {', '.join(map(repr, found))}" if found else ""


def is_inside(name: str, names: Iterable[str]) -> bool:
    """Whether the module is one of these or inside one."""
    return any(name == n or n == "" or name.startswith(f"{n}.") for n in names)


def outermost(names: Iterable[str]) -> list[str]:
    every = list(names)
    return [n for n in every if not is_inside(n, (m for m in every if m != n))]


def _has_norm(module: nn.Module) -> bool:
    return any("norm" in type(m).__name__.lower() for m in module.modules())


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of entries of a list that share a class and hold a norm and two Linears: what
    repeats. Of a list inside such a list (the blocks of a stage) the inner ones."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [child for child in module if child is not None]
        if not children:
            continue
        lists = any(isinstance(c, (nn.ModuleList, nn.Sequential)) for c in children)
        linears = min(sum(isinstance(m, nn.Linear) for m in c.modules()) for c in children)
        alike = len({type(c) for c in children}) == 1
        if alike and not lists and linears >= 2 and all(map(_has_norm, children)):
            found |= {f"{name}.{n}" if name else n for n, _ in module.named_children()}
    return [n for n, _ in model.named_modules() if n in found and not _holds(n, found)]


def _holds(name: str, names: Iterable[str]) -> bool:
    return any(n != name and (name == "" or n.startswith(f"{name}.")) for n in names)


def select(
    model: nn.Module,
    only: str | Iterable[str] | None,
    skip: str | Iterable[str] | None,
    regional: bool,
) -> tuple[dict[str, nn.Module], list[Left]]:
    """The modules to swap by name, and what stays with the host.

    Raises: as `names_of`; ValueError for regional=True where no block repeats.
    """
    roots = outermost(names_of("only", only, model)) if only is not None else [""]
    left_out = [] if skip is None else outermost(names_of("skip", skip, model))
    rows = [Left(name, "", 0, "in skip=") for name in left_out]
    if regional:
        blocks = [n for n in repeated_blocks(model) if is_inside(n, roots)]
        if not blocks:
            raise ValueError("swap_in: regional=True: no block repeats here; leave it out")
        rows += _others(model, [*blocks, *left_out], "outside the repeated blocks")
        roots = blocks
    elif only is not None:
        rows += _others(model, [*roots, *left_out], "not in only=")
    chosen = dict(x for root in roots for x in _without(model, root, left_out))
    return chosen, rows


def _without(model: nn.Module, name: str, left_out: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The widest modules inside of `name` that hold none of those that are left out."""
    module = model.get_submodule(name)
    if is_inside(name, left_out) or next(module.parameters(), None) is None:
        return
    if not _holds(name, left_out) and type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for child, _ in module.named_children():
        yield from _without(model, f"{name}.{child}" if name else child, left_out)


def _others(model: nn.Module, known: list[str], reason: str) -> list[Left]:
    """A row for each of the widest modules that hold none of the known ones."""
    found = _without(model, "", known)
    return [Left(name, "", 0, reason) for name, _ in found]


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Inside, what a call does to a model's buffers and generators is undone at the end."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    slots = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for held, before in slots:
            held.update(before)  # those that were assigned
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def tensors(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output or of arguments, by name."""
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from tensors(value, f"{name}[{i}]")
