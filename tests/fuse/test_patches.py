"""Patch embeddings as models write them, in one op with their prefix and positions.

What only looks like one is in `looks_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fuse.hosts import Host, check
from tests.fuse.kit import C, Kit, images, seeded
from tests.fuse.looks_effects import AUTOCAST
from tests.fuse.looks_layers import cls, flat, positions, with_cls

ALL = "patch_embed and prefix_tokens and pos_embed"


def rules_of(forward: Any, inputs: Any = images, **how: Any) -> list[str]:
    rules = check(Host("patches", forward, inputs, **how)).rules
    return [name for name in rules if name.startswith("patch_embed")]


def plain(kit: Kit, x: Tensor) -> Tensor:
    return with_cls(kit, flat(kit.conv(x))) + positions(kit, 7)


def torchvision(kit: Kit, x: Tensor) -> Tensor:
    x = kit.conv(x).reshape(x.shape[0], C, 6).permute(0, 2, 1)
    return torch.cat([kit.cls.expand(x.shape[0], -1, -1), x], dim=1) + positions(kit, 7)


def deit3(kit: Kit, x: Tensor) -> Tensor:
    y = flat(kit.conv(x))
    return torch.cat((cls(kit, y), y + positions(kit, 6)), dim=-2)


def registers(kit: Kit, x: Tensor) -> Tensor:
    y = flat(kit.conv(x)) + positions(kit, 6)
    return torch.cat([cls(kit, y), kit.reg.expand(len(x), -1, -1), y], dim=1)


def repeated(kit: Kit, x: Tensor) -> Tensor:
    return torch.cat([kit.cls.repeat(len(x), 1, 1), flat(kit.conv(x))], 1) + positions(kit, 7)


def of_a_vector(kit: Kit, x: Tensor) -> Tensor:
    vector = kit.ls[None, None].expand(len(x), 1, C)
    return kit.both.weight[:7] + torch.cat([vector, flat(kit.conv(x))], 1)


def by_grid(kit: Kit, x: Tensor) -> Tensor:
    y = kit.conv(x).permute(0, 2, 3, 1).reshape(len(x), -1, C)
    prefix = kit.cls.expand(len(x), -1, -1).contiguous()
    return torch.add(torch.cat([prefix, y], 1), positions(kit, 7).expand(len(x), -1, -1))


def positions_twice(kit: Kit, x: Tensor) -> Tensor:
    return deit3(kit, x) + positions(kit, 7)


SPELLINGS = [plain, torchvision, deit3, registers, repeated, of_a_vector, by_grid, positions_twice]


@pytest.mark.parametrize("forward", SPELLINGS)
def test_prefix_and_positions_become_one_op(forward):
    assert rules_of(forward) == [ALL]


@pytest.mark.parametrize("conv", [dict(bias=False), dict(padding="valid")])
def test_other_convolutions_of_patches(conv):
    def prepare(kit: Kit) -> None:
        kit.conv = nn.Conv2d(3, C, 4, 4, **conv).double()

    assert rules_of(plain, prepare=prepare) == [ALL]


def test_channels_last_images():
    def prepare(kit: Kit) -> None:
        kit.conv.to(memory_format=torch.channels_last)

    def inputs() -> tuple[Tensor]:
        return (images()[0].contiguous(memory_format=torch.channels_last),)

    assert rules_of(plain, inputs, prepare=prepare) == [ALL]


def test_a_norm_behind_the_convolution():
    result = check(Host("norm", lambda kit, x: kit.n(flat(kit.conv(x))) + kit.cls, images))
    assert result.rules["patch_embed"] == result.rules["layer_norm"] == 1


def test_a_table_in_fp32_gives_the_dtype_of_the_host():
    def prepare(kit: Kit) -> None:
        kit.cls.data, kit.both.weight.data = kit.cls.data.float(), kit.both.weight.data.float()

    assert rules_of(plain, dtype=torch.bfloat16, prepare=prepare) == [ALL]


def region_of_its_own(kit: Kit, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = flat(kit.conv(x))
    return with_cls(kit, y) + positions(kit, 7)


@pytest.mark.parametrize(("forward", "whole"), [(plain, True), (region_of_its_own, False)])
def test_autocast(forward: Callable[..., Tensor], whole: bool):
    assert (rules_of(forward, **AUTOCAST) == [ALL]) == whole


def test_a_batch_of_one_and_a_dynamic_batch():
    assert rules_of(plain, lambda: (seeded(1, 3, 8, 12),)) == [ALL]
    assert rules_of(plain, calls=3, again=lambda: (seeded(5, 3, 8, 12),)) == [ALL]
