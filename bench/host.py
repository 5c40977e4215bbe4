"""Host cost: microseconds of Python and dispatch a call of each op, ours beside torch's.

The tensors are so small that computing takes next to nothing. With a GPU, calls are enqueued and
not waited for. Without one everything but the launch itself still runs: checks, autograd.Function,
operator dispatch, allocation; `JITFunction.run` is replaced by nothing ("ours, no launch").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastvit_kernels as fk
from bench.providers import BASELINE, replaced
from bench.rows import Row
from bench.timer import median_p20_p80
from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, on_absent_gpu
from fastvit_kernels.runtime.triton import HAS_TRITON

OP = "host"
MODES = ("fwd", "both")
OURS, NO_LAUNCH, TORCH_PATH = "ours", "ours, no launch", "ours, PyTorch path"
B, T, C, H, HIDDEN = 1, 4, 64, 2, 128
ROUNDS, CALLS = 7, 100


@dataclass(frozen=True)
class Case:
    """An op's call and torch's modules for the same, on the same tensors."""

    inputs: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    torch: Callable[..., Tensor]


def cases(device: torch.device) -> dict[str, Case]:
    """By op name."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    norm = nn.LayerNorm(C, device=device)
    norm_weight, norm_bias = norm.weight, norm.bias
    proj = nn.Linear(C, C, device=device)
    proj_weight, proj_bias = proj.weight, proj.bias
    qkv_proj = nn.Linear(C, 3 * C, device=device)
    fc1, fc2 = nn.Linear(C, HIDDEN, device=device), nn.Linear(HIDDEN, C, device=device)
    conv = nn.Conv2d(3, C, 8, 8, device=device)
    pos = draw(1, T, C)
    x, residual, qkv = draw(B, T, C), draw(B, T, C), draw(B, T, 3, H, C // H)

    def torch_attention(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return {
        "layer_norm": Case((x,), lambda x: fk.layer_norm(x, norm_weight, norm_bias), norm),
        "linear": Case(
            (x, residual),
            lambda x, r: fk.linear(x, proj_weight, proj_bias, residual=r),
            lambda x, r: r + proj(x),
        ),
        "mlp": Case(
            (x, residual),
            lambda x, r: fk.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, residual=r),
            lambda x, r: r + fc2(F.gelu(fc1(x))),
        ),
        "attention": Case((qkv,), fk.attention, torch_attention),
        "qkv_attention": Case(
            (x,),
            lambda x: fk.qkv_attention(x, qkv_proj.weight, qkv_proj.bias, num_heads=H),
            lambda x: torch_attention(qkv_proj(x).unflatten(-1, (3, H, C // H))),
        ),
        "patch_embed": Case(
            (torch.randn(B, 3, 16, 16, device=device),),
            lambda im: fk.patch_embed(im, conv.weight, conv.bias, pos_embed=pos),
            lambda im: conv(im).flatten(2).transpose(1, 2) + pos,
        ),
    }  # fmt: skip


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, tensors count as on an H100 and kernels are not launched: outputs are garbage."""
    from triton.runtime.jit import JITFunction

    with ExitStack() as stack:
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
        found[NO_LAUNCH] = without_launches
    return {**found, TORCH_PATH: lambda: fk.backend("torch")}


def call_of(case: Case, provider: str, mode: str) -> Callable[[], Any]:
    """One call of the op, with its backward in mode "both"."""
    function = case.torch if provider == BASELINE else case.ours
    if mode == "fwd":
        return lambda: function(*case.inputs)
    upstream = torch.randn_like(case.torch(*case.inputs))
    return lambda: torch.autograd.backward(function(*case.inputs), upstream)


def microseconds(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of the host, a call, over `calls` of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - started) / calls


def measure_host(device: torch.device) -> Iterator[Row]:
    """A row for each op, provider and mode; its ms are the host's."""
    for name, case in cases(device).items():
        for mode in MODES:
            calls = {p: call_of(case, p, mode) for p in ways(device)}
            times: dict[str, list[float]] = {p: [] for p in calls}
            for turn in range(ROUNDS + 1):
                for provider, context in ways(device).items():
                    with context():
                        us = microseconds(calls[provider], device, CALLS)
                    if turn:  # the first one warms up
                        times[provider].append(us)
            eager = median_p20_p80(times[BASELINE])[0]
            for provider, us in times.items():
                ms, p20, p80 = (x / 1e3 for x in median_p20_p80(us))
                row = Row(OP, provider, name, "fp32", mode, B=B, T=T, samples=ROUNDS * CALLS)
                yield replace(row, ms=ms, ms_p20=p20, ms_p80=p80, speedup=eager / ms / 1e3)
