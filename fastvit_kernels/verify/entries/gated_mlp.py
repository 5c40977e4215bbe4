"""gated_mlp in each of its forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...ops.common.activation import ACTIVATIONS
from ...ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from ..op import Arg, Example, Op, Option, Pick, Shape, sized
from .arguments import EPILOGUE, OPERAND, ignoring, some_kept, with_epilogue
from .linear import FC_ARGS, fc_shapes


def _eager_gated_mlp(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
    residual: Tensor,
) -> Tensor:  # fmt: skip
    gate, value = F.linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
    return residual + F.linear(F.silu(gate) * value, fc2_weight, fc2_bias)


def _gated(rows: Shape, C: int, hidden: int, N: int, **form: bool) -> dict[str, Any]:
    return dict(rows=rows, C=C, F=hidden, N=N, separate=False, norm=False) | form


def _gated_shapes(s: Any) -> dict[str, Shape]:
    shapes = fc_shapes(s, s.F if s.separate else 2 * s.F)
    if s.separate:
        shapes |= dict(gate_weight=(s.F, s.C), gate_bias=(s.F,))
    if s.norm:
        shapes |= dict(norm_weight=(s.F,), norm_bias=(s.F,))
    return with_epilogue(shapes, s)


def _gated_configs(large: bool) -> list[Example]:
    def normed(rows: Shape, C: int, hidden: int) -> Example:
        return sized(_gated(rows, C, hidden, C, separate=True, norm=True))

    if not large:
        return [normed((2, 5), 8, 72), normed((1, 5), 8, 600)]
    return [normed((8, 197), C, hidden) for C, hidden in ((96, 72), (192, 512), (768, 2048))]


def _gated_fuzz(pick: Pick) -> Mapping[str, Any]:
    C, hidden, N = (pick.up_to(130) for _ in range(3))
    rows = pick.rows(max(1, min(600, 1_000_000 // (hidden * (2 * C + N)))))
    separate, norm = pick(False, True), pick(False, True)
    given = (*("gate_weight",) * separate, *("norm_weight",) * norm)
    last = not separate and pick(False, True)
    sizes = _gated(rows, C, hidden, N, separate=separate, norm=norm)
    sizes |= dict(given=given, gate_last=last)
    return sizes | some_kept(pick, rows, *given, "residual", "row_scale")


GATED_MLP = Op(
    gated_mlp, ignoring("recompute", gated_mlp_ref),
    args={
        **FC_ARGS, "gate_weight": Arg("matrix", operand=True), "gate_bias": OPERAND,
        "norm_weight": Arg(), "norm_bias": Arg(), **EPILOGUE,
    },
    options={
        "activation": Option("activation", tuple(ACTIVATIONS)), "gate_last": Option("flag"),
        "norm_eps": Option("eps", (1e-6, 1e-5)), "recompute": Option("flag", (False, True)),
    },
    settings=lambda s: dict(gate_last=True) if getattr(s, "gate_last", False) else {},
    shapes=_gated_shapes,
    tiny=_gated((2, 3), 8, 6, 2, separate=True, norm=True),
    at=(_gated_at := lambda v: _gated((v.B, v.T), v.C, v.F, v.C)),
    fuzz=_gated_fuzz, fuzz_share=4, configs=_gated_configs, eager=_eager_gated_mlp,
    check=lambda v: [
        Example(_gated_at(v)),
        Example(
            _gated_at(v) | dict(separate=True, norm=True), "separate, LayerNorm",
            dict(recompute=False),
        ),
    ],
)  # fmt: skip
