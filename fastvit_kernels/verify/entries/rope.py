"""rope, alone and with qk-norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ops.rope import rope, rope_ref
from ..op import Arg, Example, Op, Option, Pick, Shape, Sizes, sized
from .arguments import FIRST

TABLES = ("cos", "sin")
_NORM_PARAMETERS = {None: (), "layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}


def rope_shapes(s: Any) -> dict[str, Shape]:
    heads, table = (s.B, s.T, s.H, s.D), (*s.lead, s.T - s.prefix, s.R)
    return {
        "q": heads, "k": heads, "cos": table, "sin": table,
        **{f"{x}_norm_{name}": (s.D,) for x in "qk" for name in _NORM_PARAMETERS[s.norm]},
    }  # fmt: skip


def rope_at(v: Sizes) -> dict[str, Any]:
    D = v.C // v.H
    return dict(B=v.B, T=v.T, H=v.H, D=D, R=D, prefix=1, lead=(), norm=None)


def _rope_fuzz(pick: Pick) -> Mapping[str, Any]:
    B, H, D = pick(1, 2, 0, 1, 3), pick(1, 2, 3), 2 * pick.up_to(70)
    T = pick.up_to(max(1, min(200, 12_000 // (D * H * max(1, B)))))
    return dict(
        B=B, T=T, H=H, D=D, R=pick(D, 2 * pick.integer(1, D // 2)),
        prefix=pick(0, pick.integer(0, T)), lead=pick((), (B,), (1,), (B, H), (1, H), (B, 1)),
        norm=pick(None, None, "layer_norm", "rms_norm"),
    )  # fmt: skip


def _rope_check(v: Sizes) -> list[Example]:
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


def _rope_configs(large: bool) -> list[Example]:
    B, T = (4, 261) if large else (1, 11)
    heads = ((3, 16, 16), (2, 64, 60), (2, 80, 80), (1, 128, 128), (1, 512, 512))

    def case(H: int, D: int, R: int, **example: Any) -> Example:
        sizes = dict(B=B, T=T, H=H, D=D, R=R, prefix=5, lead=(), norm="layer_norm")
        return sized(sizes, options=dict(interleaved=R < D), **example)

    learnt = [case(*head) for head in (heads[0], heads[1], heads[-1])]
    return [*(case(*head, frozen=TABLES) for head in heads), *learnt]


_TABLE = Arg(required=True, trained=False)
ROPE = Op(
    rope, rope_ref,
    args={
        "q": FIRST, "k": FIRST, "cos": _TABLE, "sin": _TABLE, "q_norm_weight": Arg(),
        "q_norm_bias": Arg(), "k_norm_weight": Arg(), "k_norm_bias": Arg(),
    },
    options={
        "interleaved": Option("flag", (False, True)), "prefix_tokens": Option("count or 0"),
        "norm": Option("norm"), "eps": Option("eps", (1e-6, 1e-5)),
    },
    settings=lambda s: dict(prefix_tokens=s.prefix, norm=s.norm),
    shapes=rope_shapes,
    tiny=dict(B=1, T=5, H=2, D=8, R=6, prefix=1, lead=(), norm="layer_norm"),
    at=rope_at, fuzz=_rope_fuzz, fuzz_autocast=(None,), check=_rope_check, configs=_rope_configs,
    outputs=2, alike=True,
)  # fmt: skip
