"""timm's masks: boolean or added to the scores, with axes that broadcast to (B, H, T, T)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...runtime.arguments import autocast_dtype
from .fused import Given, example, is_dense, width_of


def with_mask(given: Given | None, heads: int) -> Given | None:
    """A call without an `attn_mask` that is None; None for one with a mask that the host would
    refuse, or of a kind that was not proven."""
    mask = None if given is None else given[1].get("attn_mask")
    if given is None:
        return None
    x, extras = given
    if mask is None:
        return x, {n: v for n, v in extras.items() if n != "attn_mask"}
    if not is_dense(mask) or mask.ndim != 4:
        return None
    (B, T), shape = x.shape[:2], mask.shape
    broadcasts = all(n in (1, m) for n, m in zip(shape, (B, heads, T, T), strict=True))
    typed = mask.dtype in (torch.bool, x.dtype) or autocast_dtype(x) is not None
    return given if broadcasts and typed and shape[3] == T else None


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
    for batch, T in zip((3, 2), lengths, strict=True):
        x = example(generator, batch, T, width_of(module))
        yield x, {}
        if "attn_mask" not in module.fused_arguments.names:
            continue
        if batch == 3:
            keys = torch.arange(T) < torch.tensor([[T], [T - 2], [1]])
            yield x, {"attn_mask": keys[:, None, None, :]}
        else:
            yield x, {"attn_mask": example(generator, batch, 1, T, T)}
