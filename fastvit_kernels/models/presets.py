"""`create_vit`: models by name."""

from __future__ import annotations

import difflib
from typing import Any

from .vit import VisionTransformer

# embed_dim, depth, num_heads: arXiv:2010.11929 (base and up), arXiv:2012.12877 (tiny, small)
_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
_PATCHES, _IMAGES = (14, 16, 32), (224, 384)

# The notebook model on 28 x 28 digits: T = 197, D = 32.
_MNIST = dict(
    img_size=28, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=2,
    mlp_ratio=4.0, representation_size=32,
)  # fmt: skip


def preset_names() -> tuple[str, ...]:
    """Every name of `create_vit`."""
    named = (f"vit_{s}_patch{p}_{i}" for s in _SIZES for p in _PATCHES for i in _IMAGES)
    return ("vit_mnist", *named)


def create_vit(name: str, **overrides: Any) -> VisionTransformer:
    """Build a model by name, with random weights.

    Args:
        name: "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}" as in timm, or
            "vit_mnist" (28 x 28 x 1, patch 2, C=64, 2 layers, 2 heads, 10 classes).
        overrides: any argument of VisionTransformer.
    Raises: ValueError for another name; TypeError for an unknown argument.
    """
    if not isinstance(name, str):
        raise TypeError(f"create_vit: name must be a str, got {type(name).__name__}")
    if name == "vit_mnist":
        return VisionTransformer(**{**_MNIST, **overrides})
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names())
        raise ValueError(
            f"create_vit: unknown model {name!r}; wanted 'vit_mnist' or "
            "vit_{tiny,small,base,large,huge}_patch{14,16,32}_{224,384}"
            + (f"; near names: {', '.join(near)}" if near else "")
        )
    _, size, patch, img_size = name.split("_")
    embed_dim, depth, num_heads = _SIZES[size]
    arguments = dict(
        img_size=int(img_size), patch_size=int(patch.removeprefix("patch")),
        embed_dim=embed_dim, depth=depth, num_heads=num_heads,
    )  # fmt: skip
    return VisionTransformer(**{**arguments, **overrides})
