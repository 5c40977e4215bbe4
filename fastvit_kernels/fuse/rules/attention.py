"""softmax(scale q k^T + mask) v, with the products before it where one input makes all three.

    q, k, v = views of linear(x)               ->  fk.qkv_attention(x, w, b)
    q, k, v = views of linears of one x        ->  fk.qkv_attention(x, cat(w), cat(b))
    the same, q and k turned (rope.py)         ->  fk.rope_attention(x, w, b, cos=cos, sin=sin)
    the same under a mask                      ->  fk.attention(fk.linear(x, w, b), attn_mask=mask)
    scaled_dot_product_attention(q, k, v)      ->  fk.scaled_dot_product_attention(q, k, v)

Where the heads are joined behind it, (B, H, T, D) -> (B, T, H D), the new call stands past that:
its result lies by tokens already.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .. import emitted as fk
from ..graph import Decline, Graph, aten, is_float, need, storages
from ..views import (
    ORDER_KEEPING,
    View,
    bound,
    eq,
    filled,
    is_number,
    is_tensor,
    op,
    origin,
    same_map,
    same_place,
    same_tensor,
    shape,
    val,
    view,
)
from . import rope
from .linear import Linear, linear_of
from .masks import shows_all


class Call(NamedTuple):
    """An attention as the graph has it."""

    node: Node  # its result, (B, H, T, D)
    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout: float
    is_causal: bool
    scale: float
    draw: Node | None  # the node that draws the dropout
    path: list[Node]  # what stands between q, k, v and the result


@dataclass
class Heads:
    """Where queries, keys or values come from."""

    linear: Linear
    start: int  # first column
    sequence_first: bool = False  # whether the rows of the product are (T, B), not (B, T)
    scale: float = 1.0
    path: list[Node] = field(default_factory=list)


def sdpa(g: Graph, n: Node) -> None:
    b = bound(n)
    q, k, v, mask = b["query"], b["key"], b["value"], b["attn_mask"]
    p, scale = b["dropout_p"], b["scale"]
    check_heads(q, k, v)
    need(is_number(p) and 0 <= p < 1, f"a dropout of {p}")
    D = val(q).shape[-1]
    scale = D**-0.5 if scale is None else scale
    need(is_number(scale) and math.isfinite(scale) and scale > 0, f"a scale of {scale}")
    check_mask(mask, q)
    mask = None if mask is not None and shows_all(g, mask) else mask
    call = Call(n, q, k, v, mask, float(p), b["is_causal"], float(scale), n if p else None, [])
    if b["enable_gqa"]:
        return by_heads(g, call, enable_gqa=True)
    attend(g, call)


def check_heads(q: Node, k: Node, v: Node) -> None:
    for t in (q, k, v):
        need(
            val(t).ndim in (3, 4, 5) and is_float(t) and filled(t), "heads of other than four axes"
        )
        need(val(t).ndim == val(q).ndim, "heads of different ranks")
    D = val(q).shape[-1]
    need(isinstance(D, int) and D % 8 == 0 and D <= 256, f"a head dim of {D}")


def check_mask(mask: Node | None, q: Node) -> None:
    if mask is not None:
        need(val(mask).dtype == torch.bool or is_float(mask), "a mask of integers")
        # torch's kernel for CPUs reads such a mask's memory as float64
        misread = val(q).dtype == torch.float64 and val(mask).dtype == torch.float32
        need(not misread, "a float32 mask beside float64")


def attend(g: Graph, call: Call) -> None:
    """The widest op that the operands allow."""
    ways = (packed, packed_with_mask, packed_and_turned, turned_by_heads, by_heads)
    if val(call.node).ndim != 4:
        ways = (as_four_axes,)
    why = ""
    for way in ways:
        try:
            with g.attempt():
                return way(g, call)
        except Decline as reason:
            why = str(reason)
    raise Decline(why)


def packed(g: Graph, call: Call) -> None:
    """With the projection, as one op."""
    need(call.mask is None and not call.is_causal, "a mask")
    x, weight, bias, scale, path = projection(g, call, heads(call.q), heads(call.k))
    H = val(call.q).shape[1]
    options = dict(num_heads=H, scale=call.scale * scale, dropout_p=call.dropout)
    finish(g, call, path, fk.qkv_attention, (x, weight, bias), options, "qkv_attention")


def packed_with_mask(g: Graph, call: Call) -> None:
    """The projection by itself, then attention that reads it packed."""
    need(call.mask is not None and not call.is_causal, "no mask, or a causal one")
    B, H, T, D = shape(call.q)
    check_broadcast(call.mask, (B, H, T, T), by_windows=True)
    x, weight, bias, scale, path = projection(g, call, heads(call.q), heads(call.k))
    root = end_of(g, call)
    qkv = g.emit(root, fk.linear, x, weight, bias)
    qkv = g.emit(root, aten.unflatten.int, qkv, -1, [3, H, D])
    options = dict(attn_mask=call.mask, scale=call.scale * scale, dropout_p=call.dropout)
    finish(g, call, path, fk.attention, (qkv,), options, "attention")


def packed_and_turned(g: Graph, call: Call) -> None:
    """With the projection, norms and rotary embedding of queries and keys, as one op."""
    q, k = turned_heads(call, call.q), turned_heads(call, call.k)
    need(rope.normed_alike(q, k), "different norms of queries and keys")
    need(call.mask is None and not call.is_causal, "a mask")
    need(val(call.v).dtype == val(q.x).dtype, "values of another dtype")
    before = heads(q.x, q.by_tokens), heads(k.x, k.by_tokens)
    plain = q.norm is None or all(part.scale == 1.0 for part in before)
    need(plain, "a scale before a norm")
    x, weight, bias, scale, path = projection(g, call, *before)
    root = end_of(g, call)
    options = dict(num_heads=val(call.q).shape[1], **rope.arguments(g, root, q, k))
    options |= dict(scale=call.scale * q.scale * k.scale * scale, dropout_p=call.dropout)
    path = [*path, *q.path, *k.path]
    finish(g, call, path, fk.rope_attention, (x, weight, bias), options, "rope_attention")


def turned_by_heads(g: Graph, call: Call) -> None:
    """Queries and keys turned by one op, then attention."""
    q, k = turned_heads(call, call.q), turned_heads(call, call.k)
    if not rope.normed_alike(q, k):
        q, k = turned_heads(call, call.q, False), turned_heads(call, call.k, False)
    need(eq(shape(call.q), shape(call.k)), "keys of another shape than queries")
    alike = val(q.x).dtype == val(k.x).dtype and val(q.x).device == val(k.x).device
    need(alike, "keys of another dtype or device than queries")
    root = end_of(g, call)
    options = rope.arguments(g, root, q, k)
    given = [t.x if t.by_tokens else g.emit(root, aten.transpose.int, t.x, 1, 2) for t in (q, k)]
    both = g.emit(root, fk.rope, *given, **options)
    parts = [g.emit(root, operator.getitem, both, i) for i in (0, 1)]
    parts = [g.emit(root, aten.transpose.int, part, 1, 2) for part in parts]
    path = [*q.path, *k.path, *call.path]
    scale = call.scale * q.scale * k.scale
    by_heads(g, call._replace(q=parts[0], k=parts[1], scale=scale, path=path), rule="rope")


def turned_heads(call: Call, n: Node, with_norm: bool = True) -> rope.Turned:
    """Queries or keys before they turn, under a scale."""
    path: list[Node] = []
    at, scale = scaled(same_tensor(n, path), path)
    kind = val(n).device.type
    read_as = dict(call.node.meta["region"].autocast).get(kind, val(n).dtype)
    found = rope.turned(at, read_as, with_norm)
    found.scale, found.path = scale, [*path, *found.path]
    return found


def by_samples(g: Graph, call: Call) -> Node:
    """The mask; one of W windows repeated for each image, as its sum with the scores would be."""
    mask, B = call.mask, shape(call.q)[0]
    scores = (*shape(call.q)[:3], shape(call.k)[2])
    check_broadcast(mask, scores, by_windows=True)
    W = shape(mask)[0]
    if val(mask).ndim < 4 or eq(W, 1) or eq(W, B):
        return mask
    root = end_of(g, call)
    images = g.emit(root, aten.expand.default, mask, [B // W, *shape(mask)])
    return g.emit(root, aten.flatten.using_ints, images, 0, 1)


def check_broadcast(mask: Node, scores: tuple[Any, ...], by_windows: bool = False) -> None:
    """A mask of (B, H, T, S), axes of 1 or missing; perhaps of W windows, a divisor of B."""
    sizes = (1,) * (4 - val(mask).ndim) + shape(mask)
    need(len(sizes) == 4, "a mask of more than four axes")
    for i, (a, b) in enumerate(zip(sizes, scores, strict=True)):
        fits = eq(a, 1) or eq(a, b) or (i == 0 and by_windows and eq(b % a, 0))
        need(fits, "a mask of another shape than the scores")


def finish(
    g: Graph, call: Call, path: list[Node], op: Any, args: tuple, options: dict, rule: str
) -> None:
    """An op that gives (B, T, H, D), in place of the attention or of its joined heads."""
    n = call.node
    root, way = joined(g, n)
    check_kept(g, call, root)
    gone = g.absorb([*path, *call.path, n, *way], root, draw=call.draw)
    out = g.emit(root, op, *args, **options)
    g.replace(root, handed_out(g, call, root, in_place_of(g, root, n, out)), gone, rule)


def check_kept(g: Graph, call: Call, root: Node, mask: Node | None = None) -> None:
    """Our attention keeps its result and what it reads for the backward, as products of matrices
    that they copied first do not."""
    operands = [n for n in (call.q, call.k, call.v, mask) if n is not None]
    if not val(root).requires_grad:
        return
    writer = g.writer([root, *operands], root, g.graph.output_node())
    need(writer is None, f"{writer} may write to what attention keeps")
    shown = storages(list(map(val, operands))) & g.handed_out()
    need(is_sdpa(call) or not shown, "a caller may write to what attention keeps")


def handed_out(g: Graph, call: Call, root: Node, new: Node) -> Node:
    """A result that the graph gives to a caller, who may write to it: a copy, as written attention
    does not keep its own."""
    given = val(root).requires_grad and storages(val(root)) & g.handed_out()
    return g.emit(root, aten.clone.default, new) if given and not is_sdpa(call) else new


def is_sdpa(call: Call) -> bool:
    return op(call.node) == "scaled_dot_product_attention"


def in_place_of(g: Graph, root: Node, n: Node, out: Node) -> Node:
    """(B, T, H, D) as what stood at root: (B, H, T, D), (B, T, H D), (T, B, H D) or (T B, H D)."""
    if root is n:
        return g.laid_out(root, g.emit(root, aten.transpose.int, out, 1, 2), n)
    rows = g.emit(root, aten.flatten.using_ints, out, 2)
    B, H, T, D = shape(n)
    if eq(shape(root), (B, T, H * D)) and not joined_by_token(g, n):
        return g.laid_out(root, rows, root)
    rows = g.emit(root, aten.transpose.int, rows, 0, 1)
    if val(root).ndim == 2:
        rows = g.emit(root, aten.flatten.using_ints, rows, 0, 1)
    return g.laid_out(root, rows, root)


def by_heads(g: Graph, call: Call, enable_gqa: bool = False, rule: str = "attention") -> None:
    """Queries, keys and values as they are."""
    n = call.node
    need(val(n).ndim == 4, "heads of other than four axes")
    mask = None if call.mask is None else by_samples(g, call)
    options = dict(
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=enable_gqa,
    )
    root, way = joined(g, n)
    check_kept(g, call, root, mask)
    gone = g.absorb([*call.path, n, *way], root, draw=call.draw)
    out = g.emit(root, fk.scaled_dot_product_attention, call.q, call.k, call.v, **options)
    if root is n:
        new = g.laid_out(root, out, n)
    else:
        by_token = g.emit(root, aten.transpose.int, out, 1, 2)
        new = in_place_of(g, root, n, by_token)
    g.replace(root, handed_out(g, call, root, new), gone, rule)


def as_four_axes(g: Graph, call: Call) -> None:
    """Heads in the batch, (B H, T, D), as those of one sample; (B, W, H, T, D) as B W samples."""
    n, mask = call.node, call.mask
    check_kept(g, call, n, mask)
    gone = g.absorb(call.path, n, draw=call.draw)
    flat = val(n).ndim == 5
    if flat:
        need(mask is None or val(mask).ndim <= 3, "a mask of five axes")
        q, k, v = (g.emit(n, aten.flatten.using_ints, t, 0, 1) for t in (call.q, call.k, call.v))
    else:
        q, k, v = (g.emit(n, aten.unsqueeze.default, t, 0) for t in (call.q, call.k, call.v))
    if mask is not None:
        check_broadcast(mask, (*shape(q)[:3], shape(k)[2]))
    options = dict(
        attn_mask=mask, dropout_p=call.dropout, is_causal=call.is_causal, scale=call.scale
    )
    out = g.emit(n, fk.scaled_dot_product_attention, q, k, v, **options)
    if flat:
        out = g.emit(n, aten.unflatten.int, out, 0, [-1, shape(n)[1]])
    else:
        out = g.emit(n, aten.squeeze.dim, out, 0)
    g.replace(n, handed_out(g, call, n, g.laid_out(n, out, n)), gone, "attention")


def joined(g: Graph, n: Node) -> tuple[Node, list[Node]]:
    """Where (B, H, T, D) has become (B, T, H D), (T, B, H D) or (T B, H D), and the nodes on the
    way; or n itself."""
    B, H, T, D = shape(n)
    turned = g.only_reader(n)
    if turned is None or op(turned) not in ("transpose", "permute", "swapaxes", "movedim"):
        return n, []
    if joined_by_token(g, n):
        wanted = ((T, B, H * D), (T * B, H * D))
    elif same_map(view(turned), view(n).turned(0, 2, 1, 3)):
        wanted = ((B, T, H * D),)
    else:
        return n, []
    way, at = [], turned
    while (reader := g.only_reader(at)) is not None and op(reader) in ORDER_KEEPING:
        way.append(at)
        if any(eq(shape(reader), sizes) for sizes in wanted):
            return reader, way
        at = reader
    return n, []


def end_of(g: Graph, call: Call) -> Node:
    """Where the new call stands: behind the joined heads, or at the attention itself."""
    return joined(g, call.node)[0]


def joined_by_token(g: Graph, n: Node) -> bool:
    """Whether (B, H, T, D) is turned to (T, B, H, D), as nn.MultiheadAttention does."""
    turned = g.only_reader(n)
    return turned is not None and same_map(view(turned), view(n).turned(2, 0, 1, 3))


def heads(n: Node, by_tokens: bool = False) -> Heads:
    """(B, H, T, D), or by tokens (B, T, H, D), as columns of a linear layer's result."""
    path: list[Node] = []
    at, scale = scaled(same_tensor(n, path), path)
    base, where = origin(at, path)
    linear = linear_of(base, "queries, keys and values of no linear layer")
    need(val(n).ndim == 4, "heads of other than four axes")
    where = where.turned(0, 2, 1, 3) if by_tokens else where
    B, H, T, D = where.shape
    N, start = val(base).shape[-1], where.offset
    need(val(base).is_contiguous() and eq(val(base).numel(), B * T * N), "rows of other tokens")
    need(isinstance(start, int) and isinstance(H, int), "a dynamic number of heads")
    by_batch = View(where.storage, start, (B, H, T, D), (T * N, D, N, 1))
    by_token = by_batch._replace(stride=(N, D, B * N, 1))
    sequence_first = not same_map(where, by_batch)
    need(not sequence_first or same_map(where, by_token), "heads in another order")
    return Heads(linear, start, sequence_first, scale, [base, *path])


