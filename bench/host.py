"""`python -m bench host`: microseconds of the host a call of each op, and of a timm ViT of 12
layers eager and swapped in, without a GPU too.

The tensors are so small that computing takes next to nothing. Without a GPU everything but Triton's
launcher still runs (checks, autograd.Function and its engine, allocation, the search for the
compiled kernel): a stand-in takes that launcher's place, and what the kernels should have written
is left over memory. The clock is the processor's time, which other processes do not stretch.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import Draw, Example, Op, Sizes
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import build_model
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.measure.turns import alternate
from fastvit_kernels.runtime import triton as runtime_triton
from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, on_absent_gpu
from fastvit_kernels.runtime.triton import HAS_TRITON

SIZES = Sizes(B=1, T=4, C=16, H=2, F=32, img_size=(8, 8), patch_size=4)
NO_GPU = -1  # as a device's index: a kernel that was found there is not found on a GPU
ROUNDS, CALLS = 35, 20  # short rounds: most of them run without another process in between
WIDTHS = (64, 192)  # of the models
PACKAGE = str(fk.__path__[0])


@dataclass(frozen=True)
class Case:
    """An op's or a model's call, and PyTorch's for the same, on the same tensors."""

    inputs: dict[str, Tensor]
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    calls: int = CALLS  # a round

    @cached_property
    def upstream(self) -> Tensor:
        return torch.ones_like(self.forward(self.eager))

    def forward(self, function: Callable[..., Any]) -> Any:
        """Its output, of several the first."""
        out = function(**self.inputs)
        return out[0] if isinstance(out, tuple) else out

    def both(self, function: Callable[..., Any]) -> None:
        torch.autograd.backward(self.forward(function), self.upstream)


def case_of(op: Op, device: torch.device) -> Case:
    """With the tensors that most models give."""
    sizes, unusual = op.at(SIZES), tuple(n for n, arg in op.args.items() if not arg.usual)
    given = op.inputs(Example(sizes, without=unusual), Draw(device, torch.float32))
    inputs = {
        n: x.detach().requires_grad_(op.args[n].trained) for n, x in given.items() if x is not None
    }
    options = op.settings_of(sizes, device)
    eager = op.eager or op.specification
    return Case(inputs, partial(op.function, **options), partial(eager, **options))


def cases(device: torch.device) -> Iterator[tuple[str, Case]]:
    """timm's ViT of 12 layers with one image of five tokens, if timm is here, then every op."""
    for width in WIDTHS if find_spec("timm") else ():
        sizes = dict(num_classes=10, img_size=32, embed_dim=width, num_heads=width // 32)
        eager: Any = build_model("timm:vit_tiny_patch16_224", **sizes).to(device)
        ours, image = copy.deepcopy(eager), torch.randn(1, 3, 32, 32, device=device)
        fk.swap_in(ours)
        yield f"ViT, 12 layers of {width}", Case({"x": image}, ours, eager, calls=4)
    yield from ((name, case_of(op, device)) for name, op in OPS.items())


class _Compiled:
    """Stands for a kernel that Triton has compiled: its launches do nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, tensors count as on an H100 and kernels are not launched: outputs are garbage."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *arguments: Any, **options: Any) -> _Compiled:
        return _Compiled()

    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: NO_GPU))
    with (
        fk.backend("triton"),
        on_absent_gpu(Gpu("sm_90", 132, 227 * 1024)),
        patch.object(JITFunction, "run", run),
        patch.object(runtime_triton, "_RUN", run),
        patch.object(runtime_triton, "driver", driver),
    ):
        torch.set_flush_denormal(True)
        yield
        torch.set_flush_denormal(False)


def way_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which our path to a launch runs.

    Raises: CommandError where none can.
    """
    if device.type == "cuda":
        return partial(fk.backend, "triton")
    if not HAS_TRITON or INTERPRETED:
        raise CommandError("bench host needs triton, and TRITON_INTERPRET unset")
    return without_launches


def microseconds(call: Callable[[], Any], calls: int) -> float:
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
    way, rows = way_of(device), {}
    torch.set_num_threads(1)
    for name, case in cases(device):

        def timed(run: Callable[[Any], Any], function: Any, context: Any, case: Case) -> float:
            with context():
                return microseconds(partial(run, function), min(case.calls, CALLS))

        turns = [
            partial(timed, run, function, context, case)
            for function, context in ((case.ours, way), (case.eager, nullcontext))
            for run in (case.forward, case.both)
        ]
        found = alternate(ROUNDS + 1, *turns)  # the first turn warms up
        fwd, both, eager_fwd, eager_both = (spread(us[1:]).median for us in found)
        with way():
            case.both(case.ours)  # the device is met here first
            deep = frames(partial(case.both, case.ours))
        rows[name] = (fwd, both - fwd, eager_fwd, eager_both - eager_fwd, deep)
    columns = ["fwd, us", "bwd, us", "eager fwd, us", "eager bwd, us", "frames"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def run(device: torch.device) -> int:
    print(measure(device).to_string(float_format="{:.1f}".format))
    return 0
