"""Swin: attention inside windows of a grid that may be shifted, with a learnt bias of positions.

    q k^T / sqrt(D) + bias(H, N, N) [+ mask of the shift (windows, N, N)]

The two are one mask of the fused attention, by window, and it has the gradient of the bias. A block
joins the windows before the output projection: that ends in the residual, in the image's order, and
computes nothing that was padded. Swin V2's cosine attention is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...runtime.compat import attend_in_windows, rel_pos_bias
from ...runtime.plain import is_hooked, is_plain
from .branch import PreNormBlock
from .fused import (
    NOTHING,
    DropPath,
    Epilogue,
    Fused,
    Given,
    WithNone,
    example,
    inert,
    names,
    width_of,
)
from .parts import SelfAttention
from .transformers_layers import Attention, HfMlp, ViTLayer


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


def with_shift(bias: Tensor, mask: Tensor | None) -> Tensor:
    """bias (1, H, N, N) and mask (windows, N, N) as one."""
    return bias if mask is None else bias + mask[:, None]


def _area(copy: Any) -> dict[str, int]:
    """What follows from the sides of a window: it may equal a width, which a copy narrows."""
    return {"window_area": copy.window_size[0] * copy.window_size[1]}


class Windowed(SelfAttention):
    """Attention on windows (B windows, N, C), or on x and the windows that it is cut into."""

    def fused_branch(
        self: Any, x: Tensor, epilogue: Epilogue = NOTHING, windows: Windows | None = None,
        **extras: Any,
    ) -> Tensor:  # fmt: skip
        if windows is None:
            return super().fused_branch(x, epilogue, **extras)
        tokens = x.ndim == 3  # (B, height width, C), else (B, height, width, C)
        y = windows.cut(x.unflatten(1, windows.grid) if tokens else x)
        out = windows.joined(self.fused_heads(y, **extras).flatten(2))
        return self.fused_project_out(out.flatten(1, 2) if tokens else out, epilogue)


class WindowedAttention(Windowed):
    """The same where the host's forward takes the windows, with or without a mask of the shift."""

    def fused_area(self: Any) -> int:
        """N"""
        return self.window_area

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        yield self, self.fused_area()

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[1] == self.fused_area()

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        N = self.fused_area()
        yield (example(generator, 2, N, width_of(self)),), {}
        mask = example(generator, 2, N, N).detach()
        yield (example(generator, 4, N, width_of(self)),), {self.fused_extras[0]: mask}


