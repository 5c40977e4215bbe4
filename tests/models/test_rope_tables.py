"""DINOv3's angles, against the functions of the libraries that have the model."""

import pytest
import torch

from fastvit_kernels import rope
from fastvit_kernels.models.rope_tables import centered_table


def _heads(T, H, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, T, H, D, generator=generator)


@pytest.mark.parametrize("grid", [(3, 5), (14, 14)], ids=str)
def test_centered_table_is_dinov3s(grid):
    from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
    from transformers import DINOv3ViTConfig
    from transformers.models.dinov3_vit import modeling_dinov3_vit as hf

    cos, sin = centered_table(grid, 64)
    host_sin, host_cos = RotaryEmbeddingDinoV3(64).get_embed(list(grid)).chunk(2, -1)
    torch.testing.assert_close(cos, host_cos, rtol=0, atol=2e-6)
    torch.testing.assert_close(sin, host_sin, rtol=0, atol=2e-6)
    config = DINOv3ViTConfig(hidden_size=128, num_attention_heads=2, patch_size=4)
    host = hf.DINOv3ViTRopePositionEmbedding(config).eval()
    host_cos, host_sin = host(torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]))
    torch.testing.assert_close(cos, host_cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, host_sin, rtol=0, atol=1e-5)
    q, k = (_heads(grid[0] * grid[1] + 5, 2, 64, seed) for seed in (0, 1))
    expected = hf.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), host_cos, host_sin)
    for actual, wanted in zip(rope(q, k, cos, sin, prefix_tokens=5), expected, strict=True):
        torch.testing.assert_close(actual.transpose(1, 2), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (TypeError, "grid must be a sequence of 2 ints, got 3", dict(grid=3)),
        (ValueError, "grid must be at least 1, got 0", dict(grid=(0, 2))),
        (ValueError, "dim must be a multiple of 4, got 30", dict(dim=30)),
        (ValueError, "temperature must be finite", dict(temperature=0.0)),
    ],
)
def test_tables_reject(error, message, given):
    with pytest.raises(error, match=message):
        centered_table(**{"grid": (2, 2), "dim": 8, **given})
