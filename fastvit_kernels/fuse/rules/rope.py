"""Rotary embeddings of queries and keys, after an optional norm of each head.

    q * cos + partner(q) * sin, k alike   ->  fk.rope_attention(x, w, b, cos=cos, sin=sin, ...)
                                              or fk.rope(q, k, cos, sin, ...), then attention
    cat(q[:, :, :P], turned(q[:, :, P:]), 2)          ->  prefix_tokens=P
    cat(turned(q[..., :R]), turned(q[..., R:]), -1)   ->  tables of all columns (by pairs)
    norm(q) before it                                 ->  norm="layer_norm" or "rms_norm"

partner: (-b, a) in the places of (a, b), by halves or by pairs. Its parts are compared by their
element maps, whatever slices, chunks or reshapes a model writes. Queries and keys turn by the same
tables only where those are one tensor, or the same pure operations on the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import Decline, Graph, aten, is_float, is_pure, need
from ..views import (
    CASTS,
    ORDER_KEEPING,
    UNSET,
    View,
    bound,
    eq,
    input_of,
    is_number,
    is_tensor,
    op,
    same_map,
    same_tensor,
    shape,
    source,
    step_back,
    storage_of,
    uncast,
    val,
    view,
    view_base,
    wide,
)


class Rotation(NamedTuple):
    """How heads turn: tables of each group of columns, as the model multiplies by them."""

    cos: tuple[Node, ...]
    sin: tuple[Node, ...]
    interleaved: bool
    prefix: int = 0


class HeadNorm(NamedTuple):
    """A norm over each head's columns."""

    kind: str
    weight: Node | None
    bias: Node | None
    eps: float


@dataclass
class Turned:
    """Queries or keys, back before their rotation and norm."""

    x: Node  # (B, H, T, D), or by tokens (B, T, H, D)
    by_tokens: bool
    rotation: Rotation
    rotated_by_tokens: bool  # the layout in which they turn, so that of the tables
    norm: HeadNorm | None
    path: list[Node] = field(default_factory=list)
    scale: float = 1.0  # of the turned heads


def turned(n: Node, dtype: torch.dtype) -> Turned:
    """Heads (B, H, T, D) that attention reads in a dtype, or Decline where they do not turn."""
    path: list[Node] = []
    at, by_tokens = in_layout(n, False, path, rounds=True)
    need(op(at) in ("add", "cat"), "queries or keys that do not turn")
    rotation, x = rotation_of(at, 1 if by_tokens else 2, path)
    check_dtypes(path, x, dtype)
    inner_path: list[Node] = []
    at, normed_by_tokens = in_layout(x, by_tokens, inner_path)
    norm = norm_of(at, val(n).shape[-1])
    if norm is None:
        return Turned(x, by_tokens, rotation, by_tokens, None, path)
    path += [*inner_path, at]
    before = input_of(at)
    need(val(before).dtype == val(at).dtype == val(x).dtype, "a norm that changes the dtype")
    return Turned(before, normed_by_tokens, rotation, by_tokens, norm, path)


def check_dtypes(path: list[Node], x: Node, read_as: torch.dtype) -> None:
    """Nothing on the way is narrower than x; float64 is only where x is."""
    given = val(x).dtype
    need(read_as == given, f"heads of {given} that are read as {read_as}")
    for n in path:
        if is_float(n):
            found = val(n).dtype
            need(torch.promote_types(found, given) == found, f"a rotation in {found}")
            need(found != torch.float64 or given == found, "a rotation in float64")


def in_layout(
    n: Node, by_tokens: bool, path: list[Node], rounds: bool = False
) -> tuple[Node, bool]:
    """Back through copies, exact casts (with `rounds`, any) and exchanges of heads and tokens."""
    while True:
        n = recast(n, path) if rounds else uncast(n, path)
        base = view_base(n)
        if base is None or val(base).ndim != 4 or val(n).ndim != 4:
            return n, by_tokens
        if not same_map(view(n), view(base).turned(0, 2, 1, 3)):
            return n, by_tokens
        path.append(n)
        n, by_tokens = base, not by_tokens


def recast(n: Node, path: list[Node]) -> Node:
    """Back through copies and casts of floating dtypes, those that round included."""
    while True:
        n = same_tensor(n, path)
        base = input_of(n) if op(n) in CASTS else None
        if not is_tensor(base) or not is_plain_cast(n, base):
            return n
        path.append(n)
        n = base


