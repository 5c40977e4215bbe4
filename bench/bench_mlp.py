"""mlp, with the residual of its block: each GEMM route, and the backward that stores less."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, gemm_route, ours
from bench.shapes import Shape, vits
from fastvit_kernels import mlp
from fastvit_kernels.ops.mlp.functions import mlp_ref


def shapes() -> Iterator[Shape]:
    return vits()


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    B, T, C, F = shape.B, shape.T, shape.C, shape.F
    return {
        "x": draw(B, T, C),
        "fc1_weight": draw(F, C, scale=C**-0.5), "fc1_bias": draw(F),
        "fc2_weight": draw(C, F, scale=F**-0.5), "fc2_bias": draw(C),
        "residual": draw(B, T, C),
    }  # fmt: skip


def reference(shape: Shape, dtype: str) -> Function:
    return mlp_ref


def flops(shape: Shape, mode: str) -> float:
    """Two products of 2 M C F forward, twice that backward."""
    return 4.0 * shape.B * shape.T * shape.C * shape.F * {"fwd": 1, "bwd": 2, "both": 3}[mode]


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x, residual, both W in, y and the pre-activation (M, F) out. Backward: dy, x, the
    pre-activation, both W in, dx and both dW out."""
    M, C, F = shape.B * shape.T, shape.C, shape.F
    forward = 3 * M * C + M * F + 2 * C * F
    backward = 3 * M * C + M * F + 4 * C * F
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode]) * itemsize(
        dtype
    )


def providers(shape: Shape, dtype: str) -> list[Provider]:
    return [
        eager(mlp_ref),
        ours("ours", mlp),
        ours("ours-stored", functools.partial(mlp, recompute=False)),
        ours("ours-library", mlp, gemm_route("library")),
        ours("ours-triton", mlp, gemm_route("triton")),
        compiled(mlp_ref),
    ]


OP = Op("mlp", shapes, inputs, reference, providers, flops, bytes_)
