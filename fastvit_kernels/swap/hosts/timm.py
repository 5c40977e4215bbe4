"""timm: the parts of its Vision Transformers, and the table of all that is known of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.compat import constant_when_traced
from . import attention, fused
from .attend import Turn, turn_of
from .attention import AttentionRoles
from .block import pre_norm
from .grids import turned_behind
from .masks import BIAS, BROADCAST
from .mlp import Mlp, MlpRoles
from .special import windows
from .special.models import NaFlexVit, VisionTransformer
from .special.parallel import ParallelScalingBlock, ParallelThingsBlock


class Attention(attention.Attention):
    """qkv -> q_norm, k_norm -> attention -> norm -> gate -> proj -> proj_drop. Biases of qkv may
    be parameters beside it."""

    fused_roles = AttentionRoles(
        ("qkv",),
        "num_heads",
        "proj",
        dropout="attn_drop",
        q_norm="q_norm",
        k_norm="k_norm",
        inner_norm="norm",
        gate="gate",
        after="proj_drop",
        mask="attn_mask",
        masks=BROADCAST,
        raw=True,
        biases=(("q_bias", "k_bias", "v_bias"),),
    )

    def fused_blocked(self: Any) -> str | None:
        scores = None if self.fused_attn else "fused_attn is False: it forms the scores"
        return scores or attention.Attention.fused_blocked(self)


@constant_when_traced
@cache
def tables_by_head(host: str) -> bool:
    """Whether a table (n, T', R) is by head, as from timm 1.0.16 on; by sample before."""
    rotate = sys.modules[host].apply_rot_embed_cat
    try:
        return rotate(torch.zeros(1, 2, 1, 2), torch.zeros(2, 1, 4)).shape[0] == 1
    except RuntimeError:
        return False


class RopeAttention(Attention):
    """EvaAttention and AttentionRope. Where frequencies are learnt the tables have a gradient."""

    fused_roles = Attention.fused_roles._replace(
        projections=("qkv", "q_proj", "k_proj", "v_proj"),
        rope="rope",
        groups="num_kv_groups",
        prefix="num_prefix_tokens",
    )

    def fused_others(self: Any, x: Tensor, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        yield {}
        patches, D = x.shape[1] - self.fused_prefix(), self.fused_head_dim()
        for leading in ((self.num_heads,), (len(x), 1), ()):
            rope = fused.example(generator, *leading, patches, 2 * D)
            yield {"rope": rope.detach()}
        yield {"rope": rope}  # learnt

    def fused_turn(self: Any, x: Tensor, rope: Tensor) -> Turn | None:
        """The tables of `rope`, sines first, where they are as `rope_attention` takes them."""
        (B, T, _), tokens = x.shape, x.shape[1] - self.fused_prefix()
        if rope.ndim < 2 or rope.shape[-2] != tokens:  # fixed to 1 before timm 1.0.10
            return None
        if rope.ndim == 3 and tables_by_head(self.fused_host.__module__):
            rope = rope[None]
        sin, cos = rope.chunk(2, -1)
        shape = (B, self.num_heads, T, self.fused_head_dim())
        if self.fused_norms() is None or rope.shape[-1] != 2 * shape[-1]:
            return None  # the norms are called first; the host turns all of a head
        return turn_of((cos, sin), shape, not getattr(self, "rotate_half", False))

    def fused_rotated(self: Any, q: Tensor, k: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        rotate = sys.modules[self.fused_host.__module__].apply_rot_embed_cat
        first = self.fused_prefix()
        half = {"half": True} if getattr(self, "rotate_half", False) else {}
        return tuple(turned_behind(lambda t: rotate(t, rope, **half), t, first, t) for t in (q, k))  # type: ignore


BEIT = Attention.fused_roles._replace(
    table="relative_position_bias_table",
    index="relative_position_index",
    mask="shared_rel_pos_bias",
    masks=BIAS,
)


class RelPosAttention(Attention):
    """A learnt bias of relative positions comes from a child, else from the layers'."""

    fused_children = fused.names("rel_pos")
    fused_roles = Attention.fused_roles._replace(mask="shared_rel_pos", masks=BIAS)

    def fused_bias(self: Any) -> Tensor | None:
        return None if self.rel_pos is None else self.rel_pos.get_bias()

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return super().fused_mask(x, extras if self.rel_pos is None else {})

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        if self.rel_pos is None:
            return super().fused_shapes()
        self.rel_pos.eval()  # in training it may draw numbers, before anybody looks which
        T, C = self.fused_bias().shape[-1], fused.width_of(self)
        return [(2, T, C), (1, T, C)]

    def fused_draws(self: Any) -> bool:
        inside = () if self.rel_pos is None else self.rel_pos.modules()
        return super().fused_draws() or any(
            type(m) is nn.Dropout and m.p > 0 and m.training for m in inside
        )


def _mlp(fc1: str = "fc1", gate: str = "") -> Any:
    return fused.row(
        Mlp, roles=MlpRoles(fc1, "fc2", "", "", "drop1", "norm", "drop2", gate, act="act")
    )


def _block(gamma: str, *given: str) -> Any:
    tails = (f"{gamma}{i} drop_path{i}" for i in (1, 2))
    return pre_norm("norm1", "attn", next(tails), "norm2", "mlp", next(tails), given=given)


def _res_post_block(*given: str) -> Any:
    """A norm stands between each branch and its residual, so that nothing fuses across children."""
    return pre_norm("", "attn", "norm1 drop_path1", "", "mlp", "norm2 drop_path2", given=given)


TABLE: dict[str, Any] = {
    **windows.TIMM,
    "timm.layers.attention.Attention": Attention,
    "timm.layers.attention.AttentionRope": RopeAttention,
    "timm.layers.drop.DropPath": fused.DropPath,
    "timm.layers.layer_scale.LayerScale": fused.LayerScale,
    "timm.layers.mlp.GluMlp": _mlp(gate="gate_last"),
    "timm.layers.mlp.Mlp": _mlp(),
    "timm.layers.mlp.SwiGLU": _mlp("fc1_x", "fc1_g"),
    "timm.layers.norm.LayerNorm": fused.LayerNorm,
    "timm.layers.norm.LayerNormFp32": fused.row(fused.LayerNorm, roles=fused.KEEPS),
    "timm.layers.norm.RmsNorm": fused.RmsNorm,
    "timm.layers.norm.RmsNormFp32": fused.row(fused.RmsNorm, roles=fused.KEEPS),
    "timm.models.beit.Attention": fused.row(Attention, roles=BEIT),
    "timm.models.beit.Block": _block("gamma_", "shared_rel_pos_bias"),
    "timm.models.eva.EvaAttention": RopeAttention,
    "timm.models.eva.EvaBlock": _block("gamma_", "rope", "attn_mask"),
    "timm.models.naflexvit.NaFlexVit": NaFlexVit,
    "timm.models.vision_transformer.Attention": Attention,  # to timm 1.0.16, like LayerScale
    "timm.models.vision_transformer.Block": _block("ls", "attn_mask"),
    "timm.models.vision_transformer.LayerScale": fused.LayerScale,
    "timm.models.vision_transformer_relpos.LayerScale": fused.LayerScale,
    "timm.models.vision_transformer.ParallelScalingBlock": ParallelScalingBlock,
    "timm.models.vision_transformer.ParallelThingsBlock": ParallelThingsBlock,
    "timm.models.vision_transformer.ResPostBlock": _res_post_block(),
    "timm.models.vision_transformer.VisionTransformer": VisionTransformer,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelPosAttention,
    "timm.models.vision_transformer_relpos.RelPosBlock": _block("ls", "shared_rel_pos"),
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": _res_post_block("shared_rel_pos"),
}
