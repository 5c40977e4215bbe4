"""Learned positions, resampled from one grid of patches to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_grid(patches: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """(1, rows*columns, C) of one grid -> another, bicubic with antialias, as timm resamples."""
    grid = patches.float().unflatten(1, (old[0], old[1])).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=tuple(new), mode="bicubic", antialias=True)
    return grid.flatten(2).transpose(1, 2).to(patches.dtype)


def resize_positions(
    pos_embed: Tensor, old: Sequence[int], new: Sequence[int], prefix: int
) -> Tensor:
    """The same, after `prefix` positions of class and register tokens, which stay."""
    return torch.cat((pos_embed[:, :prefix], resize_grid(pos_embed[:, prefix:], old, new)), dim=1)
