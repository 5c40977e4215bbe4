"""Masks: those that say nothing, and what a softmax gives where a row is hidden whole.

A softmax written out gives NaN for a row of -inf, our kernels 0. So a mask that is not seen to be
finite carries the NaN:

    mask   ->   where(all(mask == -inf, -1), nan, mask)

The gradients are then NaN as the host's are: all of them under an added mask; under one that is
filled in the host's queries and keys have numbers, its values alone NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..graph import Graph, aten, is_pure
from ..views import CASTS, SEVERAL_VIEWS, UNSET, VIEWS, input_of, is_number, is_tensor, op, val

MOST_ELEMENTS = 1 << 22
MOST_NODES = 60


def shows_all(g: Graph, mask: Node) -> bool:
    """Whether a boolean mask that no input makes is True throughout: transformers' arange >= 0."""
    if val(mask).dtype != torch.bool:
        return False
    value = constant(g, mask)
    return value is not None and bool(value.all())


def constant(g: Graph, n: Node) -> Tensor | None:
    """The value of a node that pure operations make of numbers alone, computed here on the CPU."""
    todo, made = [n], {}
    for each in todo:
        if len(todo) > MOST_NODES or not is_pure(each) or not is_small(each):
            return None
        if op(each) in UNSET or not g.is_untouched(each):
            return None
        todo += each.all_input_nodes
    order = {each: i for i, each in enumerate(n.graph.nodes)}
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        for each in sorted(set(todo), key=order.__getitem__):
            args, kwargs = torch.fx.map_arg((each.args, each.kwargs), made.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            made[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return made[n]


def is_small(n: Node) -> bool:
    x = val(n)
    if not isinstance(x, Tensor):
        return isinstance(x, (int, float, bool))
    return all(isinstance(s, int) for s in x.shape) and x.numel() <= MOST_ELEMENTS


def with_hidden_rows(g: Graph, root: Node, mask: Node) -> Node:
    """The mask, NaN in the rows that are -inf throughout, unless it is seen to be finite."""
    if is_finite(g, mask):
        return mask
    hidden = g.emit(root, aten.eq.Scalar, mask, -math.inf)
    hidden = g.emit(root, aten.all.dim, hidden, -1, True)
    return g.emit(root, aten.masked_fill.Scalar, mask, hidden, math.nan)


def is_finite(g: Graph, mask: Node) -> bool:
    return val(mask).is_floating_point() and bounds(g, mask) is not None


def bounds(g: Graph, n: Any, depth: int = 30) -> tuple[float, float] | None:
    """Between which numbers the elements of a node lie, as far as its operations tell.

    A parameter that learns counts as finite: a row of -inf in it would have ended the training. A
    tensor of the caller's does not, whatever it learns: padding may have been added to it.
    """
    if is_number(n):
        return (n, n) if math.isfinite(n) else None
    if not is_tensor(n) or depth == 0:
        return None
    if val(n).dtype == torch.bool:
        return (0.0, 1.0)
    if not val(n).is_floating_point():
        return None
    if n.op in ("placeholder", "get_attr"):
        limit = torch.finfo(val(n).dtype).max
        learns = isinstance(val(n), nn.Parameter) and val(n).requires_grad
        return (-limit, limit) if learns else None
    if not is_pure(n) or not g.is_untouched(n):
        return None
    found = bounds_of_call(g, n, depth - 1)
    fits = found is not None and max(map(abs, found)) <= torch.finfo(val(n).dtype).max
    return found if fits else None


def bounds_of_call(g: Graph, n: Node, depth: int) -> tuple[float, float] | None:
    name = op(n)
    if name in ("index", "index_select", "embedding", "clone", *CASTS, *VIEWS, *SEVERAL_VIEWS):
        return bounds(g, input_of(n), depth)
    if name in ("zeros", "zeros_like", "new_zeros"):
        return (0.0, 0.0)
    if name in ("ones", "ones_like", "new_ones"):
        return (1.0, 1.0)
    if name in ("sigmoid", "softmax"):
        return (0.0, 1.0)
    operands = {"where": n.args[1:3], "masked_fill": (n.args[0], n.args[-1]), "full": n.args[1:2]}
    if name in operands:
        return union([bounds(g, a, depth) for a in operands[name]])
    if name in ("add", "sub", "mul", "rsub") and len(n.args) == 2 and not n.kwargs:
        return arithmetic(name, *(bounds(g, a, depth) for a in n.args))
    return None


def union(found: list[tuple[float, float] | None]) -> tuple[float, float] | None:
    if None in found or not found:
        return None
    ends = [end for pair in found if pair for end in pair]
    return min(ends), max(ends)


def arithmetic(name: str, a: Any, b: Any) -> tuple[float, float] | None:
    if a is None or b is None:
        return None
    if name == "rsub":
        a, b, name = b, a, "sub"
    signs = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}
    ends = [signs[name](x, y) for x in a for y in b]
    return min(ends), max(ends)
