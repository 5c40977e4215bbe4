"""timm's SAM encoder: x is (B, height, width, C), windows that are padded, decomposed positions:

scores = q k^T / sqrt(D) + q R_h + q R_w
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attend import attend, attend_packed, unpack
from ..block import Block, Step, pre_norm
from ..fused import (
    NOTHING,
    Entry,
    Epilogue,
    example,
    hooked,
    inert,
    names,
    project,
    width_of,
)
from ..grids import Windows, windows_of
from ..positions import with_decomposed
from .windows import Windowed


class SamAttention(Windowed):
    fused_children = names("q_norm k_norm rope rel_pos_h rel_pos_w")
    fused_attention_dropout = names("attn_drop")
    fused_axes = (4,)

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if not (type(module.q_norm) is type(module.k_norm) is nn.Identity):
            return "it normalises queries and keys"
        return None if getattr(module, "rope", None) is None else "it turns queries and keys"

    def fused_blocked(self: Any) -> str | None:
        return hooked(self, "attn_drop", "q_norm", "k_norm")

    def fused_grid(self: Any) -> tuple[int, int] | None:
        """What its tables are for; the host interpolates them for others."""
        if not self.use_rel_pos:
            return None
        return (len(self.rel_pos_h) + 1) // 2, (len(self.rel_pos_w) + 1) // 2

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 4 and self.fused_grid() in (None, tuple(x.shape[1:3]))

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for batch in (1, 2):
            grid = self.fused_grid() or (3, 3 + batch)
            yield (example(generator, batch, *grid, width_of(self)),), {}

    def fused_heads(self: Any, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """x (B, T, C) -> (B, T, H, D)"""
        p = self.fused_dropout_p()
        qkv, scale = project(self.qkv, x), None if self.fused_attn else self.scale
        if not self.use_rel_pos:
            return attend_packed(qkv, self.num_heads, dropout_p=p, scale=scale)
        q, k, v = unpack(qkv, self.num_heads)
        along, D = (self.rel_pos_h, self.rel_pos_w), v.shape[-1]
        q, k, v = with_decomposed(q, k, v, D**-0.5 if scale is None else scale, along, grid)
        return attend(q, k, v, dropout_p=p, scale=1.0)[..., :D]

    def fused_branch(  # type: ignore[override]
        self: Any, x: Tensor, epilogue: Epilogue = NOTHING, windows: Windows | None = None
    ) -> Tensor:
        windows = windows or windows_of(x, 0)
        return super().fused_branch(x, epilogue, windows=windows, grid=windows.size)


class SamBlock(Block):
    fused_axes = (4,)
    fused_first_rebuilds = fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        if self.window_size and not (inert(self.drop_path1) and inert(self.attn.proj_drop)):
            return "it drops by window"
        return None

    def fused_takes(self: Any, x: Tensor) -> bool:
        if x.ndim != 4 or not isinstance(self.attn, SamAttention):
            return x.ndim == 4
        return self.attn.fused_grid() in (None, windows_of(x, self.window_size).size)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        size = self.window_size
        grid = (size + 1, 2 * size) if size else SamAttention.fused_grid(self.attn) or (3, 4)
        yield (example(generator, 1, *grid, width_of(self)),), {}

    def fused_context(self: Any, step: Step, x: Tensor, extras: Any) -> dict[str, Any]:
        return {"windows": windows_of(x, self.window_size)} if step.body == "attn" else {}

    def fused_call(self: Any, step: Step, context: dict[str, Any]) -> Any:
        if step.body != "attn":
            return super().fused_call(step, context)
        windows = context["windows"]

        def call(y: Tensor) -> Tensor:
            y = windows.cut(y).unflatten(1, windows.size)
            return windows.joined(self.attn(y).flatten(1, 2))

        return call


TIMM: dict[str, Entry] = {
    "timm.models.vision_transformer_sam.Attention": SamAttention,
    "timm.models.vision_transformer_sam.Block": pre_norm(
        "norm1", "attn", ("ls1", "drop_path1"), "norm2", "mlp", ("ls2", "drop_path2"),
        mixin=SamBlock,
    ),
}  # fmt: skip
