"""Patch embedding: convolutions whose kernel is their stride."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops.linear.functions import linear
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked
from .fused import Fused


class PatchConv(Fused):
    """A Conv2d whose kernel is its stride, on images: (B, in, height, width) -> (B, C, h, w); or a
    Conv3d on videos: (B, in, frames, height, width) -> (B, C, t, h, w)."""

    fused_level = "patch_embed"

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if tuple(module.kernel_size) != tuple(module.stride) or module.in_channels > 4:
            return ""  # some other convolution
        if (module.padding != "valid" and any(module.padding)) or module.groups != 1:
            return "a patch embedding with padding or groups"
        return None if set(module.dilation) == {1} else "a dilated patch embedding"

    def fused_blocked(self) -> str | None:
        return self.fused_reject(self)  # read while tracing, so that compilers guard on it

    def fused_takes(self: Any, x: Tensor) -> bool:
        fits = x.ndim == self.weight.ndim and x.shape[1] == self.in_channels
        return fits and all(n % p == 0 for n, p in zip(x.shape[2:], self.kernel_size, strict=True))

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        C, (*frames, p, q) = self.in_channels, self.kernel_size
        return [(2, C, *(2 * t for t in frames), 2 * p, 3 * q), (1, C, *frames, p, q)]

    def fused_grid(self: Any, images: Tensor) -> Tensor:
        """The op writes (B, h*w, C): the result is a view of that. Videos of one patch each, as
        Qwen-VL's processor makes them, are the rows of a Linear."""
        if images.ndim == 5 and tuple(images.shape[2:]) == tuple(self.kernel_size):
            rows = linear(images.flatten(1), self.weight.flatten(1), self.bias)
            return rows[:, :, None, None, None]
        tokens = patch_embed(images, self.weight, self.bias)
        grid = (n // p for n, p in zip(images.shape[2:], self.kernel_size, strict=True))
        return tokens.transpose(1, 2).unflatten(2, tuple(grid))

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        return self.fused_grid(x).contiguous()  # as the host's, for view()


class PatchConvOfTokens(PatchConv):
    """PatchConv in a class that takes flatten(2).transpose(1, 2) of it: that costs nothing."""

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        grid = self.fused_grid(x)
        return grid.contiguous() if is_hooked(self) else grid


PatchConv.fused_of_tokens = PatchConvOfTokens