def scaled(n: Node, path: list[Node]) -> tuple[Node, float]:
    """Back through a product with a number."""
    if op(n) != "mul" or not is_tensor(n.args[0]) or not is_number(n.args[1]):
        return n, 1.0
    x, factor = n.args
    if not 0 < factor < math.inf or val(x).dtype != val(n).dtype:
        return n, 1.0
    if factor > 1 and val(n).dtype == torch.float16:
        return n, 1.0  # it may overflow, which the kernels' fp32 would not
    path.append(n)
    return same_tensor(x, path), float(factor)


def projection(
    g: Graph, call: Call, q: Heads, k: Heads
) -> tuple[Node, Node, Node | None, float, list[Node]]:
    """x (B, T, C), weight (3 H D, C), bias of the one product; a scale of the scores; the path."""
    v = heads(call.v)
    need(v.scale == 1.0, "values under a scale")
    B, H, T, D = shape(call.q)
    x = q.linear.x
    sizes_agree = all(eq(shape(t), shape(call.q)) for t in (call.k, call.v))
    need(sizes_agree, "keys or values of another shape than queries")
    need(
        all(same_place(part.linear.x, x) for part in (k, v)),
        "queries and keys of different inputs",
    )
    need(q.sequence_first == k.sequence_first == v.sequence_first, "rows in different orders")
    root = end_of(g, call)
    weight, bias = packed_weights(g, root, (q, k, v), H * D)
    if q.sequence_first:
        need(eq(shape(x)[:-1], (T, B)), "rows of other tokens")
        x = g.emit(root, aten.transpose.int, x, 0, 1)
    elif not eq(shape(x)[:-1], (B, T)):
        sizes = [B, T, shape(x)[-1]]
        need(all(isinstance(s, int) for s in sizes[1:]), "tokens of dynamic number by windows")
        x = g.emit(root, aten.reshape.default, x, [-1, *sizes[1:]])
    return x, weight, bias, q.scale * k.scale, [*q.path, *k.path, *v.path]


def packed_weights(
    g: Graph, root: Node, parts: tuple[Heads, ...], C: Any
) -> tuple[Node, Node | None]:
    """Weight rows [q; k; v] and their bias, joined where they lie apart."""
    layers = list(dict.fromkeys(part.linear for part in parts))
    starts = tuple((layers.index(part.linear), part.start) for part in parts)
    wanted = {
        1: ((0, 0), (0, C), (0, 2 * C)),
        2: ((0, 0), (1, 0), (1, C)),
        3: ((0, 0), (1, 0), (2, 0)),
    }
    need(starts == wanted[len(layers)], "queries, keys and values in another order")
    rows = sum(val(layer.weight).shape[0] for layer in layers)
    need(eq(rows, 3 * C), "a projection with other columns too")
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    weight = g.emit(root, aten.cat.default, [layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    return weight, g.emit(root, aten.cat.default, [bias_of(g, root, layer) for layer in layers])


def bias_of(g: Graph, root: Node, layer: Linear) -> Node:
    if layer.bias is not None:
        return layer.bias
    w = val(layer.weight)
    return g.emit(root, aten.zeros.default, [w.shape[0]], dtype=w.dtype, device=w.device)
