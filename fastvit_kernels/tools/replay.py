"""Notes a model's calls of the public functions, and replays them on random inputs.

A noted call keeps shapes, strides, dtypes, which inputs want a gradient, and autocast's dtype; of
tensors of integers and booleans, which may be indices, the values too. Its replay has the op's
specification beside it, so that any launch config can be judged at the very shapes of a step.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.arguments import autocast_dtype
from ..verify.accuracy import Reference
from ..verify.cases import OPS
from ..verify.op import in_precision, run_backward

_PACKAGE = __name__.rsplit(".", 2)[0]  # fastvit_kernels, or what it is imported as

# What each public function computes, called as it is.
SPECIFICATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    op.function: op.specification for op in OPS.values()
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor. One of integers or booleans has its values: calls differ by its kind, the first
    one's values serve."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    values: Tensor | None = field(default=None, compare=False, repr=False)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        """Normal numbers; a weight keeps the scale of what it multiplies."""
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        numbers = torch.randn(max(extent, 0), generator=generator, device=generator.device)
        if "weight" in name and len(self.shape) > 1:
            numbers *= (numbers.numel() / self.shape[0]) ** -0.5
        return numbers.to(self.dtype).as_strided(self.shape, self.stride)


class Call(NamedTuple):
    """One call of a public function: its arguments by name, tensors as specs."""

    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    autocast: torch.dtype | None

    def __str__(self) -> str:
        shapes = (a.shape for _, a in self.arguments if isinstance(a, TensorSpec))
        return f"{self.function.__name__} {next(shapes, ())}"


def _noted(function: Callable[..., Any], args: Any, kwargs: Any) -> Call | None:
    """The call; None with dropout, whose bits no specification gives."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments.get("dropout_p"):
        return None
    named: list[tuple[str, Any]] = []
    autocast = None
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor):
            kind = tuple(value.shape), value.stride(), value.dtype
            if value.is_floating_point():
                autocast = autocast or autocast_dtype(value)
                value = TensorSpec(*kind, value.requires_grad and torch.is_grad_enabled())
            else:
                value = TensorSpec(*kind, values=value)
        elif isinstance(value, list):
            value = tuple(value)
        named.append((name, value))
    return Call(function, tuple(named), autocast)


@contextmanager
def noting() -> Iterator[dict[Call, int]]:
    """Inside, calls of the public functions join the yielded dict, with their count.

    The names are replaced in the package's own modules, whose models call them; a call inside
    another is part of that one.
    """
    calls: dict[Call, int] = {}
    depth = 0

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def note(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            call = _noted(function, args, kwargs) if depth == 0 else None
            if call is not None:
                calls[call] = calls.get(call, 0) + 1
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return note

    modules = [m for n, m in sys.modules.items() if f"{n}.".startswith(f"{_PACKAGE}.") and m]
    replaced = [
        (module, name, value)
        for module in modules
        if module is not sys.modules[__name__]
        for name, value in vars(module).items()
        if callable(value) and any(value is function for function in SPECIFICATIONS)
    ]
    for module, name, function in replaced:
        setattr(module, name, wrapped(function))
    try:
        yield calls
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


class Replay:
    """A noted call on random inputs, with what it should give."""

    def __init__(self, call: Call, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        self.call, self.device = call, device
        self.inputs: dict[str, Tensor | None] = {}
        self.constants: dict[str, Any] = {}
        for name, argument in call.arguments:
            if not isinstance(argument, TensorSpec):
                self.constants[name] = argument
            elif argument.values is not None:
                self.inputs[name] = argument.values.to(device)
            else:
                x = argument.random(name, generator)
                self.inputs[name] = x.requires_grad_(argument.requires_grad)

    def _called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return in_precision(functools.partial(function, **self.constants), self.call.autocast)

    def function(self, **inputs: Tensor | None) -> Any:
        return self._called(self.call.function)(**inputs)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self._called(SPECIFICATIONS[self.call.function]), self.inputs)

    def run(self) -> None:
        """Forward, and backward where an input wants a gradient."""
        with torch.enable_grad():
            run_backward(self.function(**self.inputs), self.inputs.values(), torch.randn_like)
