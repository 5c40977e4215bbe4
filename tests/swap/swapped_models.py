"""Small models of each host, a training step of theirs, and when two steps are the same."""

from __future__ import annotations

import pytest
import torch
from numerics import DEVICE
from torch import nn

from fastvit_kernels import swap_in
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small, torchvision_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")


class HandWritten(nn.Module):
    """A ViT of plain torch.nn."""

    def __init__(self, norm_first=True, activation="gelu", dropout=0.0):
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 16, 16)
        self.pos_embed = nn.Parameter(torch.randn(1, 9, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(
            64, 2, 128, dropout, activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), False)
        self.head = nn.Linear(64, 7)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.encoder(x).mean(1))


class TimmLike(nn.Module):
    """Gives a transformers model the call of the others."""

    def __init__(self, name, **settings):
        super().__init__()
        self.model, self.inputs = hf_small(name, **settings)

    def forward(self, images):
        return self.model(pixel_values=images).last_hidden_state


class Shift(nn.Module):
    def forward(self, weight):
        return weight + 0.01


def timm_model(name="vit_base_patch16_224", **settings):
    model = timm.create_model(
        name, img_size=48, embed_dim=64, depth=2, num_heads=2, num_classes=7, **settings
    )
    return randomize(model)


def images(batch=2):
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)


HOSTS = {
    "timm": timm_model,
    "torchvision": lambda: randomize(torchvision_small()[0]),
    "transformers": lambda: randomize(TimmLike("dinov2")),
    "torch_nn": lambda: randomize(HandWritten()),
}


def train_step(model, seed=0):
    """Output and gradients of a training step with this seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(images())
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_step(actual, wanted, tolerance=2e-5):
    torch.testing.assert_close(actual[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert actual[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        if grad is None:
            assert actual[1][name] is None, name
            continue
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(
            actual[1][name], grad, rtol=10 * tolerance, atol=tolerance * scale, msg=name
        )


def classes(model):
    return [type(m) for m in model.modules()]


def swap_and_return(model, **selection):
    swap_in(model, **selection)
    return model
