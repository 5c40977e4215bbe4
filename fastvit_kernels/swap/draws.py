"""A forward that draws random numbers from a generator of its own, not from the process's.

A dispatch mode, which acts in this thread alone, hands the generator to whatever operator of torch
draws. What draws from Python's generator or numpy's, or in a way that takes no generator, is
refused before it does.
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

import torch

from ..runtime.compat import QuietMode, schema_of

_PYTHONS = random.random.__self__  # the generator of the process
# They are marked as drawing, and draw nothing on a CPU: they take no dropout there.
_IDLE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_named: dict[int, tuple[CodeType, bool]] = {}  # functions by their ids: whether numpy draws there


class Foreign(RuntimeError):
    """Numbers are drawn where none of our generators can stand."""


def _arguments(func: Any) -> list[str]:
    schema = schema_of(func)
    return [] if schema is None else [a.name for a in schema.arguments]


@cache
def _with_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator; None where there is none."""
    wanted, packet = {*_arguments(func), "generator"}, func.overloadpacket
    every = (func, *(getattr(packet, name) for name in packet.overloads()))
    return next((other for other in every if {*_arguments(other)} == wanted), None)


class OwnDraws(QuietMode):
    """Inside, what draws draws from `generator`."""

    knows_our_operators = True

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or func.name() == _IDLE:
            return func(*args, **kwargs)
        if kwargs.get("generator") not in (None, torch.default_generator):
            raise Foreign("it draws from a generator of its own")
        if (taking := _with_generator(func)) is None:
            raise Foreign(f"{func.overloadpacket.__name__} draws from the generator of the process")
        return taking(*args, **{**kwargs, "generator": self.generator})


@cache
def _members(module: Any) -> set[int]:
    return {id(module), *(id(getattr(module, name)) for name in module.__all__)}


def _names_numpys(code: CodeType, names: dict[str, Any]) -> bool:
    """Whether a function with these globals names numpy.random, or what is in it. What it
    keeps of that elsewhere, in an attribute say, is not seen."""
    numpy, numpys = map(sys.modules.get, ("numpy", "numpy.random"))
    for step, then in pairwise(dis.get_instructions(code)):
        if step.opname == "IMPORT_NAME":
            x, is_asked = sys.modules.get(step.argval), "random" in code.co_names
        elif step.opname == "LOAD_GLOBAL":
            x, is_asked = names.get(step.argval), then.argval == "random"
        else:
            continue
        if x is not None and ((x is numpy and is_asked) or (numpys and id(x) in _members(numpys))):
            return True
    return False


def _refuse_foreign(frame: Any, event: str, called: Any) -> None:
    """A profile function: what it raises takes the place of the call. None is told of a call of
    numpy's, so it refuses a function that names one."""
    if event == "c_call" and getattr(called, "__self__", None) is _PYTHONS:
        raise Foreign("it draws Python's random numbers")
    if event == "call":
        code = frame.f_code  # by its id: equal codes have other globals
        if id(code) not in _named:
            _named[id(code)] = code, _names_numpys(code, frame.f_globals)
        if _named[id(code)][1]:
            raise Foreign("it draws numpy's random numbers")


@contextmanager
def own_draws(seed: int = 7) -> Iterator[torch.Generator]:
    """Inside, this thread draws from the generator that this gives."""
    generator = torch.Generator().manual_seed(seed)
    former: Callable | None = sys.getprofile()
    sys.setprofile(_refuse_foreign)
    try:
        with OwnDraws(generator):
            yield generator
    finally:
        sys.setprofile(former)
