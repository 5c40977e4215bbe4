"""`create_vit`: models by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Concatenate, ParamSpec

from .config import ViTConfig
from .vit import VisionTransformer

Arguments = dict[str, Any]
Overrides = ParamSpec("Overrides")
Build = Callable[Concatenate[str, Overrides], VisionTransformer]

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


_PRESETS: dict[str, Arguments] = {"vit_mnist": _MNIST, **dict(_vit()), **dict(_dinov3())}


def preset_names() -> tuple[str, ...]:
    """Every name of `create_vit`."""
    return tuple(_PRESETS)


def _typed_by(
    config: Callable[Overrides, Any],
) -> Callable[[Callable[..., VisionTransformer]], Build[Overrides]]:
    """Type checkers see the arguments of `config` after the name; at run time nothing changes."""
    return lambda function: function


@_typed_by(ViTConfig)
def create_vit(name: str, **overrides: Any) -> VisionTransformer:
    """Build a model by name, with random weights.

    Args:
        name: "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}" as in timm; a timm
            name of DINOv3, such as "vit_small_patch16_dinov3", which has no head; or
            "vit_mnist" (28 x 28 x 1, patch 2, C=64, 2 layers, 2 heads, 10 classes). docs/models.md
            lists them.
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
            "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}, or timm's name of a DINOv3"
            + (f"; near names: {', '.join(near)}" if near else "")
        )
    return VisionTransformer(**{**_PRESETS[name], **overrides})
