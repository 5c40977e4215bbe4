"""Attention by the library: cuDNN's or flash's kernels, those that torch's own function would take.

Forward and backward share one contract with ours, so that each may go either way: out (B, T, H, D)
contiguous, lse (B, H, T) fp32 in log2 units. The library's dq, dk and dv are tensors of their own.
Its backward adds dq in any order: where bits must repeat, ours runs. Route: configs.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...runtime import values
from ...runtime.compat import CUDNN, FLASH, FLASH_CPU, sdpa_choice

ON_CUDA = {SDPBackend.FLASH_ATTENTION.value: FLASH, SDPBackend.CUDNN_ATTENTION.value: CUDNN}
NONE = (None, None)
LOG2E = math.log2(math.e)


def _kernels(heads: Sequence[Tensor], scale: float, is_causal: bool) -> Any:
    """Forward and backward that torch would take for q, k, v (B, H, T, D); None where ours run."""
    if values.bits_must_repeat():
        return NONE
    if not heads[0].is_cuda:
        return FLASH_CPU
    return ON_CUDA.get(sdpa_choice(*heads, None, 0.0, is_causal, scale=scale), NONE)


def sdpa_forward(
    qkv: Sequence[Tensor], scale: float, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """out (B, T, H, D) and lse (B, H, T) of q, k, v (B, T, H, D); None where ours must run."""
    heads = [x.transpose(1, 2) for x in qkv]
    forward, _ = _kernels(heads, scale, is_causal)
    if forward is None:
        return None
    more = (None, True) if forward is CUDNN[0] else ()  # no bias, with lse
    out, lse, *_ = forward(*heads, *more, 0.0, is_causal, scale=scale)
    return out.transpose(1, 2).contiguous(), (lse.reshape(out.shape[:3]) * LOG2E).contiguous()


def sdpa_backward(
    dout: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> list[Tensor] | None:
    """dq, dk and dv (B, T, H, D), in strides of the library's; None where ours must run."""
    heads = [x.transpose(1, 2) for x in qkv]
    _, backward = _kernels(heads, scale, is_causal)
    if backward is None:
        return None
    # torch keeps cuDNN's graphs by the layouts of q, k and v alone, ours beside its own: the others
    # lie as where torch makes out itself
    strides = torch.empty_like(heads[0], device="meta").stride()
    dout, out = (
        x if x.stride() == strides else torch.empty_like(heads[0]).copy_(x)
        for x in (dout.transpose(1, 2), out.transpose(1, 2))
    )
    tensors = [dout, *heads, out]
    lse = (lse * (1.0 / LOG2E)).contiguous()
    if backward is FLASH_CPU[1]:
        grads = backward(*tensors, lse, 0.0, is_causal, scale=scale)
    else:
        T = lse.shape[2]
        lengths, seeds = (None, None, T, T), [lse.new_empty((), dtype=torch.int64)] * 2
        if backward is CUDNN[1]:
            lse = lse.unsqueeze(3)
            last = (*seeds, None, *lengths, 0.0, is_causal)
        else:
            last = (*lengths, 0.0, is_causal, *seeds)
        grads = backward(*tensors, lse, *last, scale=scale)
    return [x.transpose(1, 2) for x in grads]
