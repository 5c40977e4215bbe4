"""layer_norm beside torch, liger_kernel and quack. `amp`: fp32 in, bf16 out, as in training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, imported, ours
from bench.shapes import Shape, head_sweep, vits
from fastvit_kernels import layer_norm
from fastvit_kernels.ops.norm.functions import layer_norm_ref

EPS = 1e-6


def shapes() -> Iterator[Shape]:
    yield from vits()
    yield from head_sweep()


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    return {"x": draw(shape.B, shape.T, shape.C), "weight": draw(shape.C), "bias": draw(shape.C)}


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _torch_amp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _torch(x, weight, bias).to(torch.bfloat16)


def reference(shape: Shape, dtype: str) -> Function:
    def specification(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rounded = dtype == "amp" and x.dtype is not torch.float64
        out_dtype = torch.bfloat16 if rounded else None
        return layer_norm_ref(x, weight, bias, EPS, out_dtype)

    return specification


def flops(shape: Shape, mode: str) -> float:
    """An element: forward mean 1, centre 1, squares 2, scale 1, affine 2; backward 13 likewise."""
    return {"fwd": 7.0, "bwd": 13.0, "both": 20.0}[mode] * shape.B * shape.T * shape.C


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x in, y out. Backward: dy, x in, dx out. Each: mean and rstd, fp32."""
    x, y = (4, 2) if dtype == "amp" else (itemsize(dtype),) * 2
    rows = shape.B * shape.T
    forward = rows * (shape.C * (x + y) + 8)
    backward = rows * (shape.C * (2 * x + y) + 8)
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def _liger(module: Any) -> Function:
    return lambda x, weight, bias: module.LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _quack(module: Any) -> Function:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return module.layernorm_fwd(rows, weight.float(), bias.float(), eps=EPS).view(x.shape)

    return run


def providers(shape: Shape, dtype: str) -> list[Provider]:
    if dtype == "amp":
        fused = functools.partial(layer_norm, eps=EPS, out_dtype=torch.bfloat16)
        return [eager(_torch_amp), ours("ours", fused), compiled(_torch_amp)]
    return [
        eager(_torch),
        imported("liger_kernel", "liger_kernel.ops.layer_norm", _liger),
        imported("quack", "quack.rmsnorm", _quack, backward=False),
        ours("ours", functools.partial(layer_norm, eps=EPS)),
        compiled(_torch),
    ]


OP = Op(
    "layer_norm", shapes, inputs, reference, providers, flops, bytes_,
    dtypes=("bf16", "amp", "fp16", "fp32"),
)  # fmt: skip
