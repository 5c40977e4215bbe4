"""The registry of ops: one entry each, from which every list of cases is derived.

`check`, `check --all-configs`, the fuzz test, the tests of bad calls, of numbers that are not
finite and of life with the rest of torch, `tune`, and the benchmarks read OPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.vit import VisionTransformer
from ..ops.attention.functions import attention, attention_ref, qkv_attention, qkv_attention_ref
from ..ops.attention.rotary import rope_attention, rope_attention_ref
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.common.activation import ACTIVATIONS
from ..ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from ..ops.layer_norm import layer_norm, layer_norm_and_input, layer_norm_ref
from ..ops.linear import linear, linear_ref
from ..ops.mlp import mlp, mlp_ref
from ..ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..ops.rms_norm import rms_norm, rms_norm_and_input, rms_norm_ref
from ..ops.rope import rope, rope_ref
from ..runtime.arguments import autocast_dtype
from .op import (
    Arg,
    Case,
    Draw,
    Example,
    Op,
    Option,
    Pick,
    Shape,
    Sizes,
    in_memory,
    padded,
    sized,
)
from .plain_vit import model_case

FIRST = Arg(required=True, operand=True)
MATRIX = Arg("matrix", required=True, operand=True)
OPERAND = Arg(operand=True)
EPILOGUE = {
    "residual": Arg(), "layer_scale": Arg(usual=False),
    "row_scale": Arg("keep", grad=False, usual=False),
}  # fmt: skip
SCALE = Option("scale", (None, 0.3, 1.0))


def _with_epilogue(shapes: dict[str, Shape], rows: Shape, N: int) -> dict[str, Shape]:
    row_scale = {"row_scale": rows[:1]} if rows else {}
    return {**shapes, "residual": (*rows, N), "layer_scale": (N,), **row_scale}


# layer_norm, rms_norm


def _out_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype | None:
    """What the specification of a norm is asked for."""
    if x.dtype is torch.float64:
        return None  # the oracle rounds nothing
    widens = out_dtype is None and autocast_dtype(x) is not None
    return torch.float32 if widens else out_dtype


def _layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return layer_norm_ref(x, weight, bias, eps, _out_dtype(x, out_dtype))


def _layer_norm_and_input(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _layer_norm(x, *args, **options), x.view_as(x)


def _rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return rms_norm_ref(x, weight, eps, _out_dtype(x, out_dtype))


def _rms_norm_and_input(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, *args, **options), x.view_as(x)


def _norm_fuzz(pick: Pick) -> Mapping[str, Any]:
    C = pick(pick.up_to(600), pick.up_to(600), 768, 1000, 1025, 2049)
    return dict(rows=pick.rows(60_000 // (C + 40), none=True), C=C)


def _norm_configs(large: bool) -> list[Example]:
    found = []
    for C in (60, 96, 200, 384, 768, 1280, 3000, *((8192,) if large else ())):
        sizes = dict(rows=(8 * 197 + 3 if large else 5,), C=C)
        strided = C % 128 == 0
        found.append(
            sized(sizes, "strided", strided=padded(8)) if strided else sized(sizes)
        )  # fmt: skip
    return found


_NORM: dict[str, Any] = dict(
    args={"x": Arg(required=True), "weight": Arg(), "bias": Arg()},
    options={
        "eps": Option("eps", (1e-6, 1e-5, 1e-12)),
        "out_dtype": Option("dtype", (torch.float32, torch.float16, torch.bfloat16)),
    },
    shapes=lambda s: dict(x=(*s.rows, s.C), weight=(s.C,), bias=(s.C,)),
    tiny=dict(rows=(2, 3), C=8),
    at=lambda v: dict(rows=(v.B, v.T), C=v.C),
    fuzz=_norm_fuzz,
    fuzz_autocast=(None, "bf16"),
    check=lambda v: [Example(dict(rows=(v.B, v.T), C=v.C))],
)  # fmt: skip
LAYER_NORM = Op(
    layer_norm, _layer_norm, configs=lambda large: [],
    eager=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), **_NORM,
)  # fmt: skip
# The same kernels, and a second gradient: it reaches the configs of both.
LAYER_NORM_AND_INPUT = Op(
    layer_norm_and_input, _layer_norm_and_input, configs=_norm_configs, fuzz_share=2, outputs=2,
    eager=lambda x, weight, bias: (F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), x),
    **_NORM,
)  # fmt: skip
_RMS: dict[str, Any] = {
    **_NORM,
    "args": {"x": Arg(required=True), "weight": Arg()},
    "shapes": lambda s: dict(x=(*s.rows, s.C), weight=(s.C,)),
}
RMS_NORM = Op(
    rms_norm, _rms_norm, configs=lambda large: [],
    eager=lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6), **_RMS,
)  # fmt: skip
RMS_NORM_AND_INPUT = Op(
    rms_norm_and_input, _rms_norm_and_input, configs=_norm_configs, fuzz_share=2, outputs=2,
    eager=lambda x, weight: (F.rms_norm(x, x.shape[-1:], weight, 1e-6), x), **_RMS,
)  # fmt: skip


# rope

_NORM_PARAMETERS = {None: (), "layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}


def _rope_shapes(s: Any) -> dict[str, Shape]:
    heads, table = (s.B, s.T, s.H, s.D), (*s.lead, s.T - s.prefix, s.R)
    return {
        "q": heads, "k": heads, "cos": table, "sin": table,
        **{f"{x}_norm_{name}": (s.D,) for x in "qk" for name in _NORM_PARAMETERS[s.norm]},
    }  # fmt: skip


def _rope_at(v: Sizes) -> dict[str, Any]:
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
    sizes = _rope_at(v)
    return [
        Example(sizes),
        Example({**sizes, "norm": "layer_norm"}, "interleaved, LayerNorm", dict(interleaved=True)),
        Example({**sizes, "norm": "rms_norm", "lead": (1, v.H), "R": v.C // v.H - 4}, "RMSNorm"),
    ]


def _rope_configs(large: bool) -> list[Example]:
    B, T = (4, 261) if large else (1, 11)
    heads = ((3, 16, 16), (2, 64, 60), (2, 80, 80), (1, 128, 128), (1, 512, 512))
    return [
        sized(
            dict(B=B, T=T, H=H, D=D, R=R, prefix=5, lead=(), norm="layer_norm"),
            options=dict(interleaved=R < D),
        )
        for H, D, R in heads
    ]  # fmt: skip


_TABLE = Arg(required=True, grad=False, trained=False)
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
    shapes=_rope_shapes,
    tiny=dict(B=1, T=5, H=2, D=8, R=6, prefix=1, lead=(), norm="layer_norm"),
    at=_rope_at, fuzz=_rope_fuzz, fuzz_autocast=(None,), check=_rope_check, configs=_rope_configs,
    outputs=2, alike=True,
)  # fmt: skip


# linear, mlp


def _linear_check(v: Sizes) -> list[Example]:
    wide = dict(rows=(v.B, v.T), K=v.C, N=v.F)
    plain = ("x", "weight", "bias")
    return [
        Example(wide, only=plain),
        *(Example(wide, name, dict(activation=name), only=plain) for name in ACTIVATIONS),
        Example({**wide, "K": v.F, "N": v.C}, "LayerScale, DropPath, residual"),
    ]


def _linear_configs(large: bool) -> list[Example]:
    def gelu(rows: Shape, K: int, N: int) -> Example:
        only = ("x", "weight", "bias")
        return sized(
            dict(rows=rows, K=K, N=N), "gelu", options=dict(activation="gelu"), only=only
        )  # fmt: skip

    def residual(rows: Shape, K: int, N: int) -> Example:
        return sized(dict(rows=rows, K=K, N=N), "residual")

    if not large:
        return [gelu((2, 37), 72, 136), residual((2, 37), 136, 72)]
    return [
        *(gelu((8, 197), K, N) for K, N in ((768, 3072), (200, 328))),
        *(residual((8, 197), K, N) for K, N in ((768, 768), (328, 200))),
        *(gelu((1, T), 192, 768) for T in (1, 50)),
    ]


def _linear_fuzz(pick: Pick) -> Mapping[str, Any]:
    K, N = pick.up_to(260), pick.up_to(260)
    return dict(rows=pick.rows(min(600, 2_000_000 // (K * N)), none=True), K=K, N=N)


LINEAR = Op(
    linear, linear_ref,
    args={"x": FIRST, "weight": MATRIX, "bias": OPERAND, **EPILOGUE},
    options={"activation": Option("activation or None", (None, *ACTIVATIONS))},
    shapes=lambda s: _with_epilogue(
        dict(x=(*s.rows, s.K), weight=(s.N, s.K), bias=(s.N,)), s.rows, s.N
    ),
    tiny=dict(rows=(2, 3), K=8, N=4),
    at=lambda v: dict(rows=(v.B, v.T), K=v.C, N=v.C),
    fuzz=_linear_fuzz, fuzz_share=4, check=_linear_check, configs=_linear_configs,
    eager=lambda x, weight, bias, residual: residual + F.linear(x, weight, bias),
)  # fmt: skip


def _mlp(*, recompute: bool = True, **inputs: Any) -> Tensor:
    return mlp_ref(**inputs)


def _eager_mlp(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
    residual: Tensor,
) -> Tensor:  # fmt: skip
    hidden = F.gelu(F.linear(x, fc1_weight, fc1_bias))
    return residual + F.linear(hidden, fc2_weight, fc2_bias)


def _mlp_configs(large: bool) -> list[Example]:
    def both(rows: Shape, C: int, hidden: int) -> list[Example]:
        sizes = dict(rows=rows, C=C, F=hidden, N=C)
        return [sized(sizes), sized(sizes, "stored", options=dict(recompute=False))]

    def inference(rows: Shape, C: int, hidden: int) -> Example:
        """Where the hidden activations need not be kept."""
        return sized(dict(rows=rows, C=C, F=hidden, N=C), "inference", inference=True)

    if not large:
        return [*both((2, 19), 40, 72), inference((2, 19), 40, 72), inference((1, 50), 192, 80)]
    trained = [example for C in (96, 192, 768) for example in both((8, 197), C, 4 * C)]
    return [*trained, *(inference((3, 197), C, 4 * C) for C in (64, 100, 192, 256))]


def _mlp_fuzz(pick: Pick) -> Mapping[str, Any]:
    C, hidden, N = (pick.up_to(130) for _ in range(3))
    rows = pick.rows(max(1, min(600, 1_500_000 // (hidden * (C + N)))))
    return dict(rows=rows, C=C, F=hidden, N=N)


MLP = Op(
    mlp, _mlp,
    args={
        "x": FIRST, "fc1_weight": MATRIX, "fc1_bias": OPERAND, "fc2_weight": MATRIX,
        "fc2_bias": OPERAND, **EPILOGUE,
    },
    options={
        "activation": Option("activation", tuple(ACTIVATIONS)),
        "recompute": Option("flag", (False, True)),
    },
    shapes=lambda s: _with_epilogue(
        dict(
            x=(*s.rows, s.C), fc1_weight=(s.F, s.C), fc1_bias=(s.F,), fc2_weight=(s.N, s.F),
            fc2_bias=(s.N,),
        ), s.rows, s.N,
    ),
    tiny=dict(rows=(2, 3), C=8, F=6, N=4),
    at=lambda v: dict(rows=(v.B, v.T), C=v.C, F=v.F, N=v.C),
    fuzz=_mlp_fuzz, fuzz_share=4, configs=_mlp_configs, eager=_eager_mlp,
    check=lambda v: [
        Example(sizes := dict(rows=(v.B, v.T), C=v.C, F=v.F, N=v.C)),
        Example(sizes, "stored", dict(recompute=False)),
    ],
)  # fmt: skip


# gated_mlp


def _gated_mlp(*, recompute: bool = True, **inputs: Any) -> Tensor:
    return gated_mlp_ref(**inputs)


def _eager_gated_mlp(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
    residual: Tensor,
) -> Tensor:  # fmt: skip
    gate, value = F.linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
    return residual + F.linear(F.silu(gate) * value, fc2_weight, fc2_bias)


def _gated(rows: Shape, C: int, hidden: int, N: int, **form: bool) -> dict[str, Any]:
    return dict(rows=rows, C=C, F=hidden, N=N, separate=False, norm=False) | form


def _gated_shapes(s: Any) -> dict[str, Shape]:
    fc1 = s.F if s.separate else 2 * s.F
    shapes: dict[str, Shape] = dict(
        x=(*s.rows, s.C), fc1_weight=(fc1, s.C), fc1_bias=(fc1,), fc2_weight=(s.N, s.F),
        fc2_bias=(s.N,),
    )  # fmt: skip
    if s.separate:
        shapes |= dict(gate_weight=(s.F, s.C), gate_bias=(s.F,))
    if s.norm:
        shapes |= dict(norm_weight=(s.F,), norm_bias=(s.F,))
    return _with_epilogue(shapes, s.rows, s.N)


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
    return _gated(rows, C, hidden, N, separate=separate, norm=norm) | dict(
        given=given, gate_last=last
    )  # fmt: skip


GATED_MLP = Op(
    gated_mlp, _gated_mlp,
    args={
        "x": FIRST, "fc1_weight": MATRIX, "fc1_bias": OPERAND, "fc2_weight": MATRIX,
        "fc2_bias": OPERAND, "gate_weight": Arg("matrix", operand=True), "gate_bias": OPERAND,
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


# attention


def _without_dropout(function: Any) -> Any:
    """Which bits dropout draws no specification says: cases leave it out."""
    return lambda *args, dropout_p=0.0, **kwargs: function(*args, **kwargs)


def _attention_check(v: Sizes) -> list[Example]:
    rest = dict(B=v.B, T=v.T, H=v.H)
    one = dict(B=1, H=2, D=64)
    return [
        *(Example({**rest, "D": D}, f"D={D}") for D in (32, 64, 72, 128)),
        Example({**one, "T": 1}, "T=1"),
        Example({**one, "T": 260}, "T=260"),  # past the one-pass backward
    ]


def _attention_configs(large: bool) -> list[Example]:
    def packed(B: int, T: int, H: int, D: int, **example: Any) -> Example:
        return sized(dict(B=B, T=T, H=H, D=D), **example)

    def strided(B: int, T: int, H: int, D: int) -> Example:
        sizes = dict(B=B, T=T, H=H, D=D)
        return sized(sizes, "heads first", strided=in_memory(0, 2, 3, 1, 4))

    if large:
        return [
            *(packed(3, T, 5, 64) for T in (1, 50, 197, 257, 577, 1025)),
            *(packed(128, T, 17, D) for T, D in ((19, 32), (50, 64))),
            *(strided(2, 197, 3, D) for D in (32, 64, 72, 80, 96, 128, 256)),
        ]
    return [
        packed(1, 50, 2, 64),
        packed(1, 1, 1, 64),
        *(strided(1, 35, 1, D) for D in (32, 72, 128, 256)),
        packed(8, 19, 4, 16),
        packed(1, 197, 1, 64, slow=True),
        packed(1, 300, 1, 16, slow=True),
    ]


def _heads(pick: Pick) -> dict[str, int]:
    """Within the interpreter's patience: a long T has one head, and that is narrow."""
    most = pick(*[24] * 5, *[70] * 6, *[130] * 2, 257, 600)
    T = pick.up_to(most if pick.low else min(most, 257))
    if T > 130:
        return dict(B=1, H=1, T=T, D=pick(8, 32, 64, *(() if T > 260 else (72, 128))))
    B, H = pick(1, 2, 0, 1, 2, 3, 5), pick(1, 2, 3)
    if T > 33:
        B, H = min(B, 1), min(H, 2)
    D = pick(pick(8, 16, 32, 64, 72, 80, 96, 128), 8 * pick.integer(1, 32))
    return dict(B=B, H=H, T=T, D=D)


