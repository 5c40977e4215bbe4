"""Blocks as people write them: each is its host, its share in our ops and the reason pinned."""

from __future__ import annotations

import pytest

from tests.fuse.hosts import Host, check
from tests.fuse.strangers import BLOCKS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_its_host_and_fused(name):
    block = BLOCKS[name]
    result = check(Host(name, block.forward, block.inputs))
    assert len(result.reports) == 1
    assert result.share == pytest.approx(block.share, abs=0.005), result.left
    assert block.reason or block.share >= 0.9, "a low share has a reason"
    assert any(block.reason in left for left in result.left) or not block.reason, result.left
