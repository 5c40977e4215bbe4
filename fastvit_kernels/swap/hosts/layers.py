"""The rows of transformers' plain vision layers, and its attention."""

from __future__ import annotations

from typing import Any

from ...runtime.compat import attention_of
from . import attention
from .attend import registered
from .attention import AttentionRoles
from .block import pre_norm
from .fused import DropPath, LayerScale, PathRoles, ScaleRoles, names, row
from .masks import BIAS
from .mlp import plain_mlp

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


class Attention(attention.Attention):
    """Separate q, k, v projections -> attention -> output projection; gives (output, None)."""

    fused_roles = AttentionRoles(
        ("q_proj", "k_proj", "v_proj"), out="o_proj", scale="scaling", head_dim="head_dim",
        dropout="attention_dropout", result=(2, 0),
    )  # fmt: skip
    fused_unread = UNREAD
    fused_facts = attention.attention_facts

    def fused_blocked(self: Any) -> str | None:
        chosen = attention_of(self.config)
        if chosen not in ("sdpa", ATTENTION):
            return f"attn_implementation={chosen!r} is set"
        if getattr(self, "is_causal", False):
            return "is_causal is set"
        if "Text" in type(self.config).__name__ and "CLIP" in type(self.config).__name__:
            return "CLIP's text attention is causal"
        function = registered(chosen)
        if (getattr(function, "__module__", ""), getattr(function, "__name__", "")) not in SDPA:
            return f"another function is registered as {chosen!r}"
        return super().fused_blocked()


def attention_row(projections: str, out: str, *, mixin: Any = Attention, **roles: Any) -> Any:
    """The row of an attention with these Linears; `roles` are its others."""
    split = tuple(projections.split())
    known = mixin.fused_roles._replace(projections=split, out=out, **roles)
    return row(mixin, roles=known)


# CLIP's and SigLIP's names for the same.
CLIP_ATTENTION = attention_row("q_proj k_proj v_proj", "out_proj", scale="scale", dropout="dropout")


# The mask that BEiT passes is its relative position bias.
BEIT_ATTENTION = attention_row("q_proj k_proj v_proj", "o_proj", mask="attention_mask", masks=BIAS)
SCALE = row(LayerScale, roles=ScaleRoles("lambda1"))
DROP_PATH = row(DropPath, roles=PathRoles(drawn="rand"))
MLP = plain_mlp("fc1", "activation_fn", "fc2")
SWIGLU = plain_mlp("up_proj", "act_fn", "down_proj", gate="gate_proj")


def layer(
    norm1: str, attention: str, tail1: str, norm2: str, mlp: Any, tail2: str, **more: Any
) -> Any:
    """The row of a pre-norm layer whose attention gives (output, probabilities)."""
    more = {"item": 0, "unread": UNREAD, **more}
    return pre_norm(norm1, attention, tail1, norm2, mlp, tail2, **more)


VIT_NAMES = ("layernorm_before", "attention", "dropout", "layernorm_after", "mlp", "dropout")
VIT = layer(*VIT_NAMES)
CLIP_NAMES = ("layer_norm1", "self_attn", "", "layer_norm2", "mlp", "")
CLIP = layer(*CLIP_NAMES)
# One DropPath module serves both branches.
DINO_NAMES = (
    "norm1", "attention", "layer_scale1 drop_path", "norm2", "mlp", "layer_scale2 drop_path"
)  # fmt: skip
DINOV2 = layer(*DINO_NAMES)
