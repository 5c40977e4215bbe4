"""Tables of a rotation as fk.rope takes them, and when two are the same.

    (T, R), (1, T, R), (B, 1, T, R), (T, 1, R) by tokens, ...   ->   (T, R), (B, T, R), (B, H, T, R)

Queries and keys turn by the same tables only where those are one tensor, or the same pure
operations on the same tensors.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import Graph, aten, is_pure, need
from ..views import (
    UNSET,
    eq,
    input_of,
    is_tensor,
    op,
    same_place,
    shape,
    storage_of,
    val,
    view_base,
)
from .rotation import Rotation


def tables(
    g: Graph, root: Node, rotation: Rotation, sizes: tuple[Any, Any, Any], by_tokens: bool
) -> tuple[Node, Node]:
    """cos and sin as fk.rope takes them, of tables that broadcast to (B, H, T, R), sizes first, or
    by tokens to (B, T, H, R)."""
    found = []
    for i, parts in enumerate((rotation.cos, rotation.sin)):
        made = [real(g, root, t, i) for t in parts]
        made = [table(g, root, t, sizes, by_tokens) for t in made]
        if rotation.by_pair:
            made = [by_column(g, root, t, rotation.interleaved) for t in made]
        need(len({val(t).ndim for t in made}) == 1, "tables of different shapes")
        lead = {len(made) == 1 or eq(shape(t)[:-1], shape(made[0])[:-1]) for t in made}
        need(lead == {True}, "tables of different shapes")
        found.append(made[0] if len(made) == 1 else g.emit(root, aten.cat.default, made, -1))
    cos, sin = found
    need(eq(shape(cos), shape(sin)), "sines of another shape than cosines")
    return cos, sin


def real(g: Graph, root: Node, t: Node, i: int) -> Node:
    """A table, or part i of a complex one."""
    if not val(t).is_complex():
        return t
    return g.emit(root, aten.select.int, g.emit(root, aten.view_as_real.default, t), -1, i)


def by_column(g: Graph, root: Node, t: Node, interleaved: bool) -> Node:
    """A column a pair, for both of its columns."""
    if interleaved:
        return g.emit(root, aten.repeat_interleave.self_int, t, 2, -1)
    return g.emit(root, aten.cat.default, [t, t], -1)


def table(g: Graph, root: Node, t: Node, sizes: tuple[Any, Any, Any], by_tokens: bool) -> Node:
    """(T, R), (B, T, R) or (B, H, T, R), of one that broadcasts to (B, H, T, R) or by tokens."""
    if by_tokens:
        need(val(t).ndim >= 3, "tables by head")
        t = g.emit(root, aten.transpose.int, t, -2, -3)
    need(val(t).ndim >= 2, "tables of one row")
    B, H, T = sizes
    lead = (1,) * (4 - val(t).ndim) + shape(t)[:-2]
    need(eq(shape(t)[-2], T), "tables of another number of tokens")
    need(eq(lead[0], 1) or eq(lead[0], B), "tables of another number of samples")
    need(eq(lead[1], 1) or eq(lead[1], H), "tables of another number of heads")
    if eq(lead[1], 1) and eq(lead[0], 1):
        while val(t).ndim > 2:
            t = g.emit(root, aten.squeeze.dim, t, 0)
    elif eq(lead[1], 1):
        t = g.emit(root, aten.squeeze.dim, t, 1)
    elif val(t).ndim == 3:
        t = g.emit(root, aten.unsqueeze.default, t, 0)
    return t


def same_value(g: Graph, a: Any, b: Any, seen: set[tuple[Node, Node]]) -> bool:
    """Whether two nodes hold the same numbers: one place that nothing writes to, or the same pure
    operations on such."""
    if isinstance(a, (tuple, list)):
        same_length = isinstance(b, (tuple, list)) and len(a) == len(b)
        return same_length and all(same_value(g, i, j, seen) for i, j in zip(a, b, strict=True))
    if not isinstance(a, Node) or not isinstance(b, Node):
        return not isinstance(b, Node) and type(a) is type(b) and bool(a == b)
    if (a, b) in seen:
        return True
    seen.add((a, b))
    if not is_tensor(a) and a is b:
        return True
    if is_tensor(a) and is_tensor(b):
        if not alike(a, b):
            return False
        if same_place(a, b):
            return writers(g, a) == []
    known = deterministic(g, a) and deterministic(g, b)
    if not known or a.target != b.target or a.kwargs.keys() != b.kwargs.keys():
        return False
    return same_value(g, a.args, b.args, seen) and all(
        same_value(g, v, b.kwargs[name], seen) for name, v in a.kwargs.items()
    )


def alike(a: Node, b: Node) -> bool:
    x, y = val(a), val(b)
    one_state = a.meta.get("region") == b.meta.get("region")
    facts = (x.dtype, x.device, x.requires_grad) == (y.dtype, y.device, y.requires_grad)
    return one_state and facts and eq(shape(a), shape(b))


def writers(g: Graph, n: Node) -> list[float]:
    storage = storage_of(val(n))
    return [g.order[writer] for writer, written in g.written if storage in written]


def deterministic(g: Graph, n: Node) -> bool:
    """A pure call, or the one write to a fresh tensor that nothing else reads: arange(n).div_()."""
    if op(n) in UNSET or n.op != "call_function":
        return False
    if not is_tensor(n):
        return is_pure(n)
    if is_pure(n):
        return writers(g, n) in ([], [g.order[u] for u in n.users])
    base = input_of(n)
    return (
        writers(g, n) == [g.order[n]]
        and is_tensor(base)
        and list(base.users) == [n]
        and is_pure(base)
        and view_base(base) is None
        and op(n).endswith("_")
        and op(n)[:-1] in ("div", "mul", "add", "sub", "neg", "pow", "exp", "reciprocal")
    )
