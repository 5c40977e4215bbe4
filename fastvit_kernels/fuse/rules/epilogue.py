"""What follows a branch, into the kernel that writes the branch.

    residual + row_scale * layer_scale * branch(x)
        ->  branch(x, residual=residual, layer_scale=layer_scale, row_scale=row_scale)

row_scale is one number a sample (DropPath), layer_scale one a column.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .. import emitted as fk
from ..graph import Decline, Graph, aten, called, draws, is_float, need, same_shape
from ..views import bound, eq, is_number, is_tensor, op, same_tensor, shape, val
from .linear import linear_of

BRANCHES = ("linear", "fk.linear", "fk.mlp", "fk.gated_mlp")
NO_BRANCH = "a sum of no linear layer"


def epilogue(g: Graph, n: Node) -> None:
    need(bound(n).get("alpha", 1) == 1 and len(n.args) == 2, "a scaled sum")
    need(all(map(is_tensor, n.args)), "a sum with a number")
    whys = []
    # the later of two branches has the other as its residual
    for y, residual in sorted(zip(n.args, n.args[::-1], strict=True), key=lambda p: -g.order[p[0]]):
        path: list[Node] = []
        try:
            with g.attempt():
                branch, scales, divisor = scaled_branch(y, path)
                return fold(g, n, branch, residual, scales, divisor, path)
        except Decline as reason:
            whys.append(str(reason))
    raise Decline(next((why for why in whys if why != NO_BRANCH), NO_BRANCH))


def fold(
    g: Graph,
    n: Node,
    branch: Node,
    residual: Node,
    scales: dict[str, Node],
    divisor: float,
    path: list[Node],
) -> None:
    need(branch is not residual and same_shape(residual, n), "a residual that broadcasts")
    need(is_float(residual), "an integer residual")
    need(val(residual).device == val(n).device, "a residual on another device")
    gone = g.absorb([branch, *path], n)
    scales = {k: as_vector(g, n, s) for k, s in scales.items()}
    if divisor != 1:
        need("row_scale" in scales, "a branch divided by a number")
        scales["row_scale"] = divided(g, n, scales["row_scale"], divisor)
    new = with_epilogue(g, n, branch, residual=residual, **scales)
    g.replace(n, new, gone, " and ".join(["residual", *sorted(scales)]))


def with_epilogue(g: Graph, n: Node, branch: Node, **more: Any) -> Node:
    """The branch's own call once more, with an epilogue."""
    if op(branch) == "linear":
        function, args, kwargs = fk.linear, linear_of(branch)[1:], {}
    else:
        function, args, kwargs = branch.target, branch.args, branch.kwargs  # type: ignore[assignment]
    return g.emit(n, function, *args, **kwargs, **more, like=n)


def as_vector(g: Graph, n: Node, scale: Node) -> Node:
    return scale if val(scale).ndim == 1 else g.emit(n, aten.reshape.default, scale, [-1])


def divided(g: Graph, n: Node, scale: Node, divisor: float) -> Node:
    """In fp32 at least: one rounded factor would scale all of a sample."""
    own = torch.promote_types(val(scale).dtype, val(n).dtype)
    wide = torch.promote_types(own, torch.float32)
    if val(scale).dtype != wide:
        scale = g.emit(n, aten.to.dtype, scale, wide)
    return g.emit(n, aten.div.Tensor, scale, divisor)


def scaled_branch(y: Node, path: list[Node]) -> tuple[Node, dict[str, Node], float]:
    """The product under a layer scale, a row scale and a divisor, in any order."""
    scales: dict[str, Node] = {}
    divisor = 1.0
    while True:
        y = same_tensor(y, path)
        if op(y) in BRANCHES:
            taken = {"residual", "layer_scale", "row_scale"} & {
                k for k, v in y.kwargs.items() if v is not None
            }
            need(not taken, "a branch that has its residual already")
            if op(y) == "linear":
                linear_of(y)
            return y, scales, divisor
        if is_divided(y):
            path.append(y)
            y, by = y.args  # type: ignore[assignment]
            divisor *= by  # type: ignore[operator]
            continue
        need(not draws(y), f"{called(y)} draws random numbers")
        need(op(y) == "mul" and all(map(is_tensor, y.args)), NO_BRANCH)
        path.append(y)
        for z, scale in (y.args, y.args[::-1]):
            kind = scale_kind(scale, y)
            if kind and kind not in scales and same_shape(z, y) and is_product(z):
                scales[kind], y = scale, z
                break
        else:
            for z in y.args:
                need(not draws(z), f"{called(z)} draws random numbers")  # type: ignore[arg-type]
            raise Decline("a branch under a scale that is neither by column nor by sample")


def is_product(z: Node) -> bool:
    z = same_tensor(z, [])
    return op(z) in (*BRANCHES, "mul") or is_divided(z)


def is_divided(y: Node) -> bool:
    """Whether y is something divided by a positive number, as transformers' DropPath does."""
    plain = op(y) == "div" and len(y.args) == 2 and not y.kwargs and is_tensor(y.args[0])
    return plain and is_number(y.args[1]) and 0 < y.args[1] < math.inf and is_float(y.args[0])


def scale_kind(scale: Node, y: Node) -> str | None:
    """layer_scale: one number a column; row_scale: one a sample, which takes no gradient."""
    sizes, full = shape(scale), shape(y)
    if not is_float(scale) or len(full) < 2 or not 0 < len(sizes) <= len(full):
        return None
    if eq(sizes[-1], full[-1]) and not eq(full[-1], 1) and all(eq(s, 1) for s in sizes[:-1]):
        return "layer_scale"
    by_sample = len(sizes) == len(full) and eq(sizes[0], full[0]) and not eq(full[0], 1)
    if by_sample and all(eq(s, 1) for s in sizes[1:]) and not val(scale).requires_grad:
        return "row_scale"
    return None
