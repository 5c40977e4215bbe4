"""Masks that attentions take: the kinds that a search proves, examples of them, how a host reads
each; and timm's, boolean or added to the scores, with axes that broadcast to (B, H, T, T)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_raw
from ..facts import is_recognised
from .attend import is_mask
from .fused import example, inputs


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
    kind: str, keys: bool, x: Tensor, generator: torch.Generator, heads: int = 1
) -> Tensor:
    """A mask of this kind; a boolean one leaves a token nothing to attend to, too."""
    B, T, _ = x.shape
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


# How a host reads a boolean or added mask of two axes.
READINGS = {
    "": lambda mask: mask,
    "keys": lambda mask: mask[:, None, None, :],
    "not": lambda mask: ~mask,
    "not keys": lambda mask: ~mask[:, None, None, :],
}


def reading_of(roles: Any, mask: Tensor, x: Tensor) -> str | None:
    """How a mask is read; None where its kind was not proven. What may be learnt may be given."""
    kind, known = kind_of(mask, x), dict(roles.masks)
    return known.get(kind, known.get(kind.replace("added", "learnt")))


def fits(roles: Any, mask: Any, x: Tensor) -> bool:
    """Whether a mask is of a kind that was proven."""
    if mask is None:
        return True
    return (
        isinstance(mask, Tensor)
        and is_raw(mask)
        and (mask.dtype == torch.bool or mask.dtype == x.dtype)
        and reading_of(roles, mask, x) is not None
    )


def takes_mask(mask: Any, x: Tensor, heads: int) -> bool:
    """False for a mask that the host would refuse, or of a kind that was not proven."""
    if mask is None or not is_mask(mask, x, heads):
        return mask is None
    return mask.dtype in (torch.bool, x.dtype) or autocast_dtype(x) is not None


def attends_by_mask(attention: Any) -> bool:
    """Whether an attention, fused or not, takes an `attn_mask` as timm's do."""
    takes = "attn_mask" in getattr(attention, "fused_extra_kwargs", ())
    return takes and not is_recognised(type(attention))


def as_read(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask as the host's attention adds it: autocast rounds the least fp32 to -inf."""
    dtype = autocast_dtype(x)
    if mask is None or mask.dtype is torch.bool or dtype is None:
        return mask
    return mask.to(dtype)


def examples_of_masks(
    module: Any, generator: torch.Generator, *lengths: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """x of two lengths, each without a mask and, where the host takes one, with it: of the keys and
    boolean, of the scores and added."""
    for x in inputs(module, generator, *lengths):
        batch, T, _ = x.shape
        yield x, {}
        if "attn_mask" not in module.fused_arguments.names:
            continue
        if batch == 3:
            keys = torch.arange(T) < torch.tensor([[T], [T - 2], [1]])
            yield x, {"attn_mask": keys[:, None, None, :]}
        else:
            yield x, {"attn_mask": example(generator, batch, 1, T, T)}
