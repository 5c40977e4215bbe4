"""Swin: attention inside windows of a grid that may be shifted, with a learnt bias of positions.

    q k^T / sqrt(D) + bias(H, N, N) [+ mask of the shift (windows, N, N)]

The two are one mask of the fused attention, by window, and it has the gradient of the bias. A block
joins the windows before the output projection: that ends in the residual, in the image's order, and
computes nothing that was padded. Swin V2's cosine attention is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.compat import attend_in_windows, rel_pos_bias
from ....runtime.plain import is_hooked, is_plain
from .. import fused
from ..attention import Attention, AttentionRoles
from ..block import Block, Step, pre_norm
from ..fused import DropPath, Entry, Epilogue, Place, Planned, example, is_noop, names, width_of
from ..grids import Windows
from ..layers import MLP, layer
from ..layers import Attention as HfAttention


def with_shift(bias: Tensor, mask: Tensor | None) -> Tensor:
    """bias (1, H, N, N) and mask (windows, N, N) as one."""
    return bias if mask is None else bias + mask[:, None]


def _area(copy: Any) -> dict[str, int]:
    """What follows from the sides of a window: it may equal a width, which a copy narrows."""
    return {"window_area": copy.window_size[0] * copy.window_size[1]}


ROLES = AttentionRoles(("qkv",), "num_heads", "proj", dropout="attn_drop", after="proj_drop")


class WindowedAttention(Attention):
    """Attention on windows (B windows, N, C), with or without a mask of the shift; a block's on x
    and the windows that it is cut into."""

    fused_simple = False
    fused_roles = ROLES

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
        yield (example(generator, 4, N, width_of(self)),), {self.fused_extra_kwargs[0]: mask}


class WindowAttention(WindowedAttention):
    """timm's: it forms the scores by default, so `fused_attn` says nothing here."""

    fused_children = names("relative_position_bias_table softmax")
    fused_attention_dropout = names("attn_drop")
    fused_extra_kwargs = ("mask",)
    fused_derived = staticmethod(_area)

    def fused_blocked(self: Any) -> str | None:
        if is_hooked(self.attn_drop) or is_hooked(self.softmax):
            return "its probabilities are hooked"
        return None if type(self.softmax) is nn.Softmax else "its softmax was replaced"

    def fused_scale(self: Any) -> float | None:
        return None if self.fused_attn else self.scale

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return with_shift(rel_pos_bias(self), extras.get("mask"))


class SwinBlock(Block):
    """timm's: x is (B, height, width, C)."""

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

    def fused_context(self: Any, step: Step, x: Tensor, extras: Any) -> dict[str, Any]:
        if step.body != "attn":
            return {}
        return {"windows": self.fused_cut(x), "mask": self.fused_mask(x)}

    def fused_call(self: Any, step: Step, context: dict[str, Any]) -> Any:
        if step.body != "attn":
            return super().fused_call(step, context)
        return partial(attend_in_windows, self)


class StochasticDepth(DropPath):
    """torchvision's DropPath."""

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None if module.mode == "row" else "it drops whole batches"

    def fused_drop_path_params(self: Any) -> tuple[float, str, bool]:
        return self.p, "bernoulli", True


class ShiftedWindowAttention(Attention):
    """torchvision's: x is (B, height, width, C); it reads its Linears' weights, and calls none."""

    fused_roles = ROLES._replace(after="", dropout="attention_dropout")
    fused_simple = False
    fused_children = names("relative_position_bias_table")
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

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return with_shift(self.get_relative_position_bias(), extras.get("mask"))

    def fused_planned(self: Any, place: Place) -> Planned:
        planned, found = super().fused_planned(place), self.fused_found(place)

        def run(modules: list[Any], x: Tensor, epilogue: Epilogue, more: Any) -> Tensor:
            windows = found(modules).fused_cut(x)
            mask = windows.mask(found(modules).relative_position_bias_table)
            return planned(modules, x, epilogue, {"windows": windows, "mask": mask})

        return run


