"""Windows of a grid of tokens: how it is cut into them and joined again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Windows(NamedTuple):
    """Windows of a grid (height, width), after a cyclic shift."""

    grid: tuple[int, int]
    size: tuple[int, int]
    shift: tuple[int, int]
    pads_first: bool = True  # the host pads the grid, and shifts then

    def padded(self) -> tuple[int, int]:
        (height, width), (rows, columns) = self.grid, self.size
        return height + -height % rows, width + -width % columns

    def rolled(self, x: Tensor, sign: int) -> Tensor:
        if not any(self.shift):
            return x
        return torch.roll(x, (sign * self.shift[0], sign * self.shift[1]), (1, 2))

    def cut(self, x: Tensor) -> Tensor:
        """(B, height, width, C) -> (B windows, N, C), zeros where it is padded."""
        height, width = self.padded()
        pad = (0, 0, 0, width - self.grid[1], 0, height - self.grid[0])
        if not self.pads_first:
            x = self.rolled(x, -1)
        if any(pad):
            x = F.pad(x, pad)
        if self.pads_first:
            x = self.rolled(x, -1)
        x = x.unflatten(2, (-1, self.size[1])).unflatten(1, (-1, self.size[0]))
        return x.transpose(2, 3).reshape(-1, self.size[0] * self.size[1], x.shape[-1])

    def joined(self, x: Tensor) -> Tensor:
        """The inverse, without what was padded."""
        height, width = self.padded()
        rows, columns = height // self.size[0], width // self.size[1]
        x = x.unflatten(1, self.size).unflatten(0, (-1, rows, columns)).transpose(2, 3)
        x = x.reshape(-1, height, width, x.shape[-1])
        if self.pads_first:
            x = self.rolled(x, 1)
        if (height, width) != self.grid:
            x = x[:, : self.grid[0], : self.grid[1]]
        return x if self.pads_first else self.rolled(x, 1)

    def mask(self, like: Tensor) -> Tensor | None:
        """(windows, N, N): -100 between tokens that the shift alone made neighbours."""
        if not any(self.shift):
            return None
        regions = []
        for length, size, shift in zip(self.padded(), self.size, self.shift, strict=True):
            place = torch.arange(length, device=like.device)
            first = (place >= length - size).long()
            regions.append(first + (place >= length - shift) if shift else first)
        region = (regions[0][:, None] * 3 + regions[1])[None, :, :, None]
        region = self._replace(grid=self.padded(), shift=(0, 0)).cut(region)[..., 0]
        return (region[:, :, None] != region[:, None]).to(like.dtype) * -100.0


def windows_of(x: Tensor, side: int) -> Windows:
    """Of x (B, height, width, C), squares of this side; with 0, one window of the whole grid."""
    grid = (x.shape[1], x.shape[2])
    return Windows(grid, (side, side) if side else grid, (0, 0))
