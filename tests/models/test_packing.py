"""Blocks on images of several sizes as one sequence of tokens."""

from __future__ import annotations

import pytest
import torch
from model_parity import randomise
from numerics import DEVICE, rand

from fastvit_kernels.models.packing import Crops
from fastvit_kernels.models.vit import Block

KINDS = {
    "plain": {},
    "qk_norm": dict(qk_norm=True, init_values=0.5),
    "masked": dict(drop_path=0.5),
    "skipped": dict(drop_path=0.5, drop_path_mode="skip", init_values=0.5),
}


def _block(kind):
    return randomise(Block(32, 2, **KINDS[kind])).train()


@pytest.mark.parametrize("kind", KINDS)
def test_one_size_packed(kind):
    """The same draws from the same seed, output and gradients."""
    block, x = _block(kind), rand(5, 7, 32)
    crops = Crops([(5, 7)], DEVICE)
    results = []
    for call in (block, lambda x: crops.split(block(crops.join([x]), packing=crops))[0]):
        torch.manual_seed(3)
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])))
    for got, wanted in zip(results[1], results[0], strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * max(1.0, scale))


def test_sizes_do_not_mix():
    block, images = _block("qk_norm"), [rand(2, 7, 32), rand(3, 4, 32, seed=1)]
    crops = Crops([x.shape[:2] for x in images], DEVICE)
    for y, x in zip(crops.split(block(crops.join(images), packing=crops)), images, strict=True):
        torch.testing.assert_close(y, block(x), rtol=1e-4, atol=1e-5)


def test_packed_block_takes_no_rope():
    crops, tables = Crops([(1, 4)], DEVICE), torch.ones(4, 16).unsqueeze(0).unbind()
    with pytest.raises(ValueError, match="packed images have no rotary positions"):
        _block("plain")(rand(4, 32), (*tables, *tables), crops)
