"""Grids of tokens: windows that one is cut into and joined from again; and what an attention knows
of positions: a bias of its scores, q and k that a child turns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Windows(NamedTuple):
    """Windows of a grid (height, width), or (depth, height, width), after a cyclic shift."""

    grid: tuple[int, ...]
    size: tuple[int, ...]
    shift: tuple[int, ...]
    pads_first: bool = True  # the host pads the grid, and shifts then

    @property
    def tokens(self) -> int:
        """N, of each"""
        return math.prod(self.size)

    def padded(self) -> tuple[int, ...]:
        return tuple(n + -n % size for n, size in zip(self.grid, self.size, strict=True))

    def rolled(self, x: Tensor, sign: int, padded: bool) -> Tensor:
        """x, padded or not; shifted where the host shifts such a grid."""
        if padded != self.pads_first or not any(self.shift):
            return x
        return torch.roll(x, [sign * n for n in self.shift], [*range(1, len(self.grid) + 1)])

    def cut(self, x: Tensor) -> Tensor:
        """(B, *grid, C) or (B, T, C) -> (B windows, N, C), zeros where it is padded."""
        axes = len(self.grid)
        x = x if x.ndim > 3 else x.unflatten(1, self.grid)
        pad = [n - m for n, m in zip(self.padded(), self.grid, strict=True)]
        x = self.rolled(x, -1, padded=False)
        if any(pad):
            x = F.pad(x, (0, 0, *(n for m in reversed(pad) for n in (0, m))))
        x = self.rolled(x, -1, padded=True)
        for axis in range(axes, 0, -1):
            x = x.unflatten(axis, (-1, self.size[axis - 1]))
        places = range(2 * axes + 1)
        x = x.permute(0, *places[1::2], *places[2::2], 2 * axes + 1)
        return x.reshape(-1, self.tokens, x.shape[-1])

    def joined(self, x: Tensor, tokens: bool = False) -> Tensor:
        """The inverse, without what was padded, of windows (B windows, N, C) or (B windows, *size,
        C); tokens: as (B, T, C)."""
        padded, axes = self.padded(), len(self.grid)
        x = x if x.ndim > 3 else x.unflatten(1, self.size)
        x = x.unflatten(0, (-1, *(n // m for n, m in zip(padded, self.size, strict=True))))
        x = x.permute(0, *(p for n in range(1, axes + 1) for p in (n, n + axes)), 2 * axes + 1)
        x = self.rolled(x.reshape(-1, *padded, x.shape[-1]), 1, padded=True)
        if padded != self.grid:
            x = x[(slice(None), *map(slice, self.grid))]
        x = self.rolled(x, 1, padded=False)
        return x.flatten(1, axes) if tokens else x

    def mask(self, like: Tensor) -> Tensor | None:
        """(windows, N, N): -100 between tokens that the shift alone made neighbours."""
        if not any(self.shift):
            return None
        region = torch.zeros((), dtype=torch.int64, device=like.device)
        for length, size, shift in zip(self.padded(), self.size, self.shift, strict=True):
            place = torch.arange(length, device=like.device)
            own = (place >= length - size).long()
            region = region[..., None] * 3 + (own + (place >= length - shift) if shift else own)
        region = region[None, ..., None]
        region = self._replace(grid=self.padded(), shift=(0,) * len(self.grid)).cut(region)[..., 0]
        return (region[:, :, None] != region[:, None]).to(like.dtype) * -100.0


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """(R, H) rows by a (T, T) index -> (H, T, T), as BEiT and Swin add to their scores."""
    return table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)


def with_decomposed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    along: tuple[Tensor, Tensor],
    grid: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (B, H, T, D) -> the same with more columns, whose attention of scale 1 is that of
    scores scale q.k + q.R_h[y_q - y_k] + q.R_w[x_q - x_k].

    The new columns of q are its products with each R_h and R_w, those of k say where it stands: so
    no bias of T by T is formed, and R_h and R_w get their gradients through the kernels.

    Args:
        along: R_h (2 height - 1, D) and R_w (2 width - 1, D).
    Source: MViTv2, arXiv:2112.01526, as segment-anything and ViTDet use it.
    """
    height, width = grid
    y, x = torch.arange(height, device=q.device), torch.arange(width, device=q.device)
    by_row = along[0][y[:, None] - y + height - 1]  # (y_q, y_k, D)
    by_column = along[1][x[:, None] - x + width - 1]
    on_grid = q.unflatten(2, grid)
    rows = torch.einsum("bnyxd,ykd->bnyxk", on_grid, by_row).flatten(2, 3)
    columns = torch.einsum("bnyxd,xkd->bnyxk", on_grid, by_column).flatten(2, 3)
    row, column = torch.cartesian_prod(y, x).unbind(1)
    place = torch.cat((F.one_hot(row, height), F.one_hot(column, width)), dim=1).to(q.dtype)
    D = q.shape[-1]
    wide = -(-(D + height + width) // 8) * 8  # the kernels take multiples of 8
    q = torch.cat((q * scale, rows.to(q.dtype), columns.to(q.dtype)), dim=-1)
    k = torch.cat((k, place.expand(*k.shape[:2], -1, -1)), dim=-1)
    q, k = (F.pad(t, (0, wide - t.shape[-1])) for t in (q, k))
    return q, k, F.pad(v, (0, wide - D))


def turned_behind(rotate: Any, q: Tensor, prefix: int, like: Tensor) -> Tensor:
    """q (B, H, T, D) with all but the first tokens turned by a child of the host."""
    if not prefix:
        return rotate(q).type_as(like)
    return torch.cat((q[:, :, :prefix], rotate(q[:, :, prefix:])), dim=2).type_as(like)
