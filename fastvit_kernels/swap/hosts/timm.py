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
from . import attention, fused
from .attend import Turn, turn_of
from .attention import AttentionRoles, examples_with_bias
from .block import pre_norm
from .grids import turned_behind
from .masks import as_read, examples_of_masks, takes_mask
from .mlp import Mlp, MlpRoles
from .special import windows
from .special.models import NaFlexVit, VisionTransformer
from .special.parallel import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock


class Attention(attention.Attention):
    """qkv -> q_norm, k_norm -> attention -> norm -> gate -> proj -> proj_drop."""

    fused_roles = AttentionRoles(
        ("qkv",), "num_heads", "proj", dropout="attn_drop", q_norm="q_norm", k_norm="k_norm",
        inner_norm="norm", gate="gate", after="proj_drop", mask="attn_mask",
    )  # fmt: skip
    fused_attention_dropout = fused.names("attn_drop")
    fused_extra_kwargs = ("attn_mask",)

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        return (x, extras) if takes_mask(extras.get("attn_mask"), x, self.num_heads) else None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for x, given in examples_of_masks(self, generator, 5, 4):
            yield (x,), given

    def fused_blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        return as_read(extras.get("attn_mask"), x)


class WithBiases(Attention):
    """The biases of its qkv may be parameters of its own, which the host reads beside the weight
    without a call."""

    def fused_blocked(self: Any) -> str | None:
        if getattr(self, "q_bias", None) is not None and not is_plain(self.qkv):
            return "its qkv is replaced, and the host reads only the weight"
        return super().fused_blocked()

    def fused_weights(self: Any) -> list[tuple[Tensor, Tensor | None] | None]:
        if getattr(self, "q_bias", None) is None:
            return super().fused_weights()
        return [(self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))]

    @property
    def fused_simple(self: Any) -> bool:  # type: ignore[override]
        return getattr(self, "q_bias", None) is None


@constant_when_traced
@cache
def tables_by_head(host: str) -> bool:
    """Whether a table (n, T', R) is by head, as from timm 1.0.16 on; by sample before."""
    rotate = sys.modules[host].apply_rot_embed_cat
    try:
        return rotate(torch.zeros(1, 2, 1, 2), torch.zeros(2, 1, 4)).shape[0] == 1
    except RuntimeError:
        return False


class RopeAttention(WithBiases):
    """EvaAttention and AttentionRope. Where frequencies are learnt the tables have a gradient."""

    fused_roles = Attention.fused_roles._replace(rope="rope", groups="num_kv_groups")
    fused_children = fused.names("q_proj k_proj v_proj q_bias v_bias")
    fused_extra_kwargs = ("rope", "attn_mask")

    def fused_linears(self: Any) -> tuple[str, ...]:
        packed = getattr(self, "qkv", None) is not None
        return ("qkv",) if packed else ("q_proj", "k_proj", "v_proj")

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
            x = fused.example(generator, batch, patches + prefix, fused.width_of(self))
            for leading in ((), (self.num_heads,), (batch, 1)):
                rope = fused.example(generator, *leading, patches, 2 * D)
                yield (x,), {"rope": rope.detach()}
            yield (x,), {"rope": rope}  # learnt
        for x, given in examples_of_masks(self, generator, 6 + prefix, 4 + prefix):
            rope = fused.example(generator, x.shape[1] - prefix, 2 * D).detach()
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
        if self.fused_norms() is None or rope.shape[-1] != 2 * shape[-1]:
            return None  # the norms are called first; the host turns all of a head
        return turn_of(cos, sin, shape, not getattr(self, "rotate_half", False))

    def fused_rotated(self: Any, q: Tensor, k: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        rotate = sys.modules[self.fused_host.__module__].apply_rot_embed_cat
        first = getattr(self, "num_prefix_tokens", 1)
        half = {"half": True} if getattr(self, "rotate_half", False) else {}
        return tuple(turned_behind(lambda t: rotate(t, rope, **half), t, first, t) for t in (q, k))  # type: ignore


class Biased(Attention):
    """A learnt bias of relative positions, its own or the layers', is an additive mask."""

    fused_simple = False

    def fused_bias(self: Any) -> Tensor | None:
        """(1, H, T, T), its own"""

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        return x, extras

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        own, (shared,) = self.fused_bias(), self.fused_extra_kwargs
        yield from examples_with_bias(self, generator, shared, self.num_heads, own)

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        own, shared = self.fused_bias(), extras.get(self.fused_extra_kwargs[0])
        return own if shared is None else shared if own is None else own + shared


class BeitAttention(Biased, WithBiases):
    fused_children = fused.names("q_bias v_bias relative_position_bias_table")
    fused_extra_kwargs = ("shared_rel_pos_bias",)

    def fused_bias(self: Any) -> Tensor | None:
        return None if self.relative_position_bias_table is None else rel_pos_bias(self)


class RelPosAttention(Biased):
    """The bias comes from a child."""

    fused_children = fused.names("rel_pos")
    fused_extra_kwargs = ("shared_rel_pos",)

    def fused_bias(self: Any) -> Tensor | None:
        return None if self.rel_pos is None else self.rel_pos.get_bias()

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        own = self.fused_bias()
        return extras.get("shared_rel_pos") if own is None else own

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        if self.rel_pos is not None:
            self.rel_pos.eval()  # in training it may draw numbers, before anybody looks which
        yield from super().fused_examples(generator)

    def fused_draws(self: Any) -> bool:
        inside = () if self.rel_pos is None else self.rel_pos.modules()
        return super().fused_draws() or any(
            type(m) is nn.Dropout and m.p > 0 and m.training for m in inside
        )


def _mlp(fc1: str = "fc1", gate: str = "") -> fused.Row:
    return fused.row(
        Mlp, roles=MlpRoles(fc1, "fc2", "", "", "drop1", "norm", "drop2", gate, act="act")
    )


def _block(gamma: str, *given: str) -> fused.Row:
    tails = (f"{gamma}{i} drop_path{i}" for i in (1, 2))
    return pre_norm("norm1", "attn", next(tails), "norm2", "mlp", next(tails), given=given)


TABLE: dict[str, fused.Entry] = {
    **windows.TIMM,
    "timm.layers.attention.Attention": Attention,
    "timm.layers.attention.AttentionRope": RopeAttention,
    "timm.layers.drop.DropPath": fused.DropPath,
    "timm.layers.layer_scale.LayerScale": fused.LayerScale,
    "timm.layers.mlp.GluMlp": _mlp(gate="gate_last"),
    "timm.layers.mlp.Mlp": _mlp(),
    "timm.layers.mlp.SwiGLU": _mlp("fc1_x", "fc1_g"),
    "timm.layers.norm.LayerNorm": fused.LayerNorm,
    "timm.layers.norm.LayerNormFp32": fused.row(fused.LayerNorm, **fused.KEEPS),
    "timm.layers.norm.RmsNorm": fused.RmsNorm,
    "timm.layers.norm.RmsNormFp32": fused.row(fused.RmsNorm, **fused.KEEPS),
    "timm.models.beit.Attention": BeitAttention,
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
    "timm.models.vision_transformer.ResPostBlock": ResPostBlock,
    "timm.models.vision_transformer.VisionTransformer": VisionTransformer,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelPosAttention,
    "timm.models.vision_transformer_relpos.RelPosBlock": _block("ls", "shared_rel_pos"),
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": ResPostBlock,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
