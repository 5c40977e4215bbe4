"""rms_norm beside torch, liger_kernel and quack. `amp`: fp32 in, bf16 out, as in training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, imported, ours
from bench.shapes import Shape, batch, vits
from fastvit_kernels import rms_norm
from fastvit_kernels.ops.norm.functions import rms_norm_ref

EPS = 1e-6
HEADS = "heads"  # a norm of each head's queries: rows of D
ADDED = "added"  # behind a branch: it adds the residual


def shapes() -> Iterator[Shape]:
    yield from vits()
    # Queries of DINOv3's and Perception Encoder's sizes; InternViT-6B normalises all heads at once.
    for T, H, D in ((201, 12, 64), (261, 16, 64), (1025, 25, 128)):
        yield Shape(f"D{D}", batch(T), T, H * D, H, 4 * H * D, 2, variant=HEADS)
    yield Shape("InternViT-6B", batch(1025), 1025, 3200, 25, 12800, 2)
    yield Shape("ViT-B", batch(257), 257, 768, 12, 3072, 1, variant=ADDED)


def _width(shape: Shape) -> int:
    return shape.D if shape.variant == HEADS else shape.C


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    C = _width(shape)
    x = draw(shape.B, shape.T, shape.C // C, C).squeeze(2)
    found: dict[str, Tensor | None] = {"x": x, "weight": draw(C)}
    return found | {"residual": draw(*x.shape)} if shape.variant == ADDED else found


def _torch(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if residual is None else residual + y


def _torch_amp(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    return _torch(x, weight, residual).to(torch.bfloat16)


def reference(shape: Shape, dtype: str) -> Function:
    def specification(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        rounded = dtype == "amp" and x.dtype is not torch.float64
        return rms_norm_ref(x, weight, EPS, torch.bfloat16 if rounded else None, residual)

    return specification


def flops(shape: Shape, mode: str) -> float:
    """An element: forward squares 2, scale 1, weight 1, a residual 1; backward 9 likewise."""
    forward = 5.0 if shape.variant == ADDED else 4.0
    elements = shape.B * shape.T * shape.C
    return {"fwd": forward, "bwd": 9.0, "both": forward + 9.0}[mode] * elements


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x in, y out, a residual in. Backward: dy, x in, dx out. Each: rstd, fp32, a row."""
    x, y = (4, 2) if dtype == "amp" else (itemsize(dtype),) * 2
    elements = shape.B * shape.T * shape.C
    rstd = 4 * elements // _width(shape)
    forward = elements * (x + y + (x if shape.variant == ADDED else 0)) + rstd
    backward = elements * (2 * x + y) + rstd
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def _liger(module: Any) -> Function:
    """Its default rounds as Llama does; "gemma" keeps fp32 until the store, as we do."""
    return lambda x, weight: module.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False)


def _quack(module: Any) -> Function:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return module.rmsnorm(x.view(-1, x.shape[-1]), weight.float(), eps=EPS).view(x.shape)

    return run


def providers(shape: Shape, dtype: str) -> list[Provider]:
    if dtype == "amp":
        fused = functools.partial(rms_norm, eps=EPS, out_dtype=torch.bfloat16)
        return [eager(_torch_amp), ours("ours", fused), compiled(_torch_amp)]
    if shape.variant == ADDED:
        return [
            eager(_torch), ours("ours", functools.partial(rms_norm, eps=EPS)), compiled(_torch)
        ]  # fmt: skip
    return [
        eager(_torch),
        imported("liger_kernel", "liger_kernel.ops.rms_norm", _liger),
        imported("quack", "quack.rmsnorm", _quack),
        ours("ours", functools.partial(rms_norm, eps=EPS)),
        compiled(_torch),
    ]


OP = Op(
    "rms_norm", shapes, inputs, reference, providers, flops, bytes_,
    dtypes=("bf16", "amp", "fp16", "fp32"),
)  # fmt: skip
