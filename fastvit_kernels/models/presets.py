"""`create_vit`: models by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import product
from typing import Any

from .vit import VisionTransformer

Arguments = dict[str, Any]

# embed_dim, depth, num_heads: arXiv:2010.11929 (base and up), arXiv:2012.12877 (tiny, small)
_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}

# The notebook model on 28 x 28 digits: T = 197, D = 32.
_MNIST = dict(
    img_size=28,
    patch_size=2,
    in_chans=1,
    num_classes=10,
    embed_dim=64,
    depth=2,
    num_heads=2,
    mlp_ratio=4.0,
    representation_size=32,
)


def _sized(sizes: tuple[int, int, int], img_size: int, patch_size: int) -> Arguments:
    shape = dict(zip(("embed_dim", "depth", "num_heads"), sizes, strict=True))
    return dict(img_size=img_size, patch_size=patch_size, **shape)


def _vit() -> Iterator[tuple[str, Arguments]]:
    for (size, shape), patch, side in product(_SIZES.items(), (14, 16, 32), (224, 384)):
        yield f"vit_{size}_patch{patch}_{side}", _sized(shape, side, patch)


def _dinov3() -> Iterator[tuple[str, Arguments]]:
    """arXiv:2508.10104. "_qkvb" has the biases of q and v, which are 0 in the published weights."""
    common = dict(
        num_classes=0,
        global_pool="avg",
        fc_norm=False,
        init_values=1e-5,
        reg_tokens=4,
        pos_embed="none",
        rope_type="dinov3",
        rope_temperature=100.0,
        rope_rotate_half=True,
        norm_eps=1e-5,
        key_bias=False,
        dynamic_img_size=True,
    )
    gated = dict(mlp_layer="SwiGLU", act_layer="silu")
    sizes: dict[str, tuple[tuple[int, int, int], Arguments]] = {
        "tiny": (_SIZES["tiny"], {}),
        "small": (_SIZES["small"], {}),
        "small_plus": (_SIZES["small"], gated),
        "base": (_SIZES["base"], {}),
        "large": (_SIZES["large"], {}),
        "huge_plus": ((1280, 32, 20), gated),
        "7b": ((4096, 40, 32), {**gated, "mlp_ratio": 2.0}),
    }
    for size, (shape, own) in sizes.items():
        arguments = {**_sized(shape, 256, 16), **common, **own}
        if size != "tiny":
            yield f"vit_{size}_patch16_dinov3", {**arguments, "qkv_bias": False}
        if size != "7b":
            yield f"vit_{size}_patch16_dinov3_qkvb", arguments


def _eva02() -> Iterator[tuple[str, Arguments]]:
    """arXiv:2303.11331. F = 2/3 of 4 C, which the packed weights hold twice."""
    common = dict(
        global_pool="avg", act_layer="silu", rope_type="cat", ref_feat_shape=16, key_bias=False
    )
    packed = dict(mlp_layer="SwiGLUPacked", mlp_ratio=2 * (4 * 2 / 3))
    normed = dict(mlp_layer="SwiGLU", mlp_ratio=4 * 2 / 3, scale_mlp_norm=True)
    for size, fine, own in (
        ("tiny", 336, packed),
        ("small", 336, packed),
        ("base", 448, normed),
        ("large", 448, normed),
    ):
        for side in (224, fine):  # 224 is pretraining, without a head
            classes = 0 if side == 224 else 1000
            arguments = {**_sized(_SIZES[size], side, 14), **common, **own, "num_classes": classes}
            yield f"eva02_{size}_patch14_{side}", arguments


def _perception_encoder() -> Iterator[tuple[str, Arguments]]:
    """arXiv:2504.13181: "lang" and "spatial"; "core" pools by attention, which is not ours."""
    gigantic, scaled = (1536, 50, 16), dict(init_values=0.1)
    sizes: dict[str, tuple[tuple[int, int, int], int, int, Arguments]] = {
        "lang_large_patch14_448": ((1024, 23, 16), 448, 14, scaled),
        "lang_gigantic_patch14_448": ((1536, 47, 16), 448, 14, scaled),
        "spatial_tiny_patch16_512": (_SIZES["tiny"], 512, 16, {}),
        "spatial_small_patch16_512": (_SIZES["small"], 512, 16, {}),
        "spatial_base_patch16_512": (_SIZES["base"], 512, 16, {}),
        "spatial_large_patch14_448": (_SIZES["large"], 448, 14, {}),
        "spatial_gigantic_patch14_448": (gigantic, 448, 14, scaled),
    }
    common = dict(
        num_classes=0,
        global_pool="avg",
        pre_norm=True,
        final_norm=False,
        norm_eps=1e-5,
        rope_type="cat",
        rope_grid_indexing="xy",
        ref_feat_shape=32,
    )
    for name, (shape, side, patch, own) in sizes.items():
        large = "gigantic" in name
        alone = dict(class_token=False, mlp_ratio=8960 / 1536) if large else {}
        offset = dict(rope_grid_offset=0.0 if large else 1.0)
        arguments = {**_sized(shape, side, patch), **common, **own, **alone, **offset}
        yield f"vit_pe_{name}", arguments


def _rope_vit() -> Iterator[tuple[str, Arguments]]:
    """arXiv:2403.13298, axial; and timm's own, pooled, with registers."""
    axial = dict(init_values=1e-5, rope_type="cat", rope_grid_indexing="xy", rope_temperature=100.0)
    for size in ("small", "base", "large"):
        arguments = {**_sized(_SIZES[size], 224, 16), **axial}
        yield f"vit_{size}_patch16_rope_224", {**arguments, "pos_embed": "none"}
        yield f"vit_{size}_patch16_rope_ape_224", {**arguments, "no_embed_class": True}
    pooled = dict(
        global_pool="avg",
        class_token=False,
        init_values=1e-5,
        pos_embed="none",
        rope_type="cat",
        ref_feat_shape=16,
        key_bias=False,
    )
    for size, shape, registers, bias in (
        ("medium", (512, 12, 8), 1, True),
        ("mediumd", (512, 20, 8), 1, False),
        ("betwixt", (640, 12, 10), 4, True),
        ("base", _SIZES["base"], 1, True),
    ):
        own = dict(reg_tokens=registers, qkv_bias=bias)
        name = f"vit_{size}_patch16_rope_reg{registers}_gap_256"
        yield name, {**_sized(shape, 256, 16), **pooled, **own}


