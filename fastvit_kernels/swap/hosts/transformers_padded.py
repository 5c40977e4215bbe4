"""The mixins of transformers' layers that get a padding mask: SigLIP's.

They have the names of those without, by which pickles know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...runtime.plain import is_raw
from . import transformers_layers as layers
from .attend import LEAST, by_keys
from .fused import Given, bypassed, example, width_of


def is_mask(mask: Any, x: Tensor, heads: int) -> bool:
    """Whether attention on x (B, T, C) takes a mask of transformers: none, or boolean or added, of
    axes that broadcast to (B, H, T, T), without a gradient."""
    if mask is None:
        return True
    if not (isinstance(mask, Tensor) and is_raw(mask) and mask.ndim == 4):
        return False
    if mask.dtype not in (torch.bool, x.dtype) or mask.requires_grad or mask.device != x.device:
        return False
    (B, T), (*leading, keys) = x.shape[:2], mask.shape
    return keys == T and all(n in (1, m) for n, m in zip(leading, (B, heads, T), strict=True))


class ClipAttention(layers.ClipAttention):
    """SigLIP's: images or texts are padded to one length, with a mask (B, 1, T, T) whose rows are
    alike. It becomes (B, 1, 1, T), a mask of keys: a byte for each."""

    fused_extras = ("attention_mask",)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        T = 6
        x = example(generator, 3, T, width_of(self))
        shown = (torch.arange(T) < torch.tensor([[T], [4], [1]]))[:, None, None].repeat(1, 1, T, 1)
        added = torch.zeros(shown.shape, dtype=x.dtype).masked_fill_(~shown, LEAST)
        rows = shown.clone()
        rows[1, 0, 0] = ~rows[1, 0, 0]
        yield (x,), {}
        yield (x,), {"attention_mask": shown}
        yield (x,), {"attention_mask": added}
        yield (x,), {"attention_mask": rows}
        yield (x,), {"attention_mask": example(generator, 3, 1, T, T).detach()}

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        given = super().fused_given(args, kwargs)
        return None if given is None or not self.fused_takes_mask(*given) else given

    def fused_takes_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> bool:
        return is_mask(extras.get("attention_mask"), x, self.fused_width() // self.head_dim)

    def fused_width(self: Any) -> int:
        """H D"""
        return self.q_proj.out_features

    def fused_heads(  # type: ignore[override]
        self: Any, x: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        return super().fused_heads(x, by_keys(attention_mask))


class ClipLayer(layers.ClipLayer):
    fused_extras = ClipAttention.fused_extras

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        given, attention = super().fused_given(args, kwargs), self.self_attn
        if given is None or not (isinstance(attention, ClipAttention) and bypassed(attention)):
            return given  # attention is called
        return given if attention.fused_takes_mask(*given) else None
