"""How a call reaches its kernels at little cost to the host.

Checks and choices depend on what kind of call it is (shapes, strides, dtypes, devices, scalars),
never on values: `decide_once` runs them at the first call of a kind and remembers the answer. A
call that nobody watches then goes straight to the launchers; where a compiler, a transform, a
dispatch mode, a profiler or a tensor subclass looks on, it goes through the registered operators.
Figures: docs/benchmarks.md, "host".
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .backend import state
from .configs import on_change

Decision = TypeVar("Decision")

MAX_KINDS = 4096  # of calls an op remembers; a program that passes them starts anew
_PLAIN = frozenset({Tensor, nn.Parameter})
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch._C._is_any_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active  # pyright: ignore[reportAttributeAccessIssue]
_tracing_state = torch._C._get_tracing_state
_profiling = torch.autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]


def is_watched() -> bool:
    """Whether somebody wants to see operators: a compiler, transform, mode, trace or profiler."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _transforms()
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
        or _profiling()
    )


def decide_once(decide: Callable[..., Decision]) -> Callable[..., Decision]:
    """Run `decide` at the first call of each kind only.

    The function that looks the kind up is written out for each signature, as `dataclasses` does for
    __init__: a loop over the arguments takes twice as long.

    Args:
        decide: (..., direct) -> decision. It depends on the class, shape, strides, dtype, device
            and requires_grad of the parameters annotated as tensors, on its other arguments, grad
            mode, autocast, the backend and the launch configs, nothing else. `direct` says that the
            call may run launchers instead of operators. What it raises is not remembered.
    Returns: (...) -> decision, positional arguments without `direct`.
    """
    known: dict[Any, Decision] = {}
    on_change(known.clear)

    def learn(*args: Any) -> Decision:
        plain = all(type(x) in _PLAIN for x in args if isinstance(x, Tensor))
        decision = decide(*args, plain)
        try:
            kind = kind_of(*args)
            hash(kind)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, no strides, not hashable
            return decision
        if len(known) >= MAX_KINDS:
            known.clear()
        known[kind] = decision
        return decision

    parameters = dict(inspect.signature(decide).parameters)
    del parameters["direct"]
    names = ", ".join(parameters)
    kind = ", ".join(_facts(name, str(p.annotation)) for name, p in parameters.items())
    source = f"""
def kind_of({names}):
    return state(), grad(), autocast() and dtypes(), {kind}

def decided({names}):
    if is_watched():
        return decide({names}, False)
    try:
        return known[state(), grad(), autocast() and dtypes(), {kind}]
    except (KeyError, AttributeError, TypeError, RuntimeError):
        return learn({names})
"""
    scope: dict[str, Any] = dict(
        state=state, grad=_grad_enabled, autocast=_autocast_enabled, dtypes=_autocast_dtypes,
        is_watched=is_watched, decide=decide, known=known, learn=learn,
    )  # fmt: skip
    exec(source, scope)
    kind_of = scope["kind_of"]
    return functools.wraps(decide)(scope["decided"])


def _facts(name: str, annotation: str) -> str:
    """The expression for what a call's kind takes from one argument."""
    if "Tensor" not in annotation:
        return f"{name}.__class__, {name}"  # 2.0 and True equal 2 and 1, and are other arguments
    facts = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, {name}.requires_grad"
    facts = f"{name}.__class__, {name}.layout, {facts}"  # an MKLDNN tensor has strides too
    return f"None if {name} is None else ({facts})" if "None" in annotation else facts


def _autocast_dtypes() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cuda", "cpu")
    )


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python prologue, which serves torch.func alone."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


class _FirstOrder(torch.autograd.Function):
    """Gradients as they are, with a node behind them that refuses to be run."""

    @staticmethod
    def forward(ctx, op, *grads):
        ctx.op = op
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx, *_):
        attention = ctx.op in ("attention", "qkv_attention", "sdpa")
        math = " and torch.nn.attention.sdpa_kernel(SDPBackend.MATH)" if attention else ""
        raise NotImplementedError(
            f"{ctx.op}: the kernels have no second derivative, got a double backward; run the "
            f'forward under fastvit_kernels.backend("torch"){math}, which have'
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Backward of a Function whose gradients have no gradient, at a cost only under create_graph.

    torch's `once_differentiable` gives gradients without a graph where the upstream gradient has
    none: a penalty on them, added to the loss, would be left out of its gradient in silence.
    """
    guarded = once_differentiable(backward)
    name = backward.__qualname__.split(".")[0].removesuffix("Function")
    op = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not _grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():  # AOTAutograd has a refusal of its own
            return guarded(ctx, *grads)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        single = isinstance(outputs, Tensor)
        outputs = [outputs] if single else list(outputs)
        places = [i for i, x in enumerate(outputs) if x is not None]
        if not places:
            return tuple(outputs)
        refusing = _FirstOrder.apply(op, *(outputs[i].detach().requires_grad_() for i in places))
        for i, x in zip(places, refusing, strict=True):
            outputs[i] = x
        return outputs[0] if single else tuple(outputs)

    return call


def stays_direct(dy: Tensor) -> bool:
    """Whether the backward of a direct call may run launchers too."""
    return type(dy) in _PLAIN and not is_watched()
