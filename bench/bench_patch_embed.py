"""patch_embed with a class token and positions. Images need no gradient, as in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, compiled, eager, ours, plain, replaced
from bench.shapes import Shape, vits
from fastvit_kernels import patch_embed
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref


def shapes() -> Iterator[Shape]:
    return vits()


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    size, patch, C = shape.size, shape.patch, shape.C
    return {
        "images": draw(shape.B, 3, size, size, grad=False),
        "weight": draw(C, 3, patch, patch, scale=(3 * patch * patch) ** -0.5),
        "bias": draw(C),
        "prefix_tokens": draw(1, 1, C),
        "pos_embed": draw(1, shape.T, C),
    }


def reference(shape: Shape, dtype: str) -> Function:
    return patch_embed_ref


def flops(shape: Shape, mode: str) -> float:
    """2 C K a patch of K = 3 patch^2 pixels, forward and for dweight."""
    product = 2.0 * shape.B * (shape.T - 1) * shape.C * 3 * shape.patch**2
    return product * (2 if mode == "both" else 1)


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Either way: images, weight, positions, and the tokens."""
    K = 3 * shape.patch**2
    pixels, tokens = shape.B * (shape.T - 1) * K, shape.B * shape.T * shape.C
    once = pixels + tokens + shape.C * K + shape.T * shape.C
    return float(once * (2 if mode == "both" else 1)) * itemsize(dtype)


def benchmarked_convolutions() -> AbstractContextManager[Any]:
    """A context in which cuDNN measures its convolutions and takes the fastest."""
    return replaced(torch.backends.cudnn, "benchmark", True)


def providers(shape: Shape, dtype: str) -> list[Provider]:
    return [
        eager(patch_embed_ref),
        plain("eager, cudnn.benchmark", patch_embed_ref, context=benchmarked_convolutions),
        ours("ours", patch_embed),
        compiled(patch_embed_ref),
    ]


OP = Op("patch_embed", shapes, inputs, reference, providers, flops, bytes_)
