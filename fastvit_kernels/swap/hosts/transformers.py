"""Hugging Face transformers: the layers of its vision models, and its attention interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.attention.sdpa import scaled_dot_product_attention
from ...ops.linear import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_plain
from .. import hosts
from .attend import attend, registered, together
from .branch import PreNormBlock
from .fused import (
    Child,
    DropPath,
    Fused,
    LayerScale,
    RmsNorm,
    example,
    inert,
    left_dropouts,
    left_linears,
    names,
    norm_in_pytorch,
    normed_for,
    project,
    project_out,
    width_of,
)
from .parts import Mlp, SwiGLU
from .rotary import HeadNorms, Turn, attend_turned, turn_of, turned

ATTENTION = "fastvit"  # our name in transformers' AttentionInterface
# Keyword arguments that a layer hands on and that attention does not read.
UNREAD = names(
    "interpolate_pos_encoding num_items_in_batch output_hidden_states return_dict use_cache"
)


def _is_sdpa(function: Any) -> bool:
    """Whether this is transformers' own attention by torch's scaled_dot_product_attention, or
    ours."""
    name = (getattr(function, "__module__", ""), getattr(function, "__name__", ""))
    own = ("transformers.integrations.sdpa_attention", "sdpa_attention_forward")
    return function is fastvit_attention or name == own


class Attention(Fused):
    """Separate q, k, v projections -> attention -> output projection; gives (output, None)."""

    fused_level = "attention"
    fused_children = names("q_proj k_proj v_proj o_proj")
    fused_unread = UNREAD
    fused_scaling, fused_dropout, fused_out = "scaling", "attention_dropout", "o_proj"
    fused_attention_dropout = names("attention_dropout dropout dropout_prob")

    def fused_facts(self: Any) -> Any:
        chosen = self.config._attn_implementation
        return chosen, registered(chosen)

    def fused_blocked(self: Any) -> str | None:
        chosen = self.config._attn_implementation
        if chosen not in ("sdpa", ATTENTION):
            return f"attn_implementation={chosen!r} is set"
        if getattr(self, "is_causal", False):
            return "is_causal is set"
        if "Text" in type(self.config).__name__ and "CLIP" in type(self.config).__name__:
            return "CLIP's text attention is causal"
        if not _is_sdpa(registered(chosen)):
            return f"another function is registered as {chosen!r}"
        return None

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, "q_proj", "k_proj", "v_proj", self.fused_out)

    def fused_projections(self: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj

    def fused_reads_low(self: Any) -> bool:
        return all(is_plain(m) for m in self.fused_projections())

    def fused_after(self) -> Any:
        """The dropout behind the output projection."""
        return None

    def fused_dropout_p(self: Any) -> float:
        return getattr(self, self.fused_dropout) if self.training else 0.0

    def fused_packed(self: Any) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one projection to q, k and v; None where they must stay apart."""
        return together(list(self.fused_projections())) if self.fused_reads_low() else None

    def fused_qkv(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, C) -> q, k, v, each (B, H, T, D)"""
        return tuple(
            project(m, x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for m in self.fused_projections()
        )

    def fused_heads(
        self: Any, x: Tensor, mask: Tensor | None = None, turn: Turn | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        scale, dropout_p = getattr(self, self.fused_scaling), self.fused_dropout_p()
        packed = self.fused_packed()
        if packed is not None:
            return attend_turned(
                x, packed, packed[0].shape[0] // (3 * self.head_dim), turn, HeadNorms(),
                mask=mask, dropout_p=dropout_p, scale=scale,
            )  # fmt: skip
        q, k, v = self.fused_qkv(x)
        q, k = turned(q, k, turn, HeadNorms())
        return attend(q, k, v, mask=mask, dropout_p=dropout_p, scale=scale)

    def fused_branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None, **extras: Any,
    ) -> Tensor:  # fmt: skip
        out = self.fused_heads(x, **extras).flatten(2)
        out_proj = getattr(self, self.fused_out)
        return project_out(out_proj, self.fused_after(), out, residual, layer_scale, row_scale)

    def fused_forward(self: Any, x: Tensor, **extras: Any) -> tuple[Tensor, None]:
        return self.fused_branch(x, **extras), None


class ClipAttention(Attention):
    """CLIP's and SigLIP's names for the same."""

    fused_children = names("q_proj k_proj v_proj out_proj")
    fused_scaling, fused_dropout, fused_out = "scale", "dropout", "out_proj"


class BeitAttention(Attention):
    """The mask that BEiT passes is its relative position bias."""

    fused_extras = ("attention_mask",)

    def fused_heads(self: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().fused_heads(x, attention_mask)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        heads = self.q_proj.out_features // self.head_dim
        for batch, length in ((3, 5), (2, 4)):
            x = example(generator, batch, length, width_of(self))
            yield (x,), {}
            yield (x,), {"attention_mask": example(generator, 1, heads, length, length)}


class RopeAttention(Attention):
    """DINOv3 and Pixtral: q and k turn by tables for the patches, which come after the prefix. A
    table with a gradient turns them by the host's function, in PyTorch."""

    fused_dropout = "dropout"
    fused_extras = ("position_embeddings", "attention_mask")
    fused_rotation: ClassVar[dict[str, Any]] = {}  # keywords of the host's function

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for batch, patches in ((3, 4), (2, 6)):
            tokens = patches + (not self.fused_rotation)
            x = example(generator, batch, tokens, width_of(self))
            for learnt in (False, True):
                tables = [example(generator, patches, self.head_dim) for _ in "cs"]
                tables = tuple(t if learnt else t.detach() for t in tables)
                yield (x,), {"position_embeddings": tables}
            mask = example(generator, batch, 1, tokens, tokens)
            yield (x,), {"position_embeddings": tables, "attention_mask": mask}

    def fused_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = super().fused_given(args, kwargs)
        tables = None if given is None else given[1].get("position_embeddings")
        return given if isinstance(tables, (tuple, list)) and len(tables) == 2 else None

    def fused_heads(  # type: ignore[override]
        self: Any, x: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        cos, sin = position_embeddings
        (B, T, _), projection = x.shape, self.fused_projections()[0]
        shape = (B, projection.out_features // self.head_dim, T, self.head_dim)
        turn = turn_of(cos, sin, shape) if cos.ndim == 2 else None
        if turn is not None:
            return super().fused_heads(x, attention_mask, turn)
        q, k, v = self.fused_qkv(x)
        rotate = sys.modules[self.fused_host.__module__].apply_rotary_pos_emb
        q, k = rotate(q, k, cos, sin, **self.fused_rotation)
        return attend(
            q, k, v, mask=attention_mask, dropout_p=self.fused_dropout_p(),
            scale=getattr(self, self.fused_scaling),
        )  # fmt: skip


class PixtralAttention(RopeAttention):
    """Images one after the other in a sample, apart by a mask; tables for all tokens."""

    fused_rotation: ClassVar[dict[str, Any]] = {"unsqueeze_dim": 0}


class InternAttention(Attention):
    """InternVL's: RMSNorm of q and k over all heads; a dropout behind the projection."""

    fused_children = names("q_proj k_proj v_proj projection_layer projection_dropout q_norm k_norm")
    fused_scaling, fused_out = "scale", "projection_layer"

    def fused_draws(self: Any) -> bool:
        return not inert(self.projection_dropout)

    def fused_left(self: Any) -> Iterator[Child]:
        yield from super().fused_left()
        yield from left_dropouts(self, "projection_dropout")

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        for name in ("q_norm", "k_norm"):
            yield from norm_in_pytorch(name, getattr(self, name))

    def fused_heads(  # type: ignore[override]
        self: Any, x: Tensor
    ) -> Tensor:
        if inert(self.q_norm) and inert(self.k_norm):
            return super().fused_heads(x)
        packed = self.fused_packed()
        if packed is None:
            q, k, v = (project(m, x) for m in self.fused_projections())
        else:
            q, k, v = linear(x, *packed).chunk(3, dim=-1)
        q, k = (normed_for(None, norm, t) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return attend(q, k, v, dropout_p=self.fused_dropout_p(), scale=self.scale)

    def fused_after(self: Any) -> Any:
        return self.projection_dropout


class VJepaAttention(Attention):
    """V-JEPA 2: three thirds of a head turn by frame, row and column of their token."""

    fused_children = names("query key value proj dropout")
    fused_dropout, fused_out = "dropout_prob", "proj"
    fused_attention_dropout = names("dropout_prob")
    fused_extras = ("position_mask",)

    @property
    def head_dim(self: Any) -> int:
        return self.attention_head_size

    @staticmethod
    def fused_derived(copy: Any) -> dict[str, int]:
        return dict.fromkeys(("d_dim", "h_dim", "w_dim"), 2 * (copy.attention_head_size // 3 // 2))

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        derived = cls.fused_derived(module)
        same = all(getattr(module, name) == width for name, width in derived.items())
        return None if same else "its thirds of a head have other widths"

    def fused_projections(self: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        most = self.grid_depth * self.grid_size**2
        for batch, length in ((3, 5), (2, 4)):
            x = example(generator, batch, length, width_of(self))
            yield (x,), {}
            places = torch.randint(most, (batch, length), generator=generator)
            yield (x,), {"position_mask": places}

    def fused_heads(  # type: ignore[override]
        self: Any, x: Tensor, position_mask: Tensor | None = None
    ) -> Tensor:
        places = position_mask
        if places is None:
            places = torch.arange(x.shape[1], device=x.device)
        frame, place = places // self.grid_size**2, places % self.grid_size**2
        axes = torch.stack((frame, place // self.grid_size, place % self.grid_size), -1)
        # In the dtype of q, as the host's: bf16 under autocast.
        dtype = autocast_dtype(x) or x.dtype
        columns = self.d_dim
        omega = torch.arange(columns // 2, dtype=dtype, device=x.device) / (columns / 2.0)
        angles = axes.unsqueeze(-1) * (1.0 / 10000**omega)  # (..., T, 3, columns / 2)
        angles = angles.repeat(*[1] * (angles.ndim - 1), 2).flatten(-2)
        return super().fused_heads(x, None, Turn(angles.cos(), angles.sin(), True))


class HfMlp(Mlp):
    fused_fc1, fused_act, fused_fc2 = "fc1", "activation_fn", "fc2"
    fused_children = names("fc1 activation_fn fc2")


class UpDownMlp(Mlp):
    fused_fc1, fused_act, fused_fc2 = "up_proj", "act_fn", "down_proj"
    fused_children = names("up_proj act_fn down_proj")


class HfSwiGLU(SwiGLU):
    fused_gate, fused_fc1, fused_fc2, fused_act = "gate_proj", "up_proj", "down_proj", "act_fn"
    fused_children = names("gate_proj up_proj down_proj act_fn")


class HfRmsNorm(RmsNorm):
    """It reads fp32 and rounds to x.dtype before the product with its weight."""

    fused_eps = "variance_epsilon"
    fused_tolerance = 1e-5  # the host rounds to fp32

    def fused_dtype(self: Any, x: Tensor) -> torch.dtype | None:
        return torch.promote_types(x.dtype, self.weight.dtype)


class VJepaMlp(HfMlp):
    fused_act = "activation"
    fused_children = names("fc1 activation fc2")


class HfLayerScale(LayerScale):
    fused_gamma = "lambda1"


class HfDropPath(DropPath):
    def fused_row_scale(self: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        if self.drop_prob == 0.0 or not self.training:
            return None
        keep = 1 - self.drop_prob
        drawn = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=dtype, device=x.device)
        return torch.floor(drawn + keep).flatten() / keep


class ViTLayer(PreNormBlock):
    """x = x + dropout(attention(layernorm_before(x)));  x = x + dropout(mlp(layernorm_after(x)))"""

    fused_children = names("attention layernorm_before layernorm_after mlp dropout")
    fused_names = (
        "layernorm_before", "attention", ("dropout",), "layernorm_after", "mlp", ("dropout",)
    )  # fmt: skip
    fused_unread = UNREAD

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        return getattr(self, self.fused_names[1])(y, **extras)[0]


class Dinov2Layer(ViTLayer):
    """LayerScale and DropPath in each branch; one DropPath module serves both."""

    fused_children = names("norm1 attention layer_scale1 drop_path norm2 mlp layer_scale2")
    fused_names = (
        "norm1", "attention", ("layer_scale1", "drop_path"),
        "norm2", "mlp", ("layer_scale2", "drop_path"),
    )  # fmt: skip


class Dinov3Layer(Dinov2Layer):
    fused_extras = ("position_embeddings", "attention_mask")


class PixtralLayer(Dinov3Layer):
    fused_children = names("attention_norm attention ffn_norm feed_forward")
    fused_names = ("attention_norm", "attention", (), "ffn_norm", "feed_forward", ())


class Aimv2Layer(ViTLayer):
    fused_children = names("rms_norm1 attention rms_norm2 ffn")
    fused_names = ("rms_norm1", "attention", (), "rms_norm2", "ffn", ())


class InternLayer(ViTLayer):
    """LayerScale as parameters of its own; a dropout before the second."""

    fused_children = names(
        "layernorm_before attention lambda_1 layernorm_after mlp dropout lambda_2"
    )
    fused_names = (
        "layernorm_before", "attention", ("lambda_1",), "layernorm_after", "mlp",
        ("dropout", "lambda_2"),
    )  # fmt: skip


class VJepaLayer(ViTLayer):
    """Its result has a place for the probabilities."""

    fused_children = names("norm1 attention drop_path norm2 mlp")
    fused_names = ("norm1", "attention", ("drop_path",), "norm2", "mlp", ("drop_path",))
    fused_extras = ("position_mask",)

    def fused_forward(self, x: Tensor, **extras: Any) -> Any:
        return super().fused_forward(x, **extras), None


class ClipLayer(ViTLayer):
    """CLIP and SigLIP: the same with other names, and without dropout."""

    fused_children = names("layer_norm1 self_attn layer_norm2 mlp")
    fused_names = ("layer_norm1", "self_attn", (), "layer_norm2", "mlp", ())


def fastvit_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function as transformers' AttentionInterface wants them: (B, H, T, D) each.

    Grouped heads, caches, biases and whatever else is asked for go to transformers' own sdpa.
    """
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            f"attn_implementation={ATTENTION!r}: attention sinks (s_aux) have no kernel"
        )
    extras = any(kwargs.get(name) is not None for name in ("cache", "position_bias", "softcap"))
    if grouped or extras or query.shape[2] != key.shape[2]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **kwargs,
        )  # fmt: skip
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1, scale=scaling,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `attn_implementation="fastvit"` known to transformers: its attention and its masks.

    Masks are made as for "sdpa". A second call changes nothing.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, fastvit_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _family(module: str, prefix: str, *rows: tuple[str, type[Fused]]) -> dict[str, type[Fused]]:
    """Rows of the table for one model: its layer and its parts by the end of their names."""
    path = f"transformers.models.{module}.modeling_{module}.{prefix}"
    return {path + end: mixin for end, mixin in rows}


_VIT = (("Layer", ViTLayer), ("Attention", Attention), ("MLP", HfMlp))
_CLIP = (("EncoderLayer", ClipLayer), ("Attention", ClipAttention), ("MLP", HfMlp))
_DINO = (
    ("Layer", Dinov2Layer),
    ("Attention", Attention),
    ("MLP", HfMlp),
    ("SwiGLUFFN", HfSwiGLU),
    ("LayerScale", HfLayerScale),
    ("DropPath", HfDropPath),
)

TABLE: dict[str, type[Fused]] = {
    **_family("vit", "ViT", *_VIT),
    **_family("deit", "DeiT", *_VIT),
    **_family("vit_mae", "ViTMAE", *_VIT),
    **_family("vit_msn", "ViTMSN", *_VIT),
    **_family("ijepa", "IJepa", *_VIT),
    **_family("dinov2", "Dinov2", *_DINO),
    **_family("dinov2_with_registers", "Dinov2WithRegisters", *_DINO),
    **_family(
        "dinov3_vit", "DINOv3ViT", ("Layer", Dinov3Layer), ("Attention", RopeAttention),
        ("MLP", UpDownMlp), ("GatedMLP", HfSwiGLU), ("LayerScale", HfLayerScale),
    ),
    "transformers.models.dinov3_vit.modeling_dinov3_vit.Dinov3ViTDropPath": HfDropPath,
    **_family("siglip", "Siglip", *_CLIP),
    **_family("siglip2", "Siglip2", *_CLIP),
    **_family("clip", "CLIP", *_CLIP),
    **_family(
        "aimv2", "Aimv2", ("EncoderLayer", Aimv2Layer), ("Attention", ClipAttention),
        ("MLP", HfSwiGLU), ("RMSNorm", HfRmsNorm),
    ),
    **_family(
        "internvl", "InternVLVision", ("Layer", InternLayer), ("Attention", InternAttention),
        ("MLP", HfMlp), ("RMSNorm", HfRmsNorm),
    ),
    **_family(
        "pixtral", "Pixtral", ("AttentionLayer", PixtralLayer), ("Attention", PixtralAttention),
        ("MLP", HfSwiGLU), ("RMSNorm", HfRmsNorm),
    ),
    **_family(
        "vjepa2", "VJEPA2", ("Layer", VJepaLayer), ("RopeAttention", VJepaAttention),
        ("MLP", VJepaMlp), ("DropPath", HfDropPath),
    ),
    "transformers.models.beit.modeling_beit.BeitAttention": BeitAttention,
    "transformers.models.beit.modeling_beit.BeitMLP": HfMlp,
}  # fmt: skip


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
