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


def _out_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype | None:
    """What the specification of a norm is asked for."""
    if x.dtype is torch.float64:
        return None  # the oracle rounds nothing
    widens = out_dtype is None and autocast_dtype(x) is not None
    return torch.float32 if widens else out_dtype


def _layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, *,
    out_dtype: torch.dtype | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return layer_norm_ref(x, weight, bias, eps, _out_dtype(x, out_dtype), residual)


def _some(x: Tensor, samples: Tensor | None) -> Tensor:
    return x if samples is None else x[samples[: len(samples) - len(x)]]


def _layer_norm_and_input(
    x: Tensor, *args: Any, samples: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    return _layer_norm(_some(x, samples), *args, **options), x.view_as(x)


def _rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *,
    out_dtype: torch.dtype | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return rms_norm_ref(x, weight, eps, _out_dtype(x, out_dtype), residual)


def _rms_norm_and_input(
    x: Tensor, *args: Any, samples: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    return _rms_norm(_some(x, samples), *args, **options), x.view_as(x)


def _norm_fuzz(pick: Pick) -> Mapping[str, Any]:
    C = pick(pick.up_to(600), pick.up_to(600), 768, 1000, 1025, 2049)
    return dict(rows=pick.rows(60_000 // (C + 40), none=True), C=C)


def _fuzz_and_input(pick: Pick) -> Mapping[str, Any]:
    sizes = _norm_fuzz(pick)
    return {**sizes, **some_kept(pick, sizes["rows"], "samples")}


def _with_samples(norm: Mapping[str, Any]) -> dict[str, Any]:
    """What the variant that hands its input on says besides."""
    shapes = norm["shapes"]

    def of(s: Any) -> dict[str, Shape]:
        kept = getattr(s, "kept", 0)
        return shapes(s) | ({"samples": SampleShape(kept, s.rows[0])} if kept else {})

    return {
        **norm,
        "args": {**norm["args"], "samples": Arg("keep", grad=False, trained=False, usual=False)},
        "shapes": of,
        "fuzz": _fuzz_and_input,
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
    layer_norm_and_input, _layer_norm_and_input, configs=_norm_configs, fuzz_share=2, outputs=2,
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
    rms_norm_and_input, _rms_norm_and_input, configs=_norm_configs, fuzz_share=2, outputs=2,
    eager=lambda x, weight: (F.rms_norm(x, x.shape[-1:], weight, 1e-6), x),
    **_with_samples(_RMS),
)  # fmt: skip
