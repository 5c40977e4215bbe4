"""Masks of attentions: the kinds that are proven, examples of them, how a host reads each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_raw
from .attend import LEAST, by_keys


def kind_of(mask: Tensor, x: Tensor) -> str:
    """A mask for x (B, T, C): boolean, or added to the scores and perhaps learnt; of the keys
    (B, T), of the scores (T, T), of each head (H, T, T), or with axes that broadcast to
    (B, H, T, T)."""
    B, T = x.shape[:2]
    if mask.ndim == 4 and mask.shape[0] in (1, B) and mask.shape[2:] in ((1, T), (T, T)):
        shape = "4 axes"
    elif mask.ndim == 3 and mask.shape[1:] == (T, T):
        shape = "3 axes"
    elif mask.ndim == 2 and mask.shape in ((T, T), (B, T)):
        shape = "2 axes"
    else:
        return "another"
    what = "learnt" if mask.requires_grad else "added"
    return f"{'boolean' if mask.dtype == torch.bool else what}, {shape}"


def example_of_mask(
    kind: str, reading: str, x: Tensor, generator: torch.Generator, heads: int = 1
) -> Tensor:
    """A mask of this kind; a boolean one leaves a token nothing to attend to, too."""
    (B, T, _), keys = x.shape, "keys" in reading
    if reading == "padded":
        shown = torch.arange(T) < T - 2 * torch.arange(B)[:, None]
        shown = shown[:, None, None].repeat(1, 1, T, 1)
        added = torch.zeros(shown.shape, dtype=x.dtype).masked_fill_(~shown, LEAST)
        return shown if kind.startswith("boolean") else added
    if kind == "added, 3 axes":  # of two windows
        return torch.randn(2, T, T, generator=generator, dtype=x.dtype)
    if kind.startswith("learnt"):  # large: products of few numbers
        row, column = torch.randn(2, heads, T, generator=generator, dtype=x.dtype)
        mask = row.unsqueeze(-1) * column.unsqueeze(-2)
        return (mask if kind.endswith("3 axes") else mask[None]).requires_grad_()
    shape = (B, T) if keys else (T, T) if kind.endswith("2 axes") else (B, 1, T, T)
    mask = torch.randn(shape, generator=generator, dtype=x.dtype)
    if kind.startswith("added"):
        return mask
    mask = mask > -0.5
    rows = mask if keys else mask.movedim(-2, 0)
    rows[0], rows[1] = False, True
    return mask


# How a host's boolean or added mask is read: of two axes, of windows, of padding.
READINGS = {
    "": lambda mask: mask,
    "keys": lambda mask: mask[:, None, None, :],
    "not": lambda mask: ~mask,
    "not keys": lambda mask: ~mask[:, None, None, :],
    "windows": lambda mask: mask[:, None],
    "padded": by_keys,  # rows that are alike become one: a byte for each key
}


# Kinds and readings of masks that broadcast to (B, H, T, T), of a bias, and of shifted windows.
BROADCAST = (("boolean, 4 axes", ""), ("learnt, 4 axes", ""))
BIAS = (("learnt, 4 axes", ""),)
SHIFTED = (("added, 3 axes", "windows"),)
# What transformers makes for padding, none of which learns; rows may differ.
PADDED = tuple((f"{kind}, 4 axes", how) for kind in ("boolean", "added") for how in ("", "padded"))


def reading_of(roles: Any, mask: Tensor, x: Tensor) -> str | None:
    """How a mask is read; None where its kind was not proven. What may be learnt may be given."""
    kind, known = kind_of(mask, x), dict(roles.masks)
    return known.get(kind, known.get(kind.replace("added", "learnt")))


def fits(roles: Any, mask: Any, x: Tensor) -> bool:
    """Whether a mask is of a kind that was proven."""
    return mask is None or (
        isinstance(mask, Tensor)
        and is_raw(mask)
        and mask.device == x.device
        and (mask.dtype in (torch.bool, x.dtype) or autocast_dtype(x) is not None)
        and reading_of(roles, mask, x) is not None
    )


def as_read(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as a host's attention adds it: autocast rounds the least fp32 to -inf."""
    dtype = None if mask.dtype is torch.bool else autocast_dtype(x)
    return mask if dtype is None else mask.to(dtype)
