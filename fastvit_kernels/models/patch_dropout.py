"""Some patches of each image: drawn anew at every step, or given; a token in place of others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.common.samples import kept_rows
from .checks import Dropout, checked
from .rope_tables import Tables


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
        num_keep = max(1, int(num_patches * (1.0 - self.prob)))
        noise = torch.randn(images.shape[0], num_patches, device=images.device)
        return noise.argsort(dim=-1)[:, :num_keep]


def kept_tables(tables: Tables, keep: Tensor | None) -> Tables:
    """cos and sin (P, D) of all patches -> (B, K, D) of those that are kept."""
    if keep is None:
        return tables
    cos, sin = tables
    return cos[keep], sin[keep]


def kept_samples(tables: Tables, samples: Tensor) -> Tables:
    """cos and sin of the samples that `keep_samples` gave: (B, K, D) -> (S, K, D), (P, D) as is."""
    cos, sin = tables
    return tables if cos.ndim == 2 else (kept_rows(cos, samples), kept_rows(sin, samples))


def check_patches(
    model: Any, images: Tensor, num_patches: int, keep: Tensor | None, mask: Tensor | None
) -> None:
    """Raise unless `forward_features` can take them; values are not looked at."""
    op, B = "forward_features", images.shape[0]
    if keep is not None and mask is not None:
        raise ValueError(f"{op}: give keep or mask, got both")
    if keep is not None:
        check_of_patches(op, "keep", keep, torch.int64, B, 1, num_patches)
    if mask is not None:
        check_of_patches(op, "mask", mask, torch.bool, B, num_patches, num_patches)
        if model.mask_token is None:
            raise ValueError(f"{op}: mask needs a model with mask_token=True, got one without")


def check_of_patches(
    op: str, name: str, x: object, dtype: torch.dtype, batch: int, least: int = 1, most: int = 2**31
) -> None:
    """Raise unless x is (batch, from least to most) of this dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    fits = x.ndim == 2 and len(x) == batch and least <= x.shape[1] <= most
    if x.dtype is not dtype or not fits:
        counts = f"{most}" if least == most else f"{least} to {most}"
        raise ValueError(
            f"{op}: {name} must be {dtype} ({batch}, {counts}), got {x.dtype} {tuple(x.shape)}"
        )


def masked(x: Tensor, mask: Tensor, token: Tensor, positions: Tensor | None) -> Tensor:
    """x (B, n + P, C) with the token and its position where mask (B, P) is True."""
    if positions is not None:
        token = token + F.pad(positions, (0, 0, x.shape[1] - positions.shape[1], 0))
    mask = F.pad(mask, (x.shape[1] - mask.shape[1], 0))
    return torch.where(mask.unsqueeze(-1), token.to(x.dtype), x)
