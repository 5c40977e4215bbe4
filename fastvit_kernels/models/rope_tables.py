"""Rotary position embedding of DINOv3, arXiv:2508.10104: the angle of each patch.

cos and sin for `rope`, fp32 (T', D), a row for each patch in the order of PatchEmbed, row by row;
column i is paired with i + D/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..runtime.arguments import check_int, check_number
from .checks import checked

Tables = tuple[Tensor, Tensor]
RopeType = Literal["", "dinov3"]
TEMPERATURE = 100.0


def _check(op: str, grid: Sequence[int], dim: int, temperature: float) -> None:
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise TypeError(f"{op}: grid must be a sequence of 2 ints, got {grid!r}")
    for side in grid:
        check_int(op, "grid", side)
    check_int(op, "dim", dim)
    if dim % 4:
        raise ValueError(f"{op}: dim must be a multiple of 4, got {dim}")
    check_number(op, "temperature", temperature, 1.0, wanted="finite and at least 1")


def centered_table(
    grid: Sequence[int],
    dim: int,
    *,
    temperature: float = TEMPERATURE,
    device: torch.device | str | None = None,
) -> Tables:
    """Patch centres in [-1, 1], each axis by its own length, over dim/4 periods.

    Args:
        grid: (rows, columns) of patches.
        dim: the head dim D.
        temperature: period i is temperature**(4 i / dim). timm's `rope_temperature`.
    """
    _check("centered_table", grid, dim, temperature)
    exponents = 2.0 * torch.arange(dim // 4, dtype=torch.float32) / (dim // 2)
    periods = (temperature**exponents).to(device)
    axes = [2.0 * (torch.arange(0.5, n, dtype=torch.float32) / n) - 1.0 for n in grid]
    places = [x.flatten().to(device) for x in torch.meshgrid(*axes, indexing="ij")]
    angles = torch.cat([2 * math.pi * x[:, None] / periods for x in places], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class RotaryEmbedding(nn.Module):
    """(rows, columns) of patches -> cos and sin, (rows * columns, D) in fp32.

    Stands for timm's RotaryEmbeddingDinoV3, whose argument names it takes. The tables of the
    model's own grid are buffers: no state_dict holds them, and they stay fp32 when the model does
    not. Those of another grid are computed at each call.
    """

    cos: Tensor
    sin: Tensor

    @checked
    def __init__(self, dim: int, feat_shape: Sequence[int], temperature: float = TEMPERATURE):
        super().__init__()
        self.dim, self.feat_shape, self.temperature = dim, tuple(feat_shape), temperature
        cos, sin = self._tables(self.feat_shape, None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, grid: Sequence[int], device: torch.device | None) -> Tables:
        return centered_table(grid, self.dim, temperature=self.temperature, device=device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the tables, and compute them anew: fn may have rounded them or left them empty."""
        super()._apply(fn, recurse)
        if not self.cos.is_meta:
            self.cos, self.sin = self._tables(self.feat_shape, self.cos.device)
        return self

    def forward(self, grid: Sequence[int]) -> Tables:
        if tuple(grid) == self.feat_shape:
            return self.cos, self.sin
        return self._tables(grid, self.cos.device)
