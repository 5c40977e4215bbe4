"""Small vision towers of transformers whose images lie one after the other, with two inputs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from private import set_attention
from torch import Tensor, nn

from tests.model_coverage.compare import randomize

PATCH = dict(depth=2, patch_size=4, num_heads=2, out_hidden_size=48)
WIDE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, **PATCH)
# model -> class, configuration and its settings
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        dict(embed_dim=48, hidden_size=32, mlp_ratio=2, depth=2, num_heads=2, patch_size=4),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        dict(fullatt_block_indexes=[1], window_size=16, **WIDE),
    ),
    "qwen3_vl": (
        "Qwen3VLVisionModel",
        "Qwen3VLVisionConfig",
        dict(num_position_embeddings=16, deepstack_visual_indexes=[0], **WIDE),
    ),
}
GRIDS = [[1, 4, 6], [2, 2, 4]]  # frames, height, width in patches: 24 tokens, then 8 and 8


def tower(name: str, **settings: Any) -> nn.Module:
    model_class, config_class, small = TOWERS[name]
    torch.manual_seed(0)
    home = import_module(f"transformers.models.{name}.modeling_{name}")
    config = import_module(f"transformers.models.{name}.configuration_{name}")
    config = getattr(config, config_class)(**{**small, **settings})
    set_attention(config, "sdpa")
    return randomize(getattr(home, model_class)(config))


def inputs(grids: list[list[int]] = GRIDS) -> dict[str, Tensor]:
    """Rows of pixels, each a patch of two frames."""
    grid = torch.tensor(grids)
    pixels = (int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    generator = torch.Generator().manual_seed(0)
    return {"hidden_states": torch.randn(pixels, generator=generator), "grid_thw": grid}
