"""Module classes for timm's `norm_layer`, `attn_layer`, `mlp_layer` and `embed_layer` arguments.

    timm.create_model("vit_base_patch16_224", norm_layer=LayerNorm, attn_layer=Attention,
                      mlp_layer=Mlp, embed_layer=PatchEmbed)

They are timm's own classes with fused forwards, so checkpoints load unchanged. swap_in on the model
then fuses whole blocks as well.
"""

from __future__ import annotations

from typing import Any

from timm import layers as _layers

from .swap.apply import swap_in
from .swap.hosts import swapped_class

_timm: Any = _layers  # timm.layers exports more than its types say
LayerNorm: Any = swapped_class(_timm.LayerNorm)
Attention: Any = swapped_class(_timm.Attention)
Mlp: Any = swapped_class(_timm.Mlp)


class PatchEmbed(_timm.PatchEmbed):
    """timm's PatchEmbed, its convolution swapped."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        swap_in(self)


__all__ = ["Attention", "LayerNorm", "Mlp", "PatchEmbed"]