class HfSwinAttention(WindowedAttention, HfAttention):
    """transformers', from 5.x on."""

    fused_roles = HfAttention.fused_roles
    fused_children = names("relative_position_bias")
    fused_extra_kwargs = ("attention_mask",)

    def fused_area(self: Any) -> int:
        return self.relative_position_bias.window_area

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return with_shift(self.relative_position_bias(), extras.get("attention_mask"))


class HfSwinLayer(Block):
    """transformers': x is (B, height width, C) of the grid that comes with it."""

    fused_first_rebuilds = fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        return None if is_noop(self.dropout) else "its dropout draws by window"

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        if "input_dimensions" not in extras or is_hooked(self.attention):
            return None
        return x, extras

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        size, width = self.window_size, width_of(self)
        for grid in ((2 * size, size + 1), (size + 1, 2 * size)):
            x = example(generator, 1, grid[0] * grid[1], width)
            yield (x,), {"input_dimensions": grid}

    def fused_context(self: Any, step: Step, x: Tensor, extras: Any) -> dict[str, Any]:
        if step.body != "attention":
            return {}
        if not extras.get("always_partition", False):
            self.set_shift_and_window_size(extras["input_dimensions"])
        size, shift = self.window_size, self.shift_size
        height, width = extras["input_dimensions"]
        windows = Windows((height, width), (size, size), (shift, shift))
        return {"windows": windows, "attention_mask": windows.mask(x)}


TIMM: dict[str, Entry] = {
    "timm.models.swin_transformer.SwinTransformerBlock": pre_norm(
        "norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2", mixin=SwinBlock
    ),
    "timm.models.swin_transformer.WindowAttention": WindowAttention,
}
TORCHVISION: dict[str, Entry] = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ShiftedWindowAttention,
    "torchvision.models.swin_transformer.SwinTransformerBlock": pre_norm(
        "norm1", "attn", "stochastic_depth", "norm2", "mlp", "stochastic_depth", axes=(4,)
    ),
    "torchvision.ops.stochastic_depth.StochasticDepth": StochasticDepth,
}
_LAYER = layer(
    "layernorm_before", "attention", "dropout drop_path", "layernorm_after", "mlp", "dropout",
    mixin=HfSwinLayer, result=(2, 0), extra_kwargs=("input_dimensions", "always_partition"),
)  # fmt: skip
SWIN = (("Layer", _LAYER), ("Attention", HfSwinAttention), ("MLP", MLP))


class SamAttention(Attention):
    fused_attention_dropout = names("attn_drop")
    fused_axes = (4,)

    @property
    def fused_roles(self: Any) -> AttentionRoles:  # type: ignore[override]
        """Its tables are for windows of one size; the host interpolates them for others."""
        along = ("rel_pos_h", "rel_pos_w") if self.use_rel_pos else ()
        return ROLES._replace(grid=True, along=along)

    @classmethod
    def fused_known(cls) -> frozenset[str]:
        return names("qkv proj attn_drop proj_drop q_norm k_norm rope rel_pos_h rel_pos_w")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if not (type(module.q_norm) is type(module.k_norm) is nn.Identity):
            return "it normalises queries and keys"
        return None if getattr(module, "rope", None) is None else "it turns queries and keys"

    def fused_blocked(self: Any) -> str | None:
        return fused.hooked(self, "attn_drop", "q_norm", "k_norm")

    def fused_scale(self: Any) -> float | None:
        return None if self.fused_attn else self.scale


class SamBlock(Block):
    fused_axes = (4,)
    fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        if self.window_size and not (is_noop(self.drop_path1) and is_noop(self.attn.proj_drop)):
            return "it drops by window"
        return None


TIMM |= {
    "timm.models.vision_transformer_sam.Attention": SamAttention,
    "timm.models.vision_transformer_sam.Block": pre_norm(
        "norm1", "attn", "ls1 drop_path1", "norm2", "mlp", "ls2 drop_path2",
        mixin=SamBlock, window="window_size",
    ),
}  # fmt: skip
