"""timm: the parts of its Vision Transformers, and the table of all that is known of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.compat import constant_when_traced, rel_pos_bias
from ...runtime.plain import is_plain
from .. import hosts
from . import timm_sam, windows
from .attend import attend
from .block import pre_norm
from .fused import (
    KEEPS,
    NOTHING,
    Child,
    DropPath,
    Entry,
    Epilogue,
    Given,
    LayerNorm,
    LayerScale,
    RmsNorm,
    Row,
    example,
    inert,
    left_dropouts,
    left_linears,
    names,
    norm_in_pytorch,
    normed,
    project,
    row,
    width_of,
)
from .mlp import Mlp, MlpRoles
from .parts import SelfAttention, examples_with_bias
from .rotary import NO_NORMS, HeadNorms, Turn, head_norms, turn_of, turned
from .timm_blocks import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from .timm_masks import as_read, examples_of_masks, takes_mask
from .timm_models import NaFlexVit, VisionTransformer


class Attention(SelfAttention):
    """qkv -> q_norm, k_norm -> attention -> norm -> gate -> proj -> proj_drop."""

    fused_children = names("qkv q_norm k_norm attn_drop norm gate proj proj_drop")
    fused_attention_dropout = names("attn_drop")
    fused_extras = ("attn_mask",)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        return (x, extras) if takes_mask(extras.get("attn_mask"), x, self.num_heads) else None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for x, given in examples_of_masks(self, generator, 5, 4):
            yield (x,), given

    def fused_blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, "qkv", "q_proj", "k_proj", "v_proj", "gate", "proj")
        yield from left_dropouts(self, "proj_drop")

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        width = self.proj.in_features
        if self.fused_norms() is None:
            for name in ("q_norm", "k_norm"):
                yield from norm_in_pytorch(name, self.fused_part(name), width)
        yield from norm_in_pytorch("norm of attention", self.fused_part("norm"))
        if self.fused_part("gate") is not None:
            yield "gate of attention", 5 * width  # sigmoid: 2, product: 3

    def fused_reads_low(self: Any) -> bool:
        return super().fused_reads_low() and self.fused_part("gate") is None

    def fused_part(self: Any, name: str) -> Any:
        """A child that not every version of timm has."""
        return getattr(self, name, None)

    def fused_projections(self: Any) -> tuple[Any, ...]:
        if self.fused_part("qkv") is None:
            return self.q_proj, self.k_proj, self.v_proj
        return (self.qkv,)

    def fused_packed(self: Any) -> tuple[Tensor, Tensor | None] | None:
        if self.fused_part("q_bias") is None or not is_plain(self.qkv):
            return super().fused_packed()
        return self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias))

    def fused_head_dim(self: Any) -> int:
        if self.fused_part("qkv") is None:
            return self.q_proj.out_features // self.num_heads
        return super().fused_head_dim()

    def fused_norms(self) -> HeadNorms | None:
        q_norm, k_norm = self.fused_part("q_norm"), self.fused_part("k_norm")
        return head_norms(q_norm, k_norm, self.fused_head_dim())

    def fused_heads(  # type: ignore[override]
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        return self.fused_normed_heads(x, as_read(attn_mask, x), rope)

    def fused_normed_heads(
        self: Any, x: Tensor, mask: Tensor | None, rope: Tensor | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, H, D), with a mask that is added as it is."""
        norms = self.fused_norms()
        turn = None if rope is None else self.fused_turn(x, rope)
        if norms is not None and (rope is None or turn is not None):
            return self.fused_attend(x, mask, turn, norms)
        q, k, v = self.fused_qkv(x)
        if norms is None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            q, k = turned(q, k, None, norms)
        if rope is not None:  # by the host's function
            q, k = (self.fused_rotate(t, rope).type_as(v) for t in (q, k))
        return attend(q, k, v, mask=mask, dropout_p=self.fused_dropout_p())

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING, **extras: Any) -> Tensor:
        gate = self.fused_part("gate")
        gate = None if gate is None else project(gate, x).sigmoid()
        out = self.fused_heads(x, **extras).flatten(2)
        out, _ = normed(self.fused_part("norm"), out, is_plain(self.proj))
        out = out if gate is None else out * gate
        return self.fused_project_out(out, epilogue)

    def fused_is_simple(self: Any) -> bool:
        if (
            type(self).fused_heads is not Attention.fused_heads
            or self.fused_norms() is not NO_NORMS
        ):
            return False
        parts = map(self.fused_part, ("q_bias", "gate"))
        return inert(self.fused_part("norm")) and not any(p is not None for p in parts)


