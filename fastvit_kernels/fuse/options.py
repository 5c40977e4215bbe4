"""memory="low" and drop_path="skip", over a graph that the rules have been through.

memory="low"       what products keep of a norm's output, and a second norm of the sum that it
                   reads, is made again in the backward: ops/recomputed_norm.py, recomputed_sum.py
drop_path="skip"   samples that stochastic depth drops are not computed: fk.keep_samples draws a
                   fixed count of them, as DINOv2 does, in place of one number a sample
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ops.common.samples import num_kept
from ..ops.recomputed_norm import recomputed_norm
from ..ops.recomputed_sum import recomputed_sum
from . import emitted as fk
from .graph import Graph, need
from .rules.handover import is_read_by_products
from .views import ORDER_KEEPING, bound, eq, filled, hint, is_number, is_tensor, op, shape, val

PAIRS = ("fk.layer_norm_and_input", "fk.rms_norm_and_input")


# memory="low" --------------------------------------------------------------------------------


def memory_low(g: Graph, pair: Node) -> None:
    """y, x = norm_and_input(x); each product that reads y keeps x in its place."""
    y, same = output(pair, 0), output(pair, 1)
    need(y is not None and same is not None, "a norm that hands nothing on")
    need(is_read_by_products(g, y), "a norm that others than products read")
    x, weight, *others = pair.args
    bias, eps = others if op(pair) == PAIRS[0] else (None, *others)
    samples, recompute = pair.kwargs.get("samples"), None
    norm = "layer_norm" if op(pair) == PAIRS[0] else "rms_norm"
    if is_sum(x):
        new = g.emit(pair, of_sum(pair.target), *pair.args, **pair.kwargs)
        recompute = g.emit(pair, operator.getitem, new, 2)
        g.replace(pair, new, [], "memory low, sum")
    given = (same, weight, bias, eps, recompute, norm, samples)
    for u in g.readers(y):
        new = g.emit(u, rebuilding(u.target), y, given, *u.args[1:], **u.kwargs, like=u)
        g.replace(u, new, [], "memory low")


def output(pair: Node, i: int) -> Node | None:
    found = [u for u in pair.users if u.target is operator.getitem and u.args[1] == i]
    return found[0] if len(found) == 1 else None


def is_sum(x: Any) -> bool:
    """Whether x is a linear's result on a residual that a norm handed on."""
    residual = x.kwargs.get("residual") if op(x) == "fk.linear" else None
    handed_on = isinstance(residual, Node) and residual.target is operator.getitem
    return handed_on and op(residual.args[0]) in PAIRS and residual.args[1] == 1


