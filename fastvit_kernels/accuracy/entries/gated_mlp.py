"""gated_mlp in each of its forms."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from ..op import Arg, Example, Op, Shape, Sizes
from .arguments import EPILOGUE, OPERAND, ignoring, with_epilogue
from .linear import FC_ARGS, fc_shapes


def _eager(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    residual: Tensor,
) -> Tensor:
    gate, value = F.linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
    return residual + F.linear(F.silu(gate) * value, fc2_weight, fc2_bias)


def gated_sizes(rows: Shape, C: int, hidden: int, N: int, **form: bool) -> dict[str, Any]:
    return dict(rows=rows, C=C, F=hidden, N=N, separate=False, norm=False) | form


def _shapes(s: Any) -> dict[str, Shape]:
    shapes = fc_shapes(s, s.F if s.separate else 2 * s.F)
    if s.separate:
        shapes |= dict(gate_weight=(s.F, s.C), gate_bias=(s.F,))
    if s.norm:
        shapes |= dict(norm_weight=(s.F,), norm_bias=(s.F,))
    return with_epilogue(shapes, s)


def _at(v: Sizes) -> dict[str, Any]:
    return gated_sizes((v.B, v.T), v.C, v.F, v.C)


def _check(v: Sizes) -> list[Example]:
    normed = _at(v) | dict(separate=True, norm=True)
    return [Example(_at(v)), Example(normed, "separate, LayerNorm", dict(recompute=False))]


GATED_MLP = Op(
    gated_mlp,
    ignoring("recompute", gated_mlp_ref),
    eager=_eager,
    args={
        **FC_ARGS,
        "gate_weight": Arg("matrix", operand=True),
        "gate_bias": OPERAND,
        "norm_weight": Arg(),
        "norm_bias": Arg(),
        **EPILOGUE,
    },
    settings=lambda s: dict(gate_last=True) if getattr(s, "gate_last", False) else {},
    shapes=_shapes,
    at=_at,
    check=_check,
)
