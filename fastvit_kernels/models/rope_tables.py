"""Rotary position embedding of DINOv3, arXiv:2508.10104: the angle of each patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Tables = tuple[Tensor, Tensor]
RopeType = Literal["", "dinov3"]
TEMPERATURE = 100.0


def _tables(grid: Sequence[int], dim: int, device: torch.device | None = None) -> Tables:
    """Patch centres in [-1, 1], each axis by its own length, over dim/4 periods of
    TEMPERATURE**(4 i / dim)."""
    exponents = 2.0 * torch.arange(dim // 4, dtype=torch.float32) / (dim // 2)
    periods = (TEMPERATURE**exponents).to(device)
    axes = [2.0 * (torch.arange(0.5, n, dtype=torch.float32) / n) - 1.0 for n in grid]
    places = [x.flatten().to(device) for x in torch.meshgrid(*axes, indexing="ij")]
    angles = torch.cat([2 * math.pi * x[:, None] / periods for x in places], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class RotaryEmbedding(nn.Module):
    """(rows, columns) of patches -> cos and sin for `rope`, (rows * columns, D) in fp32.

    A row for each patch in the order of PatchEmbed; column i is paired with i + D/2. The tables of
    the model's own grid are buffers: no state_dict holds them, and they stay fp32 when the model
    does not. Tables of another grid are computed at each call. Stands for timm's
    RotaryEmbeddingDinoV3.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, feat_shape: tuple[int, int]):
        super().__init__()
        self.dim, self.feat_shape = dim, feat_shape
        cos, sin = _tables(feat_shape, dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the tables, and compute them anew: fn may have rounded them or left them empty."""
        super()._apply(fn, recurse)
        if not self.cos.is_meta:
            self.cos, self.sin = _tables(self.feat_shape, self.dim, self.cos.device)
        return self

    def forward(self, grid: tuple[int, int]) -> Tables:
        if grid == self.feat_shape:
            return self.cos, self.sin
        return _tables(grid, self.dim, self.cos.device)
