"""One decision a forward: what a checkpoint runs again goes the way that its forward went.

A hook, a counter, a collector of hidden states or `with backend("torch")` around a forward sends
modules and ops to PyTorch, and is gone when the backward runs that forward again. So each "yes" to
such a question inside a checkpoint is noted with the checkpoint, and its recomputation answers the
same. While nobody watches and no note is kept, nothing is looked for: `noted` is False.

A checkpoint without reentry is found by its hooks on saved tensors, one with reentry, like any
autograd Function that calls modules, by the `ctx` of its forward and backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils import checkpoint

from . import compat

_REENTRANT: Any = compat.node_class(checkpoint.CheckpointFunction) or ()
_RERUN = BackwardCFunction.apply.__code__  # what the engine calls, with the ctx first

noted = False  # whether a note may be kept: the one thing that a call reads
_notes: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()  # by checkpoint: what was yes


# The checkpoints around the innermost `with backend(...)`: of these, it tells nothing.
chosen: ContextVar[Collection[Any]] = ContextVar("checkpoints around the choice", default=())


def remembered(key: Hashable, now: bool, inside: Collection[Any] = ()) -> bool:
    """Whether the question `key` is a yes: `now`, or as it was in the forward that is run again.

    Args:
        inside: checkpoints that have nothing to say: what was asked began inside them, and does so
            again.
    """
    global noted
    if torch.compiler.is_compiling():
        return now
    if not (now or _notes):
        noted = False
        noted = bool(_notes)  # another thread may have noted one meanwhile
        return now
    if not compat.may_be_rerun():
        return now
    forwards, reruns = ([run for run in runs if run not in inside] for runs in enclosing())
    kept = [_notes[run] for run in reruns if run in _notes]
    if any(key in notes for notes in kept):
        now = True
    elif any(isinstance(run, (compat.CheckpointFrame, _REENTRANT)) for run in reruns):
        now = False  # its forward was not watched
    if now:
        for run in forwards:
            _notes.setdefault(run, set()).add(key)
            noted = True
    return now


@contextmanager
def chosen_inside() -> Iterator[None]:
    """Around what a choice of backend holds for."""
    if torch.compiler.is_compiling():
        yield
        return
    forwards, reruns = enclosing()
    token = chosen.set((*forwards, *reruns))
    try:
        yield
    finally:
        chosen.reset(token)


def enclosing() -> tuple[list[Any], list[Any]]:
    """The checkpoints whose forward runs now, and those whose forward is run again."""
    forwards: list[Any] = []
    reruns: list[Any] = []
    try:
        for pack, _ in compat.hooks_on_saves():
            for cell in inspect.unwrap(pack).__closure__ or ():
                held = cell.cell_contents
                if isinstance(held, compat.CheckpointFrame):
                    forwards.append(held)
                elif isinstance(held, ref) and isinstance(held(), compat.CheckpointFrame):
                    reruns.append(held())
        if not compat.has_forward_gradients() or compat.in_backward():
            _add_functions(forwards, reruns)
    except (AttributeError, TypeError, ValueError):
        pass  # another torch: as it is now
    return forwards, reruns


def _add_functions(forwards: list[Any], reruns: list[Any]) -> None:
    """The autograd Functions whose forward or backward is among our callers."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code is _RERUN:
            reruns.append(frame.f_locals["self"])
        elif code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, FunctionCtx):
                forwards.append(ctx)
        frame = frame.f_back
