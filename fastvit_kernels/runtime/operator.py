"""The two routes to a kernel: its launcher called directly, or registered as a torch operator.

torch.compile, export, FakeTensor, dispatch modes and profilers see operators. Of an `Operator`,
`linear_fwd[EAGER]` is the launcher itself and `linear_fwd[REGISTERED]` is
`torch.ops.fastvit_kernels.linear_fwd.default`; dispatch.py says which route a call takes. Gradients
live in the `autograd.Function` around the operators, which every compiler traces through.

`define` + `impl` + `register_fake` dispatch in 6.3 us where torch's `custom_op` takes 10.7
(figures of attention-gym #302, not measured here).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import library
from torch.utils.flop_counter import register_flop_formula

Route = Literal[0, 1]
EAGER: Route = 0
REGISTERED: Route = 1


class Operator(NamedTuple):
    """What runs on each route; `operator[route](...)`."""

    eager: Callable[..., Any]
    registered: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """On the route that modes and compilers see."""
        return self.registered(*args)


LAUNCHERS: dict[str, Callable[..., Any]] = {}  # operator name -> what it runs; aot.py traces them

NAMESPACE = "fastvit_kernels"


def operator(
    *, fake: Callable[..., Any], flops: Callable[..., int] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated launcher as `torch.ops.fastvit_kernels.<name>`.

    Its annotations are the operator's schema. An output that no argument asks for may be None, of
    the fake too: the operator, all of whose outputs are tensors, gives (0,) in fp32 for it.

    Args:
        fake: returns uninitialised outputs, from the launcher's arguments that its own
            names say; the launcher may call it to allocate.
        flops: likewise, with shapes in place of tensors -> what torch's FlopCounterMode counts for
            torch's own functions: matrix products, 2 a multiply-add.
    Returns: a decorator whose result is the `Operator`.
    """

    def register(launcher: Callable[..., Any]) -> Operator:
        name = launcher.__name__
        qualname = f"{NAMESPACE}::{name}"
        library.define(qualname, library.infer_schema(launcher, mutates_args=()))
        whole = _whole(launcher)
        library.impl(qualname, "default", whole)
        library.register_fake(qualname, _whole(_by_name(fake, launcher)))
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        if flops is not None:
            register_flop_formula(packet)(_by_name(flops, launcher))
        LAUNCHERS[name] = whole
        return Operator(launcher, packet.default)

    return register


def _by_name(function: Callable[..., Any], launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called like the launcher, with the arguments that have its parameters' names."""
    signature = inspect.signature(launcher)
    names = inspect.signature(function).parameters
    assert names.keys() <= signature.parameters.keys(), f"{launcher.__name__}: {list(names)}"

    def call(*arguments: Any, out_shape: Any = None, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        return function(**{name: bound.arguments[name] for name in names})

    return call


def _whole(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, or its fake, with a tensor for each output."""

    @functools.wraps(launcher)
    def call(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        outputs = launcher(x, *arguments, **options)
        if isinstance(outputs, tuple) and any(y is None for y in outputs):
            outputs = tuple(
                torch.empty(0, dtype=torch.float32, device=x.device) if y is None else y
                for y in outputs
            )
        return outputs

    return call


def differentiable(function: type[torch.autograd.Function]) -> Operator:
    """`apply` of an autograd.Function on both routes.

    The eager one leaves out the Python prologue of torch's, which serves torch.func alone.
    """
    base: Any = super(torch.autograd.Function, function)
    return Operator(base.apply, function.apply)
