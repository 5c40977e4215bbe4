"""qkv_attention: the QKV projection and attention as one Function, beside a Linear and SDPA."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench import bench_attention
from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, ours, sdpa_backends
from bench.shapes import Shape, token_sweep, vits
from fastvit_kernels import qkv_attention
from fastvit_kernels.ops.attention.projected import qkv_attention_ref


def shapes() -> Iterator[Shape]:
    yield from vits()
    yield from (s for s in token_sweep() if s.T <= 4097)


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    C = shape.C
    return {
        "x": draw(shape.B, shape.T, C),
        "weight": draw(3 * C, C, scale=C**-0.5),
        "bias": draw(3 * C),
    }


def reference(shape: Shape, dtype: str) -> Function:
    attend = bench_attention.reference(shape, dtype)

    def specification(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        qkv = torch.nn.functional.linear(x, weight, bias)
        return attend(qkv.unflatten(-1, (3, shape.H, shape.D)))

    return specification


def flops(shape: Shape, mode: str) -> float:
    """The projection, 2 B T C 3C forward and twice that backward, and attention's."""
    projection = 6.0 * shape.B * shape.T * shape.C**2
    return projection * {"fwd": 1, "bwd": 2, "both": 3}[mode] + bench_attention.flops(shape, mode)


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: x, W in; qkv, out, lse out. Backward: x, W, qkv, out, dout, lse in; dx, dW out."""
    rows, C = shape.B * shape.T, shape.C
    lse = 4 * shape.H * rows
    forward = (rows * 5 * C + 3 * C * C) * itemsize(dtype) + lse
    backward = (rows * 7 * C + 6 * C * C) * itemsize(dtype) + lse
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def providers(shape: Shape, dtype: str) -> list[Provider]:
    torch_ = functools.partial(qkv_attention_ref, num_heads=shape.H)
    fused = functools.partial(qkv_attention, num_heads=shape.H)
    found = [eager(torch_), *sdpa_backends(torch_), ours("ours", fused)]
    if bench_attention.has_one_pass(shape, dtype):
        found.append(ours("ours-split", fused, bench_attention.split_backward))
    return [*found, compiled(torch_)]


OP = Op("qkv_attention", shapes, inputs, reference, providers, flops, bytes_)
