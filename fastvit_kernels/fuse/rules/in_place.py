"""Writes to a tensor that nobody else sees, as new tensors, for the rules behind.

scores += bias                                      ->  scores + bias
q *= scale, of columns of one product               ->  q * scale
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import Decline, Graph, aten, have_same_strides, is_opaque, need, storages
from ..views import eq, is_tensor, op, shape, source, val, view

OPERATIONS = ("add_", "sub_", "mul_", "div_", "masked_fill_")


def as_new(g: Graph, n: Node) -> None:
    x = n.args[0]
    need(op(x) != "bernoulli_", "a mask of samples, which drop_path='skip' looks for")
    base = source(x, [])  # type: ignore[arg-type]
    own = storages(val(base))
    borrowed = any(storages(val(a)) & own for a in base.all_input_nodes)
    need(base.op == "call_function" and not is_opaque(base) and not borrowed, "a write to an input")
    others = [a for a in n.all_input_nodes if a is not x]
    need(not any(storages(val(a)) & own for a in others), "a write of a tensor to itself")
    for seen in seen_later(g, n, own):
        apart = is_tensor(seen) and is_apart(seen, x, base)  # type: ignore[arg-type]
        need(apart, f"a write that {seen.name} shows, too")
    function = getattr(getattr(aten, op(n)[:-1]), n.target._overloadname)  # type: ignore[union-attr]
    new = g.emit(n, function, *n.args, **n.kwargs)
    g.check_alike(new, n)
    found = {}
    if not have_same_strides(val(new), val(n)):
        g.written = [(writer, w - own) for writer, w in g.written]  # writes to other elements
        try:
            found = g.restride(n, new)
        except RuntimeError as error:  # a view that other strides do not allow
            raise Decline("strides that something reads") from error
        finally:
            g.number()
    g.replace(n, new, [], "in place", found)
    g.number()


def seen_later(g: Graph, n: Node, own: set[int]) -> list[Node]:
    """What shows the storage as it was before n writes, and is read behind n."""
    written, found = {n}, []
    for each in g.graph.nodes:
        if each is n or not storages(val(each)) & own:
            continue
        shown = {a for a in each.all_input_nodes if storages(val(a)) & own}
        if g.order[each] > g.order[n] and shown <= written:
            written.add(each)
        elif any(g.order[user] > g.order[n] for user in each.users):
            found.append(each)
    return found


def is_apart(a: Node, b: Node, base: Node) -> bool:
    """Whether two views of a row-major tensor show columns of it that do not meet."""
    if not val(base).is_contiguous():
        return False
    ranges = [columns(each, shape(base)[-1]) for each in (a, b)]
    if None in ranges:
        return False
    (first, last), (other_first, other_last) = ranges  # type: ignore[misc]
    return last < other_first or other_last < first


def columns(n: Node, width: Any) -> tuple[int, int] | None:
    """The first and the last column of a view of rows of this width."""
    v = view(n)
    if not isinstance(width, int) or not isinstance(v.offset, int):
        return None
    first = last = v.offset % width
    for size, stride in zip(v.shape, v.stride, strict=True):
        if eq(size, 1) or eq(stride % width, 0):
            continue
        if not isinstance(size, int) or not isinstance(stride, int):
            return None
        last += (size - 1) * stride
    return (first, last) if last < width else None
