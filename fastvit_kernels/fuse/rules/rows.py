"""A linear layer acts on each row: an order of rows that is undone behind it need not be made.

    transpose(linear(transpose(y, 0, 1)), 0, 1)    ->  linear(y)

nn.MultiheadAttention works on (T, B, C) inside, and so copies its result before the projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph import Graph, aten, draws, is_pure, need
from ..views import ORDER_KEEPING, eq, input_of, is_tensor, op, same_map, shape, val, view
from .linear import linear_of

ELEMENTWISE = ("add", "mul", "dropout", "clone")


def rows_in_order(g: Graph, n: Node) -> None:
    linear = linear_of(n)
    path: list[Node] = []
    turned = before(linear.x, path)
    y = input_of(turned)
    B, T, K = shape(y)
    rows = ((T, B, K), (T * B, K))
    need(any(eq(shape(linear.x), sizes) for sizes in rows), "rows in one order")
    root, way = behind(g, n, (B, T, shape(n)[-1]))
    gone = g.absorb([*path, turned, n, *way], root)
    new = g.emit(root, aten.linear.default, y, linear.weight, linear.bias)
    need(val(new).dtype == val(root).dtype, "another dtype")
    need(val(new).requires_grad == val(root).requires_grad, "another need of a gradient")
    restride(g, root, val(new))
    g.replace(root, new, gone, "rows in order")


def before(x: Node, path: list[Node]) -> Node:
    """The transposition of (B, T, K) to (T, B, K) that the rows of x come from."""
    while op(x) in ORDER_KEEPING and is_tensor(input_of(x)):
        path.append(x)
        x = input_of(x)
    y = input_of(x)
    need(op(x) in ("transpose", "permute", "swapaxes") and is_tensor(y), "rows in one order")
    need(val(y).ndim == 3 and same_map(view(x), view(y).turned(1, 0, 2)), "rows in one order")
    return x


def behind(g: Graph, n: Node, wanted: tuple[Any, ...]) -> tuple[Node, list[Node]]:
    """The node behind n that has its rows as (B, T, N) again, and the nodes on the way."""
    at, way = n, []
    B, T, N = wanted
    while (reader := g.only_reader(at)) is not None:
        if op(reader) in ("transpose", "permute", "swapaxes") and eq(shape(at), (T, B, N)):
            need(same_map(view(reader), view(at).turned(1, 0, 2)), "rows in another order")
            return reader, [*way, at]
        if op(reader) not in ORDER_KEEPING:
            break
        way.append(at)
        at = reader
    need(False, "rows that stay in another order")
    raise AssertionError


def restride(g: Graph, root: Node, value: Any) -> None:
    """Lets root have other strides, where no reader's result shows it; or Decline.

    Elementwise readers may take them on, until one (a sum with a residual) has its own again.
    """
    changed = {root: value}
    todo = [root]
    for n in todo:
        for reader in g.readers(n):
            if reader in changed:
                continue
            shown = op(reader) in ELEMENTWISE and is_pure(reader) and not draws(reader)
            need(shown and len(changed) < 8, "strides that something reads")
            args, kwargs = torch.fx.map_arg(
                (reader.args, reader.kwargs), lambda a: changed.get(a, val(a))
            )
            with g.fake_mode, reader.meta["region"].entered():
                out = reader.target(*args, **kwargs)  # type: ignore[operator]
            if tuple(out.stride()) != tuple(val(reader).stride()):
                changed[reader] = out
                todo.append(reader)
    for n, new in changed.items():
        n.meta["val"] = new
