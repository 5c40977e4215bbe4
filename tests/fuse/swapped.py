"""A small ViT of timm, its host, and when two steps are the same."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch

from fastvit_kernels import swap_in

timm = pytest.importorskip("timm")

VIT = dict(img_size=32, patch_size=16, embed_dim=64, num_heads=2, num_classes=10, init_values=0.1)


def vit(depth=2, **settings):
    from timm.models.vision_transformer import VisionTransformer

    torch.default_generator.manual_seed(0)
    return VisionTransformer(depth=depth, **{**VIT, **settings})


def images(batch=2, size=32, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def swapped_and_host(model=None, **settings):
    model = vit() if model is None else model
    host = copy.deepcopy(model)
    swap_in(model, **settings)
    return model, host


def assert_same(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def assert_same_step(model, host, *inputs, **named):
    """Outputs, the first of several, and gradients of all parameters, with the same draws."""
    inputs = inputs if inputs or named else (images(),)
    results = []
    for m in (model, host):
        m.zero_grad()
        torch.default_generator.manual_seed(0)
        y = m(*inputs, **named)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.square().mean().backward()
        results.append((y.detach(), [p.grad for p in m.parameters()]))
    assert_same(*results)


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "swap_in")
        yield
