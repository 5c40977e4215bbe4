"""Rotary embeddings of queries and keys, after an optional norm of each head.

    q * cos + partner(q) * sin, k alike   ->  fk.rope_attention(x, w, b, cos=cos, sin=sin, ...)
                                              or fk.rope(q, k, cos, sin, ...), then attention
    the same of norm(q), norm(k)          ->  norm="layer_norm" or "rms_norm"

rotation.py reads what turns, rope_tables.py the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..graph import Graph, is_float, need
from ..views import holds, input_of, op, same_map, same_place, shape, uncast, val, view, view_base
from .rope_tables import same_value, tables
from .rotation import Rotation, rotation_of


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


def turned(n: Node, dtype: torch.dtype, with_norm: bool = True) -> Turned:
    """Heads (B, H, T, D) that attention reads in a dtype, or Decline where they do not turn."""
    path: list[Node] = []
    at, by_tokens = in_layout(n, False, path, rounds=True)
    rotation, x = rotation_of(at, 1 if by_tokens else 2, path)
    check_dtypes(path, x, dtype)
    inner_path: list[Node] = []
    at, normed_by_tokens = in_layout(x, by_tokens, inner_path)
    norm = norm_of(at, val(n).shape[-1]) if with_norm else None
    if norm is None or not val(input_of(at)).dtype == val(at).dtype == val(x).dtype:
        return Turned(x, by_tokens, rotation, by_tokens, None, path)
    path += [*inner_path, at]
    before = input_of(at)
    return Turned(before, normed_by_tokens, rotation, by_tokens, norm, path)


def check_dtypes(path: list[Node], x: Node, read_as: torch.dtype) -> None:
    """Nothing on the way is narrower than x; float64 is only where x is."""
    given = val(x).dtype
    need(read_as == given, f"heads of {given} that are read as {read_as}")
    for n in path:
        if is_float(n):
            found = val(n).dtype
            need(holds(found, given), f"a rotation in {found}")
            need(found != torch.float64 or given == found, "a rotation in float64")


def in_layout(
    n: Node, by_tokens: bool, path: list[Node], rounds: bool = False
) -> tuple[Node, bool]:
    """Back through copies, exact casts (with `rounds`, any) and exchanges of heads and tokens."""
    while True:
        n = uncast(n, path, rounds)
        base = view_base(n)
        if base is None or val(base).ndim != 4 or val(n).ndim != 4:
            return n, by_tokens
        if not same_map(view(n), view(base).turned(0, 2, 1, 3)):
            return n, by_tokens
        path.append(n)
        n, by_tokens = base, not by_tokens


def norm_of(n: Node, D: int) -> HeadNorm | None:
    """Our norm over the last axis of D columns."""
    if op(n) not in ("fk.layer_norm", "fk.rms_norm") or n.kwargs or val(n).shape[-1] != D:
        return None
    if op(n) == "fk.rms_norm":
        _, weight, eps = n.args
        return HeadNorm("rms_norm", weight, None, eps)  # type: ignore[arg-type]
    _, weight, bias, eps = n.args
    return HeadNorm("layer_norm", weight, bias, eps)  # type: ignore[arg-type]


def normed_alike(q: Turned, k: Turned) -> bool:
    """Whether both have a norm of one kind, or none."""
    if q.norm is None or k.norm is None:
        return q.norm is k.norm
    return (q.norm.kind, q.norm.eps) == (k.norm.kind, k.norm.eps)


def arguments(g: Graph, root: Node, q: Turned, k: Turned) -> dict[str, Any]:
    """Keywords of fk.rope and fk.rope_attention, where queries and keys turn alike."""
    a, b = q.rotation, k.rotation
    alike = a._replace(cos=(), sin=()) == b._replace(cos=(), sin=()) and len(a.cos) == len(b.cos)
    need(alike and q.rotated_by_tokens == k.rotated_by_tokens, "keys turn unlike queries")
    for one, other in zip((*a.cos, *a.sin), (*b.cos, *b.sin), strict=True):
        same = same_place(one, other) or same_value(g, one, other, set())
        need(same, "keys turn by other tables than queries")
    cos, sin = tables(g, root, a, sizes_of(q), q.rotated_by_tokens)
    found = dict(cos=cos, sin=sin, interleaved=a.interleaved, prefix_tokens=a.prefix)
    if q.norm is None or k.norm is None:
        return found
    return found | dict(
        norm=q.norm.kind,
        q_norm_weight=q.norm.weight,
        q_norm_bias=q.norm.bias,
        k_norm_weight=k.norm.weight,
        k_norm_bias=k.norm.bias,
        eps=q.norm.eps,
    )


def sizes_of(q: Turned) -> tuple[Any, Any, Any]:
    """B, H and the number of tokens that turn."""
    B, H, T, _ = shape(q.x)
    if q.by_tokens:
        H, T = T, H
    return B, H, T - q.rotation.prefix
