"""The rows of transformers' plain vision layers, and its attention."""

from __future__ import annotations

from typing import Any

from ...runtime.compat import attention_of
from . import attention
from .attend import registered
from .attention import AttentionRoles
from .block import pre_norm
from .fused import ROUNDED, DropPath, LayerScale, PathRoles, ScaleRoles, names, row
from .masks import BIAS, BROADCAST, PADDED
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
        ("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        scale="scaling",
        head_dim="head_dim",
        dropout="attention_dropout",
        result=(2, 0),
    )
    fused_unread = UNREAD
    fused_facts = attention.attention_facts

    def fused_blocked(self: Any) -> str | None:
        chosen = attention_of(self.config)
        if chosen not in ("sdpa", ATTENTION):
            return f"attn_implementation={chosen!r} is set"
        if getattr(self, "is_causal", False):
            return "is_causal is set"
        function = registered(chosen)
        if (getattr(function, "__module__", ""), getattr(function, "__name__", "")) not in SDPA:
            return f"another function is registered as {chosen!r}"
        return super().fused_blocked()


def attention_row(projections: str, out: str, **roles: Any) -> Any:
    """The row of an attention with these Linears; `roles` are its others."""
    split = tuple(projections.split())
    return row(Attention, roles=Attention.fused_roles._replace(projections=split, out=out, **roles))


# Images or texts are padded to one length: SigLIP's, AIMv2's; CLIP's texts are causal besides.
_PADDED = dict(scale="scale", dropout="dropout", mask="attention_mask", masks=PADDED)
PADDED_ATTENTION = attention_row("q_proj k_proj v_proj", "out_proj", **_PADDED)
CLIP_ATTENTION = attention_row("q_proj k_proj v_proj", "out_proj", **_PADDED, causal="is_causal")
# InternVL's: RMSNorm of q and k over all heads; a dropout behind the projection.
INTERN_ATTENTION = attention_row(
    "q_proj k_proj v_proj",
    "projection_layer",
    scale="scale",
    after="projection_dropout",
    q_norm="q_norm",
    k_norm="k_norm",
    wide_norms=True,
)
# DINOv3's: q and k turn by tables for the patches, which come after the prefix.
ROPE_ATTENTION = attention_row(
    "q_proj k_proj v_proj",
    "o_proj",
    dropout="dropout",
    mask="attention_mask",
    masks=BROADCAST,
    rope="position_embeddings",
    rotate="apply_rotary_pos_emb",
    spread="*",
    prefix=1,
    kernel="half, cos before sin, any prefix",
    needs_rope=True,
)
# Images one after the other in a sample, apart by a mask; tables for all tokens.
PIXTRAL_ATTENTION = row(
    ROPE_ATTENTION,
    unread=UNREAD | {"position_ids"},  # for flash attention alone
    roles=ROPE_ATTENTION.fused_roles._replace(
        prefix=0, spread="*0", kernel="half, cos before sin, this prefix"
    ),
)
# MLCD's: in fp32, by tables that its caller makes.
MLCD_ATTENTION = attention_row(
    "q_proj k_proj v_proj",
    "out_proj",
    scale="scale",
    dropout="dropout",
    mask="attention_mask",
    masks=BROADCAST,
    rope="position_embeddings",
    rotate="apply_rotary_pos_emb_vision",
    spread="tokens",
    kernel="half, cos before sin, this prefix",
    needs_rope=True,
    rounded=True,
)
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


VIT = layer("layernorm_before", "attention", "dropout", "layernorm_after", "mlp", "dropout")
_CLIP = ("layer_norm1", "self_attn", "", "layer_norm2", "mlp", "")
_MASKED = ("attention_mask",)
CLIP, SIGLIP = layer(*_CLIP, given=(*_MASKED, "is_causal")), layer(*_CLIP, given=_MASKED)
AIMV2 = layer("rms_norm1", "attention", "", "rms_norm2", "ffn", "", given=_MASKED)
# LayerScale as parameters of its own; a dropout before the second.
INTERN = layer(
    "layernorm_before", "attention", "lambda_1", "layernorm_after", "mlp", "dropout lambda_2"
)
# One DropPath module serves both branches.
_DINO = ("norm1", "attention", "layer_scale1 drop_path", "norm2", "mlp", "layer_scale2 drop_path")
_ROPE = ("position_embeddings", "attention_mask")
DINOV2, DINOV3 = layer(*_DINO), layer(*_DINO, given=_ROPE)
MLCD = layer(*_CLIP, given=_ROPE, tolerance=ROUNDED)
PIXTRAL = layer(
    "attention_norm",
    "attention",
    "",
    "ffn_norm",
    "feed_forward",
    "",
    given=_ROPE,
    unread=PIXTRAL_ATTENTION.fused_unread,
)
