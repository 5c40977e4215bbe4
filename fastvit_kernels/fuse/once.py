"""Without a compiler, ops in a graph choose their kernels once for each of the graph's sizes.

An op looks at shapes, dtypes and needs of a gradient at each call (runtime/dispatch.py), some 2 us
of the host. Of what a graph calls, Dynamo's guards hold all of these but dynamic sizes, which are
those of the graph's inputs, and the state of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from ..runtime.dispatch import here, process_state
from .views import val

MAX_KINDS = 64  # that a graph remembers; past them it starts anew


def mark(made: GraphModule) -> None:
    """Notes, while there are fake values, which inputs tell all sizes and which calls of ours have
    no other."""
    known: set[Any] = set()
    telling: list[int] = []
    for i, n in enumerate(made.graph.find_nodes(op="placeholder")):
        if symbols := symbols_told(val(n)) - known:
            known |= symbols
            telling.append(i)
    made.meta["telling"] = telling
    for n in made.graph.nodes:
        if n.meta.get("ours"):
            n.meta["one_kind"] = is_of_one_kind(n, known)


def symbols_told(x: Any) -> set[Any]:
    """The symbols that a tensor's shape, or a number, has as they are."""
    sizes = x.shape if isinstance(x, Tensor) else [x]
    return {s.node.expr for s in sizes if isinstance(s, py_sym_types) and s.node.expr.is_symbol}


def is_of_one_kind(n: Node, known: set[Any]) -> bool:
    """Whether all calls with the same values of the known symbols get arguments of one kind."""
    values = tree_leaves(torch.fx.map_arg((n.args, n.kwargs), val))
    tensors = [x for x in values if isinstance(x, Tensor)]
    numbers = [x for x in values if isinstance(x, py_sym_types)]
    return free_symbols(tensors + numbers) <= known and not any(x.is_neg() for x in tensors)


def decided_once(made: GraphModule) -> Callable[..., Any]:
    """Its forward, in which marked ops choose at their first call for each of the sizes."""
    telling = made.meta["telling"]
    for place, n in enumerate(made.graph.nodes):
        if n.meta.get("one_kind"):
            n.target = at_place(place, n.target)
    made.recompile()
    forward = made.forward
    kept: dict[Any, dict[int, Any]] = {}

    def specs_of(inputs: tuple[Any, ...]) -> dict[int, Any] | None:
        state = process_state()
        if state is None:
            return None
        told = [inputs[i] for i in telling]
        kind = (*state, *(x.shape if isinstance(x, Tensor) else x for x in told))
        if kind not in kept and len(kept) >= MAX_KINDS:
            kept.clear()
        return kept.setdefault(kind, {})

    def call(*inputs: Any) -> Any:
        outer, here.specs = here.specs, specs_of(inputs)
        try:
            return forward(*inputs)
        finally:
            here.specs = outer

    return call


def at_place(place: int, op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def call(*args: Any, **options: Any) -> Any:
        here.place = place
        try:
            return op(*args, **options)
        finally:
            here.place = None

    return call
