"""Steps of the gate that are attention alone: masks, a learnt bias, head dims, lengths, configs."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext

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

HEAD_DIMS = (32, 64, 72, 80, 96, 128)
WIDE_HEAD_DIMS = (136, 160, 192, 256)
TOKENS = (50, 197, 257, 577, 1025)
ROUTES = (nullcontext, functools.partial(forced_route, "triton"))  # the default, and plain Triton


def backward(*outputs: Tensor) -> None:
    """The backward of these outputs of one call, from gradients in their own dtypes."""
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def _attend(
    B: int, T: int, D: int, dropout_p: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> Callable[..., Tensor]:
    """Attention of 12 heads on tensors of their own; takes a mask, is_causal and dropout_p."""
    q, k, v = (torch.empty(B, 12, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
    return functools.partial(scaled_dot_product_attention, q, k, v, dropout_p=dropout_p)


def masked_attention() -> None:
    """Queries and keys of different lengths, with a boolean mask, an additive one, and causal."""
    shapes = ((8, 12, 197, 64), (8, 12, 257, 64), (8, 12, 257, 64))
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    masks = (torch.empty(197, 257, dtype=torch.bool), torch.empty(8, 1, 1, 257, dtype=q.dtype))
    for mask in masks:
        backward(scaled_dot_product_attention(q, k, v, mask))
    backward(scaled_dot_product_attention(q, k, v, is_causal=True))


def learnt_bias() -> None:
    """A bias of each head that needs a gradient: of BEiT, of Swin's windows, of SAM's samples."""
    half, single = torch.bfloat16, torch.float32
    for B, T, H, D, windows, dtype, bias in (
        (64, 197, 12, 64, 1, half, single),
        (64, 577, 16, 64, 1, half, half),
        (4096, 49, 3, 32, 64, half, half),
        (4096, 49, 3, 32, 1, half, single),
        (1024, 144, 6, 32, 1, half, half),
        (25, 196, 16, 80, 25, half, half),
        (64, 197, 12, 96, 1, half, half),
        (64, 197, 12, 128, 1, half, half),
        (64, 49, 12, 64, 1, half, half),
        (64, 197, 12, 64, 1, single, single),
        (64, 49, 3, 32, 1, single, single),
    ):
        qkv = torch.empty(B, T, 3, H, D, dtype=dtype, requires_grad=True)
        mask = torch.empty(windows, H, T, T, dtype=bias, requires_grad=True)
        for dropout_p in (0.0, 0.1) if D <= 64 else (0.0,):
            backward(attention(qkv, attn_mask=mask, dropout_p=dropout_p))


def attention_configs() -> None:
    """Attention, forward and backward, with each launch config that ships and fits at D = 64."""
    os.environ["FASTVIT_KERNELS_FUSED_DQ"] = "1"  # this process only compiles
    here = gpu(torch.device("cpu"))  # the target
    for T, H, D in ((50, 24, 32), (50, 12, 64), (197, 12, 64), (577, 12, 64)):
        qkv = torch.empty(512, T, 3, H, D, dtype=torch.bfloat16, requires_grad=True)
        backward(attention(qkv))
        key = Problem(here, qkv.dtype, (512, T, H, D), T, "none", False, "ieee").key()
        for table in (FWD_TABLE, ONE_PASS_TABLE, DQ_TABLE, DKDV_TABLE):
            form = BwdForm(one_pass=table is ONE_PASS_TABLE)
            if D != 64 or (table is not FWD_TABLE and form.one_pass != (T < 256)):
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
    shapes = ((197, 64), (256, 64), (257, 64), (577, 64), (577, 32), (197, 128), (577, 128))
    for B, T, D in (*((256, *shape) for shape in shapes), (25, 1025, 64), (25, 1025, 32)):
        x = torch.empty(B, T, D, dtype=torch.bfloat16, requires_grad=True)
        weight, bias = (
            torch.empty(36 * D, *more, dtype=x.dtype, requires_grad=True) for more in ((D,), ())
        )
        qkv = torch.empty(B, T, 3, 12, D, dtype=x.dtype, requires_grad=True)
        for route in ROUTES:
            with route():
                backward(attention(qkv))
                backward(qkv_attention(x, weight, bias, num_heads=12))


def one_image() -> None:
    """Attention of fewer heads than SMs, and dropout beside a mask and beside causal."""
    for T in (197, 257, 577):
        attend = _attend(1, T, 64)
        for out in (
            attend(),
            attend(is_causal=True),
            attend(is_causal=True, dropout_p=0.1),
            attend(torch.empty(T, T, dtype=torch.bool), dropout_p=0.1),
            attend(torch.empty(T, T, dtype=torch.bfloat16), dropout_p=0.1),
        ):
            backward(out)


def heads(D: int) -> None:
    """Attention of one head dim at every length, and its masks, causal form and dropout."""
    for T, route in itertools.product(TOKENS, ROUTES):
        qkv = torch.empty(64, T, 3, 12, D, dtype=torch.bfloat16, requires_grad=True)
        with route():
            backward(attention(qkv))
    for T in TOKENS:
        attend = _attend(64, T, D)
        for out in (
            attend(torch.empty(T, T, dtype=torch.bool)),
            attend(torch.empty(64, 1, 1, T, dtype=torch.bool)),  # of keys
            attend(torch.empty(64, 1, 1, T, dtype=torch.bfloat16)),
            attend(is_causal=True),
            attend(dropout_p=0.1),
        ):
            backward(out)


def dropped(D: int) -> None:
    """Dropout beside causal scores and each kind of mask, of one head dim at every length."""
    for T in TOKENS:
        attend = _attend(64, T, D, dropout_p=0.1)
        for out in (
            attend(is_causal=True),
            attend(torch.empty(64, 1, 1, T, dtype=torch.bool)),  # of keys
            attend(torch.empty(T, T, dtype=torch.bool)),
            attend(torch.empty(64, 1, 1, T, dtype=torch.bfloat16)),
        ):
            backward(out)


def wide_heads(D: int) -> None:
    """Heads above 128, plain and causal."""
    attend = _attend(64, 197, D)
    for out in (attend(), attend(is_causal=True)):
        backward(out)


def few_queries() -> None:
    """Cross attention of a few queries and many keys: pooling, decoders."""
    for D, T_q, T_kv in itertools.product((32, 64, 128), (1, 16, 64), (197, 1025)):
        q = torch.empty(64, 12, T_q, D, dtype=torch.bfloat16, requires_grad=True)
        k, v = (q.new_empty(64, 12, T_kv, D).requires_grad_() for _ in range(2))
        backward(scaled_dot_product_attention(q, k, v))


def masks_in_fp32() -> None:
    """Each kind of mask in fp32: of keys, of pairs, and additive; causal; what dropout crowds."""
    for D, T in ((32, 256), (64, 197), (72, 256), (80, 197), (128, 197)):
        attend = _attend(64, T, D, dtype=torch.float32)
        keys = torch.empty(64, 1, 1, T)
        masked = [attend(m) for m in (keys.bool(), torch.empty(T, T, dtype=torch.bool), keys)]
        for out in (*masked, attend(is_causal=True)):
            backward(out)
    for D in (64, 72, 128):
        attend = _attend(64, 197, D, dropout_p=0.1, dtype=torch.float32)
        keys = torch.empty(64, 1, 1, 197, dtype=torch.bool)
        for out in (attend(), attend(is_causal=True), attend(keys)):
            backward(out)


def packed_sequences() -> None:
    """Windows, packed images and long ones, each head dim; dropout and fp32 at some."""
    lengths = ((256, 64), (64, 256), (60, 272), (16, 1024))
    for D, (B, longest) in itertools.product(HEAD_DIMS, lengths):
        cu_seqlens = torch.empty(B + 1, dtype=torch.int32)
        kinds = [(torch.bfloat16, 0.0)]
        if D in (32, 64, 80):
            kinds += [(torch.bfloat16, 0.1), (torch.float32, 0.0)]
        for dtype, dropout_p in kinds:
            qkv = torch.empty(16384, 3, 16, D, dtype=dtype, requires_grad=True)
            backward(varlen_attention(qkv, cu_seqlens, longest, dropout_p=dropout_p))
