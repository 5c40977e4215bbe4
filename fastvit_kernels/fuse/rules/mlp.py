"""The two products of an MLP and what stands between them.

linear(act(linear(x)))                                ->  fk.mlp(x, ...)
linear(act(gate) * value), of one product's halves    ->  fk.gated_mlp(x, ..., gate_last=)
linear(act(linear(x)) * linear(x))                    ->  fk.gated_mlp(x, ..., gate_weight=)
linear(layer_norm(act(gate) * value))                 ->  fk.gated_mlp(x, ..., norm_weight=)
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ...ops.common.activation import ACTIVATIONS
from .. import emitted as fk
from ..graph import Decline, Graph, called, need
from ..views import eq, is_tensor, op, same_map, same_tensor, shape, source, val, view
from .linear import Linear, activation_of, linear_of

NO_GATE = "no product of a gate and a value"


def mlp(g: Graph, n: Node) -> None:
    fc2 = linear_of(n)
    path: list[Node] = []
    kind, z = activation_of(fc2.x, path)
    z = same_tensor(z, path)
    fc1 = linear_of(z, f"{called(z)} between the first linear and its activation")
    gone = g.absorb([fc1.node, *path], n)
    weights = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
    g.replace(n, g.emit(n, fk.mlp, fc1.x, *weights, activation=kind, like=n), gone, "mlp")


def gated_mlp(g: Graph, n: Node) -> None:
    fc2 = linear_of(n)
    path: list[Node] = []
    hidden, norm = inner_norm(fc2.x, path)
    is_product = op(hidden) == "mul" and len(hidden.args) == 2 and all(map(is_tensor, hidden.args))
    need(is_product, NO_GATE)
    path.append(hidden)
    for gate, value in (hidden.args, hidden.args[::-1]):
        own: list[Node] = []
        try:
            kind, z = activation_of(gate, own)
        except Decline:
            continue
        fc1, options = gate_and_value(z, value, own)
        products = [fc1.node, *([] if "gate_weight" not in options else [source(z, [])])]
        gone = g.absorb([*products, *own, *path], n)
        weights = (fc1.weight, fc1.bias, fc2.weight, fc2.bias)
        options = {**options, **norm, "activation": kind}
        new = g.emit(n, fk.gated_mlp, fc1.x, *weights, **options, like=n)
        return g.replace(n, new, gone, "gated_mlp")
    raise Decline(f"a gate whose activation is none of {', '.join(ACTIVATIONS)}")


def inner_norm(x: Node, path: list[Node]) -> tuple[Node, dict[str, Any]]:
    """What a LayerNorm inside the MLP is of, and its parameters as fk.gated_mlp takes them."""
    hidden = same_tensor(x, path)
    if op(hidden) != "fk.layer_norm" or hidden.kwargs or hidden.args[1] is None:
        return hidden, {}
    path.append(hidden)
    of, weight, bias, eps = hidden.args
    return same_tensor(of, path), dict(norm_weight=weight, norm_bias=bias, norm_eps=eps)


def gate_and_value(z: Node, value: Node, path: list[Node]) -> tuple[Linear, dict[str, Any]]:
    """The product of the value, and where its gate is: a product of its own, or its other half."""
    gate, whole = source(z, path), source(value, path)
    one, other = (
        linear_of(gate, "a gate of no linear layer"),
        linear_of(whole, "a value of no linear"),
    )
    if gate is not whole:
        apart = same_map(view(z), view(gate)) and same_map(view(value), view(whole))
        need(apart and other.x is one.x, "gate and value of different inputs")
        return other, dict(gate_weight=one.weight, gate_bias=one.bias)
    base, F = view(gate), val(gate).shape[-1] // 2
    need(eq(shape(gate)[-1], 2 * F), "gate and value of an odd width")
    halves = [base._replace(offset=base.offset + at, shape=(*base.shape[:-1], F)) for at in (0, F)]
    for last in (False, True):
        if same_map(view(z), halves[last]) and same_map(view(value), halves[not last]):
            return one, dict(gate_last=last)
    raise Decline("gate and value are not the halves of a product")
