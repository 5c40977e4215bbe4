"""What a recognised attention knows of positions: a bias of its scores, q and k that a child
turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """(R, H) rows by a (T, T) index -> (H, T, T), as BEiT and Swin add to their scores."""
    return table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)


def with_decomposed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, along: tuple[Tensor, Tensor],
    grid: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
    places = torch.cartesian_prod(y, x)
    place = torch.cat((F.one_hot(places[:, 0], height), F.one_hot(places[:, 1], width)), dim=1).to(
        q.dtype
    )
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
