"""LayerNorm and RMSNorm over the last axis.

layer_norm(x, (C,), w, b, eps)              ->  fk.layer_norm(x, w, b, eps)
rms_norm(x, (C,), w, eps)                   ->  fk.rms_norm(x, w, eps)
x * rsqrt(mean(x^2, -1) + eps) [* w]        ->  fk.rms_norm(x, w, eps)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .. import emitted as fk
from ..graph import Graph, need
from ..views import (
    CASTS,
    bound,
    eq,
    filled,
    holds,
    is_number,
    is_tensor,
    op,
    same_tensor,
    shape,
    uncast,
    val,
)


def layer_norm(g: Graph, n: Node) -> None:
    b = bound(n)
    x, weight, bias, eps = b["input"], b["weight"], b["bias"], b["eps"]
    check_norm(x, b["normalized_shape"], eps)
    gone = g.absorb([], n)
    g.replace(n, g.emit(n, fk.layer_norm, x, weight, bias, eps, like=n), gone, "layer_norm")


def rms_norm(g: Graph, n: Node) -> None:
    b = bound(n)
    x, weight, eps = b["input"], b["weight"], b["eps"]
    if eps is None:  # of the dtype of the statistics
        eps = torch.finfo(torch.promote_types(val(x).dtype, torch.float32)).eps
    check_norm(x, b["normalized_shape"], eps)
    gone = g.absorb([], n)
    g.replace(n, g.emit(n, fk.rms_norm, x, weight, eps, like=n), gone, "rms_norm")


def check_norm(x: Node, axes: Any, eps: Any) -> None:
    need(len(axes) == 1, "a norm over several axes")
    need(isinstance(eps, float) and 0 < eps < math.inf, f"eps of {eps}")
    need(val(x).is_floating_point() and filled(x), "a norm of integers, or of nothing")


def written_rms_norm(g: Graph, n: Node) -> None:
    """From rsqrt: the statistics before it, the products after it."""
    path: list[Node] = []
    x, wide, eps = mean_square(n, path)
    root = product(g, n, wide, path)
    need(root is not None, "rsqrt of a mean square that does not multiply x")
    path += [n]
    last, weight = root, None
    end = narrowed(g, root, path, val(x).dtype)
    if (user := g.only_reader(end)) is not None and op(user) == "mul":
        other = next((a for a in user.args if a is not end), None)
        if is_tensor(other) and eq(shape(other), shape(x)[-1:]):
            path += [end]
            last, weight = user, other
    if weight is None:
        last = end
    gone = g.absorb([root, *path], last)
    out_dtype, given = val(last).dtype, val(x).dtype
    need(holds(given, out_dtype), f"{given} normed to {out_dtype}")
    new = g.emit(last, fk.rms_norm, x, weight, eps, out_dtype=out_dtype, like=last)
    g.replace(last, new, gone, "rms_norm")


def mean_square(n: Node, path: list[Node]) -> tuple[Node, Node, float]:
    """x, x in the dtype of the statistics, and eps, of rsqrt(mean(x^2, -1, keepdim) + eps)."""
    total = n.args[0]
    need(op(total) == "add" and len(total.args) == 2 and not total.kwargs, "rsqrt of no sum")
    mean, eps = total.args
    need(is_number(eps) and eps > 0 and op(mean) == "mean", "rsqrt of no mean square")
    b = bound(mean)
    rank = val(mean).ndim
    last_axis = list(b.get("dim") or []) in ([-1], [rank - 1])
    need(last_axis and b["keepdim"] is True and b["dtype"] is None, "a mean over other axes")
    squares = b.get("self")
    if op(squares) == "pow":
        wide, exponent = squares.args
        need(is_number(exponent) and exponent == 2, "no square")
    else:
        need(op(squares) == "mul" and squares.args[0] is squares.args[1], "no square")
        wide = squares.args[0]
    need(is_tensor(wide) and val(wide).dtype == val(n).dtype, "a square in another dtype")
    need(val(wide).dtype != torch.float16, "squares that overflow in float16")
    path += [total, mean, squares]
    x = uncast(wide, path)
    need(filled(x), "a norm of nothing")
    return x, wide, float(eps)


def product(g: Graph, n: Node, wide: Node, path: list[Node]) -> Node | None:
    """x * rsqrt(...), x in the dtype of the statistics."""
    x = same_tensor(wide, [])
    for user in g.readers(n):
        if op(user) == "mul" and len(user.args) == 2:
            other = user.args[0] if user.args[1] is n else user.args[1]
            copies: list[Node] = []
            if is_tensor(other) and other is not n and same_tensor(other, copies) is x:
                path += copies
                return user
    return None


def narrowed(g: Graph, root: Node, path: list[Node], dtype: torch.dtype) -> Node:
    """The cast back to the dtype of x behind a node, if there is one."""
    user = g.only_reader(root)
    if user is None or op(user) not in CASTS or val(root).dtype == dtype:
        return root
    if val(user).dtype != dtype or not eq(shape(user), shape(root)):
        return root
    path.append(root)
    return user
