"""`attention` with a mask: packed qkv in, packed dqkv out, and the gradient of an additive mask.

The same kernels as without (forward.py, backward_split.py); backward_bias.py for the mask's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import check_device, check_tensor
from ...runtime.operator import operator
from .backward_bias import launch_bias_grad
from .launch import (
    Softmax,
    empty_dqkv,
    empty_lse,
    empty_outputs,
    fwd_flops,
    launch_bwd,
    launch_fwd,
    readable,
)


def as_four_axes(mask: Tensor) -> Tensor:
    """(batch, H, T, T), each perhaps 1."""
    return mask[(None,) * (4 - mask.ndim)]


def check_mask(mask: Any, qkv: Tensor) -> None:
    """Raise unless a mask of `attention` is of a dtype and shape that its docstring has."""
    if mask is None:
        return
    is_bool = isinstance(mask, Tensor) and mask.dtype is torch.bool and not mask.is_nested
    if not (is_bool and mask.layout is torch.strided):
        check_tensor("attention", "attn_mask", mask)
    check_device("attention", "attn_mask", mask, qkv)
    B, T, _, H, _ = qkv.shape
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    each = mask.ndim <= 4 and shape[1] in (1, H) and shape[2] in (1, T) and shape[3] in (1, T)
    if not each or not (B % shape[0] == 0 if shape[0] else B == 0):
        raise ValueError(
            f"attention: attn_mask must broadcast to {(B, H, T, T)}, or its first axis must divide "
            f"{B}, got shape {tuple(mask.shape)}"
        )


def unsupported_mask(mask: Tensor | None) -> str | None:
    """What torch can do and the kernels cannot, or None."""
    # Such a gradient is 0: what rounding leaves of it is more in the kernels than in torch.
    if mask is not None and mask.requires_grad and (mask.ndim == 0 or mask.shape[-1] == 1):
        return "attn_mask needs a gradient and is alike for all keys"
    return None


def _empty_masked_fwd(qkv: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    out, _ = empty_outputs(qkv)
    return out, empty_lse(out, mask)


@operator(fake=_empty_masked_fwd, flops=fwd_flops)
def masked_attention_fwd(
    qkv: Tensor, mask: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Packed (B, T, 3, H, D), mask of four axes -> out (B, T, H, D), lse (`empty_lse`)."""
    return launch_fwd(readable(qkv).unbind(2), Softmax(scale, dropout_p, seed, mask))


def _empty_masked_bwd(qkv: Tensor, mask: Tensor, needs_dmask: bool) -> tuple[Tensor, Tensor]:
    return empty_dqkv(qkv), mask.new_empty(mask.shape if needs_dmask else (0,))


def _flops_bwd(dout, needs_dmask):
    return (14 if needs_dmask else 10) * math.prod(dout) * dout[1]


@operator(fake=_empty_masked_bwd, flops=_flops_bwd)
def masked_attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    needs_dmask: bool,
) -> tuple[Tensor, Tensor]:
    """dqkv (B, T, 3, H, D), contiguous; the mask's gradient, empty where none is needed."""
    dqkv, dmask = _empty_masked_bwd(qkv, mask, needs_dmask)
    if qkv.numel() == 0:
        return dqkv, dmask.zero_()
    dout, heads = readable(dout), readable(qkv).unbind(2)
    softmax = Softmax(scale, dropout_p, seed, mask)
    _, delta, _ = launch_bwd(dqkv.unbind(2), dout, heads, out, lse, softmax)
    if needs_dmask:
        assert delta is not None
        launch_bias_grad(dmask, dout, heads, lse, delta, mask, softmax)
    return dqkv, dmask
