"""The product that all others are made of.

linear(x, w, b)          ->  fk.linear(x, w, b)
act(linear(x, w, b))     ->  fk.linear(x, w, b, activation=act)
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from ...ops.common.activation import ACTIVATIONS
from .. import emitted as fk
from ..graph import Decline, Graph, called, draws, is_float, need
from ..views import bound, eq, filled, is_number, is_tensor, op, same_tensor, shape, val


class Linear(NamedTuple):
    """A product as the graph has it."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None


def linear_of(n: Node, why: str = "no linear layer") -> Linear:
    """The parts of a linear layer, or Decline."""
    need(op(n) == "linear", why)
    b = bound(n)
    x, weight, bias = b["input"], b["weight"], b["bias"]
    need(val(weight).ndim == 2 and val(x).ndim >= 2, "a linear layer of vectors")
    need(is_float(x) and filled(x) and filled(weight), "a linear layer of integers, or of nothing")
    need(bias is None or eq(shape(bias), shape(weight)[:1]), "a bias by rows")
    return Linear(n, x, weight, bias)


def activation_of(n: Node, path: list[Node]) -> tuple[str, Node]:
    """The activation that a node is and what it is of; the path gets what it is made of."""
    n = same_tensor(n, path)
    path.append(n)
    if op(n) == "gelu":
        b = bound(n)
        return ("gelu" if b["approximate"] == "none" else "gelu_tanh"), b["self"]
    if op(n) == "silu":
        return "silu", n.args[0]  # type: ignore[return-value]
    if op(n) == "mul" and len(n.args) == 2 and all(map(is_tensor, n.args)):
        for z, gate in (n.args, n.args[::-1]):
            if op(gate) != "sigmoid":
                continue
            inner = gate.args[0]
            if inner is z:
                path.append(gate)
                return "silu", z
            if op(inner) == "mul" and inner.args[0] is z and is_quick(inner.args[1]):
                path += [gate, inner]
                return "quick_gelu", z
    need(not draws(n), f"{called(n)} draws random numbers")
    raise Decline(f"{called(n)} is none of {', '.join(ACTIVATIONS)}")


def is_quick(factor: object) -> bool:
    return is_number(factor) and factor == 1.702


def activated_linear(g: Graph, n: Node) -> None:
    path: list[Node] = []
    kind, z = activation_of(n, path)
    lin = linear_of(same_tensor(z, path), "an activation of no linear layer")
    gone = g.absorb([lin.node, *path], n)
    new = g.emit(n, fk.linear, lin.x, lin.weight, lin.bias, activation=kind, like=n)
    g.replace(n, new, gone, "linear and activation")


def plain_linear(g: Graph, n: Node) -> None:
    lin = linear_of(n)
    gone = g.absorb([], n)
    new = g.emit(n, fk.linear, lin.x, lin.weight, lin.bias, like=n)
    g.replace(n, new, gone, "linear")
