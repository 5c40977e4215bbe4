"""rope_attention beside a Linear, the rotation and SDPA in torch, and beside our ops one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from bench import bench_attention, bench_qkv_attention, bench_rope
from bench.harness import Draw, Op
from bench.providers import Function, Provider, compiled, eager, ours, sdpa_backends
from bench.shapes import Shape
from fastvit_kernels import linear, rope, rope_attention, scaled_dot_product_attention
from fastvit_kernels.ops.attention.rotary import rope_attention_ref

PARTS = "ours-parts"  # linear, rope, attention: each an op of its own


def shapes() -> Iterator[Shape]:
    yield from bench_rope.shapes()


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    return {**bench_qkv_attention.inputs(shape, dtype, draw), **bench_rope.turning(shape, draw)}


def reference(shape: Shape, dtype: str) -> Function:
    """Head by head where float64 scores of all heads are too many."""
    attend = bench_attention.reference(shape, dtype)
    turn = bench_rope.reference(shape, dtype)

    def specification(x: Tensor, weight: Tensor, bias: Tensor, **turning: Tensor) -> Tensor:
        q, k, v = _projected(x, weight, bias, shape, torch.nn.functional.linear)
        q, k = turn(q, k, **turning)
        return attend(torch.stack((q, k, v), 2))

    return specification


def _projected(
    x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, product: Function
) -> tuple[Tensor, ...]:
    return product(x, weight, bias).unflatten(-1, (3, shape.H, shape.D)).unbind(2)


def _parts(shape: Shape) -> Function:
    turn = bench_rope.called(rope, shape)

    def run(x: Tensor, weight: Tensor, bias: Tensor, **turning: Tensor) -> Tensor:
        q, k, v = _projected(x, weight, bias, shape, linear)
        q, k, v = (t.transpose(1, 2) for t in (*turn(q, k, **turning), v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return run


def flops(shape: Shape, mode: str) -> float:
    return bench_qkv_attention.flops(shape, mode) + bench_rope.flops(shape, mode)


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Those of qkv_attention, in which q and k could turn where they are loaded; the tables in."""
    tables = bench_rope.table_bytes(shape) * (2 if mode == "both" else 1)
    return bench_qkv_attention.bytes_(shape, dtype, mode) + tables


def providers(shape: Shape, dtype: str) -> list[Provider]:
    def called(function: Function) -> Function:
        return functools.partial(bench_rope.called(function, shape), num_heads=shape.H)

    torch_ = called(rope_attention_ref)
    return [
        eager(torch_), *sdpa_backends(torch_), ours("ours", called(rope_attention)),
        ours(PARTS, _parts(shape)), compiled(torch_),
    ]  # fmt: skip


OP = Op("rope_attention", shapes, inputs, reference, providers, flops, bytes_)
