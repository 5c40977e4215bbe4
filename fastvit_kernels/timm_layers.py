"""Module classes for timm's `norm_layer`, `attn_layer`, `mlp_layer` and `embed_layer` arguments.

    timm.create_model("vit_base_patch16_224", norm_layer=LayerNorm, attn_layer=Attention,
                      mlp_layer=Mlp, embed_layer=PatchEmbed)

They are timm's own classes, each swapped by itself when it is made, so that checkpoints load
unchanged. swap_in on the whole model fuses more: residuals, norms and what stands between layers.
"""

from __future__ import annotations

from typing import Any

from timm import layers as _layers

from .fuse.swap import swap_in

_timm: Any = _layers  # timm.layers exports more than its types say


class _Swapped:
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        swap_in(self)  # type: ignore[arg-type]


class LayerNorm(_Swapped, _timm.LayerNorm):
    """timm's LayerNorm, swapped."""


class Attention(_Swapped, _timm.Attention):
    """timm's Attention, swapped."""


class Mlp(_Swapped, _timm.Mlp):
    """timm's Mlp, swapped."""


class PatchEmbed(_Swapped, _timm.PatchEmbed):
    """timm's PatchEmbed, swapped."""


__all__ = ["Attention", "LayerNorm", "Mlp", "PatchEmbed"]
