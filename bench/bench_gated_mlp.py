"""gated_mlp, with the residual of its block, at the widths of towers that have one.

Variants: packed weights ("" and "packed"), separate ones, separate ones and a LayerNorm inside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, imported, ours
from bench.shapes import Shape, batch, vit
from fastvit_kernels import gated_mlp
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp_ref

# Tower -> T, C, H, F, how its weights lie. timm 1.0.31, transformers 5.23.
TOWERS = {
    "EVA02-L": (257, 1024, 16, 2730, "norm"),
    "EVA02-B": (257, 768, 12, 2048, "norm"),
    "DINOv2-g": (257, 1536, 24, 4096, "packed"),
    "DINOv3-H+": (201, 1280, 20, 5120, "separate"),
    "AIMv2-L": (256, 1024, 8, 2816, "separate"),
    "DINOv3-7B": (201, 4096, 32, 8192, "separate"),
}


def shapes() -> Iterator[Shape]:
    yield replace(vit("B", 224, 0), F=2048, variant="packed")
    for tier, (model, (T, C, H, F, form)) in enumerate(TOWERS.items(), 1):
        yield Shape(model, batch(T), T, C, H, F, min(tier, 4), variant=form)


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    B, T, C, F = shape.B, shape.T, shape.C, shape.F
    separate = shape.variant in ("separate", "norm")
    rows = F if separate else 2 * F
    given: dict[str, Tensor | None] = {
        "x": draw(B, T, C),
        "fc1_weight": draw(rows, C, scale=C**-0.5), "fc1_bias": draw(rows),
        "fc2_weight": draw(C, F, scale=F**-0.5), "fc2_bias": draw(C),
    }  # fmt: skip
    if separate:
        given |= {"gate_weight": draw(F, C, scale=C**-0.5), "gate_bias": draw(F)}
    if shape.variant == "norm":
        given |= {"norm_weight": draw(F), "norm_bias": draw(F)}
    return {**given, "residual": draw(B, T, C)}


def reference(shape: Shape, dtype: str) -> Function:
    return gated_mlp_ref


def flops(shape: Shape, mode: str) -> float:
    """Three products of 2 M C F forward, twice that backward."""
    return 6.0 * shape.B * shape.T * shape.C * shape.F * {"fwd": 1, "bwd": 2, "both": 3}[mode]


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x, residual, the W in, y, gate and value (M, F) out. Backward: dy, x, gate, value,
    the W in, dx and the dW out. A norm's mean and rstd: fp32, once each way."""
    M, C, F = shape.B * shape.T, shape.C, shape.F
    forward = 3 * M * C + 2 * M * F + 3 * C * F
    backward = 3 * M * C + 2 * M * F + 6 * C * F
    elements = {"fwd": forward, "bwd": backward, "both": forward + backward}[mode]
    stats = 8 * M * (1 + (mode == "both")) if shape.variant == "norm" else 0
    return float(elements) * itemsize(dtype) + stats


def _liger(module: Any) -> Function:
    linear = torch.nn.functional.linear

    def run(
        x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
        residual: Tensor, gate_weight: Tensor | None = None, gate_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if gate_weight is None:
            gate, value = linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
        else:
            gate, value = linear(x, gate_weight, gate_bias), linear(x, fc1_weight, fc1_bias)
        hidden = module.LigerSiLUMulFunction.apply(gate, value)
        return residual + linear(hidden, fc2_weight, fc2_bias)

    return run


def providers(shape: Shape, dtype: str) -> list[Provider]:
    found = [
        eager(gated_mlp_ref),
        ours("ours", gated_mlp),
        ours("ours-stored", functools.partial(gated_mlp, recompute=False)),
        compiled(gated_mlp_ref),
    ]
    if shape.variant != "norm":
        found.append(imported("liger_kernel", "liger_kernel.ops.swiglu", _liger))
    return found


OP = Op("gated_mlp", shapes, inputs, reference, providers, flops, bytes_)
