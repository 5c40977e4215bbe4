"""python -m tests.machine.device.left_out TARGET CALL...: what the machine notices of a launch.

Each instruction that orders others (barrier, wait, commit, fence) is left out, one at a time; the
launch runs again from the same memory, and a line says what noticed. Nothing may: another one may
order the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import fastvit_kernels as fk
from fastvit_kernels.ops.common.gemm_configs import SPECIALIZED
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from tests.machine.aot import TARGETS

from .driver import Recorded, ptx_machine
from .faults import MachineError

ORDERS = ("bar.", "barrier.", "cp.async.wait", "cp.async.commit", "cp.async.bulk.wait")
ORDERS += ("cp.async.bulk.commit", "wgmma.wait", "wgmma.commit", "fence.proxy", "mbarrier.")


class Row(NamedTuple):
    kernel: str
    kind: str  # "wgmma.wait_group"
    source: str  # the line of Python that the instruction comes from
    noticed: str  # the fault's class, "Value"; "" nothing


def noticed(recorded: Recorded, wanted: list[torch.Tensor]) -> str:
    """What is wrong in a launch, in either order of its groups."""
    try:
        for order in (1, 0) if recorded.program.parts_for_good else (0,):
            recorded.run(order)
    except MachineError as error:
        return type(error).__name__
    same = (
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(recorded.tensors, wanted, strict=True)
    )
    return "" if all(same) else "Value"


def rows(recorded: Recorded) -> Iterator[Row]:
    program = recorded.program
    recorded.run()
    wanted = [x.clone() for x in recorded.tensors]
    for op in program.ops:
        if not op.name.startswith(ORDERS):
            continue
        former, op.run = op.run, lambda group: None
        kind = ".".join(op.parts[: 3 if op.parts[0] in ("cp", "fence") else 2])
        yield Row(program.name, kind, op.source, noticed(recorded, wanted))
        op.run = former


def of_call(target: str, call: Callable[[], Any], config: Any = None) -> Iterator[Row]:
    """Of each launch of a call, on two SMs, with this config of its GEMM."""
    gpu = Gpu(target, 2, TARGETS[target].shared_limit)
    with (
        ptx_machine(target, recorded=[]) as machine,
        on_absent_gpu(gpu),
        forced("linear_fwd", config),
    ):
        call()
    for recorded in machine.recorded or []:
        yield from rows(recorded)


def main(target: str, *names: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size).bfloat16() for size in ((2, 37, 136), (136, 136), 136))
    qkv = torch.randn(1, 70, 3, 1, 32).bfloat16()
    product = partial(fk.linear, x, weight, bias, activation="gelu")
    calls: dict[str, tuple[Any, Any]] = {
        "linear": (product, None),
        "attention": (partial(fk.attention, qkv), None),
        "roles": (product, SPECIALIZED),  # minutes
    }
    for name in names:
        for row in of_call(target, *calls[name]):
            print(*row, sep=",")


if __name__ == "__main__":
    main(*sys.argv[1:])