def _lost_qkv(module: Any) -> str | None:
    """The host reads its qkv's weight beside biases of its own, without calling it."""
    if getattr(module, "q_bias", None) is None or is_plain(module.qkv):
        return None
    return "its qkv is replaced, and the host reads only the weight"


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

    fused_children = Attention.fused_children | names("q_proj k_proj v_proj q_bias v_bias")
    fused_extras = ("rope", "attn_mask")

    def fused_blocked(self: Any) -> str | None:
        return _lost_qkv(self) or super().fused_blocked()

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        yield from super().fused_pytorch()
        groups = getattr(self, "num_kv_groups", 1)
        if groups > 1:
            yield "k and v repeated", 2 * (1 + 1 / groups) * self.proj.in_features
        if self.fused_norms() is None:
            # q and k: halves rotated, two products, a sum, cat with the prefix
            yield "RoPE", 2 * 9 * self.proj.in_features

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        prefix, D = getattr(self, "num_prefix_tokens", 1), self.fused_head_dim()
        for patches, batch in ((6, 3), (4, 2)):
            x = example(generator, batch, patches + prefix, width_of(self))
            for leading in ((), (self.num_heads,), (batch, 1)):
                rope = example(generator, *leading, patches, 2 * D)
                yield (x,), {"rope": rope.detach()}
            yield (x,), {"rope": rope}  # learnt
        for x, given in examples_of_masks(self, generator, 6 + prefix, 4 + prefix):
            rope = example(generator, x.shape[1] - prefix, 2 * D).detach()
            yield (x,), {"rope": rope, **given} if given else {}

    def fused_turn(self: Any, x: Tensor, rope: Tensor) -> Turn | None:
        """The tables of `rope`, sines first, where they are as `rope_attention` takes them."""
        (B, T, _), tokens = x.shape, x.shape[1] - getattr(self, "num_prefix_tokens", 1)
        if rope.ndim < 2 or rope.shape[-2] != tokens:  # fixed to 1 before timm 1.0.10
            return None
        if rope.ndim == 3 and tables_by_head(self.fused_host.__module__):
            rope = rope[None]
        sin, cos = rope.chunk(2, -1)
        shape = (B, self.num_heads, T, self.fused_head_dim())
        if rope.shape[-1] != 2 * shape[-1]:  # the host turns all of a head
            return None
        return turn_of(cos, sin, shape, not getattr(self, "rotate_half", False))

    def fused_qkv(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().fused_qkv(x)
        groups = getattr(self, "num_kv_groups", 1)
        if groups > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return q, k, v

    def fused_rotate(self: Any, x: Tensor, rope: Tensor) -> Tensor:
        rotate = sys.modules[self.fused_host.__module__].apply_rot_embed_cat
        first = getattr(self, "num_prefix_tokens", 1)
        half = {"half": True} if getattr(self, "rotate_half", False) else {}
        return torch.cat([x[:, :, :first], rotate(x[:, :, first:], rope, **half)], dim=2)


class BeitAttention(Attention):
    """BEiT's: the relative position bias is an additive mask."""

    fused_children = names(
        "qkv q_bias v_bias relative_position_bias_table attn_drop proj proj_drop"
    )
    fused_extras = ("shared_rel_pos_bias",)

    def fused_blocked(self: Any) -> str | None:
        return _lost_qkv(self) or super().fused_blocked()

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        own = None if self.relative_position_bias_table is None else rel_pos_bias(self)
        yield from examples_with_bias(self, generator, "shared_rel_pos_bias", self.num_heads, own)

    def fused_heads(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        mask = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            mask = rel_pos_bias(self)
            mask = mask if shared_rel_pos_bias is None else mask + shared_rel_pos_bias
        return self.fused_normed_heads(x, mask)


class RelPosAttention(Attention):
    """The relative position bias comes from a child or is shared by the layers."""

    fused_children = names("qkv q_norm k_norm rel_pos attn_drop proj proj_drop")
    fused_extras = ("shared_rel_pos",)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        # In training it may draw numbers, before anybody looks which.
        own = None if self.rel_pos is None else self.rel_pos.eval().get_bias()
        yield from examples_with_bias(self, generator, "shared_rel_pos", self.num_heads, own)

    def fused_draws(self: Any) -> bool:
        inside = () if self.rel_pos is None else self.rel_pos.modules()
        return super().fused_draws() or any(
            type(m) is nn.Dropout and m.p > 0 and m.training for m in inside
        )

    def fused_heads(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        mask = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        return self.fused_normed_heads(x, mask)


def _mlp(fc1: str = "fc1", gate: str = "") -> Row:
    return row(Mlp, roles=MlpRoles(fc1, "fc2", "", "", "drop1", "norm", "drop2", gate, act="act"))


def _block(gamma: str, *given: str) -> Row:
    tails = ((f"{gamma}{i}", f"drop_path{i}") for i in (1, 2))
    return pre_norm("norm1", "attn", next(tails), "norm2", "mlp", next(tails), given=given)


TABLE: dict[str, Entry] = {
    **windows.TIMM,
    **timm_sam.TIMM,
    "timm.layers.attention.Attention": Attention,
    "timm.layers.attention.AttentionRope": RopeAttention,
    "timm.layers.drop.DropPath": DropPath,
    "timm.layers.layer_scale.LayerScale": LayerScale,
    "timm.layers.mlp.GluMlp": _mlp(gate="gate_last"),
    "timm.layers.mlp.Mlp": _mlp(),
    "timm.layers.mlp.SwiGLU": _mlp("fc1_x", "fc1_g"),
    "timm.layers.norm.LayerNorm": LayerNorm,
    "timm.layers.norm.LayerNormFp32": row(LayerNorm, **KEEPS),
    "timm.layers.norm.RmsNorm": RmsNorm,
    "timm.layers.norm.RmsNormFp32": row(RmsNorm, **KEEPS),
    "timm.models.beit.Attention": BeitAttention,
    "timm.models.beit.Block": _block("gamma_", "shared_rel_pos_bias"),
    "timm.models.eva.EvaAttention": RopeAttention,
    "timm.models.eva.EvaBlock": _block("gamma_", "rope", "attn_mask"),
    "timm.models.naflexvit.NaFlexVit": NaFlexVit,
    "timm.models.vision_transformer.Attention": Attention,  # to timm 1.0.16, like LayerScale
    "timm.models.vision_transformer.Block": _block("ls", "attn_mask"),
    "timm.models.vision_transformer.LayerScale": LayerScale,
    "timm.models.vision_transformer_relpos.LayerScale": LayerScale,
    "timm.models.vision_transformer.ParallelScalingBlock": ParallelScalingBlock,
    "timm.models.vision_transformer.ParallelThingsBlock": ParallelThingsBlock,
    "timm.models.vision_transformer.ResPostBlock": ResPostBlock,
    "timm.models.vision_transformer.VisionTransformer": VisionTransformer,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelPosAttention,
    "timm.models.vision_transformer_relpos.RelPosBlock": _block("ls", "shared_rel_pos"),
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": ResPostBlock,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
