"""What turns, and by what: rotary embeddings read by element maps.

    x * cos + partner(x) * sin            partner: (-b, a) in the places of (a, b)
    cat(a * cos - b * sin, b * cos + a * sin)             tables of a column a pair
    view_as_real(view_as_complex(x) * z)                  cos and sin in one complex table
    cat(x[:, :, :P], turned(x[:, :, P:]), 2)              after a prefix of tokens
    cat(turned(x[..., :R]), turned(x[..., R:]), -1)       columns in groups, the last may stay

Pairs (a, b) are halves of the columns or neighbours; whatever slices, chunks or reshapes a model
writes, its parts are compared by which elements of one tensor they show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import Decline, is_float, need
from ..views import (
    ORDER_KEEPING,
    View,
    bound,
    eq,
    input_of,
    is_number,
    is_tensor,
    op,
    same_map,
    shape,
    source,
    step_back,
    uncast,
    val,
    view,
    view_base,
)


class Rotation(NamedTuple):
    """How heads turn: tables of each group of columns, as the model multiplies by them."""

    cos: tuple[Node, ...]
    sin: tuple[Node, ...]  # or complex tables, as both
    interleaved: bool
    prefix: int = 0
    by_pair: bool = False  # tables have a column a pair


def rotation_of(n: Node, tokens: int, path: list[Node]) -> tuple[Rotation, Node]:
    """How a node turns and what turns, of four axes; `tokens`: which one is that of tokens.

    The path gets the nodes in between. Raises Decline where a node is no rotation.
    """
    n = uncast(n, path, rounds=True)
    need(is_tensor(n) and val(n).ndim == 4, "a rotation of other than four axes")
    if op(n) == "add":
        return by_tables(n, path)
    if op(n) == "cat" and bound(n)["dim"] % 4 == tokens:
        return after_prefix(n, tokens, path)
    way: list[Node] = []
    pairs = pairs_joined(n, way)
    if pairs is not None and {op(pairs.a), op(pairs.b)} == {"add", "sub"}:
        path += way
        return by_parts(n, pairs, path)
    if op(n) == "cat" and bound(n)["dim"] % 4 == 3:
        return by_columns(n, tokens, path)
    return by_complex_table(n, path)


# One group of columns -----------------------------------------------------------------------


def by_tables(n: Node, path: list[Node]) -> tuple[Rotation, Node]:
    """x * cos + partner(x) * sin, in any order."""
    path.append(n)
    terms = products(n, path)
    for first, second in (terms, terms[::-1]):
        for x, cos in (first, first[::-1]):
            for other, sin in (second, second[::-1]):
                between: list[Node] = []
                interleaved = partner(other, x, between)
                if interleaved is None:
                    continue
                need(eq(shape(x), shape(n)), "a rotation that broadcasts")
                check_tables(cos, sin, x, val(x).shape[-1])
                path += between
                return Rotation((cos,), (sin,), interleaved), uncast(x, path)
    raise Decline("a sum of no rotation")


def products(n: Node, path: list[Node]) -> list[tuple[Node, Node]]:
    """The factors of both terms of a sum or difference of two products."""
    need(len(n.args) == 2 and not n.kwargs and all(map(is_tensor, n.args)), "a scaled sum")
    terms = [uncast(t, path, rounds=True) for t in n.args]
    for t in terms:
        plain = op(t) == "mul" and len(t.args) == 2 and all(map(is_tensor, t.args))
        need(plain, "a sum of no rotation")
        path.append(t)
    return [tuple(t.args) for t in terms]  # type: ignore[misc]


def check_tables(cos: Node, sin: Node, x: Node, columns: int) -> None:
    for table in (cos, sin):
        t = val(table)
        need(is_float(table) and t.ndim <= 4 and t.device == val(x).device, "tables elsewhere")
        need(eq(t.shape[-1:], (columns,)), "tables of another width")
        need(t.dtype != torch.float64 or val(x).dtype == t.dtype, "tables in float64")


def partner(p: Node, x: Node, path: list[Node]) -> bool | None:
    """Whether p is x's partner: True by neighbours, False by halves, None if it is not."""
    p = uncast(p, path)
    pairs = pairs_joined(p, path)
    if pairs is None or not eq(shape(p), shape(x)):
        return None
    minus = negated(pairs.a, path)
    if minus is None or not is_half(minus, x, 1, pairs.interleaved, path):
        return None
    return pairs.interleaved if is_half(pairs.b, x, 0, pairs.interleaved, path) else None


class Pairs(NamedTuple):
    """What stands in the first and in the second places of all pairs."""

    a: Node
    b: Node
    interleaved: bool


