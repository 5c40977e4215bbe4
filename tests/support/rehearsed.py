"""`python -m bench targets` on a device that stands in: what goes wrong on a real one goes wrong in
processes, the rest is real. REHEARSAL is a folder: `tried` has a line for each fault that came.

a  one of ours raises
b  a provider hangs
c  a provider loses the device: every later call of its process fails
d  takes longer than there is, unless there is a file `time` in the folder
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench_stand_ins import CPU, TINY, FakeTimer, with_providers
from interpreter import mend_interpreter

from bench import measure, plan, run
from bench.__main__ import main
from bench.ops import OPS, plain
from fastvit_kernels.measure.timer import DeviceLost

FOLDER = Path(os.environ["REHEARSAL"])
LOST: list[str] = []


class Device(FakeTimer):
    def clear(self):
        if LOST:
            raise DeviceLost("CUDA error: an illegal memory access was encountered")


def fault(name: str) -> None:
    with (FOLDER / "tried").open("a") as file:
        file.write(f"{name}\n")


def raises(**inputs):
    fault("raises")
    raise RuntimeError("no kernel image")


def hangs(**inputs):
    fault("hangs")
    time.sleep(1e6)


def loses(**inputs):
    fault("loses")
    LOST.append("a context")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def target(model: str, seconds: float, name: str = "", function=None) -> plan.Task:
    """layer_norm by eager and ours, and by a function with a fault; fwd alone."""

    def providers(shape, dtype):
        own = [p for p in OPS["layer_norm"].providers(shape, dtype) if p.name in ("eager", "ours")]
        return [*own[:1], plain(name, function)] if name else own

    op = with_providers(OPS["layer_norm"], providers)
    task = plan.op_target(op, replace(TINY, model=model), ("fwd",))
    return replace(task, seconds=seconds)


def targets(shapes) -> list[plan.Task]:
    most = 100.0  # a guess that no process exceeds
    return [
        target("a", most, "ours-raises", raises),
        target("b", 0.0, "hangs", hangs),
        target("c", most, "loses", loses),
        target("d", most if (FOLDER / "time").exists() else 1e9),
    ]


if __name__ == "__main__":
    measure.COPY_BYTES, measure.MATMUL_SIDE = 2**12, {"bf16": 8}
    plan.targets = targets
    run.HUNG_S = 8.0
    mend_interpreter()
    sys.exit(main(sys.argv[1:], run.Machine(CPU, Device)))
