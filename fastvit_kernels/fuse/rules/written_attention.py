"""Attention that a model writes out, scaled anywhere, under masks that are added or filled in.

dropout(softmax(scale (q k^T) + mask)) v       ->  fk.scaled_dot_product_attention and wider
(q k^T) * s, s one number a head (cosine)      ->  the same of q * s
scores.masked_fill(hidden, -inf), where        ->  a mask of -inf
windows: scores (B W, H, T, S) + mask (W, 1, T, S) by a view  ->  fk.attention's mask by windows
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..graph import Decline, Graph, aten, need
from ..views import (
    CASTS,
    ORDER_KEEPING,
    VIEWS,
    bound,
    eq,
    hint,
    holds,
    input_of,
    is_number,
    is_tensor,
    op,
    same_tensor,
    shape,
    val,
)
from .attention import Call, attend, check_heads
from .masks import constant, with_hidden_rows

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
PLAIN = {"mul", "div", "add", "masked_fill", "where", *VIEWS, *ORDER_KEEPING, *CASTS}
FILLED = ("full", "full_like", "new_full")


@dataclass
class Scores:
    """What stands between a softmax and the product of queries and keys."""

    product: Node
    scale: float = 1.0
    head_scales: list[Node] = field(default_factory=list)  # (..., 1, 1)
    # from the last to the first: a mask that is added (None), or what is -inf, where it is this
    terms: list[tuple[Node, bool | None]] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)

    @property
    def masks(self) -> list[Node]:
        return [mask for mask, hides in self.terms if hides is None]

    @property
    def hidden(self) -> list[Node]:
        return [mask for mask, hides in self.terms if hides is not None]


def written_attention(g: Graph, n: Node) -> None:
    weights, v = factors(n, "...ts,...sd->...td")
    path: list[Node] = []
    try:
        softmax, p, draw = behind_softmax(weights, path)
    except Decline as reason:
        raise Decline(in_attention(n, weights) or str(reason)) from None
    b = bound(softmax)
    need(b["dim"] in (-1, val(softmax).ndim - 1), "a softmax over another axis")
    scores = scores_of(b["self"])
    path += [softmax, *scores.path]
    for each in path:
        x = val(each)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            need(
                holds(x.dtype, val(n).dtype),
                f"a softmax in {x.dtype} for a result in {val(n).dtype}",
            )
    q, kt = factors(scores.product, "...td,...sd->...ts")
    is_turned = op(scores.product) != "einsum"
    k = g.emit(n, aten.transpose.int, kt, -2, -1) if is_turned else kt
    check_operands(n, q, k, v, scores)
    q = under_head_scales(g, n, q, scores.head_scales)
    mask = mask_of(g, n, scores)
    attend(g, Call(n, q, k, v, mask, p, False, scores.scale, draw, path))


def factors(n: Node, equation: str) -> tuple[Node, Node]:
    """The operands of a batched matrix product."""
    if op(n) == "einsum":
        need(
            is_equation(n.args[0], equation) and len(n.args[1]) == 2,
            "an einsum that is no linear layer or attention",
        )
        return n.args[1][0], n.args[1][1]  # type: ignore[index,return-value]
    need(op(n) in PRODUCTS, "a product that is no attention")
    first, second = n.args[-2:]
    need(is_tensor(first) and is_tensor(second), "a product that is no attention")
    return first, second  # type: ignore[return-value]


def is_equation(given: object, wanted: str) -> bool:
    """Whether an einsum is the wanted one by other letters: "bhij,bhjd->bhid"."""
    parts = str(given).replace(" ", "").replace("->", ",").split(",")
    names = wanted.replace("...", "").replace("->", ",").split(",")
    if len(parts) != 3 or any(len(part) < 2 or not part.isalpha() for part in parts):
        return False
    heads = {part[:-2] for part in parts}
    letters: dict[str, str] = {}
    for part, name in zip(parts, names, strict=True):
        for letter, role in zip(part[-2:], name, strict=True):
            if letters.setdefault(letter, role) != role:
                return False
    distinct = len(set(letters.values())) == len(letters)
    apart = not any(letter in head for head in heads for letter in letters)
    return len(heads) == 1 and distinct and apart


def behind_softmax(n: Node, path: list[Node]) -> tuple[Node, float, Node | None]:
    """The softmax under a dropout and a cast to the values' dtype."""
    p, draw = 0.0, None
    while True:
        n = same_tensor(n, path)
        if op(n) == "softmax":
            return n, p, draw
        if op(n) == "dropout" and draw is None:
            b = bound(n)
            need(is_number(b["p"]) and 0 <= b["p"] < 1, "a dropout of everything")
            p, draw = float(b["p"]), n
        else:
            why = f"no softmax before this matmul, but {op(n) or 'an input'}"
            need(op(n) in CASTS and is_tensor(input_of(n)), why)
            need(val(n).is_floating_point(), why)
        path.append(n)
        n = input_of(n)


