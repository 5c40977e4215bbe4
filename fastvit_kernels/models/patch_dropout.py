"""Patch dropout: a training step on some patches of each image, drawn anew at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import Dropout, checked
from .rope_tables import Tables


def draw_kept(batch: int, num_patches: int, prob: float, device: torch.device) -> Tensor:
    """(batch, K) indices of patches, in no order, as timm's PatchDropout draws them."""
    num_keep = max(1, int(num_patches * (1.0 - prob)))
    noise = torch.randn(batch, num_patches, device=device)
    return noise.argsort(dim=-1)[:, :num_keep]


class PatchDropout(nn.Module):
    """Draws the patches that a training step keeps, as many of each image: arXiv:2212.00794.

    Draws what timm's PatchDropout draws.
    """

    @checked
    def __init__(self, prob: Dropout = 0.0):
        super().__init__()
        self.prob = prob

    def forward(self, images: Tensor, num_patches: int) -> Tensor | None:
        """(B, K) indices of patches, in no order; None where all are kept."""
        if not self.training or self.prob == 0:
            return None
        return draw_kept(images.shape[0], num_patches, self.prob, images.device)


def kept_tables(tables: Tables, keep: Tensor | None) -> Tables:
    """cos and sin (P, D) of all patches -> (B, K, D) of those that are kept."""
    if keep is None:
        return tables
    cos, sin = tables
    return cos[keep], sin[keep]
