"""Hugging Face transformers: the layers of its vision models, and its attention interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.attention.sdpa import scaled_dot_product_attention
from ...runtime.plain import is_plain
from .. import hosts
from .attend import attend, attend_weights
from .fused import (
    DropPath,
    Fused,
    LayerScale,
    Left,
    is_dense,
    left_dropouts,
    left_linears,
    names,
    pre_norm_branch,
    project,
    project_out,
)
from .parts import Mlp, SwiGLU

ATTENTION = "fastvit"  # our name in transformers' AttentionInterface
# Keyword arguments that a layer hands on and that attention does not read.
UNREAD = names(
    "interpolate_pos_encoding num_items_in_batch output_hidden_states return_dict use_cache"
)


def _ordinary(mask: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for plain attention: no mask, no probabilities, nothing unknown."""
    return mask is None and all(v is None or v is False or k in UNREAD for k, v in kwargs.items())


def _packed(parameters: list[Tensor | None]) -> bool:
    """Whether q, k and v can share one matmul: all there or none, one dtype, frozen together."""
    first = parameters[0]
    if first is None or any(p is None for p in parameters):
        return all(p is None for p in parameters)
    return all(
        p.dtype == first.dtype and p.requires_grad == first.requires_grad
        for p in parameters if p is not None
    )  # fmt: skip


class Attention(Fused):
    """Separate q, k, v projections -> attention -> output projection; gives (output, None)."""

    level = "attention"
    children_known = names("q_proj k_proj v_proj o_proj")
    HEADS, SCALE, DROP, OUT = "num_attention_heads", "scaling", "attention_dropout", "o_proj"

    def blocked(self: Any) -> str | None:
        chosen = self.config._attn_implementation
        return None if chosen in ("sdpa", ATTENTION) else f"attn_implementation={chosen!r} is set"

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, "q_proj", "k_proj", "v_proj", self.OUT)

    def _projections(self: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj

    def reads_low(self: Any) -> bool:
        return all(is_plain(m) for m in self._projections())

    def _dropout_p(self: Any) -> float:
        return getattr(self, self.DROP) if self.training else 0.0

    def _qkv(self: Any, x: Tensor) -> list[Tensor]:
        """(B, T, C) -> q, k, v, each (B, H, T, D)"""
        H = getattr(self, self.HEADS)
        return [project(m, x).unflatten(-1, (H, -1)).transpose(1, 2) for m in self._projections()]

    def _attend(self: Any, x: Tensor, mask: Tensor | None = None, **context: Any) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        scale = getattr(self, self.SCALE)
        if mask is None and self.reads_low():
            weights = [m.weight for m in self._projections()]
            biases = [m.bias for m in self._projections()]
            if _packed(weights) and _packed(biases):
                # A copy of the weights is small beside three passes over x.
                bias = None if biases[0] is None else torch.cat(biases)
                return attend_weights(
                    x, torch.cat(weights), bias, getattr(self, self.HEADS),
                    dropout_p=self._dropout_p(), scale=scale,
                )  # fmt: skip
        return attend(*self._qkv(x), mask=mask, dropout_p=self._dropout_p(), scale=scale)

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None, **context: Any,
    ) -> Tensor:  # fmt: skip
        out = self._attend(x, **context).flatten(2)
        return project_out(getattr(self, self.OUT), None, out, residual, layer_scale, row_scale)

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        dense = is_dense(hidden_states) and hidden_states.ndim == 3
        if not dense or not _ordinary(attention_mask, kwargs) or self.blocked():
            return self.host_forward(hidden_states, attention_mask, **kwargs)
        return self.branch(hidden_states), None


class ClipAttention(Attention):
    """CLIP's and SigLIP's names for the same."""

    children_known = names("q_proj k_proj v_proj out_proj")
    HEADS, SCALE, DROP, OUT = "num_heads", "scale", "dropout", "out_proj"


