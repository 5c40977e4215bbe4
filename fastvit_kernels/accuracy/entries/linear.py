"""linear and mlp: products with an epilogue."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...ops.common.activation import ACTIVATIONS
from ...ops.linear import linear, linear_ref
from ...ops.mlp import mlp, mlp_ref
from ..op import Example, Op, Shape, Sizes
from .arguments import EPILOGUE, FIRST, MATRIX, OPERAND, ignoring, with_epilogue


def _linear_check(v: Sizes) -> list[Example]:
    wide = dict(rows=(v.B, v.T), K=v.C, N=v.F)
    plain = ("x", "weight", "bias")
    return [
        Example(wide, only=plain),
        *(Example(wide, name, dict(activation=name), only=plain) for name in ACTIVATIONS),
        Example({**wide, "K": v.F, "N": v.C}, "LayerScale, DropPath, residual"),
        Example({**wide, "K": v.F, "N": v.C, "kept": (v.B + 1) // 2}, "kept samples"),
    ]


LINEAR = Op(
    linear,
    linear_ref,
    eager=lambda x, weight, bias, residual: residual + F.linear(x, weight, bias),
    args={"x": FIRST, "weight": MATRIX, "bias": OPERAND, **EPILOGUE},
    shapes=lambda s: with_epilogue(dict(x=(*s.rows, s.K), weight=(s.N, s.K), bias=(s.N,)), s),
    at=lambda v: dict(rows=(v.B, v.T), K=v.C, N=v.C),
    check=_linear_check,
)


FC_ARGS = {
    "x": FIRST,
    "fc1_weight": MATRIX,
    "fc1_bias": OPERAND,
    "fc2_weight": MATRIX,
    "fc2_bias": OPERAND,
}


def fc_shapes(s: Any, fc1: int) -> dict[str, Shape]:
    """Of an MLP's two layers, the first with so many columns."""
    return dict(
        x=(*s.rows, s.C),
        fc1_weight=(fc1, s.C),
        fc1_bias=(fc1,),
        fc2_weight=(s.N, s.F),
        fc2_bias=(s.N,),
    )


def _eager_mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    residual: Tensor,
) -> Tensor:
    hidden = F.gelu(F.linear(x, fc1_weight, fc1_bias))
    return residual + F.linear(hidden, fc2_weight, fc2_bias)


MLP = Op(
    mlp,
    ignoring("recompute", mlp_ref),
    eager=_eager_mlp,
    args=FC_ARGS | EPILOGUE,
    shapes=lambda s: with_epilogue(fc_shapes(s, s.F), s),
    at=(_mlp_at := lambda v: dict(rows=(v.B, v.T), C=v.C, F=v.F, N=v.C)),
    check=lambda v: [Example(_mlp_at(v)), Example(_mlp_at(v), "stored", dict(recompute=False))],
)
