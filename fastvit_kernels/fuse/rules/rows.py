"""A linear layer acts on each row: an order of rows that is undone behind it need not be made.

    transpose(linear(transpose(y, 0, 1)), 0, 1)    ->  linear(y)

nn.MultiheadAttention works on (T, B, C) inside, and so copies its result before the projection.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import Decline, Graph, aten, need
from ..views import ORDER_KEEPING, eq, input_of, is_tensor, op, same_map, shape, val, view
from .linear import linear_of


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
    g.check_alike(new, root)
    try:
        found = g.restride(root, new)
    except (RuntimeError, ValueError) as error:  # a view that other strides do not allow
        raise Decline("strides that something reads") from error
    g.replace(root, new, gone, "rows in order", found)


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
    raise Decline("rows that stay in another order")
