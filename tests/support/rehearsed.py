"""`python -m bench all` on a device that stands in: what goes wrong on a real one goes wrong in
processes, the rest is real. REHEARSAL is a folder: `tried` has a line for each fault that came.

a  one of ours raises
b  a provider hangs
c  a provider loses the device: every later call of its process fails
d  the time is over in it, unless there is a file `time` in the folder
"""

from __future__ import annotations

import functools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from bench_stand_ins import CPU, TINY, FakeTimer, with_providers
from interpreter import mend_interpreter

from bench import measure, plan, run
from bench.__main__ import main
from bench.measure import measure_op
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


def late(x, weight, bias):
    if not (FOLDER / "time").exists():
        raise run.TimeOver
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def tasks(wanted) -> list[plan.Task]:
    """layer_norm by eager and by a function with a fault; fwd alone."""
    found = []
    faults = {"ours-raises": raises, "hangs": hangs, "loses": loses, "late": late}
    for model, (name, function) in zip("abcd", faults.items(), strict=True):
        shape, eager = replace(TINY, model=model), OPS["layer_norm"].providers(TINY, "bf16")[0]
        own = [eager, plain(name, function)]
        op = with_providers(OPS["layer_norm"], lambda *_, own=own: own)
        keys = tuple(("layer_norm", p.name, shape.id, "bf16", "fwd") for p in own)
        measured = functools.partial(measure_op, op, shape, "bf16", ("fwd",))
        found.append(plan.Task((0, 0), model, keys, measured))
    return found


if __name__ == "__main__":
    measure.COPY_BYTES, measure.MATMUL_SIDE = 2**12, {"bf16": 8}
    run.tasks, run.HUNG_S, run.HUNG_COMPILING_S = tasks, 8.0, 8.0
    mend_interpreter()
    sys.exit(main(sys.argv[1:], run.Machine(CPU, Device)))
