"""linear with its two epilogues in a ViT: proj (LayerScale, residual) and fc1 (exact GELU)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, gemm_route, ours
from bench.shapes import Shape, variants, vits
from fastvit_kernels import linear
from fastvit_kernels.ops.linear.functions import linear_ref


def shapes() -> Iterator[Shape]:
    return variants(vits(), "proj", "fc1")


def _sizes(shape: Shape) -> tuple[int, int, int]:
    """M, N, K of the product."""
    N = shape.F if shape.variant == "fc1" else shape.C
    return shape.B * shape.T, N, shape.C


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    _, N, K = _sizes(shape)
    found: dict[str, Tensor | None] = {
        "x": draw(shape.B, shape.T, K), "weight": draw(N, K, scale=K**-0.5), "bias": draw(N),
    }  # fmt: skip
    if shape.variant == "proj":
        found |= {"residual": draw(shape.B, shape.T, N), "layer_scale": draw(N)}
    return found


def _activation(shape: Shape) -> str | None:
    return "gelu" if shape.variant == "fc1" else None


def reference(shape: Shape, dtype: str) -> Function:
    return functools.partial(linear_ref, activation=_activation(shape))


def flops(shape: Shape, mode: str) -> float:
    """2 M N K forward; backward as much for dx and for dweight."""
    M, N, K = _sizes(shape)
    return 2.0 * M * N * K * {"fwd": 1, "bwd": 2, "both": 3}[mode]


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x, W in, y out, and residual in or pre-activation out. Backward: dy, x, W in, dx,
    dW out, and the pre-activation in or the output of the product, for dlayer_scale, rebuilt."""
    M, N, K = _sizes(shape)
    saved = 1 if shape.variant == "fc1" else 0
    forward = M * K + N * K + 2 * M * N
    backward = 2 * M * K + 2 * N * K + (1 + saved) * M * N
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode]) * itemsize(
        dtype
    )


def providers(shape: Shape, dtype: str) -> list[Provider]:
    torch_ = reference(shape, dtype)
    fused = functools.partial(linear, activation=_activation(shape))
    return [
        eager(torch_),
        ours("ours", fused),
        ours("ours-library", fused, gemm_route("library")),
        ours("ours-triton", fused, gemm_route("triton")),
        compiled(torch_),
    ]


OP = Op("linear", shapes, inputs, reference, providers, flops, bytes_)