class BeitAttention(Attention):
    """The mask that BEiT passes is its relative position bias."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        dense = is_dense(hidden_states) and hidden_states.ndim == 3
        if not dense or not _ordinary(None, kwargs) or self.blocked():
            return self.host_forward(hidden_states, attention_mask, **kwargs)
        return self.branch(hidden_states, mask=attention_mask), None


class RopeAttention(Attention):
    """DINOv3: q and k are rotated by PyTorch between the projections and attention."""

    HEADS, DROP = "num_heads", "dropout"

    def _attend(
        self: Any, x: Tensor, mask: Tensor | None = None, position_embeddings: Any = None,
        **context: Any,
    ) -> Tensor:  # fmt: skip
        q, k, v = self._qkv(x)
        host = sys.modules[self.host.__module__]
        q, k = host.apply_rotary_pos_emb(q, k, *position_embeddings)
        return attend(q, k, v, dropout_p=self._dropout_p(), scale=getattr(self, self.SCALE))

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None,
        position_embeddings: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        dense = is_dense(hidden_states) and hidden_states.ndim == 3
        if not dense or not _ordinary(attention_mask, kwargs) or self.blocked():
            return self.host_forward(
                hidden_states, attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        return self.branch(hidden_states, position_embeddings=position_embeddings), None


class HfMlp(Mlp):
    fc1_name, act_name, fc2_name = "fc1", "activation_fn", "fc2"
    children_known = names("fc1 activation_fn fc2")


class UpDownMlp(Mlp):
    fc1_name, act_name, fc2_name = "up_proj", "act_fn", "down_proj"
    children_known = names("up_proj act_fn down_proj")


class HfSwiGLU(SwiGLU):
    gate_name, up_name, down_name, act_name = "gate_proj", "up_proj", "down_proj", "act_fn"
    children_known = names("gate_proj up_proj down_proj act_fn")


class HfLayerScale(LayerScale):
    parameter = "lambda1"


class HfDropPath(DropPath):
    def row_scale(self: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        if self.drop_prob == 0.0 or not self.training:
            return None
        keep = 1 - self.drop_prob
        drawn = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=dtype, device=x.device)
        return torch.floor(drawn + keep).flatten() / keep


class ViTLayer(Fused):
    """x = x + dropout(attention(layernorm_before(x)));  x = x + dropout(mlp(layernorm_after(x)))"""

    level = "block"
    children_known = names("attention layernorm_before layernorm_after mlp dropout")
    NORM1, ATTN, TAIL1 = "layernorm_before", "attention", ("dropout",)
    NORM2, MLP, TAIL2 = "layernorm_after", "mlp", ("dropout",)

    @property
    def pieces(self) -> tuple[str, ...]:
        tail = tuple(t for t in (*self.TAIL1, *self.TAIL2) if t != "dropout")
        return (self.NORM1, self.ATTN, self.NORM2, self.MLP, *tail)

    @property
    def bodies(self) -> tuple[str, ...]:
        return (self.ATTN, self.MLP)

    def left(self: Any) -> Iterator[Left]:
        yield from left_dropouts(self, *{*self.TAIL1, *self.TAIL2})

    def _call(self: Any, y: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        return self.attention(y, mask, **kwargs)[0]

    def _context(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Takes what the attention's branch reads out of kwargs."""
        return {}

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        if not is_dense(hidden_states) or hidden_states.ndim != 3:
            return self.host_forward(hidden_states, attention_mask, **kwargs)
        rest = dict(kwargs)
        context = self._context(rest)
        x = pre_norm_branch(
            hidden_states, getattr(self, self.NORM1), getattr(self, self.ATTN),
            *(getattr(self, t) for t in self.TAIL1),
            call=lambda y: self._call(y, attention_mask, kwargs),
            jump=_ordinary(attention_mask, rest), **context,
        )  # fmt: skip
        return pre_norm_branch(
            x, getattr(self, self.NORM2), getattr(self, self.MLP),
            *(getattr(self, t) for t in self.TAIL2),
        )  # fmt: skip


class Dinov2Layer(ViTLayer):
    """LayerScale and DropPath in each branch; one DropPath module serves both."""

    children_known = names("norm1 attention layer_scale1 drop_path norm2 mlp layer_scale2")
    NORM1, ATTN, TAIL1 = "norm1", "attention", ("layer_scale1", "drop_path")
    NORM2, MLP, TAIL2 = "norm2", "mlp", ("layer_scale2", "drop_path")

    def _call(self: Any, y: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        return self.attention(y, attention_mask=mask, **kwargs)[0]


class Dinov3Layer(Dinov2Layer):
    def _context(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"position_embeddings": kwargs.pop("position_embeddings", None)}


class ClipLayer(ViTLayer):
    """CLIP and SigLIP: the same with other names, and without dropout."""

    children_known = names("layer_norm1 self_attn layer_norm2 mlp")
    NORM1, ATTN, TAIL1 = "layer_norm1", "self_attn", ()
    NORM2, MLP, TAIL2 = "layer_norm2", "mlp", ()

    def _call(self: Any, y: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        return self.self_attn(hidden_states=y, attention_mask=mask, **kwargs)[0]


def fastvit_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function as transformers' AttentionInterface wants them: (B, H, T, D) each.

    Grouped heads, caches, biases and whatever else is asked for go to transformers' own sdpa.
    """
    grouped = getattr(module, "num_key_value_groups", 1) > 1
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
    "transformers.models.beit.modeling_beit.BeitAttention": BeitAttention,
    "transformers.models.beit.modeling_beit.BeitMLP": HfMlp,
}  # fmt: skip


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
