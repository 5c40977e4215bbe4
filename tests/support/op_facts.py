"""What tests alone ask of each op: its smallest call, options with bad values, random sizes.

The rest of an op's entry, which `check` and bench read too, is in fastvit_kernels/accuracy/entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.entries.attention import packed_sizes
from fastvit_kernels.accuracy.entries.gated_mlp import gated_sizes
from fastvit_kernels.accuracy.op import Op, Shape
from fastvit_kernels.ops.common.activation import ACTIVATIONS

if TYPE_CHECKING:
    from fuzz_cases import Pick


@dataclass(frozen=True)
class Option:
    """An argument that is no tensor. Its kind is a key of OPTIONS in tests/ops/test_bad_calls.py:
    the values that it refuses."""

    kind: str
    draws: tuple[Any, ...] = ()  # what the fuzz test takes; nothing: it follows from the sizes


@dataclass(frozen=True)
class Facts:
    tiny: Mapping[str, Any]  # sizes of the smallest call that has every tensor
    fuzz: Callable[[Pick], Mapping[str, Any]]  # random sizes; "given": tensors that they need
    options: Mapping[str, Option] = field(default_factory=dict)
    share: int = 3  # of the random calls
    autocast: tuple[str | None, ...] = (None, None, "bf16", "fp16")
    # kinds of tests/ops/test_bad_calls.py that are no mistake, by argument
    accepts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alike: bool = False  # its outputs are of one shape, each of other tensors


def single(op: Op, outputs: Any) -> Tensor:
    """One tensor that depends on all the op's tensors."""
    if FACTS[op.name].alike:
        return torch.stack(outputs)
    return outputs[0] if op.outputs > 1 else outputs


def _some_kept(pick: Pick, rows: Shape, *given: str) -> dict[str, Any]:
    """Now and then a share of the samples alone, with what that needs."""
    if len(rows) < 2 or not rows[0] or pick.integer(0, 2):
        return {}
    return dict(kept=pick.integer(1, rows[0]), given=given)


