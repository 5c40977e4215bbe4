"""attention on packed QKV beside SDPA with every backend forced, flash_attn and xformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.harness import Draw, Op, itemsize
from bench.providers import (
    Function,
    Provider,
    compiled,
    eager,
    imported,
    ours,
    sdpa_backends,
)
from bench.shapes import Shape, head_sweep, token_sweep, vits
from fastvit_kernels import attention as attention_op
from fastvit_kernels.ops.attention.configs import BwdForm
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.launch import bwd_launch
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.dtypes import DTYPES

LONG_T = 1024  # above it the float64 oracle goes head by head: its scores are (B, H, T, T)


def shapes() -> Iterator[Shape]:
    yield from vits()
    yield from token_sweep()
    yield from head_sweep()


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    return {"qkv": draw(shape.B, shape.T, 3, shape.H, shape.D)}


def by_head(qkv: Tensor) -> Tensor:
    """attention_ref head by head; the backward computes the scores of each head anew."""
    heads = [checkpoint(attention_ref, h, use_reentrant=False) for h in qkv.split(1, dim=3)]
    return torch.cat(heads, dim=2)


def reference(shape: Shape, dtype: str) -> Function:
    def specification(qkv: Tensor) -> Tensor:
        long = qkv.dtype is torch.float64 and qkv.shape[1] > LONG_T
        return by_head(qkv) if long else attention_ref(qkv)

    return specification


def flops(shape: Shape, mode: str) -> float:
    """2 B H T^2 D a product; forward q k^T, p v; backward s again, dv, dp, dq, dk."""
    products = {"fwd": 2, "bwd": 5, "both": 7}[mode]
    return 2.0 * products * shape.B * shape.H * shape.T**2 * shape.D


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Forward: qkv in, out and lse out. Backward: qkv, out, dout, lse in, dqkv out."""
    tensors = {"fwd": 4, "bwd": 8, "both": 12}[mode]
    lse = 4 * shape.B * shape.H * shape.T * (2 if mode == "both" else 1)
    return float(tensors * shape.B * shape.T * shape.C * itemsize(dtype) + lse)


def _flash_attn(module: Any) -> Function:
    return lambda qkv: module.flash_attn_qkvpacked_func(qkv)


def _separate(module: Any) -> Function:
    """FlashAttention 3 and 4: the output, or it and the lse."""

    def run(qkv: Tensor) -> Tensor:
        out = module.flash_attn_func(*qkv.unbind(2))
        return out if isinstance(out, Tensor) else out[0]

    return run


def _xformers(module: Any) -> Function:
    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(2)
        return module.memory_efficient_attention(q, k, v)

    return run


def split_backward() -> Any:
    """A context in which no backward takes the one-pass form."""
    return forced("attention_bwd", BwdForm(one_pass=False))


def has_one_pass(shape: Shape, dtype: str) -> bool:
    """Whether the backward of this shape takes the one-pass form by itself."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sizes = (shape.B, shape.T, shape.H, shape.D)
    problem = (gpu(device), DTYPES[dtype], sizes, shape.T, "none", False, "ieee")
    return bwd_launch(*problem).one_pass is not None


def providers(shape: Shape, dtype: str) -> list[Provider]:
    found = [eager(attention_ref), *sdpa_backends(attention_ref)]
    if dtype != "fp32":
        found.append(imported("flash_attn", "flash_attn", _flash_attn))
        found.append(imported("flash_attn_3", "flash_attn_interface", _separate))
        found.append(imported("flash_attn_4", "flash_attn.cute", _separate))
        found.append(imported("xformers", "xformers.ops", _xformers))
    found.append(ours("ours", attention_op))
    if has_one_pass(shape, dtype):
        found.append(ours("ours-split", attention_op, split_backward))
    return [*found, compiled(attention_ref)]


OP = Op("attention", shapes, inputs, reference, providers, flops, bytes_)