def in_attention(n: Node, weights: Node) -> str:
    """What a person calls a product of an attention that no rule takes; "" of no attention."""
    way = way_to_softmax(n, lambda at: list(at.users))
    if way is not None:
        passed = told(way[1:])
        if not passed:
            return "q k^T of an attention that is not fused"
        return f"attention not fused: q k^T passes {passed} before the softmax"
    passed = told(way_to_softmax(weights, lambda at: at.all_input_nodes) or [])
    if passed:
        return f"attention not fused: the softmax passes {passed} before the product with v"
    return ""


def told(way: list[Node]) -> str:
    """What stands on the way, without what any attention has there."""
    return ", ".join(dict.fromkeys(op(n) or n.name for n in way if op(n) not in PLAIN))


def way_to_softmax(start: Node, onward: Callable[[Node], list[Node]]) -> list[Node] | None:
    """The nodes from a tensor of scores to a softmax of its size; None where there is none."""
    ways: dict[Node, list[Node]] = {start: [start]}
    for at in (todo := [start]):
        for n in onward(at) if len(ways[at]) < 12 else ():
            if not is_tensor(n) or n in ways or val(n).ndim < 3:
                continue
            is_like_start = eq(shape(n)[-2:], shape(start)[-2:]) or sizes(n) == sizes(start)
            if op(n) == "softmax" and is_like_start:
                return ways[at]
            ways[n] = [*ways[at], n]
            mixes_heads = op(n) == "einsum" and is_like_start
            if mixes_heads or op(n) not in (*PRODUCTS, "softmax"):
                todo.append(n)
    return None


def sizes(n: Node) -> list[int]:
    """In no order: heads that are mixed may lie last."""
    return sorted(map(hint, shape(n)))


def scores_of(n: Node) -> Scores:
    """Back from a softmax to the product of queries and keys."""
    found = Scores(n)
    at = n
    while True:
        at = same_tensor(at, found.path)
        name = op(at)
        if name in PRODUCTS:
            return with_product(found, at)
        found.path.append(at)
        if name in CASTS and val(at).is_floating_point() and is_tensor(input_of(at)):
            at = input_of(at)
        elif name in ("mul", "div"):
            at = scaled(found, at)
        elif name == "add":
            at = masked(found, at)
        elif name == "masked_fill":
            b = bound(at)
            at = filled(found, at, b["self"], b["value"], b["mask"], True)
        elif name == "where":
            at = chosen(found, at)
        elif name in ("view", "reshape") and (inner := by_windows(found, at)) is not None:
            at = inner
        else:
            raise Decline(f"{name or 'an unknown call'} between the scores and their softmax")


def with_product(found: Scores, at: Node) -> Scores:
    if op(at) == "baddbmm":
        b = bound(at)
        need(b["beta"] in (0, 1) and is_number(b["alpha"]) and b["alpha"] > 0, "scaled scores")
        # autograd gives zeros, not nothing, to what is added nought times
        need(b["beta"] == 1 or not val(b["self"]).requires_grad, "scores plus nought of a tensor")
        if b["beta"] == 1:
            unscaled(found)
            found.terms.append((b["self"], None))
        found.scale *= b["alpha"]
    found.product = at
    found.path.append(at)
    return found


def scaled(found: Scores, at: Node) -> Node:
    """A scale of the scores: a number, or a tensor of one number a head."""
    need(len(at.args) == 2 and not at.kwargs, "a rounded scale")
    y, s = at.args
    if is_number(y):
        y, s = s, y
        need(op(at) == "mul", "a number over the scores")
    need(is_tensor(y) and (is_number(s) or is_tensor(s)), "a scale")
    if is_number(s):
        need(math.isfinite(s) and s > 0, f"a scale of {s}")
        found.scale = found.scale * s if op(at) == "mul" else found.scale / s
        return y  # type: ignore[return-value]
    need(op(at) == "mul", "scores over a tensor")
    if val(y).ndim < val(s).ndim or not eq(shape(y), shape(at)):
        y, s = s, y
    by_head = val(s).ndim == 0 or (val(s).ndim >= 2 and eq(shape(s)[-2:], (1, 1)))
    need(eq(shape(y), shape(at)) and by_head, "scores times a tensor")
    found.head_scales.append(s)  # type: ignore[arg-type]
    return y  # type: ignore[return-value]


def masked(found: Scores, at: Node) -> Node:
    """scores + mask: the operand that leads to the product is the scores."""
    need(
        len(at.args) == 2 and not at.kwargs and all(map(is_tensor, at.args)), "scores plus a number"
    )
    unscaled(found)
    for y, mask in (at.args, at.args[::-1]):
        if eq(shape(y), shape(at)) and leads_to_product(y):
            found.terms.append((mask, None))
            return y
    raise Decline("a sum of other than scores and a mask")


def unscaled(found: Scores) -> None:
    need(found.scale == 1.0 and not found.head_scales, "a mask that is scaled, too")


def leads_to_product(n: Node) -> bool:
    for _ in range(12):
        n = same_tensor(n, [])
        if op(n) in PRODUCTS:
            return True
        onward = ("mul", "div", "add", "masked_fill", "view", "reshape", *CASTS)
        if op(n) not in onward or not is_tensor(input_of(n)):
            return False
        n = input_of(n)
    return False


