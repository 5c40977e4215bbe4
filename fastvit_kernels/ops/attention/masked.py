"""Masks of `attention`: what may come, in four axes, and what the kernels cannot do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import check_device, check_tensor


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
