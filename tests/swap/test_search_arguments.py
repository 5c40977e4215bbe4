"""What the search hands to a host that it does not know: RoPE's tables of the right width."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastvit_kernels.swap import observe
from fastvit_kernels.swap.hosts import attention


class Packed(nn.Module):
    def __init__(self, C=24, heads=3):
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, rope_tables=None, mask=None):
        return x


class Separate(nn.Module):
    def __init__(self, C=24, heads=3, D=10):
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(C, heads * D) for _ in "qkv")
        self.proj = nn.Linear(heads * D, C)

    def forward(self, hidden, position_embeddings=None):
        return hidden


@pytest.mark.parametrize(
    ("module", "projections", "heads", "wanted"),
    [
        (Packed(), None, 3, (7, 8)),  # nothing is known but C / H
        (Packed(), ("qkv",), 3, (5, 8)),  # 72 / 3 heads / q, k and v
        (Separate(), ("q", "k", "v"), 3, (5, 10)),  # heads need not fill C
    ],
)
def test_tables_are_a_head_wide_and_without_the_prefix(module, projections, heads, wanted):
    roles = projections and SimpleNamespace(projections=projections, heads=heads, prefix=2)
    (tables,) = observe.angles_for(module.double(), 7, "rope", roles).values()
    assert [tuple(t.shape) for t in tables] == [wanted] * 2
    assert {t.dtype for t in tables} == {torch.float64} and not torch.equal(*tables)


def test_the_argument_with_the_angles_is_known_by_its_name():
    assert observe.angle_argument(Packed()) == "rope_tables"
    assert observe.angle_argument(Separate()) == "position_embeddings"
    assert observe.angle_argument(nn.Linear(2, 2)) is None
    masks = {n: observe.is_mask(n) for n in ("attn_mask", "rel_pos_bias", "rope", "x")}
    assert masks == {"attn_mask": True, "rel_pos_bias": True, "rope": False, "x": False}


def test_every_way_of_rope_is_tried_once():
    ways = list(attention.ways_of_rope())
    assert len(ways) == len(set(ways)) == 2 * 2 * 2


def test_a_way_of_rope_reads_the_tables_as_it_says():
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(5, 8, generator=generator) for _ in "cs")
    x = torch.randn(2, 7, 24, generator=generator)

    def turn(kernel, tables=(one, two), prefix=2):
        roles = SimpleNamespace(kernel=kernel, heads=3, prefix=prefix)
        module = SimpleNamespace(fused_roles=roles, fused_head_dim=lambda: 8)
        return attention.Attention.fused_turn(module, x, tables)

    for way in attention.ways_of_rope():
        found = turn(way)
        cos, sin = (two, one) if "sin before cos" in way else (one, two)
        assert torch.equal(found.cos, cos) and torch.equal(found.sin, sin), way
        assert found.interleaved == ("interleaved" in way)
        assert (turn(way, prefix=1) is None) == ("this prefix" in way)
        assert turn(way, (one[None], two[None])) is None and turn(way, (one,)) is None
    assert turn("") is None and turn("half, cos before sin, any prefix", one) is None
