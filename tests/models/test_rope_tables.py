"""The tables, against the functions of the libraries whose models have them."""

from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels import rope
from fastvit_kernels.models.rope_tables import (
    alternating_table,
    centered_table,
    index_table,
    video_table,
)


def _heads(T, H, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, T, H, D, generator=generator)


def _near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
@pytest.mark.parametrize(
    ("grid", "options", "timms"),
    [
        ((3, 5), {}, {}),
        ((4, 3), dict(ref_grid=(16, 16)), dict(ref_feat_shape=(16, 16))),  # EVA02
        (  # Perception Encoder
            (5, 4),
            dict(ref_grid=(24, 24), offset=1.0, xy=True),
            dict(ref_feat_shape=(24, 24), grid_offset=1.0, grid_indexing="xy"),
        ),
        ((6, 6), dict(temperature=100.0), dict(temperature=100.0)),
    ],
)
def test_index_table_is_timms(grid, options, timms, half):
    from timm.layers import RotaryEmbeddingCat

    host = RotaryEmbeddingCat(64, in_pixels=False, rotate_half=half, **timms)
    sin, cos = host.get_embed(grid).chunk(2, -1)
    actual = index_table(grid, 64, interleaved=not half, **options)
    _near(actual[0], cos)
    _near(actual[1], sin)


def test_timms_rotation_is_ropes():
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    x = _heads(15, 2, 64).transpose(1, 2)
    for half in (False, True):
        table = RotaryEmbeddingCat(64, in_pixels=False, rotate_half=half).get_embed((3, 5))
        sin, cos = table.chunk(2, -1)
        q, _ = rope(x.transpose(1, 2), x.transpose(1, 2), cos, sin, interleaved=not half)
        _near(q.transpose(1, 2), apply_rot_embed_cat(x, table, half=half))


@pytest.mark.parametrize("grid", [(3, 5), (14, 14)], ids=str)
def test_centered_table_is_dinov3s(grid):
    from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
    from transformers import DINOv3ViTConfig
    from transformers.models.dinov3_vit import modeling_dinov3_vit as hf

    cos, sin = centered_table(grid, 64)
    host_sin, host_cos = RotaryEmbeddingDinoV3(64).get_embed(list(grid)).chunk(2, -1)
    _near(cos, host_cos)
    _near(sin, host_sin)
    config = DINOv3ViTConfig(hidden_size=128, num_attention_heads=2, patch_size=4)
    host = hf.DINOv3ViTRopePositionEmbedding(config).eval()
    host_cos, host_sin = host(torch.zeros(1, 3, 4 * grid[0], 4 * grid[1]))
    torch.testing.assert_close(cos, host_cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, host_sin, rtol=0, atol=1e-5)
    q, k = (_heads(grid[0] * grid[1] + 5, 2, 64, seed) for seed in (0, 1))
    expected = hf.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), host_cos, host_sin)
    for actual, wanted in zip(rope(q, k, cos, sin, prefix_tokens=5), expected, strict=True):
        torch.testing.assert_close(actual.transpose(1, 2), wanted, rtol=0, atol=1e-4)


def _places(rows, columns):
    """(T', 2) of row and column, as transformers passes them."""
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack((i.flatten(), j.flatten()), -1)


def _config(**sizes):
    rope_parameters = dict(rope_type="axial", rope_theta=10000.0)
    return SimpleNamespace(rope_parameters=rope_parameters, head_dim=64, **sizes)


def test_alternating_table_is_pixtrals():
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    host = PixtralVisionRotaryEmbedding(_config())
    actual = alternating_table((3, 4), 64)
    for table, expected in zip(actual, host(torch.zeros(1), _places(3, 4)), strict=True):
        _near(table, expected)


def test_index_table_is_qwen2_vls():
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

    host = Qwen2VLVisionRotaryEmbedding(_config())
    actual = index_table((3, 4), 64, interleaved=False)
    for table, expected in zip(actual, host(torch.zeros(1), _places(3, 4)), strict=True):
        _near(table, expected)


def test_video_table_is_vjepa2s():
    from transformers import VJEPA2Config
    from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2RopeAttention

    config = VJEPA2Config(
        patch_size=4,
        crop_size=12,
        frames_per_clip=4,
        tubelet_size=2,
        hidden_size=128,
        num_attention_heads=2,
    )
    host = VJEPA2RopeAttention(config, 128, 2)
    q, k = _heads(18, 2, 64), _heads(18, 2, 64, seed=1)
    ids = host.get_position_ids(q)
    cos, sin = video_table((2, 3, 3), 64)
    assert cos.shape == (18, 60)
    for actual, x in zip(rope(q, k, cos, sin, interleaved=True), (q, k), strict=True):
        expected = host.apply_rotary_embeddings(x.transpose(1, 2), ids)
        torch.testing.assert_close(actual.transpose(1, 2), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "grid must be a sequence of 2 ints, got 3", lambda: index_table(3, 64)),
        (TypeError, "sequence of 3 ints", lambda: video_table((2, 2), 64)),
        (ValueError, "grid must be at least 1, got 0", lambda: centered_table((0, 2), 64)),
        (ValueError, "dim must be a multiple of 4, got 30", lambda: centered_table((2, 2), 30)),
        (
            ValueError,
            "temperature must be finite",
            lambda: alternating_table((2, 2), 8, temperature=0.0),
        ),
        (TypeError, "xy must be True or False", lambda: index_table((2, 2), 8, xy="xy")),
    ],
)
def test_tables_reject(error, message, call):
    with pytest.raises(error, match=message):
        call()
