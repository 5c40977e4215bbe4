"""Host cost: microseconds of Python and dispatch a call of each op, ours beside torch's; and of
swapped models, beside their hosts.

The tensors are so small that computing takes next to nothing. With a GPU, calls are enqueued and
not waited for. Without one everything but the launch itself still runs: checks, autograd.Function,
operator dispatch, allocation; `JITFunction.run` is replaced by nothing ("ours, no launch"). "Ours,
on a CPU" is what runs there: PyTorch's path of an op, the rewritten graph of a swapped model. The
clock is the processor's time, which other processes do not stretch. What a kernel should have
written is left over memory: numbers too small for fp32's exponent would slow the products that read
them several times over, so they count as zeros.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import fastvit_kernels as fk
from bench.ops import BASELINE, replaced
from bench.rows import Row
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.measure.turns import alternate
from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import define_torchvision_operators
from fastvit_kernels.runtime.triton import HAS_TRITON
from fastvit_kernels.verify.cases import OPS
from fastvit_kernels.verify.op import Draw, Example, Op, Sizes

OP = "host"
MODES = ("fwd", "both")
OURS, NO_LAUNCH, ON_CPU = "ours", "ours, no launch", "ours, on a CPU"
SIZES = Sizes(B=1, T=4, C=64, H=2, F=128, img_size=(16, 16), patch_size=8)
ROUNDS, CALLS = 35, 20  # short rounds: most of them run without another process in between


@dataclass(frozen=True)
class Case:
    """An op's call and what models of torch call for the same, on the same tensors."""

    inputs: dict[str, Tensor]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    calls: int = CALLS  # a round


def cases(device: torch.device) -> dict[str, Case]:
    return {name: _case(op, device) for name, op in OPS.items()}


def _case(op: Op, device: torch.device) -> Case:
    """With the tensors that most models give."""
    sizes, unusual = op.at(SIZES), tuple(n for n, arg in op.args.items() if not arg.usual)
    given = op.inputs(Example(sizes, without=unusual), Draw(device, torch.float32))
    inputs = {
        n: x.detach().requires_grad_(op.args[n].trained) for n, x in given.items() if x is not None
    }

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its options; of several outputs the first."""
        options = op.settings_of(sizes, device)
        if op.outputs > 1:
            return lambda **inputs: function(**inputs, **options)[0]
        return functools.partial(function, **options) if options else function

    return Case(inputs, first(op.function), first(op.eager or op.specification))


def models() -> tuple[str, ...]:
    """Names of swapped models of timm, where that is installed: a block, twelve layers."""
    names = "swapped block, C = 64", "swapped 12 layers, C = 64", "swapped 12 layers, C = 192"
    return names if find_spec("timm") is not None else ()


def swapped_case(name: str, device: torch.device) -> Case:
    """One image, or its tokens."""
    define_torchvision_operators()
    from timm.models.vision_transformer import Block, VisionTransformer

    C, calls = int(name.rpartition(" ")[2]), CALLS
    host, x = Block(C, C // 32, init_values=1e-5), torch.randn(SIZES.B, SIZES.T, C)
    if "block" not in name:
        host = VisionTransformer(
            img_size=32,
            patch_size=16,
            embed_dim=C,
            num_heads=C // 32,
            class_token=False,
            global_pool="avg",
            num_classes=10,
        )
        x, calls = torch.randn(SIZES.B, 3, 32, 32), max(CALLS // 5, 1)  # four patches
    swapped = copy.deepcopy(host.to(device))
    fk.swap_in(swapped)
    given = {"x": x.to(device).requires_grad_()}
    return Case(given, lambda x: swapped(x), lambda x: host(x), calls)


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


def ways(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Provider -> the context that it runs in; torch's modules first."""
    found: dict[str, Callable[[], Any]] = {BASELINE: ExitStack}
    if device.type == "cuda":
        return {**found, OURS: lambda: fk.backend("triton")}
    if HAS_TRITON and not INTERPRETED:
        return {**found, NO_LAUNCH: without_launches, ON_CPU: ExitStack}
    return {**found, ON_CPU: lambda: fk.backend("torch")}


def call_of(case: Case, provider: str, mode: str) -> Callable[[], Any]:
    """One call of the op, with its backward in mode "both"."""
    function, inputs = case.torch if provider == BASELINE else case.ours, case.inputs
    if mode == "fwd":
        return lambda: function(**inputs)
    upstream = torch.randn_like(case.torch(**inputs))
    return lambda: torch.autograd.backward(function(**inputs), upstream)


def microseconds(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of the host's processors, a call, over `calls` of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.process_time_ns()
    for _ in range(calls):
        call()
    return 1e-3 * (time.process_time_ns() - started) / calls


def measure_host(device: torch.device) -> Iterator[Row]:
    """A row for each op or model, provider and mode; its ms are the host's."""
    contexts = ways(device)

    def timed(case: Case, provider: str, call: Callable[[], Any]) -> float:
        with contexts[provider]():
            return microseconds(call, device, case.calls)

    swapped = {name: swapped_case(name, device) for name in models()}
    for name, case in (swapped | cases(device)).items():
        for mode in MODES:
            turns = [
                functools.partial(timed, case, provider, call_of(case, provider, mode))
                for provider in contexts
            ]
            # the first turn warms up
            found = [spread(us[1:]) for us in alternate(ROUNDS + 1, *turns)]
            for provider, us in zip(contexts, found, strict=True):
                ms, p20, p80 = (x / 1e3 for x in us)
                yield Row(
                    OP,
                    provider,
                    name,
                    "fp32",
                    mode,
                    T=SIZES.T,
                    ms=ms,
                    ms_p20=p20,
                    ms_p80=p80,
                    samples=ROUNDS * case.calls,
                    speedup=found[0].median / us.median,
                )
