"""timm's masks: boolean or added to the scores, with axes that broadcast to (B, H, T, T)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....runtime.arguments import autocast_dtype
from ...facts import is_recognised
from ..attend import is_mask
from ..fused import example, inputs


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
