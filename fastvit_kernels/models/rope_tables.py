"""Tables of rotary position embedding, as the families of vision models compute theirs.

Each function returns cos and sin for `rope`, fp32 (T', R), a row for each patch in the order of
PatchEmbed: row by row, frame by frame. `dim` is the head dim D.

    function            hosts                                           pairing in rope
    index_table         EVA02, Perception Encoder, SAM3, RoPE-ViT       interleaved
                        Qwen2-VL, Qwen2.5-VL, Qwen3-VL                  half
    centered_table      DINOv3                                          half
    alternating_table   Pixtral                                         half
    video_table         V-JEPA 2                                        interleaved

`RotaryEmbedding` holds those of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..runtime.arguments import check_flags, check_int, check_number
from .checks import Flag, checked

Tables = tuple[Tensor, Tensor]
RopeType = Literal["", "cat", "dinov3"]
GridIndexing = Literal["ij", "xy"]


def _check(op: str, grid: Sequence[int], axes: int, dim: int, multiple: int, temperature: float):
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != axes:
        raise TypeError(f"{op}: grid must be a sequence of {axes} ints, got {grid!r}")
    for side in grid:
        check_int(op, "grid", side)
    check_int(op, "dim", dim)
    if dim % multiple:
        raise ValueError(f"{op}: dim must be a multiple of {multiple}, got {dim}")
    check_number(op, "temperature", temperature, 1.0, wanted="finite and at least 1")


def _positions(axes: Sequence[Tensor], device: torch.device | str | None) -> list[Tensor]:
    """Each axis' coordinate at every cell of the grid, (T',)."""
    return [x.flatten().to(device) for x in torch.meshgrid(*axes, indexing="ij")]


def _spread(angles: Tensor, interleaved: bool) -> Tables:
    """cos and sin of (T', R/2), in both columns of their pairs."""
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def index_table(
    grid: Sequence[int],
    dim: int,
    *,
    temperature: float = 10000.0,
    interleaved: bool = True,
    ref_grid: Sequence[int] | None = None,
    offset: float = 0.0,
    xy: bool = False,
    device: torch.device | str | None = None,
) -> Tables:
    """Angles from the index of a patch: dim/4 frequencies of its row, then dim/4 of its column.

    Args:
        grid: (rows, columns) of patches.
        temperature: frequency i is temperature**(-4 i / dim). timm's `rope_temperature`.
        interleaved: the layout for `rope(interleaved=True)`; else the one for half pairing.
        ref_grid: scales indices so that the grid covers this one; timm's `ref_feat_shape`.
        offset: added to each index; timm's `rope_grid_offset`.
        xy: columns first, as Perception Encoder's; timm's `rope_grid_indexing="xy"`.
    """
    op = "index_table"
    _check(op, grid, 2, dim, 4, temperature)
    check_flags(op, interleaved=interleaved, xy=xy)
    check_number(op, "offset", offset)
    n = dim // 4
    bands = 1.0 / temperature ** (torch.arange(n, dtype=torch.float32) / n)
    axes = [torch.arange(side, dtype=torch.float32) + offset for side in grid]
    if ref_grid is not None:
        _check(op, ref_grid, 2, dim, 4, temperature)
        axes = [x / side * ref for x, side, ref in zip(axes, grid, ref_grid, strict=True)]
    rows, columns = _positions(axes, device)
    first, second = (columns, rows) if xy else (rows, columns)
    bands = bands.to(device)
    return _spread(torch.cat((first[:, None] * bands, second[:, None] * bands), -1), interleaved)


def centered_table(
    grid: Sequence[int],
    dim: int,
    *,
    temperature: float = 100.0,
    interleaved: bool = False,
    device: torch.device | str | None = None,
) -> Tables:
    """DINOv3's: patch centres in [-1, 1], each axis by its own length, over dim/4 periods."""
    _check("centered_table", grid, 2, dim, 4, temperature)
    check_flags("centered_table", interleaved=interleaved)
    exponents = 2.0 * torch.arange(dim // 4, dtype=torch.float32) / (dim // 2)
    periods = (temperature**exponents).to(device)
    axes = [2.0 * (torch.arange(0.5, n, dtype=torch.float32) / n) - 1.0 for n in grid]
    angles = [2 * math.pi * x[:, None] / periods for x in _positions(axes, device)]
    return _spread(torch.cat(angles, -1), interleaved)


def alternating_table(
    grid: Sequence[int],
    dim: int,
    *,
    temperature: float = 10000.0,
    device: torch.device | str | None = None,
) -> Tables:
    """Pixtral's: of dim/2 frequencies the even ones turn by the row, the odd ones by the column."""
    _check("alternating_table", grid, 2, dim, 4, temperature)
    bands = 1.0 / temperature ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    bands = bands.to(device)
    rows, columns = _positions([torch.arange(n, dtype=torch.float32) for n in grid], device)
    return _spread(
        torch.cat((rows[:, None] * bands[::2], columns[:, None] * bands[1::2]), -1), False
    )


def video_table(
    grid: Sequence[int],
    dim: int,
    *,
    temperature: float = 10000.0,
    device: torch.device | str | None = None,
) -> Tables:
    """V-JEPA 2's for (frames, rows, columns): three parts of even width, R = 60 of dim 64.

    A part repeats its frequencies whole, [f0 f1 ... f0 f1 ...], and is turned in interleaved pairs
    all the same: the two columns of a pair have different angles.
    """
    _check("video_table", grid, 3, dim, 2, temperature)
    n = dim // 3 // 2
    if n == 0:
        raise ValueError(f"video_table: dim must be at least 6, got {dim}")
    bands = 1.0 / temperature ** (torch.arange(n, dtype=torch.float32) / n)
    axes = [torch.arange(side, dtype=torch.float32) for side in grid]
    parts = [x[:, None] * bands.to(device) for x in _positions(axes, device)]
    angles = torch.cat([torch.cat((part, part), -1) for part in parts], -1)
    return angles.cos(), angles.sin()


class RotaryEmbedding(nn.Module):
    """(rows, columns) of patches -> cos and sin, (rows * columns, D) in fp32.

    Stands for timm's RotaryEmbeddingCat ("cat": EVA02, Perception Encoder, RoPE-ViT) and
    RotaryEmbeddingDinoV3 ("dinov3"), whose argument names it takes. The tables of the model's own
    grid are buffers: no state_dict holds them, and they stay fp32 when the model does not. Those of
    another grid are computed at each call.
    """

    cos: Tensor
    sin: Tensor

    @checked
    def __init__(
        self,
        dim: int,
        feat_shape: Sequence[int],
        rope_type: Literal["cat", "dinov3"] = "cat",
        temperature: float = 10000.0,
        rotate_half: Flag = False,
        grid_indexing: GridIndexing = "ij",
        grid_offset: float = 0.0,
        ref_feat_shape: Sequence[int] | int | None = None,
    ):
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
        common: dict[str, Any] = dict(temperature=self.temperature, device=device)
        common["interleaved"] = not self.rotate_half
        if self.rope_type == "dinov3":
            return centered_table(grid, self.dim, **common)
        return index_table(
            grid,
            self.dim,
            ref_grid=self.ref_feat_shape,
            offset=self.grid_offset,
            xy=self.grid_indexing == "xy",
            **common,
        )

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
