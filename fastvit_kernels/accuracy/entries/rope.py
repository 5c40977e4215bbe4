"""rope, alone and with qk-norm."""

from __future__ import annotations

from typing import Any

from ...ops.rope import rope, rope_ref
from ..op import Arg, Example, Op, Shape, Sizes
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


_TABLE = Arg(required=True, trained=False)
ROPE = Op(
    rope,
    rope_ref,
    outputs=2,
    args={
        "q": FIRST,
        "k": FIRST,
        "cos": _TABLE,
        "sin": _TABLE,
        "q_norm_weight": Arg(),
        "q_norm_bias": Arg(),
        "k_norm_weight": Arg(),
        "k_norm_bias": Arg(),
    },
    settings=lambda s: dict(prefix_tokens=s.prefix, norm=s.norm),
    shapes=rope_shapes,
    at=rope_at,
    check=_check,
)
