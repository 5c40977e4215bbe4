"""Attention by the model of loop_model.py, beside Triton kernels of others.

    python -m tests.machine.peers --arch sm_90 --tokens 197 257 577 1025 \\
        --tutorial 06-fused-attention.py --flash-attn flash_attn_triton.py

Compiles each peer's own code for the named GPU (none need be there), takes the best of its
autotuned configs by the model, and prints modelled microseconds. Nothing here is a measurement. The
files are those of triton's tutorials (python/tutorials/) and of flash-attention (flash_attn/); none
is part of this repository. The tutorial takes fp16 and multiples of 128 tokens, so its rows are for
T padded up to one.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from fastvit_kernels import attention
from fastvit_kernels.commands.console import aligned
from fastvit_kernels.commands.options import add, positive
from fastvit_kernels.ops.attention.configs import forced_route
from tests.machine.aot import TARGETS, CompileError

from .examine import timed
from .faults import faults
from .launches import Trace, tracing
from .loop_model import ROOFS
from .ranking import trace_time

# (B, T, H, D) -> the output of a forward, and what its backward takes
Run = Callable[[int, int, int, int], tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def best_of_autotuned(trace: Trace) -> Iterator[None]:
    """Inside, an autotuned kernel launches the config of the least modelled time."""
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        found, calls, refused = [], len(trace.torch_calls), None
        for config in self.prune_configs(kwargs):
            options = config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **options})
            try:
                self.fn.run(*args, **kwargs, **options)
            except CompileError as error:
                refused = error
                continue
            launch = trace.launches.pop()
            if launch.kernel.shared <= launch.kernel.shared_limit:
                us, own = timed(launch).modelled.us, trace.torch_calls[calls:]
                found.append((us, len(found), launch, own))
            del trace.torch_calls[calls:]
        if not found:
            raise refused or CompileError("no config fits")
        _, _, launch, own = min(found)
        trace.launches.append(launch)
        trace.torch_calls += own

    with mock.patch.object(Autotuner, "run", run):
        yield


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Triton looks for the source
    spec.loader.exec_module(module)
    return module


def _ours(B: int, T: int, H: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = attention(torch.empty(B, T, 3, H, D, dtype=torch.bfloat16, requires_grad=True))
    return out, torch.empty_like(out)


def _tutorial(path: Path) -> Run:
    module = _load(path)
    module.supports_host_descriptor = lambda: False  # descriptors are made in the kernel
    names = list(inspect.signature(module._attention.forward).parameters)[4:]

    def run(B: int, T: int, H: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
        T = -(-T // 128) * 128
        q, k, v = (
            torch.empty(B, H, T, D, dtype=torch.float16, requires_grad=True) for _ in range(3)
        )
        given = {"causal": False, "sm_scale": D**-0.5}
        out = module._attention.apply(q, k, v, *(given.get(name, False) for name in names))
        return out, torch.empty_like(out)

    return run


def _flash_attn(path: Path) -> Run:
    module = _load(path)

    def run(B: int, T: int, H: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.empty(B, T, 3, H, D, dtype=torch.bfloat16, requires_grad=True)
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            out = module.flash_attn_qkvpacked_func(qkv, None, False, None)
        return out, torch.empty_like(out)

    return run


class Row(NamedTuple):
    provider: str
    T: int
    fwd: str
    bwd: str
    bound: str
    faults: str


def _row(provider: str, run: Run, arch: str, B: int, T: int, H: int, D: int) -> Row:
    ours = forced_route("triton")  # at any T
    with ours, tracing(TARGETS[arch]) as trace, best_of_autotuned(trace):
        try:
            out, upstream = run(B, T, H, D)
            fwd, launches = trace_time(trace, arch)
            out.backward(upstream)
        except CompileError as error:
            return Row(provider, T, "does not compile", "", str(error).splitlines()[0], "")
        total, _ = trace_time(trace, arch)
    heaviest = max(launches, key=lambda one: one.modelled.us)
    codes = {id(launch.code): launch.code for launch in trace.launches}.values()
    wrong = sum(len(faults(code)) for code in codes if code is not None)
    return Row(provider, T, f"{fwd:.0f}", f"{total - fwd:.0f}", heaviest.modelled.bound, str(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90", choices=list(ROOFS))
    parser.add_argument("--tokens", nargs="+", type=positive(int), default=[197, 257, 577, 1025])
    add(parser, "--batch", default=256)
    parser.add_argument("--heads", type=positive(int), default=12)
    parser.add_argument("--head-dim", type=positive(int), default=64)
    parser.add_argument("--tutorial", type=Path, help="triton's 06-fused-attention.py")
    parser.add_argument("--flash-attn", type=Path, help="flash-attention's flash_attn_triton.py")
    args = parser.parse_args()
    capability = divmod(int(args.arch.removeprefix("sm_")), 10)
    providers: dict[str, Run] = {"ours": _ours}
    with (
        tracing(TARGETS[args.arch]),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        from triton.runtime.driver import driver

        active: Any = driver.active
        active.get_active_torch_device = lambda: torch.device("cpu")
        if args.tutorial is not None:
            providers["Triton tutorial 06"] = _tutorial(args.tutorial)
        if args.flash_attn is not None:
            providers["flash_attn_triton"] = _flash_attn(args.flash_attn)
    print(f"{args.arch}, {ROOFS[args.arch].gpu}: modelled microseconds, not measured; batch")
    print(f"{args.batch}, {args.heads} heads of {args.head_dim}, bf16\n")
    rows = []
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        for T in args.tokens:
            for name, run in providers.items():
                rows.append(_row(name, run, args.arch, args.batch, T, args.heads, args.head_dim))
                print(*rows[-1], file=sys.stderr, flush=True)
    header = ("provider", "T", "forward", "backward", "forward's bound", "faults")
    print(aligned([header, *(tuple(map(str, row)) for row in rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
