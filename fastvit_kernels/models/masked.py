"""Masked pre-training: a token in place of patches, and what predicts those that were not read.

    features = encoder.forward_features(images, keep=keep)     # MAE, or a context of JEPA
    pixels = decoder(features, keep, hidden)                   # or features of several target sets

A transformer without masks does not know the order of its tokens. So the decoder reads them as they
come, each with the position of its patch, and predicts the targets alone, in the order given: the
same numbers as in the order of the image, without a gather and without the head of the patches that
no loss reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checks import Count, checked
from .norms import LayerNorm
from .packing import Crops
from .patch_dropout import check_of_patches
from .vit import Block, VisionTransformer


class MaskedDecoder(nn.Module):
    """MAE's decoder and JEPA's predictor, arXiv:2111.06377 and 2301.08243.

    Args:
        encoder: the VisionTransformer whose `forward_features` it reads, for width, patches and
            prefix tokens. It does not become a submodule.
        out_dim: values predicted per patch: patch_size**2 * in_chans pixels, or the encoder's
            width.
        embed_dim, depth, num_heads: of the decoder; block: other arguments of its blocks.
    """

    @checked
    def __init__(
        self,
        encoder: Any,
        out_dim: Count,
        embed_dim: Count = 512,
        depth: Count = 8,
        num_heads: Count = 16,
        **block: Any,
    ):
        super().__init__()
        if not isinstance(encoder, VisionTransformer):
            raise TypeError(
                f"MaskedDecoder: encoder must be a VisionTransformer, got {type(encoder).__name__}"
            )
        self.num_prefix_tokens = encoder.num_prefix_tokens
        self.embed = nn.Linear(encoder.embed_dim, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, encoder.patch_embed.num_patches, embed_dim))
        block = {"qkv_bias": True, **block}
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads, **block) for _ in range(depth)))
        self.norm = LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, out_dim)
        for p in (self.mask_token, self.pos_embed):
            nn.init.trunc_normal_(p, std=0.02)

    def no_weight_decay(self) -> set[str]:
        return {"mask_token", "pos_embed"}

    def forward(self, features: Tensor, keep: Tensor, targets: Tensor | Sequence[Tensor]) -> Any:
        """What it predicts of the patches `targets`, in their order.

        Args:
            features: (B, n + K, C), what the encoder gave of the patches keep.
            keep: (B, K) int64.
            targets: (B, N) int64; or a sequence of sets (B, N_i), of which none sees another:
                one pass of the blocks for all (docs/varlen.md).
        Returns: (B, N, out_dim); of a sequence a list of (B, N_i, out_dim).
        Raises: ValueError, TypeError where shapes or dtypes do not fit.
        """
        op = "MaskedDecoder"
        B = len(features)
        single = isinstance(targets, Tensor)
        sets = [targets] if single else list(targets)
        if not sets:
            raise ValueError(f"{op}: targets must hold at least one set, got none")
        for name, each in (("keep", keep), *(("targets", each) for each in sets)):
            check_of_patches(op, name, each, torch.int64, B)
        if features.shape[1] != self.num_prefix_tokens + keep.shape[1]:
            wanted = f"{self.num_prefix_tokens} + {keep.shape[1]}"
            raise ValueError(f"{op}: features must have {wanted} tokens, got {features.shape[1]}")
        x = self.embed(features)
        positions = self.pos_embed[0].to(x.dtype)
        prefix, kept = x.split([self.num_prefix_tokens, keep.shape[1]], dim=1)
        context = torch.cat([prefix, kept + positions[keep]], dim=1)
        lengths: dict[int, list[int]] = {}
        for i, each in enumerate(sets):
            lengths.setdefault(each.shape[1], []).append(i)
        batches = []
        for places in lengths.values():
            asked = self.mask_token.to(x.dtype) + positions[torch.cat([sets[i] for i in places])]
            batches.append(torch.cat([context.repeat(len(places), 1, 1), asked], dim=1))
        found: list[Any] = [None] * len(sets)
        for (N, places), y in zip(lengths.items(), self._decoded(batches), strict=True):
            y = self.head(self.norm(y[:, -N:]))
            for i, part in zip(places, y.split(B), strict=True):
                found[i] = part
        return found[0] if single else found

    def _decoded(self, batches: list[Tensor]) -> list[Tensor]:
        """What the blocks give; of several lengths as one sequence."""
        if len(batches) == 1:
            return [self.blocks(batches[0])]
        packing = Crops([(len(x), x.shape[1]) for x in batches], batches[0].device)
        x = Crops.join(batches)
        for block in self.blocks:
            x = block(x, packing=packing)
        return packing.split(x)
