"""Images to tokens: the patch convolution, with the prefix tokens and positions behind it.

conv2d, conv3d (stride = kernel) as (B, T, C)    ->  fk.patch_embed(images, w, b)
the same as a grid (B, h, w, C)                  ->  unflatten(fk.patch_embed(images, w, b))
cat([prefix expanded, ..., tokens], 1)           ->  fk.patch_embed(..., prefix_tokens=prefix)
tokens + pos                                     ->  fk.patch_embed(..., pos_embed=pos)

Positions stand before the prefix (DeiT III, DINOv2) or behind it (ViT). The convolution's tokens
lie by channels, the op's by tokens: all that reads them goes on with other strides where nobody can
tell, else they are copied.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Node

from .. import emitted as fk
from ..graph import Decline, Graph, aten, is_float, need
from ..views import (
    View,
    bound,
    eq,
    filled,
    is_tensor,
    op,
    same_map,
    same_tensor,
    shape,
    val,
    view,
    view_base,
)

LONGEST_WAY = 6  # views between a convolution and its tokens


def patch_embed(g: Graph, n: Node) -> None:
    images, weight, bias = patches_of(n)
    root, way, is_grid = tokens_of(g, n)
    behind = Behind(root) if is_grid else followed(g, root)
    gone = g.absorb([n, *way, root, *behind.path], behind.root)
    root, extra = behind.root, {}
    if behind.prefix:
        rows = [p.emit(g, root) for p in behind.prefix]
        extra["prefix_tokens"] = rows[0] if len(rows) == 1 else g.emit(root, aten.cat.default, rows)
    if behind.pos is not None:
        extra["pos_embed"] = behind.pos.emit(g, root)
    new = g.emit(root, fk.patch_embed, images, weight, bias, **extra)
    if is_grid:
        new = g.emit(root, aten.unflatten.int, new, 1, list(shape(n)[2:]))
    put(g, root, new, gone, " and ".join(["patch_embed", *extra]))


def put(g: Graph, root: Node, new: Node, gone: list[Node], rule: str) -> None:
    """new in place of root, whose strides may be others."""
    g.check_alike(new, root)
    try:
        found = g.restride(root, new)
    except Exception:  # a view that strides do not allow, or a Decline
        g.replace(root, g.laid_out(root, new, root), gone, rule)
    else:
        g.replace(root, new, gone, rule, found)


def patches_of(n: Node) -> tuple[Node, Node, Node | None]:
    """Images, weight and bias of a convolution that meets every pixel once."""
    b = bound(n)
    images, weight, bias = b["input"], b["weight"], b["bias"]
    kernel = shape(weight)[2:]
    is_batch = val(images).ndim == val(weight).ndim == len(kernel) + 2
    need(is_batch and is_float(images) and filled(images), "a convolution of no batch of images")
    need(all(isinstance(k, int) for k in kernel), "a kernel of dynamic size")
    need(any(k > 1 for k in kernel), "a convolution of single pixels")
    need(each(b["stride"], kernel) == kernel, "a convolution whose patches overlap or are apart")
    padding = (0,) if b["padding"] == "valid" else b["padding"]
    need(not isinstance(padding, str) and not any(padding), "a convolution with padding")
    need(set(b["dilation"]) == {1} and b["groups"] == 1, "a dilated or grouped convolution")
    divides = all(eq(s % k, 0) for s, k in zip(shape(images)[2:], kernel, strict=True))
    need(divides, "sizes of images that are no multiples of the patch")
    need(bias is None or eq(shape(bias), shape(weight)[:1]), "a bias of another shape")
    return images, weight, bias


def each(sizes: Any, kernel: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(sizes) * (len(kernel) if len(sizes) == 1 else 1)


def tokens_of(g: Graph, n: Node) -> tuple[Node, list[Node], bool]:
    """Where the convolution has become (B, T, C), else (B, *grid, C); and the views up to there."""
    base = view(n)
    B, C, *grid = base.shape
    steps = base.stride[2:]
    for size, step, outer in zip(grid[1:], steps[1:], steps, strict=False):
        need(eq(outer, step * size), "a convolution whose rows lie apart")
    tokens = base._replace(
        shape=(B, math.prod(grid), C), stride=(base.stride[0], steps[-1], base.stride[1])
    )
    maps = base.turned(0, *range(2, 2 + len(grid)), 1)
    found, way, at = None, [], n
    for _ in range(LONGEST_WAY):
        reader = g.only_reader(at)
        if reader is None or not is_tensor(reader) or view_base(reader) is not at:
            break
        if same_map(view(reader), tokens):
            return reader, way, False
        if same_map(view(reader), maps):
            found = reader, list(way), True
        way.append(reader)
        at = reader
    if found is None:
        raise Decline("a convolution that is not read as tokens")
    return found


class Rows(NamedTuple):
    """A table that all samples share, (n, C): a node that has its elements."""

    base: Node
    seen: View  # its rows, as the model reads them

    def emit(self, g: Graph, root: Node) -> Node:
        rows = self.base
        if not eq(shape(rows), self.seen.shape):
            rows = g.emit(root, aten.reshape.default, rows, list(self.seen.shape))
        need(same_map(view(rows), self.seen), "a table in another order")
        return rows


@dataclass
class Behind:
    """What follows the tokens: up to where, and which tables."""

    root: Node
    path: list[Node] = field(default_factory=list)
    prefix: list[Rows] = field(default_factory=list)
    pos: Rows | None = None


def followed(g: Graph, tokens: Node) -> Behind:
    """Positions, prefix tokens, positions: each where it is there."""
    found = Behind(tokens)
    for step in (add_positions, add_prefix, add_positions):
        reader = g.only_reader(found.root)
        path: list[Node] = []
        with contextlib.suppress(Decline):
            need(reader is not None and is_tensor(reader), "tokens that several read")
            step(found, reader, path)
            found.path += [*path, found.root]
            found.root = reader
    return found


def add_positions(found: Behind, n: Node, path: list[Node]) -> None:
    need(op(n) == "add" and found.pos is None and bound(n).get("alpha") == 1, "no sum")
    a, b = n.args[:2]
    pos = b if a is found.root else a
    need(is_tensor(pos) and pos is not found.root, "a sum with a number, or with itself")
    found.pos = table(pos, shape(found.root)[1:], path)


def add_prefix(found: Behind, n: Node, path: list[Node]) -> None:
    need(op(n) == "cat", "no cat")
    b = bound(n)
    *parts, last = b["tensors"]
    need(b["dim"] in (1, -2) and last is found.root and parts, "a cat in another order")
    need(found.root not in parts, "tokens twice")
    C = shape(found.root)[-1]
    for p in parts:
        need(is_tensor(p) and val(p).ndim == 3, "a prefix of other than three axes")
    found.prefix = [table(p, (shape(p)[1], C), path) for p in parts]


def table(n: Node, rows: tuple[Any, ...], path: list[Node]) -> Rows:
    """(B, *rows), the same for all samples, or (1, *rows), (*rows): the node that it repeats."""
    need(is_float(n), "a table of integers")
    n = same_tensor(n, path)
    if op(n) == "repeat":
        path.append(n)
        base, repeats = n.args
        need(all(isinstance(r, int) and r == 1 for r in repeats[1:]), "a table repeated by rows")
        need(len(repeats) == 3 and eq(shape(base), (1, *rows)), "a table of other rows")
        n = base
    seen = view(n)
    if val(n).ndim == 3:
        shared = eq(shape(n)[0], 1) or eq(seen.stride[0], 0)
        need(shared, "a table of each sample")
        seen = seen._replace(shape=seen.shape[1:], stride=seen.stride[1:])
    need(eq(seen.shape, rows), "a table of other rows")
    while not eq(val(n).numel(), math.prod(rows)):
        base = view_base(n)
        need(base is not None, "a table of each sample")
        path.append(n)
        n = base
    return Rows(n, seen)
