"""Hugging Face transformers: what its classes become, and its attention interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.attention.sdpa import scaled_dot_product_attention
from . import layers
from .fused import KEEPS, RmsNorm, row
from .layers import ATTENTION, DROP_PATH, MLP, SCALE, SWIGLU
from .mlp import plain_mlp
from .special import bias, models, packed, towers, windows


def fastvit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
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
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `attn_implementation="fastvit"` known to transformers: its attention and its masks.

    Masks are made as for "sdpa". A second call changes nothing.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, fastvit_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def family(module: str, prefix: str, *rows: tuple[str, Any]) -> dict[str, Any]:
    """Rows of the table for one model: its layer and its parts by the end of their names."""
    path = f"transformers.models.{module}.modeling_{module}.{prefix}"
    return {path + end: mixin for end, mixin in rows}


_VIT = (("Layer", layers.VIT), ("Attention", layers.Attention), ("MLP", MLP))
_CLIP = (("EncoderLayer", layers.CLIP), ("Attention", layers.CLIP_ATTENTION), ("MLP", MLP))
_SIGLIP = (("EncoderLayer", layers.SIGLIP), ("Attention", layers.PADDED_ATTENTION), ("MLP", MLP))
_DINO = (
    ("Layer", layers.DINOV2),
    ("Attention", layers.Attention),
    ("MLP", MLP),
    ("SwiGLUFFN", SWIGLU),
    ("LayerScale", SCALE),
    ("DropPath", DROP_PATH),
)

TABLE: dict[str, Any] = {
    **family("vit", "ViT", *_VIT),
    **family("deit", "DeiT", *_VIT),
    **family(
        "vit_mae",
        "ViTMAE",
        *_VIT,
        ("Embeddings", models.MaeEmbeddings),
        ("PatchEmbeddings", models.MAE_PATCHES),
    ),
    **family("vit_msn", "ViTMSN", *_VIT),
    **family("ijepa", "IJepa", *_VIT),
    **family("dinov2", "Dinov2", *_DINO),
    **family("dinov2_with_registers", "Dinov2WithRegisters", *_DINO),
    **family(
        "dinov3_vit",
        "DINOv3ViT",
        ("Layer", layers.DINOV3),
        ("Attention", layers.ROPE_ATTENTION),
        ("MLP", plain_mlp("up_proj", "act_fn", "down_proj")),
        ("GatedMLP", SWIGLU),
        ("LayerScale", SCALE),
    ),
    "transformers.models.dinov3_vit.modeling_dinov3_vit.Dinov3ViTDropPath": DROP_PATH,
    **family("siglip", "Siglip", *_SIGLIP),
    **family("siglip2", "Siglip2", *_SIGLIP),
    **family("clip", "CLIP", *_CLIP),
    **family("metaclip_2", "MetaClip2", *_CLIP),
    **family(
        "mlcd",
        "MLCD",
        ("EncoderLayer", layers.MLCD),
        ("Attention", layers.MLCD_ATTENTION),
        ("MLP", MLP),
    ),
    **family(
        "aimv2",
        "Aimv2",
        ("EncoderLayer", layers.AIMV2),
        ("Attention", layers.PADDED_ATTENTION),
        ("MLP", SWIGLU),
    ),
    **family(
        "internvl",
        "InternVLVision",
        ("Layer", layers.INTERN),
        ("Attention", layers.INTERN_ATTENTION),
        ("MLP", MLP),
    ),
    **family(
        "pixtral",
        "Pixtral",
        ("AttentionLayer", layers.PIXTRAL),
        ("Attention", layers.PIXTRAL_ATTENTION),
        ("MLP", SWIGLU),
    ),
    **family(
        "vjepa2",
        "VJEPA2",
        ("Layer", towers.VJEPA),
        ("RopeAttention", towers.VJepaAttention),
        ("MLP", plain_mlp("fc1", "activation", "fc2")),
        ("DropPath", DROP_PATH),
    ),
    **family(
        "gemma4",
        "Gemma4",
        ("VisionEncoderLayer", towers.GEMMA),
        ("VisionAttention", towers.GemmaAttention),
        ("VisionMLP", towers.GemmaMlp),
        ("ClippableLinear", towers.Clippable),
        ("RMSNorm", row(RmsNorm, roles=KEEPS)),
    ),
    **family("swin", "Swin", *windows.SWIN, ("DropPath", DROP_PATH)),
    **family("swinv2", "Swinv2", *windows.SWINV2),
    **family("hiera", "Hiera", *windows.HIERA),
    **family("sam2", "Sam2", *windows.SAM2),
    **family("sam3", "Sam3ViT", *windows.SAM3),
    **bias.DATA2VEC,
    **family("beit", "Beit", *bias.BEIT),
}
for _model, (_prefix, _rows) in packed.PACKED.items():
    TABLE |= family(_model, _prefix, *_rows)
