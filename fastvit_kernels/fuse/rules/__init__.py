"""The rules, in the order in which they are tried; each file has a picture before -> after."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch.fx import Node

from ..graph import Graph
from . import (
    apart,
    attention,
    epilogue,
    handover,
    in_place,
    linear,
    mlp,
    norms,
    patches,
    products,
    rows,
    written_attention,
)


class Rule(NamedTuple):
    """A rule and the operations at which it looks."""

    apply: Callable[[Graph, Node], None]
    roots: tuple[str, ...]


NORMS = ("fk.layer_norm", "fk.rms_norm")
RULES = (
    Rule(in_place.as_new, in_place.OPERATIONS),
    Rule(patches.patch_embed, ("conv2d", "conv3d")),
    Rule(products.product_of_weight, ("matmul", "mm")),
    Rule(products.addmm, ("addmm",)),
    Rule(products.einsum, ("einsum",)),
    Rule(norms.layer_norm, ("layer_norm",)),
    Rule(norms.rms_norm, ("rms_norm",)),
    Rule(norms.written_rms_norm, ("rsqrt",)),
    Rule(attention.sdpa, ("scaled_dot_product_attention",)),
    Rule(products.einsum_by_heads, ("einsum",)),
    Rule(written_attention.written_attention, ("matmul", "bmm", "einsum")),
    Rule(rows.rows_in_order, ("linear",)),
    Rule(mlp.gated_mlp, ("linear",)),
    Rule(mlp.mlp, ("linear",)),
    Rule(apart.mlp_apart, ("linear",)),
    Rule(epilogue.epilogue, ("add",)),
    Rule(linear.activated_linear, ("gelu", "silu", "mul")),
    Rule(epilogue.epilogue, ("add",)),
    Rule(apart.residual_apart, ("add",)),
    Rule(linear.plain_linear, ("linear",)),
    Rule(handover.narrow_norm, NORMS),
    Rule(handover.norm_and_input, NORMS),
)
