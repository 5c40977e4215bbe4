"""The mixins of ViTMAE's embeddings, which keep a share of an image's patches.

The host embeds all patches, then gathers those that it keeps. Here the patches are drawn first, by
the host's own method and with its numbers, and `patch_embed` reads no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....ops.patch_embed.functions import patch_embed
from ....runtime.plain import is_raw
from ..fused import Fused, Given, Unfused, can_inline, example, names
from ..patch_conv import PatchConv


class MaePatches(Unfused):
    """Its projection, which the embeddings read."""

    fused_level = "epilogue"
    fused_children = names("projection")


class MaeEmbeddings(Fused):
    fused_level = "patch_embed"
    fused_children = names("cls_token patch_embeddings position_embeddings")
    fused_extra_kwargs = ("noise", "interpolate_pos_encoding")
    fused_axes = (4,)

    def fused_blocked(self: Any) -> str | None:
        patches = self.patch_embeddings
        projection = patches.projection
        if not (isinstance(patches, MaePatches) and can_inline(patches)):
            return "its patch embedding must be called"
        if not (isinstance(projection, PatchConv) and can_inline(projection)):
            return "its projection must be called"
        return None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        patches = self.patch_embeddings
        x = example(generator, 2, patches.num_channels, *patches.image_size)
        yield (x,), {}
        yield (x,), {"noise": example(generator, 2, patches.num_patches).detach()}

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        if extras.pop("interpolate_pos_encoding", False):
            return None
        patches = self.patch_embeddings
        noise, shape = extras.get("noise"), (x.shape[0], patches.num_patches)
        if noise is not None:
            if not (isinstance(noise, Tensor) and is_raw(noise) and noise.shape == shape):
                return None
            if noise.device != x.device:
                return None
        fits = tuple(x.shape[1:]) == (patches.num_channels, *patches.image_size)
        keeps = int(shape[1] * (1 - self.config.mask_ratio)) > 0
        return (x, extras) if fits and keeps and x.is_floating_point() else None

    def fused_forward(
        self: Any, x: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        projection = self.patch_embeddings.projection
        places = torch.arange(self.patch_embeddings.num_patches, device=x.device)
        places = places.expand(x.shape[0], -1).unsqueeze(-1)
        keep, mask, restore = self.random_masking(places, noise)
        tokens = patch_embed(
            x, projection.weight, projection.bias, prefix_tokens=self.cls_token,
            pos_embed=self.position_embeddings, keep=keep.squeeze(-1),
        )  # fmt: skip
        return tokens, mask, restore
