"""layer_norm and rms_norm, and the variants that hand their input on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.common.samples import kept_rows
from ...ops.norm.functions import (
    layer_norm,
    layer_norm_and_input,
    layer_norm_ref,
    rms_norm,
    rms_norm_and_input,
    rms_norm_ref,
)
from ...runtime.arguments import autocast_dtype
from ..op import Arg, Example, Op, SampleShape, Shape, Sizes


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
        kept = x if samples is None else kept_rows(x, samples)
        return norm(kept, *args, **options), x.view_as(x)

    return norm_and_input


_layer_norm, _rms_norm = _norm(layer_norm_ref), _norm(rms_norm_ref)


def _at(v: Sizes) -> dict[str, Any]:
    return dict(rows=(v.B, v.T), C=v.C)


def _shapes(s: Any) -> dict[str, Shape]:
    whole: Shape = (*s.rows, s.C)
    shapes: dict[str, Shape] = dict(x=whole, weight=(s.C,), bias=(s.C,), residual=whole)
    if kept := getattr(s, "kept", 0):
        shapes["samples"] = SampleShape(kept, s.rows[0])
    return shapes


def _check(v: Sizes) -> list[Example]:
    return [Example(_at(v), without=("residual",)), Example(_at(v), "residual")]


def _check_and_input(v: Sizes) -> list[Example]:
    return [Example(_at(v)), Example(_at(v) | dict(kept=(v.B + 1) // 2), "kept samples")]


_RMS = {"x": Arg(required=True), "weight": Arg()}
_LAYER = {**_RMS, "bias": Arg()}
_RESIDUAL = {"residual": Arg(usual=False)}
_SAMPLES = {"samples": Arg("keep", grad=False, trained=False, usual=False)}
_ALONE: dict[str, Any] = dict(shapes=_shapes, at=_at, check=_check)
_BOTH: dict[str, Any] = dict(shapes=_shapes, at=_at, check=_check_and_input, outputs=2)
LAYER_NORM = Op(
    layer_norm,
    _layer_norm,
    _LAYER | _RESIDUAL,
    **_ALONE,
    eager=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6),
)
LAYER_NORM_AND_INPUT = Op(
    layer_norm_and_input,
    _and_input(_layer_norm),
    _LAYER | _SAMPLES,
    **_BOTH,
    eager=lambda x, weight, bias: (F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), x),
)
RMS_NORM = Op(
    rms_norm,
    _rms_norm,
    _RMS | _RESIDUAL,
    **_ALONE,
    eager=lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
)
RMS_NORM_AND_INPUT = Op(
    rms_norm_and_input,
    _and_input(_rms_norm),
    _RMS | _SAMPLES,
    **_BOTH,
    eager=lambda x, weight: (F.rms_norm(x, x.shape[-1:], weight, 1e-6), x),
)