def is_plain_cast(n: Node, base: Node) -> bool:
    a, b = val(n), val(base)
    in_one_region = base.op != "call_function" or n.meta["region"] == base.meta["region"]
    alike = (a.device, a.requires_grad) == (b.device, b.requires_grad)
    return in_one_region and alike and eq(shape(n), shape(base)) and wide(a.dtype) and wide(b.dtype)


def norm_of(n: Node, D: int) -> HeadNorm | None:
    """Our norm over the last axis of D columns."""
    if op(n) not in ("fk.layer_norm", "fk.rms_norm") or n.kwargs or val(n).shape[-1] != D:
        return None
    if op(n) == "fk.rms_norm":
        _, weight, eps = n.args
        return HeadNorm("rms_norm", weight, None, eps)  # type: ignore[arg-type]
    _, weight, bias, eps = n.args
    return HeadNorm("layer_norm", weight, bias, eps)  # type: ignore[arg-type]


# x cos + partner(x) sin ---------------------------------------------------------------------


def rotation_of(n: Node, tokens: int, path: list[Node]) -> tuple[Rotation, Node]:
    """How a node turns and what turns, of four axes; `tokens`: which one is that of tokens."""
    n = recast(n, path)
    need(is_tensor(n) and val(n).ndim == 4, "a rotation of other than four axes")
    if op(n) == "cat":
        path.append(n)
        b = bound(n)
        parts, dim = b["tensors"], b["dim"] % 4
        need(all(map(is_tensor, parts)), "a rotation of no tensors")
        if dim == 3:
            return by_columns(n, parts, tokens, path)
        need(dim == tokens, "a prefix of other than tokens")
        return after_prefix(n, parts, tokens, path)
    need(op(n) == "add" and len(n.args) == 2 and not n.kwargs, "no rotation")
    path.append(n)
    return by_tables(n, path)


def by_tables(n: Node, path: list[Node]) -> tuple[Rotation, Node]:
    """x * cos + partner(x) * sin, in any order."""
    terms = [recast(t, path) for t in n.args if is_tensor(t)]  # type: ignore[arg-type]
    products = len(terms) == 2 and all(op(t) == "mul" and len(t.args) == 2 for t in terms)
    need(products and all(is_tensor(a) for t in terms for a in t.args), "a sum of no rotation")
    path += terms
    for first, second in (terms, terms[::-1]):
        for x, cos in (first.args, first.args[::-1]):
            for other, sin in (second.args, second.args[::-1]):
                found = path_of_partner(other, x)  # type: ignore[arg-type]
                if found is None:
                    continue
                interleaved, between = found
                need(eq(shape(x), shape(n)), "a rotation that broadcasts")
                check_tables(cos, sin, x)  # type: ignore[arg-type]
                path += between
                whole = uncast(x, path)
                return Rotation((cos,), (sin,), interleaved), whole  # type: ignore[arg-type]
    raise Decline("a sum of no rotation")


def check_tables(cos: Node, sin: Node, x: Node) -> None:
    for table in (cos, sin):
        t = val(table)
        need(is_float(table) and t.ndim <= 4 and t.device == val(x).device, "tables elsewhere")
        need(eq(t.shape[-1:], val(x).shape[-1:]), "tables of another width")
        need(t.dtype != torch.float64 or val(x).dtype == t.dtype, "tables in float64")


def path_of_partner(p: Node, x: Node) -> tuple[bool, list[Node]] | None:
    """Whether p is x's partner, and by pairs; with the nodes between them."""
    path: list[Node] = []
    p = uncast(p, path)
    stacked = p
    while op(stacked) in ORDER_KEEPING and is_tensor(input_of(stacked)):
        path.append(stacked)
        stacked = input_of(stacked)
    if op(stacked) == "cat" and stacked is p:
        interleaved, axis = False, val(p).ndim - 1
    elif op(stacked) == "stack" and val(stacked).ndim == val(x).ndim + 1:
        b = bound(stacked)
        interleaved = b["dim"] % val(stacked).ndim == val(x).ndim
        axis = val(x).ndim if interleaved else val(x).ndim - 1
        if not eq(shape(stacked)[: val(x).ndim - 1], shape(x)[:-1]):
            return None
    else:
        return None
    b = bound(stacked)
    if not eq(shape(p), shape(x)) or len(b["tensors"]) != 2:
        return None
    if b["dim"] % val(stacked).ndim != axis:
        return None
    path.append(stacked)
    minus, plus = b["tensors"]
    minus = negated(minus, path)
    D = val(x).shape[-1]
    if minus is None or not is_tensor(plus) or not isinstance(D, int) or D % 2:
        return None
    for part, i in ((minus, 1), (plus, 0)):
        if not is_half(part, x, i, interleaved, path):
            return None
    return interleaved, path


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


