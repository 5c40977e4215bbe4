"""DDP and FSDP2 over a swapped model: two processes give the losses of one, and choose as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm")
PROGRAM = Path(__file__).parent.parent / "support" / "hosts_distributed.py"


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {world: torch.load(folder / f"{world}.pt") for world in (1, 2)}


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("ddp", 1e-5),
        ("fsdp2", 1e-5),
        ("fsdp2_checkpoint", 1e-5),
        ("fsdp2_mixed_checkpoint", 1e-4),
        ("fsdp2_policy_checkpoint", 1e-5),
    ],
)
def test_two_processes_give_the_losses_of_one(losses, kind, tolerance):
    one, two = losses[1][kind], losses[2][kind]
    assert one[-1] < one[0], "it trains"
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=tolerance, atol=tolerance)


def test_all_processes_take_the_choices_of_the_first(tmp_path):
    """Whose times say something else to each: alone, the second would fuse all but the block."""
    program = PROGRAM.with_name("choices_distributed.py")
    started = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [process.wait(600) for process in started] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["fused"][0] == "1" and len(first["rows"]) == 2  # not "0", the norm
    assert second == first
