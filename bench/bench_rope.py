"""rope beside torch and its compiler: queries and keys of a packed qkv, qk-norm or none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, ours
from bench.shapes import VITS, Shape, batch
from fastvit_kernels import rope
from fastvit_kernels.ops.rope import rope_ref

# Tokens, of them prefix: DINOv3 at 224 and 256, Perception Encoder at 448, EVA02 at 448.
TOKENS = ((201, 5), (261, 5), (1025, 1))
INTERLEAVED = "interleaved"  # Perception Encoder, EVA02, V-JEPA 2
NORMED = "layer_norm"
LEARNT = "learnt"  # tables of each head, with gradients: RoPE-ViT "mixed"
PREFIX = dict(TOKENS)  # other lengths: a class token


def _prefix(shape: Shape) -> int:
    return PREFIX.get(shape.T, 1)


def shapes() -> Iterator[Shape]:
    for T, _ in TOKENS:
        for model in ("B", "L", "S"):
            C, _, H, F = VITS[model]
            tier = int(T != 201) if model == "B" else 2
            shape = Shape(f"ViT-{model}", batch(T), T, C, H, F, tier)
            yield shape
            yield replace(shape, variant=INTERLEAVED)
            yield replace(shape, variant=NORMED)
    C, _, H, F = VITS["B"]
    yield Shape("ViT-B", batch(197), 197, C, H, F, 1, variant=LEARNT)


def turning(shape: Shape, draw: Draw) -> dict[str, Tensor | None]:
    """Tables, and the parameters of a norm."""
    learns = shape.variant == LEARNT
    heads = (1, shape.H) if learns else ()
    angles = 3 * draw(*heads, shape.T - _prefix(shape), shape.D, grad=False).float()
    found: dict[str, Tensor | None] = {
        name: table.requires_grad_(learns)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin()))
    }
    if shape.variant == NORMED:
        found |= {f"{x}_norm_{name}": draw(shape.D) for x in "qk" for name in ("weight", "bias")}
    return found


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    qkv = draw(shape.B, shape.T, 3, shape.H, shape.D, grad=False)
    q, k = (qkv[:, :, i].requires_grad_() for i in (0, 1))
    return {"q": q, "k": k, **turning(shape, draw)}


def called(function: Function, shape: Shape) -> Function:
    """An op that turns, with the options of this shape."""
    norm = NORMED if shape.variant == NORMED else None
    return functools.partial(
        function, interleaved=shape.variant in (INTERLEAVED, LEARNT),
        prefix_tokens=_prefix(shape), norm=norm,
    )  # fmt: skip


def reference(shape: Shape, dtype: str) -> Function:
    return called(rope_ref, shape)


def flops(shape: Shape, mode: str) -> float:
    """An element of q and of k: 3 each way; a norm 7 forward, 13 backward; tables that learn 4."""
    normed = shape.variant == NORMED
    forward, backward = (10.0, 16.0) if normed else (3.0, 3.0)
    backward += 4.0 if shape.variant == LEARNT else 0.0
    elements = 2 * shape.B * shape.T * shape.C
    return {"fwd": forward, "bwd": backward, "both": forward + backward}[mode] * elements


def table_bytes(shape: Shape) -> int:
    """Of cos and sin, fp32."""
    heads = shape.H if shape.variant == LEARNT else 1
    return 2 * 4 * heads * (shape.T - _prefix(shape)) * shape.D


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """q and k in and out, the tables in; the backward of a norm reads q and k again, that of tables
    too, and writes their gradients."""
    operand = 2 * shape.B * shape.T * shape.C * itemsize(dtype)
    forward = 2 * operand + table_bytes(shape)
    backward = forward + (operand if shape.variant in (NORMED, LEARNT) else 0)
    backward += table_bytes(shape) if shape.variant == LEARNT else 0
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def providers(shape: Shape, dtype: str) -> list[Provider]:
    specification = called(rope_ref, shape)
    return [eager(specification), ours("ours", called(rope, shape)), compiled(specification)]


OP = Op("rope", shapes, inputs, reference, providers, flops, bytes_)
