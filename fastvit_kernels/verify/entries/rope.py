"""rope, alone and with qk-norm."""

from __future__ import annotations

from typing import Any

from ...ops.rope import rope, rope_ref
from ..op import Arg, Example, Op, Shape, Sizes, sized
from .arguments import FIRST

TABLES = ("cos", "sin")
_NORM_PARAMETERS = {None: (), "layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}


def rope_shapes(s: Any) -> dict[str, Shape]:
    heads, table = (s.B, s.T, s.H, s.D), (*s.lead, s.T - s.prefix, s.R)
    norms = {f"{x}_norm_{name}": (s.D,) for x in "qk" for name in _NORM_PARAMETERS[s.norm]}
    return {"q": heads, "k": heads, "cos": table, "sin": table, **norms}


def rope_at(v: Sizes) -> dict[str, Any]:
    D = v.C // v.H
    return dict(B=v.B, T=v.T, H=v.H, D=D, R=D, prefix=1, lead=(), norm=None)


def _check(v: Sizes) -> list[Example]:
    sizes = rope_at(v)
    normed, by_head = {**sizes, "norm": "layer_norm"}, {**sizes, "lead": (1, v.H)}
    interleaved = dict(interleaved=True)
    return [
        Example(sizes, frozen=TABLES),
        Example(normed, "interleaved, LayerNorm", interleaved, frozen=TABLES),
        Example({**by_head, "norm": "rms_norm", "R": v.C // v.H - 4}, "RMSNorm", frozen=TABLES),
        Example(by_head, "learnt tables by head", interleaved),
        Example(normed, "LayerNorm, learnt tables"),
    ]


def _configs(large: bool) -> list[Example]:
    B, T = (4, 261) if large else (1, 11)
    heads = ((3, 16, 16), (2, 64, 60), (2, 80, 80), (1, 128, 128), (1, 512, 512))

    def case(H: int, D: int, R: int, **example: Any) -> Example:
        sizes = dict(B=B, T=T, H=H, D=D, R=R, prefix=5, lead=(), norm="layer_norm")
        return sized(sizes, options=dict(interleaved=R < D), **example)

    learnt = [case(*head) for head in (heads[0], heads[1], heads[-1])]
    return [*(case(*head, frozen=TABLES) for head in heads), *learnt]


_TABLE = Arg(required=True, trained=False)
ROPE = Op(
    rope, rope_ref, outputs=2,
    args={
        "q": FIRST, "k": FIRST, "cos": _TABLE, "sin": _TABLE, "q_norm_weight": Arg(),
        "q_norm_bias": Arg(), "k_norm_weight": Arg(), "k_norm_bias": Arg(),
    },
    settings=lambda s: dict(prefix_tokens=s.prefix, norm=s.norm),
    shapes=rope_shapes, at=rope_at, check=_check, configs=_configs,
)  # fmt: skip
