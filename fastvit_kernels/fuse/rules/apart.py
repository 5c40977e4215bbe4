"""What runs in our ops, but not as one: no rewriting, a row of the report.

linear(act(linear(x))) that stays two products    ->  why the rule for it declined
residual + branch(x) that stays a sum             ->  the same
"""

from __future__ import annotations

import math
import operator
from itertools import permutations, takewhile

import torch
from torch.fx import Node

from ..graph import Graph, is_float, is_foreign_linear, path_of, same_shape
from ..views import (
    ORDER_KEEPING,
    SEVERAL_VIEWS,
    VIEWS,
    bound,
    hint,
    is_tensor,
    op,
    same_place,
    shape,
)
from .epilogue import BRANCHES, NO_BRANCH
from .mlp import NO_GATE

NORMS = {"layer_norm", "rms_norm", "fk.layer_norm", "fk.rms_norm"}
ARITHMETIC = {"add", "sub", "mul", "div", "neg", "to", "_to_copy", "type_as", "dropout"}
TURNS = set("permute transpose t movedim swapaxes swapdims moveaxis numpy_T mT".split())
PASSED = (VIEWS - TURNS) | SEVERAL_VIEWS | ORDER_KEEPING | NORMS | ARITHMETIC | {"dropout_"}
UNTAGGED = {"prelu", "hardswish", "log_sigmoid", "glu"}  # torch does not tag them as pointwise


def mlp_apart(g: Graph, n: Node) -> None:
    """An MLP, gated or not: its last linear reads an activation of linears of one input."""
    products, inner = branch(bound(n)["input"], ("linear",))
    if not products or not any(map(is_activation, inner)):
        return
    if any(map(is_foreign_linear, (n, *products))):  # it has a row of its own
        return
    first = products[0]
    x, *others = (bound(product)["input"] for product in products)
    of_one_input = all(same_place(other, x) for other in others)
    if not of_one_input and not any(op(m) == "add" for m in inner):  # LoRA adds to the first linear
        return
    why, kind = g.reasons[n]["gated_mlp"], "gated_mlp"
    if why == NO_GATE or not of_one_input:
        why, kind = g.reasons[n]["mlp"], "mlp"
    number = {1: "two", 2: "three"}.get(len(products), "several")
    g.apart.append((around(n, first), kind, f"runs as {number} linears: {why}"))


def residual_apart(g: Graph, n: Node) -> None:
    """A sum with a residual that the product before it could have written."""
    why = g.reasons[n]["epilogue"]
    for y, residual in permutations(n.args, 2) if why != NO_BRANCH else ():
        if not (is_float(y) and is_float(residual) and same_shape(residual, n)):
            continue
        products, inner = branch(y, BRANCHES)
        products = [m for m in products if same_shape(m, n)]  # a scale may be of another's
        if any(op(m) in NORMS or is_activation(m) for m in inner) or len(products) != 1:
            continue
        if is_free(products[0], why):
            why = f"added by itself, not by the product before it: {why}"
            return g.apart.append((path_of(n), "residual", why))


def branch(n: Node, ends: tuple[str, ...]) -> tuple[list[Node], list[Node]]:
    """The products that a value is made of element by element, and what stands between; none where
    anything else of its size goes in."""
    products: list[Node] = []
    inner: list[Node] = []
    todo = [n]
    for at in todo:
        if op(at) in ends:
            products.append(at)
        elif is_passed(at):
            inner.append(at)
            todo += [a for a in at.all_input_nodes if a not in todo]
        elif is_tensor(at) and size(at) >= size(n):
            return [], []
    return products, inner


def size(n: Node) -> int:
    return math.prod(map(hint, shape(n)))


def is_passed(n: Node) -> bool:
    return op(n) in PASSED or n.target is operator.getitem or is_activation(n)


def is_activation(n: Node) -> bool:
    """Whether a node computes element by element what arithmetic and views do not."""
    if op(n) in PASSED:
        return False
    is_operator = isinstance(n.target, torch._ops.OpOverload)
    return op(n) in UNTAGGED or (is_operator and torch.Tag.pointwise in n.target.tags)


def is_free(product: Node, why: str) -> bool:
    """Whether a product of ours has no residual, and is no factor of something else."""
    is_read_once = len(product.users) == 1 or "read elsewhere" in why
    is_ours = is_read_once and not is_foreign_linear(product)
    return is_ours and product.kwargs.get("residual") is None


def around(*nodes: Node) -> str:
    """The module that holds the modules of all."""
    parts = zip(*(path_of(n).split(".") for n in nodes), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))