def chosen(found: Scores, at: Node) -> Node:
    """The scores, and where a condition says so, -inf."""
    condition, *values = at.args
    for y, value, hides in ((*values, False), (*values[::-1], True)):
        if op(value) in FILLED and is_tensor(y):
            found.path.append(value)
            value = bound(value)["fill_value"]
        if is_tensor(y) and is_number(value):
            return filled(found, at, y, value, condition, hides)
    raise Decline("scores where another tensor is not")


def filled(found: Scores, at: Node, y: Any, value: Any, condition: Any, hides: bool) -> Node:
    """-inf where a boolean mask is `hides`."""
    need(value == -math.inf, "scores under a mask are set to a finite number")
    need(not found.head_scales, "a mask under a scale that may be negative")
    need(
        val(condition).dtype == torch.bool and eq(shape(y), shape(at)), "a mask that is no boolean"
    )
    found.terms.append((condition, hides))
    return y


def by_windows(found: Scores, at: Node) -> Node | None:
    """(B W, H, T, S) -> (B, W, H, T, S) + mask (1, W, 1, T, S) -> back, as Swin writes it."""
    total = same_tensor(input_of(at), found.path)
    if val(at).ndim != 4 or op(total) != "add" or len(total.args) != 2:
        return None
    for y, mask in (total.args, total.args[::-1]):
        if not is_tensor(y) or not is_tensor(mask) or not val(y).ndim == val(mask).ndim == 5:
            continue
        inner = input_of(y) if op(y) in ("view", "reshape") else None
        if not is_tensor(inner) or not eq(shape(inner), shape(at)):
            continue
        one, W, heads = shape(mask)[:3]
        if eq((one, W, heads), (1, shape(y)[1], 1)) and eq(shape(y)[2:], shape(at)[1:]):
            unscaled(found)
            found.path += [total, y]
            found.terms.append((mask, None))
            return inner
    return None


def check_operands(n: Node, q: Node, k: Node, v: Node, scores: Scores) -> None:
    check_heads(q, k, v)
    lead = shape(q)[:-2]
    need(eq(shape(k)[:-2], lead) and eq(shape(v)[:-2], lead), "heads that broadcast")
    need(eq(shape(v)[-2:], shape(k)[-2:]), "values of another width than keys")
    # the host's gradient of the scores is 0 there, and ours 0 but for rounding
    need(not eq(shape(k)[-2], 1), "a softmax over one key")
    need(eq(shape(n), shape(q)), "a result of another shape")
    need(val(q).dtype == val(k).dtype, "queries and keys of different dtypes")
    for mask in (*scores.masks, *scores.hidden):
        need(val(mask).ndim <= 5 and val(mask).device == val(q).device, "a mask elsewhere")
    for mask in scores.masks:
        need(val(mask).is_floating_point(), "an added mask of booleans or integers")
        rounded = val(mask).dtype == torch.float64 != val(q).dtype
        need(not rounded, "a mask in float64 for heads in less")
    every = [shape(mask)[-4:][::-1] for mask in (*scores.masks, *scores.hidden)]
    for sizes in itertools.zip_longest(*every, fillvalue=1):
        wide = [s for s in sizes if not eq(s, 1)]
        need(all(eq(s, wide[0]) for s in wide), "masks by window and by sample")


def under_head_scales(g: Graph, n: Node, q: Node, scales: list[Node]) -> Node:
    """(q k^T) s = (q s) k^T where s has one number a head."""
    for s in scales:
        need(val(s).dtype == val(q).dtype, "a scale of another dtype")
        q = g.emit(n, aten.mul.Tensor, q, s)
    return q


def mask_of(g: Graph, n: Node, scores: Scores) -> Node | None:
    """All masks as one, in the host's order, its wholly hidden rows NaN."""

    def where_hidden(mask: Node, hides: bool) -> Node:
        return mask if hides else g.emit(n, aten.logical_not.default, mask)

    if len(scores.terms) == 1 and scores.hidden:
        ((mask, hides),) = scores.terms
        value = constant(g, where_hidden(mask, bool(hides)))
        if value is not None and not value.all(-1).any():
            return where_hidden(mask, not hides)
    total = None
    for mask, hides in reversed(scores.terms):
        if hides is not None:
            if total is None:
                options = dict(dtype=val(n).dtype, device=val(n).device)
                total = g.emit(n, aten.zeros.default, [], **options)
            filled = broadcast(g, n, total, where_hidden(mask, hides))
            total = g.emit(n, aten.masked_fill.Scalar, *filled, -math.inf)
            continue
        if val(mask).ndim == 5:
            mask = g.emit(n, aten.squeeze.dim, mask, 0)
        total = mask if total is None else g.emit(n, aten.add.Tensor, total, mask)
    return None if total is None else with_hidden_rows(g, n, total)


def broadcast(g: Graph, n: Node, mask: Node, hidden: Node) -> tuple[Node, Node]:
    """masked_fill's first operand must have the full shape."""
    sizes = torch.broadcast_shapes(shape(mask), shape(hidden))
    if eq(shape(mask), tuple(sizes)):
        return mask, hidden
    return g.emit(n, aten.expand.default, mask, list(sizes)), hidden
