"""Blocks as people write them: each as its host, with the share in our ops and the reason pinned.

python -m tests.fuse.test_strangers [NAME ...]      every block, or these, with its figures
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.fuse.hosts import Host, check, run
from tests.fuse.strangers import BLOCKS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_its_host_and_fused(name):
    block = BLOCKS[name]
    result = check(Host(name, block.forward, block.inputs))
    assert len(result.reports) == 1
    assert result.share == pytest.approx(block.share, abs=0.005), result.left
    assert any(block.reason in left for left in result.left) or not block.reason, result.left


def test_a_low_share_has_a_reason():
    assert len(BLOCKS) >= 60
    assert all(block.reason for block in BLOCKS.values() if block.share < 0.9)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or BLOCKS:
        result = run(Host(name, BLOCKS[name].forward, BLOCKS[name].inputs))
        print(f"{result.share:.3f} {name}: {result.wrong or 'equal'}; {dict(result.rules)}")
        for left in sorted(set(result.left)):
            print(f"      {left}")


if __name__ == "__main__":
    main()