def after_prefix(
    n: Node, parts: list[Node], tokens: int, path: list[Node]
) -> tuple[Rotation, Node]:
    """The first tokens as they are, then those that turn."""
    need(len(parts) == 2, "a prefix in several parts")
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


def by_columns(n: Node, parts: list[Node], tokens: int, path: list[Node]) -> tuple[Rotation, Node]:
    """Groups of columns with tables of their own; the last may stay as it is."""
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
    pairs = {rotation.interleaved for rotation, _ in groups}
    need(len(groups) == 1 or pairs == {True}, "groups of columns that turn by halves")
    need(all(rotation.prefix == 0 for rotation, _ in groups), "a prefix within columns")
    inner = [x for _, x in groups] + ([] if rest is None else [rest])
    whole = columns_joined(n, inner, path)
    cos = sum((rotation.cos for rotation, _ in groups), ())
    sin = sum((rotation.sin for rotation, _ in groups), ())
    return Rotation(cos, sin, pairs.pop()), whole


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


# Tables -------------------------------------------------------------------------------------


def tables(g: Graph, root: Node, q: Turned) -> tuple[Node, Node]:
    """cos and sin as fk.rope takes them."""
    found = []
    for parts in (q.rotation.cos, q.rotation.sin):
        made = [table(g, root, t, q) for t in parts]
        need(len({val(t).ndim for t in made}) == 1, "tables of different shapes")
        lead = {len(made) == 1 or eq(shape(t)[:-1], shape(made[0])[:-1]) for t in made}
        need(lead == {True}, "tables of different shapes")
        found.append(made[0] if len(made) == 1 else g.emit(root, aten.cat.default, made, -1))
    cos, sin = found
    need(eq(shape(cos), shape(sin)), "sines of another shape than cosines")
    return cos, sin


def table(g: Graph, root: Node, t: Node, q: Turned) -> Node:
    """(T, R), (B, T, R) or (B, H, T, R), of one that broadcasts to (B, H, T, R) or by tokens."""
    if q.rotated_by_tokens:
        need(val(t).ndim >= 3, "tables by head")
        t = g.emit(root, aten.transpose.int, t, -2, -3)
    need(val(t).ndim >= 2, "tables of one row")
    B, H, T = sizes_of(q)
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


def sizes_of(q: Turned) -> tuple[Any, Any, Any]:
    """B, H and the number of tokens that turn."""
    B, H, T, _ = shape(q.x)
    if q.by_tokens:
        H, T = T, H
    return B, H, T - q.rotation.prefix


def arguments(g: Graph, root: Node, q: Turned, k: Turned) -> dict[str, Any]:
    """Keywords of fk.rope and fk.rope_attention, where queries and keys turn alike."""
    a, b = q.rotation, k.rotation
    alike = (a.interleaved, a.prefix, len(a.cos)) == (b.interleaved, b.prefix, len(b.cos))
    need(alike and q.rotated_by_tokens == k.rotated_by_tokens, "keys turn unlike queries")
    for one, other in zip((*a.cos, *a.sin), (*b.cos, *b.sin), strict=True):
        same = same_place(one, other) or same_value(g, one, other, set())
        need(same, "keys turn by other tables than queries")
    cos, sin = tables(g, root, q)
    found = dict(cos=cos, sin=sin, interleaved=a.interleaved, prefix_tokens=a.prefix)
    if q.norm is None and k.norm is None:
        return found
    need(q.norm is not None and k.norm is not None, "one norm for queries and keys")
    assert q.norm is not None and k.norm is not None
    need(q.norm.kind == k.norm.kind and q.norm.eps == k.norm.eps, "different norms")
    return found | dict(
        norm=q.norm.kind,
        q_norm_weight=q.norm.weight,
        q_norm_bias=q.norm.bias,
        k_norm_weight=k.norm.weight,
        k_norm_bias=k.norm.bias,
        eps=q.norm.eps,
    )


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


def same_place(a: Node, b: Node) -> bool:
    """One tensor; that nobody writes to it between the two reads, `absorb` sees."""
    return a is b or (source(a, []) is source(b, []) and same_map(view(a), view(b)))


def alike(a: Node, b: Node) -> bool:
    x, y = val(a), val(b)
    one_state = a.meta.get("region") == b.meta.get("region")
    facts = (x.dtype, x.device, x.requires_grad) == (y.dtype, y.device, y.requires_grad)
    return one_state and facts and eq(shape(a), shape(b))


def writers(g: Graph, n: Node) -> list[float]:
    storage = storage_of(val(n))
    return [at for at, written in g.written if storage in written]


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
