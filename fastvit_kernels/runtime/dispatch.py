"""How a call reaches its kernels at little cost to the host.

Checks and choices depend on what kind of call it is (shapes, dtypes, devices, scalars), never on
strides or values: `cached_dispatch` makes them at the first call of a kind and keeps the answer, a
spec of the op. Its `route` says how the kernels are called: EAGER, their launchers, outside
torch.compile, transforms, dispatch modes, profilers and tensor subclasses; REGISTERED, torch's
operators, inside; None where PyTorch's specification must run. Figures: docs/benchmarks.md, "host".
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import backend as backends, compat
from .backend import GPUS, dtype_reason, own_backend, use_triton
from .configs import on_change
from .operator import EAGER, REGISTERED, Route
from .plain import OWN_FUNCTIONS

# (*args) -> the call's spec, a NamedTuple with a field `route`
Decide = TypeVar("Decide", bound=Callable[..., Any])

MAX_KINDS = 4096  # of calls an op remembers; a program that passes them starts anew
_PLAIN = frozenset({Tensor, nn.Parameter})
_SCALARS = frozenset({bool, int, float, str, torch.dtype})
_OF_COMPILERS = (compat.FakeTensor, compat.FunctionalTensor)
_NO_DISPATCH = getattr(Tensor, "__torch_dispatch__", None)  # no dispatch of its own
grad_enabled = torch.is_grad_enabled


class _Here(threading.local):
    """The place of a graph that this thread is at. A graph's owner knows that all calls of an op
    from one place are of one kind: their spec is looked up by the place."""

    specs: Any = None  # place -> the op's `dispatch`, its spec; None: each call is looked at
    place: int | None = None


here = _Here()
_changes = [0]  # of launch configs


def _count_change() -> None:
    _changes[0] += 1


on_change(_count_change)


def process_state() -> tuple[Any, ...] | None:
    """What a call's kind depends on besides its arguments, grad mode and autocast; None where a
    compiler, a mode or a profiler watches."""
    if compat.needs_dispatcher():
        return None
    return own_backend() or backends.process, GPUS.absent, _changes[0]


class _Indirect(Exception):
    """A tensor whose memory does not hold its values as they are: for the dispatcher to resolve."""


def cached_dispatch(decide: Decide) -> Decide:
    """Run `decide` at the first call of each kind only.

    Args:
        decide: checks a call's arguments and gives its spec, as for registered operators. It
            depends on the shape, dtype, device and requires_grad of tensors, on the other
            arguments, grad mode, autocast, the backend and the launch configs, nothing else. What
            it raises is not remembered.
    Returns: the same, for positional arguments, and with the route that this call takes.
    """
    known: dict[Any, Any] = {}
    on_change(known.clear)

    @functools.wraps(decide)
    def dispatch(*args: Any) -> Any:
        if compat.is_dynamo_compiling():
            return decide(*args)
        place = here.place
        if place is not None:
            here.place = None  # an op's first decision is that of its place
            specs = here.specs
            if specs is not None:
                found = specs.get(place)
                if found is None:
                    found = specs[place] = dispatch, dispatch(*args)
                if found[0] is dispatch:
                    return found[1]
        # `needs_dispatcher`, of functions of C
        looked = compat.num_modes() > 0 or compat.in_transform() or compat.forward_level() >= 0
        looked = looked or compat.is_jit_tracing() or compat.is_profiling()
        chosen = own_backend() or backends.process
        by_torch = chosen == "torch"  # whose functions take any memory
        if looked:
            return decide(*args)
        autocast = compat.is_autocast_on() and _autocast_dtypes()
        facts = [chosen, GPUS.absent, grad_enabled(), autocast]
        try:
            for x in args:
                if x is None:
                    facts.append(None)
                elif x.__class__ in _PLAIN:
                    if by_torch:
                        facts += x.layout, x.is_meta
                    elif x.is_neg() or not (x.data_ptr() or x.numel() == 0):
                        raise _Indirect  # a negated view, a zero without memory
                    # An index stands for its device: a process has one kind of accelerator.
                    facts += x.shape, x.dtype, x.get_device(), x.requires_grad
                elif x.__class__ in _SCALARS or not isinstance(x, Tensor):
                    facts += x.__class__, x  # 2.0 and True equal 2 and 1, and are other arguments
                else:
                    raise _Indirect  # a subclass
            kind = tuple(facts)
            spec = known.get(kind)
        except _NO_KIND:
            return decide(*args)
        if spec is None:
            spec = decide(*args)
            if spec.route is not None:
                spec = spec._replace(route=EAGER)
            if len(known) >= MAX_KINDS:
                known.clear()
            known[kind] = spec
        return spec

    return cast(Decide, dispatch)


# No memory (sparse, or left over from a transform), not hashable.
_NO_KIND = (RuntimeError, TypeError, _Indirect)


def _autocast_dtypes() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cuda", "cpu")
    )


def choose_route(op: str, unsupported: str | None, *tensors: Tensor | None) -> Route | None:
    """REGISTERED where the kernels of `op` can run, None for PyTorch's specification.

    Args:
        unsupported: what the op itself cannot do in a kernel, None where it can.
        tensors: all that the op reads, its first argument first.
    Raises, warns: as `use_triton`.
    """
    first = tensors[0]
    assert first is not None
    for x in tensors:
        unsupported = unsupported or _own_dispatch(x)
    unsupported = unsupported or dtype_reason(*(x.dtype for x in tensors if x is not None))
    return REGISTERED if use_triton(op, first, unsupported) else None


def _own_dispatch(x: Tensor | None) -> str | None:
    """Why only torch's own functions may read x, or None."""
    if x is None or type(x) in _PLAIN or isinstance(x, _OF_COMPILERS):
        return None
    cls: Any = type(x)
    if cls.__torch_dispatch__ is _NO_DISPATCH and cls.__torch_function__ in OWN_FUNCTIONS:
        return None
    return f"{cls.__name__} has a dispatch of its own"


