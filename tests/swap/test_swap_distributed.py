"""DDP and FSDP2 over a swapped model: two processes give the losses of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm")
PROGRAM = Path(__file__).parent.parent / "support" / "hosts_distributed.py"


def start(world: int, out: Path) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(world), str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("losses"), {}
    for world in (1, 2):
        out = folder / f"{world}.pt"
        processes = start(world, out)
        logs = [p.communicate(timeout=3600)[0] for p in processes]
        assert [p.returncode for p in processes] == [0] * world, "\n".join(logs)
        found[world] = torch.load(out)
    return found


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("ddp", 1e-5),
        ("fsdp2", 1e-5),
        ("fsdp2_checkpoint", 1e-5),
        ("fsdp2_mixed_checkpoint", 1e-4),
    ],
)
def test_two_processes_give_the_losses_of_one(losses, kind, tolerance):
    one, two = losses[1][kind], losses[2][kind]
    assert one[-1] < one[0], "it trains"
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=tolerance, atol=tolerance)
