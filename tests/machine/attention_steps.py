"""Steps of the gate that are attention alone: masks, dropout, a learnt bias, head dims, configs."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor

from fastvit_kernels.ops.attention.configs import (
    BWD_TABLE,
    DKDV_TABLE,
    DQ_TABLE,
    FWD_TABLE,
    ONE_PASS_TABLE,
    BwdForm,
    forced_route,
)
from fastvit_kernels.ops.attention.functions import attention
from fastvit_kernels.ops.attention.launch import Problem
from fastvit_kernels.ops.attention.projected import qkv_attention
from fastvit_kernels.ops.attention.sdpa import scaled_dot_product_attention
from fastvit_kernels.ops.attention.varlen import varlen_attention
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced

HEAD_DIMS = (32, 64, 80, 96, 128)
WIDE_HEAD_DIMS = (160, 256)
HALF, SINGLE = torch.bfloat16, torch.float32
ROUTES = (nullcontext, functools.partial(forced_route, "triton"))  # the default, and plain Triton


def backward(*outputs: Tensor) -> None:
    """The backward of these outputs of one call, from gradients in their own dtypes."""
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def _attend(B: int, T: int, D: int, dtype: torch.dtype = HALF) -> Callable[..., Tensor]:
    """Attention of 12 heads on tensors of their own; takes a mask, is_causal and dropout_p."""
    q, k, v = (torch.empty(B, 12, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
    return functools.partial(scaled_dot_product_attention, q, k, v)


def _masks(B: int, T: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Boolean by pair and by key, additive by key."""
    yield torch.empty(T, T, dtype=torch.bool)
    yield torch.empty(B, 1, 1, T, dtype=torch.bool)
    yield torch.empty(B, 1, 1, T, dtype=dtype)


def masked_attention() -> None:
    """Queries and keys of different lengths, with a boolean mask, an additive one, and causal."""
    shapes = ((8, 12, 197, 64), (8, 12, 257, 64), (8, 12, 257, 64))
    q, k, v = (torch.empty(s, dtype=HALF, requires_grad=True) for s in shapes)
    masks = (torch.empty(197, 257, dtype=torch.bool), torch.empty(8, 1, 1, 257, dtype=q.dtype))
    for mask in masks:
        backward(scaled_dot_product_attention(q, k, v, mask))
    backward(scaled_dot_product_attention(q, k, v, is_causal=True))


def learnt_bias() -> None:
    """A bias of each head that needs a gradient: of BEiT, of Swin's windows, of wide heads."""
    for B, T, H, D, windows, dtype, bias in (
        (64, 577, 16, 64, 1, HALF, HALF),
        (4096, 49, 3, 32, 64, HALF, HALF),
        (25, 196, 16, 80, 25, HALF, HALF),
        (64, 197, 12, 128, 1, HALF, HALF),
        (64, 197, 12, 64, 1, SINGLE, SINGLE),
    ):
        qkv = torch.empty(B, T, 3, H, D, dtype=dtype, requires_grad=True)
        mask = torch.empty(windows, H, T, T, dtype=bias, requires_grad=True)
        for dropout_p in (0.0, 0.1) if D <= 64 else (0.0,):
            backward(attention(qkv, attn_mask=mask, dropout_p=dropout_p))


@patch.dict(os.environ, FASTVIT_KERNELS_FUSED_DQ="1")
def attention_configs() -> None:
    """Attention with each launch config that ships and fits at D = 64, and on each route."""
    here = gpu(torch.device("cpu"))  # the target
    for T, H in ((50, 12), (197, 12), (577, 12)):
        qkv = torch.empty(512, T, 3, H, 64, dtype=HALF, requires_grad=True)
        key = Problem(here, qkv.dtype, (512, T, H, 64), T, "none", False, "ieee").key()
        for table in (FWD_TABLE, ONE_PASS_TABLE, DQ_TABLE, DKDV_TABLE):
            form = BwdForm(one_pass=table is ONE_PASS_TABLE)
            if table is not FWD_TABLE and form.one_pass != (T < 256):
                continue
            for config in table.candidates(here, *key)[1:]:
                if getattr(config, "route", "triton") == "library":
                    continue
                if T == 50 and getattr(config, "heads", 1) == 1:
                    continue  # compiled for T = 197
                with forced(table.name, config), forced(BWD_TABLE.name, form):
                    out = attention(qkv)
                    if table is not FWD_TABLE:
                        backward(out)
    for B, T, D in ((256, 197, 64), (256, 577, 64), (25, 1025, 32), (256, 577, 128)):
        x = torch.empty(B, T, D, dtype=HALF, requires_grad=True)
        weight, bias = (
            torch.empty(36 * D, *more, dtype=x.dtype, requires_grad=True) for more in ((D,), ())
        )
        qkv = torch.empty(B, T, 3, 12, D, dtype=x.dtype, requires_grad=True)
        for route in ROUTES:
            with route():
                backward(attention(qkv))
                backward(qkv_attention(x, weight, bias, num_heads=12))


def heads(D: int) -> None:
    """Attention of one head dim: three lengths; causal and each mask, beside dropout too."""
    for T in (50, 197, 577):
        qkv = torch.empty(64, T, 3, 12, D, dtype=HALF, requires_grad=True)
        backward(attention(qkv))
    for T, dropout_p in itertools.product((197, 577), (0.0, 0.1)):
        attend = functools.partial(_attend(64, T, D), dropout_p=dropout_p)
        for out in (attend(), attend(is_causal=True), *map(attend, _masks(64, T, HALF))):
            backward(out)


def wide_heads() -> None:
    """Heads above 128, plain and causal; beside a mask D = 256 spills 8 bytes on sm_80."""
    for D in WIDE_HEAD_DIMS:
        attend = _attend(64, 197, D)
        backward(attend())
        backward(attend(is_causal=True))


def few_queries() -> None:
    """Cross attention of a few queries and many keys: pooling, decoders."""
    for D, T_q in itertools.product((64, 128), (1, 64)):
        q = torch.empty(64, 12, T_q, D, dtype=HALF, requires_grad=True)
        k, v = (q.new_empty(64, 12, 197, D).requires_grad_() for _ in range(2))
        backward(scaled_dot_product_attention(q, k, v))


def masks_in_fp32() -> None:
    """fp32: each kind of mask, and dropout beside none and beside keys."""
    for D, T in itertools.product((64, 128), (197, 577)):
        attend = _attend(64, T, D, SINGLE)
        for out in (attend(), attend(is_causal=True), *map(attend, _masks(64, T, SINGLE))):
            backward(out)
        backward(attend(dropout_p=0.1))
        backward(attend(torch.empty(64, 1, 1, T, dtype=torch.bool), dropout_p=0.1))


def packed_sequences() -> None:
    """Windows and long packed images of some head dims; dropout and fp32 at D = 64."""
    for D, (B, longest) in itertools.product((32, 64, 128), ((256, 64), (16, 1024))):
        cu_seqlens = torch.empty(B + 1, dtype=torch.int32)
        kinds = [(HALF, 0.0)] + [(HALF, 0.1), (SINGLE, 0.0)] * (D == 64)
        for dtype, dropout_p in kinds:
            qkv = torch.empty(16384, 3, 16, D, dtype=dtype, requires_grad=True)
            backward(varlen_attention(qkv, cu_seqlens, longest, dropout_p=dropout_p))