def pairs_joined(n: Node, path: list[Node]) -> Pairs | None:
    """The two parts that a cat, or a stack behind reshapes, joins to columns."""
    at, rank = n, val(n).ndim
    while op(at) in ORDER_KEEPING and is_tensor(input_of(at)):
        path.append(at)
        at = input_of(at)
    if op(at) not in ("cat", "stack"):
        return None
    path.append(at)
    b = bound(at)
    parts, dim = b["tensors"], b["dim"] % val(at).ndim
    if len(parts) != 2 or not all(map(is_tensor, parts)) or not eq(*map(shape, parts)):
        return None
    if op(at) == "cat":
        return Pairs(*parts, False) if at is n and dim == rank - 1 else None
    by_pairs = val(at).ndim == rank + 1 and eq(shape(at)[: rank - 1], shape(n)[:-1])
    return Pairs(*parts, dim == rank) if by_pairs and dim >= rank - 1 else None


def by_parts(n: Node, pairs: Pairs, path: list[Node]) -> tuple[Rotation, Node]:
    """a cos - b sin in the first places, b cos + a sin in the second."""
    need(op(pairs.a) == "sub" and op(pairs.b) == "add", "a rotation of another sign")
    path += [pairs.a, pairs.b]
    first, second = products(pairs.a, path), products(pairs.b, path)
    for a, cos in (first[0], first[0][::-1]):
        whole = whole_of(a, n, pairs.interleaved, path)
        for b, sin in (first[1], first[1][::-1]):
            if whole is None or not is_half(b, whole, 1, pairs.interleaved, path):
                continue
            for terms in (second, second[::-1]):
                if not is_product(terms[0], whole, 1, cos, pairs.interleaved, path):
                    continue
                if is_product(terms[1], whole, 0, sin, pairs.interleaved, path):
                    check_tables(cos, sin, whole, val(whole).shape[-1] // 2)
                    found = Rotation((cos,), (sin,), pairs.interleaved, by_pair=True)
                    return found, uncast(whole, path)
    raise Decline("pairs of no rotation")


def is_product(
    factors: tuple[Node, Node],
    whole: Node,
    i: int,
    table: Node,
    interleaved: bool,
    path: list[Node],
) -> bool:
    """Whether a product is of whole's first (0) or second (1) places and this very table."""
    for x, t in (factors, factors[::-1]):
        if t is table and is_half(x, whole, i, interleaved, path):
            return True
    return False


def whole_of(a: Node, like: Node, interleaved: bool, path: list[Node]) -> Node | None:
    """The tensor of this shape of which a is the first part of all pairs."""
    for part, _ in steps_back(a):
        for whole in views_back(part, []):
            if eq(shape(whole), shape(like)) and is_half(a, whole, 0, interleaved, path):
                return whole
    return None


def by_complex_table(n: Node, path: list[Node]) -> tuple[Rotation, Node]:
    """view_as_real(view_as_complex(x) * z), in the order of x's columns."""
    at = n
    while op(at) in ORDER_KEEPING and is_tensor(input_of(at)):
        path.append(at)
        at = input_of(at)
    need(op(at) == "view_as_real", "queries or keys that do not turn")
    need(eq(shape(at)[:3], shape(n)[:3]) and val(at).ndim == 5, "complex numbers of other axes")
    turned = input_of(at)
    path += [at, turned]
    need(op(turned) == "mul" and len(turned.args) == 2, "no product of complex numbers")
    for z, table in (turned.args, turned.args[::-1]):
        if op(z) == "view_as_complex" and is_tensor(table) and val(table).is_complex():
            path.append(z)
            x = input_of(z)
            while not eq(shape(x), shape(n)) and op(x) in ORDER_KEEPING:
                path.append(x)
                x = input_of(x)
            need(eq(shape(x), shape(n)), "complex numbers of other columns")
            t = val(table)
            plain = t.device == val(x).device and not t.is_conj() and t.ndim <= 4
            need(plain and eq(t.shape[-1] * 2, shape(x)[-1]), "a complex table of another width")
            return Rotation((table,), (table,), True, by_pair=True), uncast(x, path)
    raise Decline("no product of complex numbers")


def negated(n: Any, path: list[Node]) -> Node | None:
    """What a node is the negative of."""
    n = uncast(n, path)
    if op(n) == "mul" and is_tensor(n.args[0]) and is_number(n.args[1]) and n.args[1] == -1:
        path.append(n)
        return n.args[0]
    if op(n) != "neg" or not is_tensor(input_of(n)):
        return None
    path.append(n)
    return input_of(n)


def is_half(part: Node, x: Node, i: int, interleaved: bool, path: list[Node]) -> bool:
    """Whether a node is x's first (0) or second (1) columns of pairs, before or after casts."""
    wholes, ways = steps_back(x), steps_back(part)
    for whole, way in wholes:
        for half, half_way in ways:
            between: list[Node] = []
            if source(half, between) is not source(whole, []):
                continue
            if val(half).dtype == val(whole).dtype and same_map(
                view(half), columns_of_pairs(view(whole), i, interleaved)
            ):
                path += [*way, *half_way, *between]
                return True
    return False


def steps_back(n: Node) -> list[tuple[Node, list[Node]]]:
    """A node and what it is a copy or exact cast of, each with the nodes on the way."""
    path: list[Node] = []
    last = uncast(n, path)
    found = [(m, path[:i]) for i, m in enumerate(path) if is_tensor(m)]
    return [*found, (last, path)]


def columns_of_pairs(v: View, i: int, interleaved: bool) -> View:
    """The element map of the columns a (0) or b (1) of all pairs (a, b)."""
    half, step = v.shape[-1] // 2, v.stride[-1]
    sizes = (*v.shape[:-1], half)
    if interleaved:
        return View(v.storage, v.offset + i * step, sizes, (*v.stride[:-1], 2 * step))
    return View(v.storage, v.offset + i * half * step, sizes, v.stride)


# Prefixes and groups ------------------------------------------------------------------------


def after_prefix(n: Node, tokens: int, path: list[Node]) -> tuple[Rotation, Node]:
    """The first tokens as they are, then those that turn."""
    path.append(n)
    parts = bound(n)["tensors"]
    need(len(parts) == 2 and all(map(is_tensor, parts)), "a prefix in several parts")
    rotation, rest = rotation_of(parts[1], tokens, path)
    need(rotation.prefix == 0, "a prefix within another")
    prefix = uncast(parts[0], path)
    P = val(prefix).shape[tokens]
    need(isinstance(P, int), "a prefix of dynamic length")
    for whole in views_back(rest, path):
        w = view(whole)
        if not eq(w.shape, shape(n)):
            continue
        split = (part_of(w, tokens, 0, prefix), part_of(w, tokens, P, rest))
        between: list[Node] = []
        same = source(prefix, between) is source(whole, [])
        if same and same_map(view(prefix), split[0]) and same_map(view(rest), split[1]):
            path += between
            return rotation._replace(prefix=P), whole
    raise Decline("a prefix of another tensor than what turns")


def by_columns(n: Node, tokens: int, path: list[Node]) -> tuple[Rotation, Node]:
    """Groups of columns with tables of their own; the last may stay as it is."""
    path.append(n)
    parts = bound(n)["tensors"]
    need(all(map(is_tensor, parts)), "a rotation of no tensors")
    groups: list[tuple[Rotation, Node]] = []
    rest = None
    for i, part in enumerate(parts):
        way: list[Node] = []
        try:
            groups.append(rotation_of(part, tokens, way))
            path += way
        except Decline:
            need(i and i == len(parts) - 1, "columns that do not turn before some that do")
            rest = uncast(part, path)
    need(groups, "columns that do not turn")
    (interleaved, by_pair), *others = {(r.interleaved, r.by_pair) for r, _ in groups}
    need(not others, "groups of columns that turn unlike each other")
    need(len(groups) == 1 or interleaved, "groups of columns that turn by halves")
    need(all(rotation.prefix == 0 for rotation, _ in groups), "a prefix within columns")
    inner = [x for _, x in groups] + ([] if rest is None else [rest])
    whole = columns_joined(n, inner, path)
    cos = sum((rotation.cos for rotation, _ in groups), ())
    sin = sum((rotation.sin for rotation, _ in groups), ())
    return Rotation(cos, sin, interleaved, by_pair=by_pair), whole


def columns_joined(n: Node, parts: list[Node], path: list[Node]) -> Node:
    """The tensor whose columns, all and in order, are these."""
    for whole in views_back(parts[0], path):
        w, column = view(whole), 0
        between: list[Node] = []
        if not eq(w.shape, shape(n)):
            continue
        for part in parts:
            same = source(part, between) is source(whole, [])
            if not same or not same_map(view(part), part_of(w, 3, column, part)):
                break
            column += val(part).shape[-1]
        else:
            path += between
            return whole
    raise Decline("columns of another tensor")


def part_of(whole: View, axis: int, start: int, part: Node) -> View:
    """The element map of whole.narrow(axis, start, size of part)."""
    sizes = list(whole.shape)
    sizes[axis] = shape(part)[axis]
    offset = whole.offset + start * whole.stride[axis]
    return View(whole.storage, offset, tuple(sizes), whole.stride)


def views_back(n: Node, path: list[Node]) -> list[Node]:
    """What a node is a view of, one after the other; the path gets the node and its views."""
    found = []
    while (base := view_base(n)) is not None:
        n = step_back(n, base, path)
        found.append(n)
    return found