class WindowAttention(WindowedAttention):
    """timm's: it forms the scores by default, so `fused_attn` says nothing here."""

    fused_children = names("relative_position_bias_table qkv attn_drop softmax proj proj_drop")
    fused_attention_dropout = names("attn_drop")
    fused_extras = ("mask",)
    fused_derived = staticmethod(_area)

    def fused_blocked(self: Any) -> str | None:
        if is_hooked(self.attn_drop) or is_hooked(self.softmax):
            return "its probabilities are hooked"
        return None if type(self.softmax) is nn.Softmax else "its softmax was replaced"

    def fused_scale(self: Any) -> float | None:
        return None if self.fused_attn else self.scale

    def fused_heads(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.fused_attend(x, with_shift(rel_pos_bias(self), mask))


class SwinBlock(PreNormBlock):
    """timm's: x is (B, height, width, C)."""

    fused_names = ("norm1", "attn", ("drop_path1",), "norm2", "mlp", ("drop_path2",))
    fused_axes = (4,)
    fused_first_rebuilds, fused_alike = False, True
    fused_derived = staticmethod(_area)

    def fused_cut(self: Any, x: Tensor) -> Windows:
        return Windows((x.shape[1], x.shape[2]), self.window_size, self.shift_size, False)

    def fused_mask(self: Any, x: Tensor) -> Tensor | None:
        if getattr(self, "dynamic_mask", False):
            return self.get_attn_mask(x.new_empty(1, *self.fused_cut(x).padded(), 1))
        return self.attn_mask

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        (rows, columns), width = self.window_size, width_of(self)
        grid = (rows + 1, 2 * columns)
        if self.attn_mask is not None:  # of that many windows
            grid = self.input_resolution
        yield (example(generator, 1, *grid, width),), {}

    def fused_context(self: Any, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"windows": self.fused_cut(x), "mask": self.fused_mask(x)}

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        return attend_in_windows(self, y)


class StochasticDepth(DropPath):
    """torchvision's DropPath."""

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None if module.mode == "row" else "it drops whole batches"

    def fused_way(self: Any) -> tuple[float, str, bool]:
        return self.p, "bernoulli", True


class ShiftedWindowAttention(Windowed):
    """torchvision's: x is (B, height, width, C); it reads its Linears' weights, and calls none."""

    fused_after, fused_dropout = "", "attention_dropout"
    fused_children = names("relative_position_bias_table qkv proj")
    fused_attention_dropout = names("attention_dropout")
    fused_axes = (4,)

    def fused_blocked(self: Any) -> str | None:
        if not (is_plain(self.qkv) and is_plain(self.proj)):
            return "it reads the weight of a Linear that is replaced"
        if self.training and self.dropout > 0:
            return "its dropout draws by window"
        return None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        rows, columns = self.window_size
        for grid in ((rows + 1, 2 * columns), (2 * rows, columns)):
            yield (example(generator, 2, *grid, width_of(self)),), {}

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        yield self, self.window_size[0] * self.window_size[1]

    def fused_cut(self: Any, x: Tensor) -> Windows:
        size = tuple(self.window_size)
        windows = Windows((x.shape[1], x.shape[2]), size, (0, 0))
        bounds = zip(self.shift_size, size, windows.padded(), strict=True)
        shift = [0 if n >= length else step for step, n, length in bounds]
        return windows._replace(shift=tuple(shift))

    def fused_heads(self: Any, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return self.fused_attend(x, with_shift(self.get_relative_position_bias(), mask))

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:  # type: ignore[override]
        windows = self.fused_cut(x)
        mask = windows.mask(self.relative_position_bias_table)
        return super().fused_branch(x, epilogue, windows=windows, mask=mask)


class TorchvisionSwinBlock(PreNormBlock):
    fused_names = ("norm1", "attn", ("stochastic_depth",), "norm2", "mlp", ("stochastic_depth",))
    fused_axes = (4,)


class HfSwinAttention(WindowedAttention, Attention):
    """transformers', from 5.x on."""

    fused_children = names("q_proj k_proj v_proj o_proj relative_position_bias")
    fused_extras = ("attention_mask",)

    def fused_area(self: Any) -> int:
        return self.relative_position_bias.window_area

    def fused_heads(self: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        mask = with_shift(self.relative_position_bias(), attention_mask)
        return self.fused_attend(x, mask)


class HfSwinLayer(WithNone, ViTLayer):
    """transformers': x is (B, height width, C) of the grid that comes with it."""

    fused_names = (
        "layernorm_before", "attention", ("dropout", "drop_path"),
        "layernorm_after", "mlp", ("dropout",),
    )  # fmt: skip
    fused_extras = ("input_dimensions", "always_partition")
    fused_first_rebuilds = fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        return None if inert(self.dropout) else "its dropout draws by window"

    def fused_checked(self, x: Any, extras: dict[str, Any]) -> Given | None:
        return super().fused_checked(x, extras) if "input_dimensions" in extras else None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        size, width = self.window_size, width_of(self)
        for grid in ((2 * size, size + 1), (size + 1, 2 * size)):
            x = example(generator, 1, grid[0] * grid[1], width)
            yield (x,), {"input_dimensions": grid}

    def fused_context(  # type: ignore[override]
        self: Any, x: Tensor, input_dimensions: tuple[int, int], always_partition: bool = False
    ) -> dict[str, Any]:
        if not always_partition:
            self.set_shift_and_window_size(input_dimensions)
        size, shift = self.window_size, self.shift_size
        height, width = input_dimensions
        windows = Windows((height, width), (size, size), (shift, shift))
        return {"windows": windows, "attention_mask": windows.mask(x)}

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        windows, mask = extras["windows"], extras["attention_mask"]
        y = windows.cut(y.unflatten(1, windows.grid))
        return windows.joined(self.attention(y, mask)[0]).flatten(1, 2)


TIMM: dict[str, type[Fused]] = {
    "timm.models.swin_transformer.SwinTransformerBlock": SwinBlock,
    "timm.models.swin_transformer.WindowAttention": WindowAttention,
}
TORCHVISION: dict[str, type[Fused]] = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ShiftedWindowAttention,
    "torchvision.models.swin_transformer.SwinTransformerBlock": TorchvisionSwinBlock,
    "torchvision.ops.stochastic_depth.StochasticDepth": StochasticDepth,
}
SWIN = (("Layer", HfSwinLayer), ("Attention", HfSwinAttention), ("MLP", HfMlp))
