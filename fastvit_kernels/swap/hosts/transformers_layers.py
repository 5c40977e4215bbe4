"""The mixins of transformers' plain vision layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...runtime.compat import attention_of
from .attend import registered
from .branch import PreNormBlock
from .fused import DropPath, LayerScale, WithNone, names
from .parts import Mlp, SelfAttention, SwiGLU, examples_with_bias

ATTENTION = "fastvit"  # our name in transformers' AttentionInterface
# Keyword arguments that a layer hands on and that attention does not read.
UNREAD = names(
    "interpolate_pos_encoding num_items_in_batch output_hidden_states return_dict use_cache"
)
# transformers' own attention by torch's scaled_dot_product_attention, and ours
SDPA = (
    ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    (f"{__package__}.transformers", "fastvit_attention"),
)


def _is_sdpa(function: Any) -> bool:
    return (getattr(function, "__module__", ""), getattr(function, "__name__", "")) in SDPA


class Attention(WithNone, SelfAttention):
    """Separate q, k, v projections -> attention -> output projection; gives (output, None)."""

    fused_linears = ("q_proj", "k_proj", "v_proj")
    fused_children = names("q_proj k_proj v_proj o_proj")
    fused_unread = UNREAD
    fused_scaling, fused_dropout, fused_out = "scaling", "attention_dropout", "o_proj"
    fused_after = ""
    fused_attention_dropout = names("attention_dropout dropout dropout_prob")

    def fused_facts(self: Any) -> Any:
        chosen = attention_of(self.config)
        return chosen, registered(chosen)

    def fused_blocked(self: Any) -> str | None:
        chosen = attention_of(self.config)
        if chosen not in ("sdpa", ATTENTION):
            return f"attn_implementation={chosen!r} is set"
        if getattr(self, "is_causal", False):
            return "is_causal is set"
        if "Text" in type(self.config).__name__ and "CLIP" in type(self.config).__name__:
            return "CLIP's text attention is causal"
        if not _is_sdpa(registered(chosen)):
            return f"another function is registered as {chosen!r}"
        return None

    def fused_scale(self: Any) -> float:
        return getattr(self, self.fused_scaling)

    def fused_head_dim(self: Any) -> int:
        return self.head_dim


class ClipAttention(Attention):
    """CLIP's and SigLIP's names for the same."""

    fused_children = names("q_proj k_proj v_proj out_proj")
    fused_scaling, fused_dropout, fused_out = "scale", "dropout", "out_proj"


class BeitAttention(Attention):
    """The mask that BEiT passes is its relative position bias."""

    fused_extras = ("attention_mask",)

    def fused_heads(self: Any, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.fused_attend(x, attention_mask)

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        heads = self.q_proj.out_features // self.head_dim
        yield from examples_with_bias(self, generator, "attention_mask", heads)


class HfMlp(Mlp):
    fused_fc1, fused_act, fused_fc2 = "fc1", "activation_fn", "fc2"
    fused_children = names("fc1 activation_fn fc2")


class UpDownMlp(Mlp):
    fused_fc1, fused_act, fused_fc2 = "up_proj", "act_fn", "down_proj"
    fused_children = names("up_proj act_fn down_proj")


class HfSwiGLU(SwiGLU):
    fused_gate, fused_fc1, fused_fc2, fused_act = "gate_proj", "up_proj", "down_proj", "act_fn"
    fused_children = names("gate_proj up_proj down_proj act_fn")


class HfLayerScale(LayerScale):
    fused_gamma = "lambda1"


class HfDropPath(DropPath):
    def fused_way(self: Any) -> tuple[float, str, bool]:
        return self.drop_prob, "rand", True


class ViTLayer(PreNormBlock):
    """x = x + dropout(attention(layernorm_before(x)));  x = x + dropout(mlp(layernorm_after(x)))"""

    fused_names = (
        "layernorm_before", "attention", ("dropout",), "layernorm_after", "mlp", ("dropout",)
    )  # fmt: skip
    fused_unread = UNREAD

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        return getattr(self, self.fused_names[1])(y, **extras)[0]


class Dinov2Layer(ViTLayer):
    """LayerScale and DropPath in each branch; one DropPath module serves both."""

    fused_names = (
        "norm1", "attention", ("layer_scale1", "drop_path"),
        "norm2", "mlp", ("layer_scale2", "drop_path"),
    )  # fmt: skip


class ClipLayer(ViTLayer):
    """CLIP and SigLIP: the same with other names, and without dropout."""

    fused_names = ("layer_norm1", "self_attn", (), "layer_norm2", "mlp", ())
