"""Patch embeddings as models write them, and what only looks like one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewritten import compiled, fired, rules_of
from torch import nn

P, C, SIDE, BATCH = 4, 16, 12, 3
T = (SIDE // P) ** 2
ALL = "patch_embed and prefix_tokens and pos_embed"


class Stem(nn.Module):
    """A convolution, tables, and one spelling of what stands between them."""

    def __init__(self, spell, prefix=1, **conv):
        super().__init__()
        self.conv = nn.Conv2d(3, C, **{"kernel_size": P, "stride": P, **conv})
        self.cls = nn.Parameter(torch.randn(1, prefix, C))
        self.reg = nn.Parameter(torch.randn(1, 2, C))
        self.pos = nn.Parameter(torch.randn(1, T, C))
        self.long = nn.Parameter(torch.randn(1, T + prefix, C))
        self.each = nn.Parameter(torch.randn(BATCH, T, C))
        self.column = nn.Parameter(torch.randn(1, 1, C))
        self.row = nn.Parameter(torch.randn(1, T, 1))
        self.vector = nn.Parameter(torch.randn(C))
        self.norm = nn.LayerNorm(C)
        self.register_buffer("index", torch.arange(T * C).view(1, T, C))
        self.spell = spell
        self.double()

    def forward(self, x):
        return self.spell(self, x)

    def tokens(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)


def images(side=SIDE, dtype=torch.double):
    return torch.randn(BATCH, 3, side, side, dtype=dtype)


def patch_rules(stem, x=None, **more):
    rules = fired(stem, images() if x is None else x, **more)
    return [name for name in rules if name.startswith("patch_embed")]


def with_cls(m, x):
    return torch.cat([m.cls.expand(x.shape[0], -1, -1), m.tokens(x)], 1)


def torchvision(m, x):
    x = m.conv(x).reshape(x.shape[0], C, T).permute(0, 2, 1)
    return torch.cat([m.cls.expand(x.shape[0], -1, -1), x], dim=1) + m.long


def deit3(m, x):
    return torch.cat((m.cls.expand(len(x), -1, -1), m.tokens(x) + m.pos), dim=-2)


def registers(m, x):
    x = m.tokens(x) + m.pos
    prefix = m.cls.expand(len(x), -1, -1), m.reg.expand(len(x), -1, -1)
    return torch.cat([*prefix, x], dim=1)


def repeated(m, x):
    return torch.cat([m.cls.repeat(len(x), 1, 1), m.tokens(x)], 1) + m.long


def of_a_vector(m, x):
    x = m.tokens(x)
    return m.long[0] + torch.cat([m.vector[None, None].expand(len(x), 1, C), x], 1)


def by_grid(m, x):
    x = m.conv(x).permute(0, 2, 3, 1).reshape(len(x), -1, C)
    cls = m.cls.expand_as(m.each[:, :1]).contiguous()
    return torch.add(torch.cat([cls, x], 1), m.long.expand(len(x), -1, -1))


ALL_OF_IT = [
    lambda m, x: with_cls(m, x) + m.long,
    lambda m, x: torch.add(m.long, with_cls(m, x)),
    torchvision,
    deit3,
    registers,
    repeated,
    of_a_vector,
    by_grid,
    lambda m, x: F.relu(with_cls(m, x) + m.long),
]


@pytest.mark.parametrize("spell", ALL_OF_IT)
@pytest.mark.parametrize("conv", [{}, dict(bias=False), dict(padding="valid")])
def test_prefix_and_positions_become_one_op(spell, conv):
    assert patch_rules(Stem(spell, **conv)) == [ALL]


def test_channels_last_images():
    x = images().contiguous(memory_format=torch.channels_last)
    assert patch_rules(Stem(ALL_OF_IT[0]).to(memory_format=torch.channels_last), x) == [ALL]


def test_tokens_keep_the_strides_that_a_caller_sees():
    rules = patch_rules(Stem(lambda m, x: m.tokens(x)))  # `fired` compares strides
    assert rules == ["patch_embed"]
    assert patch_rules(Stem(lambda m, x: m.tokens(x) + m.pos)) == ["patch_embed and pos_embed"]


def hidden(m, x):
    """Strides of the sum go on to what a view reads; those of a norm do not."""
    x = m.tokens(x) + m.pos
    x = x + F.relu(m.norm(x))
    return m.norm(x).view(len(x), -1), x.mean(1)


def test_strides_that_nobody_sees_are_not_copied(monkeypatch):
    from fastvit_kernels.fuse.graph import Graph

    def laid_out(g, root, n, like):
        g.check_alike(n, like)
        a, b = n.meta["val"], like.meta["val"]
        assert a.stride() == b.stride(), "a copy"
        return n

    monkeypatch.setattr(Graph, "laid_out", laid_out)
    assert patch_rules(Stem(hidden)) == ["patch_embed and pos_embed"]


def test_a_norm_behind_the_convolution():
    rules = fired(Stem(lambda m, x: m.norm(m.tokens(x)) + m.pos), images())
    assert rules["patch_embed"] == rules["layer_norm"] == 1
    grid = Stem(lambda m, x: m.norm(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * 2)
    assert patch_rules(grid) == ["patch_embed"]


class Tubelets(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, C, (2, P, P), (2, P, P))
        self.pos = nn.Parameter(torch.randn(1, 2 * T, C))

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).flatten(2).transpose(1, 2)
        return x + self.pos


def test_tubelets_of_a_video():
    x = torch.randn(BATCH, 4, 3, SIDE, SIDE, dtype=torch.double)
    assert patch_rules(Tubelets().double(), x) == ["patch_embed and pos_embed"]


def test_a_table_in_fp32_gives_the_dtype_of_the_host():
    stem = Stem(ALL_OF_IT[0]).float()
    stem.conv.bfloat16()
    x = images(dtype=torch.bfloat16)
    assert patch_rules(stem, x, rtol=2e-2, atol=2e-2) == [ALL]
    stem = Stem(ALL_OF_IT[0]).float()
    assert patch_rules(stem, images().float(), autocast=True, rtol=2e-2, atol=2e-2) == [ALL]


# ----------------------------------------------------------------------- what only looks like it


CONVOLUTIONS = [
    dict(padding=1, stride=P - 1),
    dict(padding=1),  # as many patches as without
    dict(padding=2),
    dict(padding="same", stride=1),
    dict(stride=2),
    dict(dilation=2),
    dict(kernel_size=1, stride=1),
]


@pytest.mark.parametrize("conv", CONVOLUTIONS)
def test_other_convolutions_stay(conv):
    assert patch_rules(Stem(lambda m, x: m.tokens(x), **conv)) == []


def test_groups_and_sizes_that_do_not_divide_stay():
    grouped = Stem(lambda m, x: m.tokens(x))
    grouped.conv = nn.Conv2d(4, C, P, P, groups=2).double()
    x = torch.randn(BATCH, 4, SIDE, SIDE, dtype=torch.double)
    assert patch_rules(grouped, x) == []
    assert patch_rules(Stem(lambda m, x: m.tokens(x)), images(SIDE + 1)) == []
    assert patch_rules(Stem(lambda m, x: m.conv(x[0]).flatten(1).t())) == []


def written_weight(m, x):
    y = m.conv(x)
    with torch.no_grad():
        m.conv.weight.mul_(2)
    return y.flatten(2).transpose(1, 2)


STAY = [
    lambda m, x: m.conv(x),
    lambda m, x: m.conv(x).flatten(1),
    lambda m, x: m.conv(x).flatten(2).view(len(x), T, C),  # other elements
    lambda m, x: m.conv(x).permute(0, 3, 2, 1).flatten(1, 2),  # patches by columns
]


@pytest.mark.parametrize("spell", STAY)
def test_what_is_no_row_of_patches_stays(spell):
    assert patch_rules(Stem(spell)) == []


def test_a_feature_map_that_others_read_stays():
    def spell(m, x):
        y = m.conv(x)
        return y.flatten(2).transpose(1, 2) + m.pos, y.mean((2, 3))

    assert patch_rules(Stem(spell)) == []


def test_writes_in_between_stay():
    def scaled(m, x):
        y = m.conv(x)
        y.mul_(2)
        return y.flatten(2).transpose(1, 2) + m.pos

    def tokens_written(m, x):
        y = m.tokens(x)
        y.mul_(2)
        return y + m.pos

    assert patch_rules(Stem(scaled)) == []
    assert "pos_embed" not in "".join(patch_rules(Stem(tokens_written)))
    assert patch_rules(Stem(written_weight), grad=False) == []


def prefix_written(m, x):
    cls = m.cls.expand(len(x), -1, -1)
    y = torch.cat([cls, m.tokens(x)], 1)
    m.cls.mul_(2)
    return y + m.long


def pos_written(m, x):
    y = m.tokens(x) + m.pos
    m.pos.mul_(2)
    return torch.cat([m.cls.expand(len(x), -1, -1), y], 1)


@pytest.mark.parametrize("spell", [prefix_written, pos_written])
def test_a_table_that_is_written_is_read_before(spell):
    assert ALL not in patch_rules(Stem(spell), grad=False)


NO_PREFIX = [
    lambda m, x: torch.cat([m.tokens(x), m.cls.expand(len(x), -1, -1)], 1),
    lambda m, x: torch.cat([m.cls.expand(len(x), T, C), m.tokens(x)], 2),
    lambda m, x: torch.cat([m.each[:, :1], m.tokens(x)], 1),
    lambda m, x: torch.cat([x.mean((2, 3))[:, :1, None].expand(-1, 1, C), m.tokens(x)], 1),
    lambda m, x: torch.cat([m.cls.expand(len(x), -1, -1).flip(0) * 1, m.tokens(x)], 1),
    lambda m, x: torch.cat([m.each.repeat(1, 1, 1), m.tokens(x)], 1),
]


@pytest.mark.parametrize("spell", NO_PREFIX)
def test_what_is_no_prefix_stays(spell):
    assert patch_rules(Stem(spell)) == ["patch_embed"]


NO_POSITIONS = [
    lambda m, x: m.tokens(x).detach() + m.pos,
    lambda m, x: m.tokens(x) + m.each,
    lambda m, x: m.tokens(x) + m.column,
    lambda m, x: m.tokens(x) + m.row,
    lambda m, x: m.tokens(x) + m.index,
    lambda m, x: torch.add(m.tokens(x), m.pos, alpha=2),
    lambda m, x: m.tokens(x) - m.pos,
    lambda m, x: m.tokens(x) + 1,
    lambda m, x: m.tokens(x) + m.pos * x.mean((1, 2, 3), keepdim=True)[:, 0],
]


@pytest.mark.parametrize("spell", NO_POSITIONS)
def test_what_is_no_table_of_positions_stays(spell):
    assert patch_rules(Stem(spell)) == ["patch_embed"]


def frozen(m, x):
    with torch.no_grad():
        x = m.tokens(x)
    return torch.cat([m.cls.expand(len(x), -1, -1), x], 1)


def test_a_frozen_stem_stays_frozen():
    assert "prefix" not in "".join(patch_rules(Stem(frozen)))


def in_fp32(m, x):
    with torch.autocast("cpu", enabled=False):
        x = m.tokens(x)
    return with_tables(m, x)


def with_tables(m, x):
    return torch.cat([m.cls.expand(len(x), -1, -1), x], 1) + m.long


def test_a_region_of_the_models_own_autocast_stays():
    stem = Stem(in_fp32).float()
    rules = patch_rules(stem, images().float(), autocast=True, rtol=1e-5, atol=1e-5)
    assert "prefix" not in "".join(rules)


def test_positions_before_and_behind_the_prefix():
    def both(m, x):
        return torch.cat([m.cls.expand(len(x), -1, -1), m.tokens(x) + m.pos], 1) + m.long

    assert patch_rules(Stem(both)) == [ALL]


def test_a_batch_of_one_and_a_dynamic_batch():
    stem = Stem(ALL_OF_IT[0])
    assert patch_rules(stem, torch.randn(1, 3, SIDE, SIDE, dtype=torch.double)) == [ALL]
    torch._dynamo.reset()
    stem = Stem(ALL_OF_IT[0])
    call = compiled(stem)
    for batch in (2, 5, 7):  # the second call makes a graph of any batch
        x = torch.randn(batch, 3, SIDE, SIDE, dtype=torch.double)
        torch.testing.assert_close(call(x), stem(x))
    assert rules_of(stem) == {ALL: 2}
