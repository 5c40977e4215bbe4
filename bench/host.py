"""`python -m bench host`: microseconds of the host a call of each op, without a GPU too.

The tensors are so small that computing takes next to nothing. Without a GPU everything but the
launch itself still runs (checks, autograd.Function and its engine, allocation): `JITFunction.run`
is replaced by nothing, and what the kernels should have written is left over memory. The clock is
the processor's time, which other processes do not stretch.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import fastvit_kernels as fk
from bench.ops import replaced
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import Draw, Example, Op, Sizes
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.measure.turns import alternate
from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, on_absent_gpu
from fastvit_kernels.runtime.triton import HAS_TRITON

SIZES = Sizes(B=1, T=4, C=64, H=2, F=128, img_size=(16, 16), patch_size=8)
ROUNDS, CALLS = 35, 20  # short rounds: most of them run without another process in between
PACKAGE = str(fk.__path__[0])


@dataclass(frozen=True)
class Case:
    """An op's call, and PyTorch's for the same, on the same tensors."""

    inputs: dict[str, Tensor]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    upstream: Tensor

    def forward(self, function: Callable[..., Any]) -> Any:
        return function(**self.inputs)

    def both(self, function: Callable[..., Any]) -> None:
        torch.autograd.backward(function(**self.inputs), self.upstream)


def case_of(op: Op, device: torch.device) -> Case:
    """With the tensors that most models give; of several outputs the first."""
    sizes, unusual = op.at(SIZES), tuple(n for n, arg in op.args.items() if not arg.usual)
    given = op.inputs(Example(sizes, without=unusual), Draw(device, torch.float32))
    inputs = {
        n: x.detach().requires_grad_(op.args[n].trained) for n, x in given.items() if x is not None
    }
    options = op.settings_of(sizes, device)

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        if op.outputs > 1:
            return lambda **inputs: function(**inputs, **options)[0]
        return functools.partial(function, **options) if options else function

    eager = first(op.eager or op.specification)
    return Case(inputs, first(op.function), eager, torch.randn_like(eager(**inputs)))


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, tensors count as on an H100 and kernels are not launched: outputs are garbage."""
    from triton.runtime.jit import JITFunction

    with ExitStack() as stack:
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)
        stack.enter_context(fk.backend("triton"))
        stack.enter_context(on_absent_gpu(Gpu("sm_90", 132, 227 * 1024)))
        stack.enter_context(replaced(JITFunction, "run", lambda self, *args, **options: None))
        yield


def way_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which our path to a launch runs.

    Raises: CommandError where none can.
    """
    if device.type == "cuda":
        return functools.partial(fk.backend, "triton")
    if not HAS_TRITON or INTERPRETED:
        raise CommandError("bench host needs triton, and TRITON_INTERPRET unset")
    return without_launches


def microseconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Of the host's processors, a call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.process_time_ns()
    for _ in range(calls):
        call()
    return 1e-3 * (time.process_time_ns() - started) / calls


def frames(call: Callable[[], Any]) -> int:
    """The most frames of this package that stand above each other in a call, the backward too."""
    depth = most = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, most
        if frame.f_code.co_filename.startswith(PACKAGE):
            depth += {"call": 1, "return": -1}.get(event, 0)
            most = max(most, depth)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return most


def measure(device: torch.device) -> pd.DataFrame:
    """Medians by op: forward and backward of ours and of PyTorch's, in turns, and our frames."""
    way, rows, threads = way_of(device), [], torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.zeros(SIZES.T, SIZES.C, device=device, requires_grad=True)
    # What `torch.autograd.backward` takes by itself, which a step of a model calls once.
    view = Case({"x": x}, lambda x: x.view_as(x), lambda x: x.view_as(x), torch.ones_like(x))
    for name, case in {
        "a view": view,
        **{name: case_of(op, device) for name, op in OPS.items()},
    }.items():

        def timed(run: Callable[[Any], Any], function: Any, context: Any) -> float:
            with context():
                return microseconds(functools.partial(run, function))

        turns = [
            functools.partial(timed, run, function, context)
            for function, context in ((case.ours, way), (case.eager, ExitStack))
            for run in (case.forward, case.both)
        ]
        found = alternate(ROUNDS + 1, *turns)  # the first turn warms up
        fwd, both, eager_fwd, eager_both = (spread(us[1:]).median for us in found)
        with way():
            deep = frames(functools.partial(case.both, case.ours))
        rows.append((name, fwd, both - fwd, eager_fwd, eager_both - eager_fwd, deep))
    torch.set_num_threads(threads)
    columns = ("op", "fwd, us", "bwd, us", "eager fwd, us", "eager bwd, us", "frames")
    return pd.DataFrame(rows, columns=columns).set_index("op")


def run(device: torch.device) -> int:
    print(measure(device).to_string(float_format="{:.1f}".format))
    return 0