def _aimv2() -> Iterator[tuple[str, Arguments]]:
    """arXiv:2411.14402."""
    common = dict(
        num_classes=0,
        global_pool="avg",
        fc_norm=False,
        class_token=False,
        qkv_bias=False,
        proj_bias=False,
        act_layer="silu",
        mlp_layer="SwiGLU",
        norm_layer="RmsNorm",
        embed_norm_layer="RmsNorm",
        norm_eps=1e-5,
    )
    for size, shape, ratio in (
        ("large", (1024, 24, 8), 2.75),
        ("huge", (1536, 24, 12), 2.6667),
        ("1b", (2048, 24, 16), 2.75),
        ("3b", (3072, 24, 24), 2.6667),
    ):
        for side in (224, 336, 448):
            arguments = {**_sized(shape, side, 14), **common, "mlp_ratio": ratio}
            yield f"aimv2_{size}_patch14_{side}", arguments


_PRESETS: dict[str, Arguments] = {
    "vit_mnist": _MNIST,
    **dict(_vit()),
    **dict(_dinov3()),
    **dict(_eva02()),
    **dict(_perception_encoder()),
    **dict(_rope_vit()),
    **dict(_aimv2()),
}


def preset_names() -> tuple[str, ...]:
    """Every name of `create_vit`."""
    return tuple(_PRESETS)


def create_vit(name: str, **overrides: Any) -> VisionTransformer:
    """Build a model by name, with random weights.

    Args:
        name: "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}" as in timm; a name of
            timm's for DINOv3, EVA02, Perception Encoder (lang, spatial), RoPE-ViT (axial) or AIMv2,
            such as "vit_small_patch16_dinov3"; or "vit_mnist" (28 x 28 x 1, patch 2, C=64, 2
            layers, 2 heads, 10 classes). docs/models.md lists them. A plain ViT has 1000
            classes; else image size and number of classes are those of timm's default weights, 0
            where these have no head.
        overrides: any argument of VisionTransformer, which has most of timm's.
    Raises: ValueError for another name; TypeError for an unknown argument, with what to do instead
        for one of timm's.
    """
    if not isinstance(name, str):
        raise TypeError(f"create_vit: name must be a str, got {type(name).__name__}")
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS)
        raise ValueError(
            f"create_vit: unknown model {name!r}; wanted 'vit_mnist' or "
            "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}, or timm's name of a "
            "DINOv3, EVA02, Perception Encoder, RoPE-ViT or AIMv2"
            + (f"; near names: {', '.join(near)}" if near else "")
        )
    return VisionTransformer(**{**_PRESETS[name], **overrides})
