"""What a norm hands on.

y = norm(x); ...; z = branch(y, residual=x)    ->  y, x = fk.layer_norm_and_input(x)

The residual's gradient is then added inside the norm's backward. Under autocast

y = norm(x); linear(y), which casts it         ->  fk.layer_norm(x, out_dtype=autocast's)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .. import emitted as fk
from ..graph import Graph, need, storages
from ..views import eq, op, shape, val

PRODUCTS = ("linear", "mlp", "gated_mlp", "qkv_attention", "rope_attention")  # read y first


def is_read_by_products(g: Graph, y: Node) -> bool:
    """Whether only our products read y, as what they multiply."""
    products = {"fk." + name for name in PRODUCTS}
    return bool(y.users) and all(
        op(u) in products and u.args[0] is y and count(u, y) == 1 for u in y.users
    )


def count(reader: Node, n: Node) -> int:
    """How often a node reads another."""
    found: list[Node] = []
    torch.fx.map_arg((reader.args, reader.kwargs), found.append)
    return found.count(n)


def narrow_norm(g: Graph, n: Node) -> None:
    dtype = dict(n.meta["region"].autocast).get(val(n).device.type)
    need(dtype is not None and val(n).dtype == torch.float32, "no autocast, or no fp32 norm")
    need(is_read_by_products(g, n), "a norm that others than products read")
    same = all(u.meta["region"].autocast == n.meta["region"].autocast for u in n.users)
    need(same, "products in another autocast region")
    new = g.emit(n, n.target, *n.args, **{**n.kwargs, "out_dtype": dtype})
    g.replace(n, new, [], "norm in autocast's dtype")


def norm_and_input(g: Graph, n: Node) -> None:
    x = n.args[0]
    assert isinstance(x, Node)
    need(n.kwargs.get("residual") is None, "a norm with a residual of its own")
    later = [u for u in g.readers(x) if g.order[u] > g.order[n] and is_residual(u, x)]
    need(later, "a norm whose input is no residual later")
    reader = later[0]
    need(n.meta["region"] == reader.meta["region"], "a residual in another region")
    written = {s for _, w in g.written for s in w}
    need(not storages(val(x)) & written, "a norm's input that is written to")
    both = fk.layer_norm_and_input if op(n) == "fk.layer_norm" else fk.rms_norm_and_input
    pair = g.emit(n, both, *n.args, **n.kwargs)
    y = g.emit(n, operator.getitem, pair, 0, like=n)
    same = g.emit(n, operator.getitem, pair, 1)
    # with a frozen x it needs a gradient where the norm's parameters do
    learns = val(reader).requires_grad or not val(same).requires_grad
    need(learns, "a sum that takes no gradient")
    reader.replace_input_with(x, same)
    g.replace(n, y, [], "norm_and_input")


def is_residual(u: Node, x: Node) -> bool:
    """Whether a node adds x to something of its shape, and reads it for nothing else."""
    adds = u.kwargs.get("residual") is x if u.meta.get("ours") else op(u) == "add"
    return adds and count(u, x) == 1 and eq(shape(u), shape(x))
