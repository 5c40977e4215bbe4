"""The mixins of transformers' layers that get a padding mask: SigLIP's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import layers
from ..attend import LEAST, by_keys, is_mask
from ..fused import Given, example, width_of


class PaddedAttention(layers.Attention):
    """SigLIP's: images or texts are padded to one length, with a mask (B, 1, T, T) whose rows are
    alike. It becomes (B, 1, 1, T), a mask of keys: a byte for each."""

    fused_roles = layers.CLIP_ATTENTION.attributes["fused_roles"]._replace(mask="attention_mask")
    fused_extra_kwargs = ("attention_mask",)

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

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        """None beside a mask that learns, or of other axes, dtype or device than transformers'."""
        mask = extras.get("attention_mask")
        if mask is None:
            return x, extras
        fits = is_mask(mask, x, self.q_proj.out_features // self.head_dim)
        same = fits and mask.dtype in (torch.bool, x.dtype) and mask.device == x.device
        return (x, extras) if same and not mask.requires_grad else None

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return by_keys(extras.get("attention_mask"))


LAYER = layers.layer(*layers.CLIP_NAMES, given=PaddedAttention.fused_extra_kwargs)
