"""MONAI: the Swin blocks of SwinUNETR, whose windows have two axes or three."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fused
from .block import Block, pre_norm
from .fused import example, row, width_of
from .grids import Windows, bias_of
from .masks import fits
from .mlp import Mlp, MlpRoles
from .special.windows import WINDOW_ATTENTION


def _few_positions(copy: Any) -> dict[str, Any]:
    """Windows of 2 by 2 by 2, of which a proof takes no seconds."""
    few = {"window_size": 2, "shift_size": 1}
    return {name: tuple(min(n, most) for n in getattr(copy, name)) for name, most in few.items()}


class WindowAttention(WINDOW_ATTENTION):
    """Of a window that may be smaller than that of its table, whose first rows it takes."""

    fused_roles = WINDOW_ATTENTION.fused_roles._replace(tokens=0)
    fused_derived = None

    def fused_blocked(self: Any) -> str | None:
        drops = self.use_flash_attention and self.fused_dropout_p() > 0
        return "its dropout is for gradients alone" if drops else super().fused_blocked()

    def fused_bias(self: Any, tokens: int | None = None) -> Tensor:
        index = self.relative_position_index[:tokens, :tokens]
        return bias_of(self.relative_position_bias_table, index)

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor:
        mask, own = extras.get("mask"), self.fused_bias(x.shape[1])
        return own if mask is None else own + mask[:, None]

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        return [(4, 5, width_of(self)), (2, 4, width_of(self))]


class SwinBlock(Block):
    """x (B, *grid, C), and the mask of the shift (windows, N, N)."""

    fused_extra_kwargs = ("mask_matrix",)
    fused_first_rebuilds, fused_alike = False, True
    fused_derived = staticmethod(_few_positions)

    def fused_blocked(self: Any) -> str | None:
        return "its halves run inside checkpoints" if self.use_checkpoint else None

    def fused_cut(self: Any, x: Tensor) -> Windows:
        grid = tuple(x.shape[1:-1])
        every = zip(grid, self.window_size, self.shift_size, strict=True)
        cuts = [(n, 0) if n <= size else (size, shift) for n, size, shift in every]
        sizes, shifts = zip(*cuts, strict=True)
        return Windows(grid, sizes, shifts)

    def fused_calls(self: Any, generator: torch.Generator) -> list[tuple[Tensor, dict[str, Any]]]:
        """A grid of a whole number of windows in no axis, and one of a single window in one."""
        first, *others = self.window_size
        grids = (2 * first - 1, *(n + 1 for n in others)), (first, *(2 * n for n in others))
        inputs = [example(generator, 2, *grid, width_of(self)) for grid in grids]
        return [(x, {"mask_matrix": self.fused_cut(x).mask(x)}) for x in inputs]

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 2 + len(self.window_size)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        window = x.new_empty(1, self.fused_cut(x).tokens, 0)  # the size of what its mask is for
        known = fits(WindowAttention.fused_roles, extras.get("mask_matrix"), window)
        return (x, extras) if known else None

    def fused_own(self: Any, x: Tensor, extras: Any) -> dict[str, Any]:
        windows = self.fused_cut(x)
        return {"windows": windows, "mask": extras["mask_matrix"] if any(windows.shift) else None}


TABLE: dict[str, Any] = {
    "monai.networks.blocks.mlp.MLPBlock": row(
        Mlp, roles=MlpRoles("linear1", "linear2", drop="drop1", after="drop2", act="fn")
    ),
    "monai.networks.layers.drop_path.DropPath": fused.DropPath,
    "monai.networks.nets.swin_unetr.SwinTransformerBlock": pre_norm(
        "norm1", "attn", "drop_path", "norm2", "mlp", "drop_path", mixin=SwinBlock
    ),
    "monai.networks.nets.swin_unetr.WindowAttention": WindowAttention,
}
