"""One of two gloo processes that swap a model by times of their own; run by
tests/swap/test_swap_distributed.py.

python choices_distributed.py RANK OUT: to rank 0 a fused block is fast and all else slow, to rank 1
the other way around. What each swapped, and by which times, goes to OUT/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fastvit_kernels import set_backend, swap_in
from fastvit_kernels.swap import choices
from fastvit_kernels.swap.hosts.fused import Fused

RANK, OUT = int(sys.argv[1]), Path(sys.argv[2])


class Clock:
    def sample(self, run, count, flush):
        run()
        fused = getattr(run.args[0], "fused_level", "")
        fast = fused and (fused == "block") == (RANK == 0)
        return [0.5 if fast else 1.0] * count

    def clear(self):
        pass


def main() -> None:
    torch.set_num_threads(1)
    set_backend("torch")
    choices.timer_of = lambda device: Clock()
    block = nn.TransformerEncoderLayer(24, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.LayerNorm(24), block)
    meeting = f"file://{OUT}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=2)
    report = swap_in(model, measure=torch.randn(2, 5, 24), budget=1e6)
    dist.destroy_process_group()
    fused = [name for name, m in model.named_modules() if isinstance(m, Fused)]
    rows = [str(row) for row in report.choices.rows]
    (OUT / f"{RANK}.json").write_text(json.dumps({"fused": fused, "rows": rows}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread that asks for the GIL while Python ends aborts the process


main()
