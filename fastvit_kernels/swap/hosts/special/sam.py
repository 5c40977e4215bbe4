"""timm's SAM encoder: x is (B, height, width, C), windows that are padded, decomposed positions:

scores = q k^T / sqrt(D) + q R_h + q R_w
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..attention import Attention, AttentionRoles
from ..block import Block, pre_norm
from ..fused import Entry, hooked, is_noop, names
from .windows import ROLES


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
        return hooked(self, "attn_drop", "q_norm", "k_norm")

    def fused_scale(self: Any) -> float | None:
        return None if self.fused_attn else self.scale


class SamBlock(Block):
    fused_axes = (4,)
    fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        if self.window_size and not (is_noop(self.drop_path1) and is_noop(self.attn.proj_drop)):
            return "it drops by window"
        return None


TIMM: dict[str, Entry] = {
    "timm.models.vision_transformer_sam.Attention": SamAttention,
    "timm.models.vision_transformer_sam.Block": pre_norm(
        "norm1", "attn", ("ls1", "drop_path1"), "norm2", "mlp", ("ls2", "drop_path2"),
        mixin=SamBlock, window="window_size",
    ),
}  # fmt: skip
