"""The angles of a model with rotary positions: cos and sin for each grid of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .checks import Flag, checked
from .rope_tables import Tables, centered_table, index_table

RopeType = Literal["", "cat", "dinov3"]
GridIndexing = Literal["ij", "xy"]


class RotaryEmbedding(nn.Module):
    """(rows, columns) of patches -> cos and sin, (rows * columns, D) in fp32.

    Stands for timm's RotaryEmbeddingCat ("cat": EVA02, Perception Encoder, RoPE-ViT) and
    RotaryEmbeddingDinoV3 ("dinov3"), whose argument names it takes. The tables of the model's own
    grid are buffers: no state_dict holds them, and they stay fp32 when the model does not. Those of
    another grid are computed at each call.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @checked
    def __init__(
        self, dim: int, feat_shape: Sequence[int], rope_type: Literal["cat", "dinov3"] = "cat",
        temperature: float = 10000.0, rotate_half: Flag = False,
        grid_indexing: GridIndexing = "ij", grid_offset: float = 0.0,
        ref_feat_shape: Sequence[int] | int | None = None,
    ):  # fmt: skip
        super().__init__()
        if rope_type == "dinov3" and (grid_indexing != "ij" or grid_offset or ref_feat_shape):
            raise ValueError(
                "RotaryEmbedding: grid_indexing, grid_offset and ref_feat_shape are of rope_type "
                "'cat', got rope_type 'dinov3'"
            )
        if isinstance(ref_feat_shape, int):
            ref_feat_shape = ref_feat_shape, ref_feat_shape
        self.dim, self.feat_shape, self.rope_type = dim, tuple(feat_shape), rope_type
        self.temperature, self.rotate_half = temperature, rotate_half
        self.grid_indexing, self.grid_offset = grid_indexing, grid_offset
        self.ref_feat_shape = ref_feat_shape
        cos, sin = self._tables(self.feat_shape, None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, grid: Sequence[int], device: torch.device | None) -> Tables:
        interleaved = not self.rotate_half
        if self.rope_type == "dinov3":
            return centered_table(
                grid, self.dim, temperature=self.temperature, interleaved=interleaved,
                device=device,
            )  # fmt: skip
        return index_table(
            grid, self.dim, temperature=self.temperature, interleaved=interleaved,
            ref_grid=self.ref_feat_shape, offset=self.grid_offset,
            xy=self.grid_indexing == "xy", device=device,
        )  # fmt: skip

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