def _norm_fuzz(pick: Pick) -> dict[str, Any]:
    C = pick(pick.up_to(600), pick.up_to(600), 768, 1000, 1025, 2049)
    return dict(rows=pick.rows(60_000 // (C + 40), none=True), C=C)


def _sampled_norm_fuzz(pick: Pick) -> dict[str, Any]:
    sizes = _norm_fuzz(pick)
    return sizes | _some_kept(pick, sizes["rows"], "samples")


def _linear_fuzz(pick: Pick) -> dict[str, Any]:
    K, N = pick.up_to(260), pick.up_to(260)
    rows = pick.rows(min(600, 2_000_000 // (K * N)), none=True)
    return dict(rows=rows, K=K, N=N) | _some_kept(pick, rows, "residual", "row_scale")


def _mlp_fuzz(pick: Pick) -> dict[str, Any]:
    C, hidden, N = (pick.up_to(130) for _ in range(3))
    rows = pick.rows(max(1, min(600, 1_500_000 // (hidden * (C + N)))))
    sizes = dict(rows=rows, C=C, F=hidden, N=N)
    return sizes | _some_kept(pick, rows, "residual", "row_scale")


def _gated_fuzz(pick: Pick) -> dict[str, Any]:
    C, hidden, N = (pick.up_to(130) for _ in range(3))
    rows = pick.rows(max(1, min(600, 1_000_000 // (hidden * (2 * C + N)))))
    separate, norm = pick(False, True), pick(False, True)
    given = (*("gate_weight",) * separate, *("norm_weight",) * norm)
    last = not separate and pick(False, True)
    sizes = gated_sizes(rows, C, hidden, N, separate=separate, norm=norm)
    sizes |= dict(given=given, gate_last=last)
    return sizes | _some_kept(pick, rows, *given, "residual", "row_scale")


def _rope_fuzz(pick: Pick) -> dict[str, Any]:
    B, H, D = pick(1, 2, 0, 1, 3), pick(1, 2, 3), 2 * pick.up_to(70)
    T = pick.up_to(max(1, min(200, 12_000 // (D * H * max(1, B)))))
    return dict(
        B=B,
        T=T,
        H=H,
        D=D,
        R=pick(D, 2 * pick.integer(1, D // 2)),
        prefix=pick(0, pick.integer(0, T)),
        lead=pick((), (B,), (1,), (B, H), (1, H), (B, 1)),
        norm=pick(None, None, "layer_norm", "rms_norm"),
    )


def _heads(pick: Pick) -> dict[str, Any]:
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


def _attention_fuzz(pick: Pick) -> dict[str, Any]:
    sizes = _heads(pick)
    if pick(False, False, True):
        B, H, T = sizes["B"], sizes["H"], sizes["T"]
        windows = pick(*(n for n in range(1, B + 1) if B % n == 0)) if B else 0
        sizes["mask"] = (windows, pick(H, 1), pick(T, T, 1), pick(T, T, T, 1))[pick(0, 0, 1) :]
        if len(sizes["mask"]) == 3 and pick(False, True):
            sizes["mask"] = sizes["mask"][1:]
    return sizes


def _rope_attention_fuzz(pick: Pick) -> dict[str, Any]:
    heads = _heads(pick)
    D, T = heads["D"], heads["T"]
    return dict(
        **heads,
        lead=pick((), (), (1, heads["H"])),
        prefix=pick(0, pick.integer(0, T)),
        C=pick.up_to(100),
        R=pick(D, 2 * pick.integer(1, D // 2)),
        norm=pick(None, "layer_norm", "rms_norm"),
    )


def _varlen_fuzz(pick: Pick) -> dict[str, Any]:
    most = pick(*[9] * 4, *[40] * 4, 130) if pick.low else 40
    count = pick(1, 2, 3, 5)
    lengths = tuple(pick(0, 1, pick.up_to(most), pick.up_to(most)) for _ in range(count))
    D = pick(8, 32, 64, 72, 80, 8 * pick.integer(1, 32)) if max(lengths) <= 40 else pick(8, 32, 72)
    return dict(lengths=lengths, H=pick(1, 2), D=D, slack=pick(0, 0, 70))


def _sdpa_fuzz(pick: Pick) -> dict[str, Any]:
    sizes = _heads(pick)
    T = sizes["T"]
    sizes["S"] = pick(T, pick.up_to(24 if T > 64 else 70))
    sizes |= dict(is_causal=pick(False, True), mask=None)
    if not sizes["is_causal"] and pick(False, True):
        whole = (sizes["B"], sizes["H"], T, sizes["S"])
        sizes["mask"] = tuple(pick(n, n, 1) for n in whole)[pick(0, 2) :]
    return sizes


def _patch_fuzz(pick: Pick) -> dict[str, Any]:
    B, C, channels = pick(1, 2, 0, 1, 2, 3, 5), pick.up_to(130), pick(1, 3, 4)
    height, width = (pick(1, 2, 3, 4, 5, 7, 8, 14, 16) for _ in range(2))
    depth = pick(0, 0, 1, 2, 3)  # frames of a patch, 0 for an image
    most = 20_000 // (height * width * channels * max(1, depth))
    most = max(1, min(600, most) // max(1, B))
    rows = pick.integer(1, min(24, most))
    columns = pick.integer(1, max(1, min(25, most // rows)))
    frames = pick.integer(1, max(1, min(4, most // (rows * columns))))
    grid, patch = (rows, columns), (height, width)
    if depth:
        grid, patch = (frames, *grid), (depth, *patch)
    prefix, num_patches = pick(0, pick.integer(0, 5)), math.prod(grid)
    return dict(
        B=B,
        channels=channels,
        grid=grid,
        patch=patch,
        C=C,
        prefix=prefix,
        lead=pick((), (1,)),
        pos=num_patches + pick(0, prefix),
        given=("prefix_tokens",),
        kept=pick(0, pick.integer(1, num_patches)),
        index=pick(torch.int64, torch.int32),
    )


_NORM_OPTIONS = {
    "eps": Option("eps", (1e-6, 1e-5, 1e-12)),
    "out_dtype": Option("dtype", (torch.float32, torch.float16, torch.bfloat16)),
}
_NORM_SIZES = dict(rows=(2, 3), C=8)
_NORM = Facts(_NORM_SIZES, _norm_fuzz, _NORM_OPTIONS, autocast=(None, "bf16"))
_SAMPLED_NORM = Facts(_NORM_SIZES, _sampled_norm_fuzz, _NORM_OPTIONS, 2, (None, "bf16"))
_SCALE = Option("scale", (None, 0.3, 1.0))
_SCORES = {"scale": _SCALE, "dropout_p": Option("probability below 1")}
_RECOMPUTE = {"recompute": Option("flag", (False, True))}
_ROPE_OPTIONS = {
    "interleaved": Option("flag", (False, True)),
    "prefix_tokens": Option("count or 0"),
    "norm": Option("norm"),
    "eps": Option("eps", (1e-6, 1e-5)),
}
_QKV_SIZES = dict(B=1, T=5, H=2, D=8)
_ROPE_SIZES = dict(**_QKV_SIZES, R=6, prefix=1, lead=(), norm="layer_norm")
_MASKS = ("nested", "jagged")

FACTS: dict[str, Facts] = {
    "layer_norm": _NORM,
    "layer_norm_and_input": _SAMPLED_NORM,
    "rms_norm": _NORM,
    "rms_norm_and_input": _SAMPLED_NORM,
    "linear": Facts(
        dict(rows=(2, 3), K=8, N=4),
        _linear_fuzz,
        {"activation": Option("activation or None", (None, *ACTIVATIONS))},
        share=4,
    ),
    "rope": Facts(_ROPE_SIZES, _rope_fuzz, _ROPE_OPTIONS, autocast=(None,), alike=True),
    "attention": Facts(
        dict(**_QKV_SIZES, mask=(2, 5, 5)),
        _attention_fuzz,
        _SCORES,
        accepts={"attn_mask": ("wider", "bool", "scalar")},
    ),
    "qkv_attention": Facts(
        dict(**_QKV_SIZES, C=16),
        lambda pick: dict(**_heads(pick), C=pick.up_to(100)),
        {"num_heads": Option("count"), **_SCORES},
        share=2,
    ),
    "rope_attention": Facts(
        dict(**_ROPE_SIZES, C=16),
        _rope_attention_fuzz,
        {"num_heads": Option("count"), **_ROPE_OPTIONS, **_SCORES},
        share=2,
    ),
    "varlen_attention": Facts(packed_sizes((3, 0, 2), 2, 8), _varlen_fuzz, _SCORES, share=2),
    "scaled_dot_product_attention": Facts(
        dict(B=1, H=2, T=5, S=6, D=8, mask=(5, 6)),
        _sdpa_fuzz,
        {
            "dropout_p": Option("probability"),
            "is_causal": Option("flag"),
            "scale": _SCALE,
            "enable_gqa": Option("flag"),
        },
        share=4,
        accepts={
            "query": _MASKS,
            "key": _MASKS,
            "value": ("wider", *_MASKS),
            "attn_mask": ("bool", "scalar", *_MASKS),
        },
    ),
    "mlp": Facts(
        dict(rows=(2, 3), C=8, F=6, N=4),
        _mlp_fuzz,
        {"activation": Option("activation", tuple(ACTIVATIONS)), **_RECOMPUTE},
        share=4,
    ),
    "gated_mlp": Facts(
        gated_sizes((2, 3), 8, 6, 2, separate=True, norm=True),
        _gated_fuzz,
        {
            "activation": Option("activation", tuple(ACTIVATIONS)),
            "gate_last": Option("flag"),
            "norm_eps": Option("eps", (1e-6, 1e-5)),
            **_RECOMPUTE,
        },
        share=4,
    ),
    "patch_embed": Facts(
        dict(B=2, channels=3, grid=(2, 1), patch=(4, 4), C=8, prefix=1),
        _patch_fuzz,
        accepts={"weight": ("wider",)},
    ),
}
assert FACTS.keys() == OPS.keys()
