"""layer_norm and rms_norm, and the variants that hand their input on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.norm.functions import (
    layer_norm,
    layer_norm_and_input,
    layer_norm_ref,
    rms_norm,
    rms_norm_and_input,
    rms_norm_ref,
)
from ...runtime.arguments import autocast_dtype
from ..op import Arg, Example, Op, Option, Pick, SampleShape, Shape, padded, sized
from .arguments import some_kept


def _norm(reference: Any) -> Any:
    """The specification of a norm: under autocast it widens what has no dtype of its own."""

    def norm(x: Tensor, *args: Any, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if x.dtype is torch.float64:
            out_dtype = None  # the oracle rounds nothing
        elif out_dtype is None and autocast_dtype(x) is not None:
            out_dtype = torch.float32
        return reference(x, *args, out_dtype=out_dtype, **options)

    return norm


def _and_input(norm: Any) -> Any:
    """The norm, of the kept samples where some are, and all of its input."""

    def norm_and_input(
        x: Tensor, *args: Any, samples: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        kept = x if samples is None else x[samples[: len(samples) - len(x)]]
        return norm(kept, *args, **options), x.view_as(x)

    return norm_and_input


_layer_norm, _rms_norm = _norm(layer_norm_ref), _norm(rms_norm_ref)


def _norm_fuzz(pick: Pick) -> Mapping[str, Any]:
    C = pick(pick.up_to(600), pick.up_to(600), 768, 1000, 1025, 2049)
    return dict(rows=pick.rows(60_000 // (C + 40), none=True), C=C)


def _with_samples(norm: Mapping[str, Any]) -> dict[str, Any]:
    """What the variant that hands its input on says besides."""

    def shapes(s: Any) -> dict[str, Shape]:
        kept = getattr(s, "kept", 0)
        return norm["shapes"](s) | ({"samples": SampleShape(kept, s.rows[0])} if kept else {})

    def fuzz(pick: Pick) -> Mapping[str, Any]:
        sizes = norm["fuzz"](pick)
        return sizes | some_kept(pick, sizes["rows"], "samples")

    return {
        **norm,
        "args": {**norm["args"], "samples": Arg("keep", grad=False, trained=False, usual=False)},
        "shapes": shapes,
        "fuzz": fuzz,
        "check": lambda v: [
            Example(sizes := dict(rows=(v.B, v.T), C=v.C)),
            Example(sizes | dict(kept=(v.B + 1) // 2), "kept samples"),
        ],
    }


def _with_residual(norm: Mapping[str, Any]) -> dict[str, Any]:
    """What a norm that adds says besides."""
    shapes = norm["shapes"]
    return {
        **norm,
        "args": {**norm["args"], "residual": Arg(usual=False)},
        "shapes": lambda s: shapes(s) | dict(residual=(*s.rows, s.C)),
        "check": lambda v: [
            Example(sizes := dict(rows=(v.B, v.T), C=v.C), without=("residual",)),
            Example(sizes, "residual"),
        ],
    }


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
    eager=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6),
    **_with_residual(_NORM),
)  # fmt: skip
# The same kernels, and a second gradient: it reaches the configs of both.
LAYER_NORM_AND_INPUT = Op(
    layer_norm_and_input, _and_input(_layer_norm), configs=_norm_configs, fuzz_share=2, outputs=2,
    eager=lambda x, weight, bias: (F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), x),
    **_with_samples(_NORM),
)  # fmt: skip
_RMS: dict[str, Any] = {
    **_NORM,
    "args": {"x": Arg(required=True), "weight": Arg()},
    "shapes": lambda s: dict(x=(*s.rows, s.C), weight=(s.C,)),
}
RMS_NORM = Op(
    rms_norm, _rms_norm, configs=lambda large: [],
    eager=lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
    **_with_residual(_RMS),
)  # fmt: skip
RMS_NORM_AND_INPUT = Op(
    rms_norm_and_input, _and_input(_rms_norm), configs=_norm_configs, fuzz_share=2, outputs=2,
    eager=lambda x, weight: (F.rms_norm(x, x.shape[-1:], weight, 1e-6), x),
    **_with_samples(_RMS),
)  # fmt: skip