@functools.cache
def of_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """A norm that hands its input on, and what makes that input again, or None."""

    def norm_and_input(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        with recomputed_sum(x) as recompute:
            y, same = function(x, *args, **kwargs)
        return y, same, recompute

    norm_and_input.__name__ = function.__name__
    return norm_and_input


@functools.cache
def rebuilding(function: Callable[..., Any]) -> Callable[..., Any]:
    """A product that keeps of y what makes it again."""

    def product(y: Tensor, norm: tuple[Any, ...], *args: Any, **kwargs: Any) -> Tensor:
        with recomputed_norm(y, *norm):
            return function(y, *args, **kwargs)

    product.__name__ = function.__name__
    return product


# drop_path="skip" ----------------------------------------------------------------------------

# What computes each sample by itself, of its first argument, with no number of samples in it.
BY_SAMPLE = set(
    "fk.qkv_attention fk.rope_attention fk.attention fk.linear fk.mlp fk.gated_mlp flatten "
    "unflatten".split()
)


def keep_samples(x: Tensor, rate: float) -> Tensor:
    """`fk.keep_samples` of the batch of x; of a fake x of any batch, as many as its hint tells."""
    B = x.shape[0]
    if isinstance(B, int):
        return fk.keep_samples(B, rate, device=x.device)
    return torch.empty(num_kept(hint(B), rate) + B, dtype=torch.int64, device=x.device)


def drop_path_skip(g: Graph, n: Node) -> None:
    """What a compiler may see: it is to make no kernels for one number of kept samples."""
    rows = n.kwargs.get("row_scale")
    need(isinstance(rows, Node) and isinstance(shape(rows)[0], int), "a dynamic batch")
    drop_path_skip_of_any_batch(g, n)


def drop_path_skip_of_any_batch(g: Graph, n: Node) -> None:
    """pair -> branch -> n(..., residual=, row_scale=), for the samples that are kept."""
    rows, residual = n.kwargs.get("row_scale"), n.kwargs.get("residual")
    need(isinstance(rows, Node) and isinstance(residual, Node), "no stochastic depth")
    rate, drawing = draw_of(g, rows, n)
    inner, y = branch_of(g, n)
    pair = y.args[0]
    need(y is output(pair, 0) and residual is output(pair, 1), "a residual of another norm")
    need(g.only_reader(residual) is n and "samples" not in pair.kwargs, "a residual read twice")
    nodes = (pair, y, residual, *inner, *drawing)
    need(all(m.meta["region"] == n.meta["region"] for m in nodes), "another region")
    x = pair.args[0]
    need(filled(x) and val(x).ndim >= 3, "no samples")
    samples = g.emit(pair, keep_samples, x, rate)
    both = g.emit(pair, pair.target, *pair.args, **pair.kwargs, samples=samples)
    at, same = (g.emit(pair, operator.getitem, both, i) for i in (0, 1))
    for m in inner:
        at = g.emit(m, m.target, at, *m.args[1:], **m.kwargs)
    epilogue = {**n.kwargs, "residual": same, "row_scale": samples}
    new = g.emit(n, n.target, at, *n.args[1:], **epilogue, like=n)
    g.replace(n, new, [*inner, y, residual, pair, *drawing], "drop_path skip")


def branch_of(g: Graph, n: Node) -> tuple[list[Node], Node]:
    """From the norm's output to the branch's last product: what is between, in order."""
    inner: list[Node] = []
    reader, at = n, n.args[0]
    while True:
        need(isinstance(at, Node) and g.only_reader(at) is reader, "a branch that others read")
        others = [m for m in reader.all_input_nodes if m is not at and is_tensor(m)]
        if reader is n:
            others = [m for m in others if m not in (n.kwargs["residual"], n.kwargs["row_scale"])]
        shared = all(val(m).ndim <= 2 or eq(shape(m)[0], 1) for m in others)
        need(shared, "a branch that reads a table of each sample")
        if at.target is operator.getitem and op(at.args[0]) in PAIRS:
            return inner[::-1], at
        need(op(at) in BY_SAMPLE, f"{at.name} may mix samples")
        plain = at.kwargs.get("residual") is None and at.kwargs.get("row_scale") is None
        need(plain and at.args[0] is not None, "a branch with a residual inside")
        if op(at) in ("flatten", "unflatten"):
            need(at.args[1] != 0, f"{at.name} may mix samples")
        inner.append(at)
        reader, at = at, at.args[0]


def draw_of(g: Graph, rows: Node, reader: Node) -> tuple[float, list[Node]]:
    """The rate of bernoulli(1 - rate) / (1 - rate), one number a sample, and what draws it."""
    drawing: list[Node] = []
    factor, at = 1.0, rows
    while op(at) not in ("bernoulli_", "floor", "floor_"):
        need(isinstance(at, Node) and g.only_reader(at) is reader, "draws that others read")
        drawing.append(at)
        name = op(at).rstrip("_")
        if name in ("div", "mul") and len(at.args) == 2 and not at.kwargs:
            need(is_number(at.args[1]) and at.args[1] > 0, "draws under a scale")
            factor = factor / at.args[1] if name == "div" else factor * at.args[1]
        else:
            need(name in (*ORDER_KEEPING, "to"), "no draws of stochastic depth")
        reader, at = at, at.args[0]
    need(g.only_reader(at) is reader, "draws that others read")
    keep, start = keep_of(at)
    need(all(g.only_reader(m) is not None for m in start), "draws that others read")
    need(is_number(keep) and 0 < keep < 1 and abs(factor * keep - 1) < 1e-6, "draws, not scaled")
    return 1 - keep, [*drawing, *start]


def keep_of(at: Node) -> tuple[Any, list[Node]]:
    """bernoulli_(empty, keep), or floor(rand + keep): the probability of 1, and its nodes."""
    b = bound(at)
    made = b["self"]
    if op(at) == "bernoulli_":
        need(b["generator"] is None and op(made) == "empty", "draws by a generator, or into x")
        return b.get("p"), [at, made]
    need(op(made) == "add" and bound(made).get("alpha") == 1, "no draws of stochastic depth")
    rand, keep = made.args[:2]
    need(op(rand) == "rand" and rand.kwargs.get("generator") is None, "no draws of rand")
    return keep, [at, made, rand]