ATTENTION = Op(
    attention, _without_dropout(attention_ref), eager=attention_ref,
    args={"qkv": FIRST},
    options={"scale": SCALE, "dropout_p": Option("probability below 1")},
    shapes=lambda s: dict(qkv=(s.B, s.T, 3, s.H, s.D)),
    tiny=dict(B=1, T=5, H=2, D=8),
    at=lambda v: dict(B=v.B, T=v.T, H=v.H, D=v.C // v.H),
    fuzz=_heads, check=_attention_check, configs=_attention_configs,
)  # fmt: skip

QKV_ATTENTION = Op(
    qkv_attention, _without_dropout(qkv_attention_ref), eager=qkv_attention_ref,
    args={"x": FIRST, "weight": MATRIX, "bias": OPERAND},
    options={
        "num_heads": Option("count"), "scale": SCALE, "dropout_p": Option("probability below 1"),
    },
    settings=lambda s: dict(num_heads=s.H),
    shapes=lambda s: dict(
        x=(s.B, s.T, s.C), weight=(3 * s.H * s.D, s.C), bias=(3 * s.H * s.D,)
    ),
    tiny=dict(B=1, T=5, H=2, D=8, C=16),
    at=(_qkv_at := lambda v: dict(B=v.B, T=v.T, H=v.H, D=v.C // v.H, C=v.C)),
    fuzz=lambda pick: dict(**_heads(pick), C=pick.up_to(100)), fuzz_share=2,
    check=lambda v: [Example(_qkv_at(v))],
    configs=lambda large: [],  # the kernels of `attention`
)  # fmt: skip


def _rope_attention_shapes(s: Any) -> dict[str, Shape]:
    shapes = _rope_shapes(s)
    del shapes["q"], shapes["k"]
    return {
        "x": (s.B, s.T, s.C),
        "weight": (3 * s.H * s.D, s.C),
        "bias": (3 * s.H * s.D,),
        **shapes,
    }


def _rope_attention_fuzz(pick: Pick) -> Mapping[str, Any]:
    heads = _heads(pick)
    D, T = heads["D"], heads["T"]
    rest = dict(prefix=pick(0, pick.integer(0, T)), lead=(), C=pick.up_to(100))
    return dict(
        **heads,
        **rest,
        R=pick(D, 2 * pick.integer(1, D // 2)),
        norm=pick(None, "layer_norm", "rms_norm"),
    )


ROPE_ATTENTION = Op(
    rope_attention, _without_dropout(rope_attention_ref),
    args={
        "x": FIRST, "weight": MATRIX, "bias": OPERAND,
        **{name: arg for name, arg in ROPE.args.items() if name not in ("q", "k")},
    },
    options={
        "num_heads": Option("count"), **ROPE.options, "scale": SCALE,
        "dropout_p": Option("probability below 1"),
    },
    settings=lambda s: dict(num_heads=s.H, prefix_tokens=s.prefix, norm=s.norm),
    shapes=_rope_attention_shapes,
    tiny=dict(B=1, T=5, H=2, D=8, C=16, R=6, prefix=1, lead=(), norm="layer_norm"),
    at=lambda v: dict(**_rope_at(v), C=v.C),
    fuzz=_rope_attention_fuzz, fuzz_share=2,
    check=lambda v: [
        Example({**_rope_at(v), "C": v.C}),
        Example({**_rope_at(v), "C": v.C, "norm": "layer_norm"}, "LayerNorm"),
    ],
    configs=lambda large: [],  # the kernels of `attention` and `rope`
)  # fmt: skip


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    # torch's CPU kernel for 16 bits refuses rows that overlap
    query, key, value = (x.contiguous() for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, *args, **options)


def _sdpa_shapes(s: Any) -> dict[str, Shape]:
    keys = (s.B, s.H, s.S, s.D)
    shapes = dict(query=(s.B, s.H, s.T, s.D), key=keys, value=keys)
    return shapes if s.mask is None else {**shapes, "attn_mask": s.mask}


def _sdpa_check(v: Sizes) -> list[Example]:
    sizes = dict(B=v.B, H=v.H, T=v.T, S=v.T, D=v.C // v.H)
    return [
        Example({**sizes, "S": v.T + 5, "mask": None}, "S=T+5"),
        Example({**sizes, "mask": (v.B, 1, v.T, v.T)}, "boolean mask", boolean=True),
        Example({**sizes, "mask": (v.H, v.T, v.T)}, "additive mask"),
    ]


def _sdpa_configs(large: bool) -> list[Example]:
    def each(T: int, S: int, D: int) -> list[Example]:
        sizes = dict(B=1, H=2, T=T, S=S, D=D)
        mask = (1, 1, T, S)
        return [
            sized({**sizes, "mask": None}),
            sized({**sizes, "mask": mask}, "boolean", boolean=True),
            sized({**sizes, "mask": mask}, "additive"),
            sized({**sizes, "mask": None}, "causal", options=dict(is_causal=True)),
        ]

    return [*each(197, 261, 64), each(130, 197, 128)[1]] if large else each(37, 42, 32)


def _sdpa_fuzz(pick: Pick) -> Mapping[str, Any]:
    sizes: dict[str, Any] = _heads(pick)
    T = sizes["T"]
    sizes["S"] = pick(T, pick.up_to(24 if T > 64 else 70))
    sizes |= dict(is_causal=pick(False, True), mask=None)
    if not sizes["is_causal"] and pick(False, True):
        whole = (sizes["B"], sizes["H"], T, sizes["S"])
        sizes["mask"] = tuple(pick(n, n, 1) for n in whole)[pick(0, 2) :]
    return sizes


_MASKS = ("nested", "jagged")
SDPA = Op(
    scaled_dot_product_attention, _without_dropout(_sdpa), eager=F.scaled_dot_product_attention,
    args={
        "query": Arg(required=True, operand=True, accepts=_MASKS),
        "key": Arg(required=True, operand=True, accepts=_MASKS),
        "value": Arg(required=True, operand=True, accepts=("wider", *_MASKS)),
        "attn_mask": Arg("mask", grad=False, usual=False, accepts=("bool", "scalar", *_MASKS)),
    },
    options={
        "dropout_p": Option("probability"), "is_causal": Option("flag"), "scale": SCALE,
        "enable_gqa": Option("flag"),
    },
    settings=lambda s: dict(is_causal=getattr(s, "is_causal", False)),
    shapes=_sdpa_shapes,
    tiny=dict(B=1, H=2, T=5, S=6, D=8, mask=(5, 6)),
    at=lambda v: dict(B=v.B, H=v.H, T=v.T, S=v.T, D=v.C // v.H, mask=None),
    fuzz=_sdpa_fuzz, fuzz_share=4, check=_sdpa_check, configs=_sdpa_configs,
)  # fmt: skip


# patch_embed


def _patch_sizes(v: Sizes, prefix: int = 1) -> dict[str, Any]:
    grid = (v.img_size[0] // v.patch_size, v.img_size[1] // v.patch_size)
    return dict(
        B=v.B, channels=3, grid=grid, patch=(v.patch_size, v.patch_size), C=v.C, prefix=prefix,
    )  # fmt: skip


def _patch_shapes(s: Any) -> dict[str, Shape]:
    (rows, columns), (height, width) = s.grid, s.patch
    found: dict[str, Shape] = dict(
        images=(s.B, s.channels, rows * height, columns * width),
        weight=(s.C, s.channels, height, width), bias=(s.C,),
        pos_embed=(*getattr(s, "lead", (1,)), getattr(s, "pos", s.prefix + rows * columns), s.C),
    )  # fmt: skip
    if s.prefix:
        found["prefix_tokens"] = (*getattr(s, "lead", (1,)), s.prefix, s.C)
    return found


def _patch_fuzz(pick: Pick) -> Mapping[str, Any]:
    B, C, channels = pick(1, 2, 0, 1, 2, 3, 5), pick.up_to(130), pick(1, 3, 4)
    height, width = (pick(1, 2, 3, 4, 5, 7, 8, 14, 16) for _ in range(2))
    most = max(1, min(600, 20_000 // (height * width * channels)) // max(1, B))
    rows = pick.integer(1, min(24, most))
    columns = pick.integer(1, max(1, min(25, most // rows)))
    prefix = pick(0, pick.integer(0, 5))
    return dict(
        B=B, channels=channels, grid=(rows, columns), patch=(height, width), C=C, prefix=prefix,
        lead=pick((), (1,)), pos=rows * columns + pick(0, prefix), given=("prefix_tokens",),
    )  # fmt: skip


def _patch_configs(large: bool) -> list[Example]:
    def example(B: int, size: Shape, patch: int, C: int) -> Example:
        return sized(_patch_sizes(Sizes(B, 0, C, 0, 0, (size[0], size[1]), patch)))

    if not large:
        return [example(2, (24, 16), 8, 40)]
    return [
        example(5, (224, 192), 16, 192), example(5, (224, 192), 16, 768),
        example(3, (56, 42), 14, 200),
    ]  # fmt: skip


PATCH_EMBED = Op(
    patch_embed, patch_embed_ref,
    args={
        "images": Arg(required=True, operand=True, trained=False),
        "weight": Arg("matrix", required=True, operand=True, accepts=("wider",)),
        "bias": OPERAND, "prefix_tokens": Arg(), "pos_embed": Arg(),
    },
    shapes=_patch_shapes,
    tiny=dict(B=2, channels=3, grid=(2, 1), patch=(4, 4), C=8, prefix=1),
    at=_patch_sizes,
    fuzz=_patch_fuzz, configs=_patch_configs,
    check=lambda v: [Example(_patch_sizes(v, prefix=2))],
)  # fmt: skip


# By name, in the order in which an image meets them, the parts of an op before it.
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        LAYER_NORM, LAYER_NORM_AND_INPUT, RMS_NORM, RMS_NORM_AND_INPUT, LINEAR, ROPE, ATTENTION,
        QKV_ATTENTION, ROPE_ATTENTION, SDPA, MLP, GATED_MLP, PATCH_EMBED,
    )
}  # fmt: skip


def _vision_transformer(v: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=v.img_size, patch_size=v.patch_size, num_classes=10, embed_dim=v.C,
            depth=v.depth, num_heads=v.H, mlp_ratio=v.F / v.C, reg_tokens=1, init_values=0.5,
        )  # fmt: skip
    images = Draw(device, dtype)(v.B, 3, *v.img_size, grad=False)
    return model_case(model.to(device, dtype).eval(), images)


def check_cases(v: Sizes, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """What `check` runs: each op's examples, and a whole model."""
    found = [op.case(example, device, dtype) for op in OPS.values() for example in op.check(v)]
    return [*found, _vision_transformer(v, device, dtype)]


def config_cases(large: bool, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """What reaches every launch config that ships, the slow ones last: a test takes the first."""
    pairs = [(op, example) for op in OPS.values() for example in op.configs(large)]
    pairs.sort(key=lambda pair: pair[1].slow)
    return [op.case(example, device, dtype) for op, example in pairs]
