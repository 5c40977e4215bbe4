"""Masked pre-training of transformers, swapped: every block fused, gradients by the 2x rule."""

from __future__ import annotations

import copy

import pytest
import torch
from numerics import DEVICE
from torch import nn

from fastvit_kernels import swap_in, watch
from fastvit_kernels.swap.compare import model_errors
from tests.model_coverage.compare import randomize

transformers = pytest.importorskip("transformers")
SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=48,
    patch_size=16,
)
MASK = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) < 0.6


def _images(**inputs):
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": images, **inputs}


def ibot():
    model = transformers.Dinov2Model(transformers.Dinov2Config(**SIZES))
    return model, _images(bool_masked_pos=MASK)


def simmim():
    config = transformers.ViTConfig(**SIZES, encoder_stride=16)
    return transformers.ViTForMaskedImageModeling(config), _images(bool_masked_pos=MASK)


def i_jepa():
    model = transformers.IJepaModel(transformers.IJepaConfig(**SIZES), use_mask_token=True)
    return model, _images(bool_masked_pos=MASK)


class WithMasks(nn.Module):
    def __init__(self, model, masks):
        super().__init__()
        self.model, self.masks = model, masks

    def forward(self, video):
        found = self.model(video, **self.masks)
        return torch.cat([found.last_hidden_state, found.predictor_output.last_hidden_state], 1)


def v_jepa():
    """A context of 10 patches of 18; its host takes one target set a call."""
    config = transformers.VJEPA2Config(
        crop_size=48,
        frames_per_clip=4,
        hidden_size=72,
        num_hidden_layers=1,
        mlp_ratio=2,
        num_attention_heads=3,
        pred_hidden_size=72,
        pred_num_attention_heads=3,
        pred_num_hidden_layers=1,
        pred_num_mask_tokens=2,
    )
    generator = torch.Generator().manual_seed(0)
    video = torch.randn(2, 4, 3, 48, 48, generator=generator)
    order = torch.rand(2, 18, generator=generator).argsort(1)
    masks = dict(context_mask=[order[:, :10]], target_mask=[order[:, 10:]])
    return WithMasks(transformers.VJEPA2Model(config), masks), {"video": video}


@pytest.mark.parametrize("build", [ibot, simmim, i_jepa, v_jepa])
def test_every_block_is_fused(build):
    torch.manual_seed(0)
    model, inputs = build()
    randomize(model)
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)
    swapped = copy.deepcopy(model).to(DEVICE)
    assert swap_in(swapped).level == "block"
    with watch(swapped) as status:
        swapped(**inputs)
    ways = {row.way for row in status.modules if row.level == "block"}
    assert ways == {"fused"}, str(status)