def backward_route(route: Route, *grads: Tensor | None) -> Route:
    """The route of a backward: the forward's, unless by now a mode is active, or a gradient's
    memory does not hold its values as they are."""
    if route is not EAGER or compat.needs_dispatcher():
        return REGISTERED
    try:
        for x in grads:
            if x is not None and (x.__class__ not in _PLAIN or x.is_neg() or not x.data_ptr()):
                return REGISTERED
    except RuntimeError:
        return REGISTERED
    return EAGER


class _FirstOrder(torch.autograd.Function):
    """Gradients as they are, with a node behind them that refuses to be run."""

    @staticmethod
    def forward(ctx, op, number, *tensors):
        ctx.op = op
        return tuple(g.view_as(g) for g in tensors[:number])

    @staticmethod
    def backward(ctx, *_):
        attention = ctx.op.endswith("attention") or ctx.op == "sdpa"
        math = " and torch.nn.attention.sdpa_kernel(SDPBackend.MATH)" if attention else ""
        raise NotImplementedError(
            f"{ctx.op}: the kernels have no second derivative, got a double backward; run the "
            f'forward under fastvit_kernels.backend("torch"){math}, which have'
        )


def first_order(op: str, backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    """What `backward` of a Function of `op` gives where `grad_enabled()`, as under create_graph:
    gradients that have no gradient.

    torch's `once_differentiable` gives gradients without a graph where the upstream gradient has
    none: a penalty on them, added to the loss, would be left out of its gradient in silence.
    """
    if torch.compiler.is_compiling():  # AOTAutograd has a refusal of its own
        return once_differentiable(backward)(ctx, *grads)
    watched = _Watched(ctx)
    with torch.no_grad():
        outputs = backward(watched, *grads)
    read = [g for g in (*grads, *watched.read) if g is not None and g.requires_grad]
    read += _leaves([fn for fn, _ in ctx.next_functions], {g.grad_fn for g in read})
    return _refusing(op, outputs, read)


class _Watched:
    """A Function's ctx that notes which saved tensors are read: a checkpoint gives each once."""

    def __init__(self, ctx: Any):
        vars(self).update(ctx=ctx, read=[])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.ctx, name)
        if name == "saved_tensors":
            self.read.extend(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


def _leaves(nodes: list[Any], known: set[Any]) -> list[Tensor]:
    """The leaves that these nodes of the graph lead to, but for those behind known ones."""
    found: list[Tensor] = []
    while nodes:
        if (node := nodes.pop()) is None or node in known:
            continue
        known.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        nodes += [fn for fn, _ in node.next_functions]
    return found


def _refusing(op: str, outputs: Any, read: list[Tensor]) -> Any:
    """The gradients with a node behind them that refuses to be run. It leads to what they were made
    of, as the engine runs no node that leads to none of the inputs that it is asked for."""
    single = isinstance(outputs, Tensor)
    outputs = [outputs] if single else list(outputs)
    places = [i for i, x in enumerate(outputs) if x is not None]
    if places:
        made = (outputs[i].detach().requires_grad_() for i in places)
        refusing = _FirstOrder.apply(op, len(places), *made, *read)
        for i, x in zip(places, refusing, strict=True):
            outputs[i] = x
    return outputs[0] if single else tuple(outputs)
