"""python -m tests.machine.device.gluon CASE...: the kernels in Gluon, which run nowhere else here.

Their warps have roles, so each case says in which order groups of warps go. By the 2x rule, the
same bits twice, and as many launches of each kernel as the case says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.runner import poisoned
from fastvit_kernels.ops.attention.configs import FUSED_DQ, own_bwd, own_fwd
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention_ref
from fastvit_kernels.ops.common.gemm_configs import SPECIALIZED, TMA_STORES
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp_ref
from fastvit_kernels.ops.linear import linear_ref
from fastvit_kernels.ops.mlp import mlp_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import torch_sdpa
from fastvit_kernels.runtime.configs import forced

from .driver import ptx_machine
from .kernels import training_fault


class Call(NamedTuple):
    """An op, what it computes, and its arguments."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: dict[str, Tensor]


@dataclass
class Run:
    """How a call runs: kernels that it launches, by name without what all names share."""

    launches: dict[str, int]
    configs: dict[str, Any] = field(default_factory=dict)  # forced, by table
    num_sms: int = 2
    unpack: Callable[[Tensor], Tensor] | None = None  # what a hook brings back of a saved tensor


Draw = Callable[..., Tensor]
Case = Callable[[Draw], tuple[Call, Run]]


def _off_16(x: Tensor) -> Tensor:
    """Two bytes behind a place where a tensor map may begin."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def _attention(rand: Draw, T: int, D: int, B: int = 2, scale: float = 0.3) -> Call:
    inputs = {"qkv": rand(B, T, 3, 3, D)}
    return Call(partial(fk.attention, scale=scale), partial(attention_ref, scale=scale), inputs)


def _separate(rand: Draw, T: int, D: int) -> Call:
    """Heads before tokens in memory."""
    inputs = {name: rand(1, 3, T, D) for name in ("query", "key", "value")}
    function = partial(fk.scaled_dot_product_attention, scale=0.3)
    return Call(function, partial(torch_sdpa, scale=0.3), inputs)


def _projected(rand: Draw, T: int, D: int, B: int = 2) -> Call:
    """Whose bias has a gradient that the backward sums."""
    inputs = {"x": rand(B, T, 40), "weight": rand(9 * D, 40, scale=0.3), "bias": rand(9 * D)}
    run: dict[str, Any] = dict(scale=0.3, num_heads=3)
    return Call(partial(fk.qkv_attention, **run), partial(qkv_attention_ref, **run), inputs)


def _forward(T: int, D: int, **options: float) -> Case:
    """Six heads on two SMs: rings go round, and groups have tiles of several heads."""
    run = Run({"fwd_pingpong": 1, "bwd_pingpong": 0}, {"attention_bwd": own_bwd})
    return lambda rand: (_attention(rand, T, D, **options), run)


def _backward(T: int, D: int, call: Callable[..., Call] = _attention, **changes: Any) -> Case:
    run = Run({"fwd_pingpong": 0, "bwd_pingpong": 1}, {"attention_fwd": own_fwd})
    return lambda rand: (call(rand, T, D), replace(run, **changes))


def _five_products(T: int, D: int, call: Callable[..., Call], num_sms: int, **options: int) -> Case:
    """Three heads on one SM go round the rings; on two a head is dealt whole to each, and the third
    in parts, which a second kernel sums."""
    launches = {"bwd_fused_dq": 1, "bwd_sum_parts": int(num_sms == 2)}
    configs = {"attention_fwd": own_fwd, "attention_bwd": FUSED_DQ}

    def case(rand: Draw) -> tuple[Call, Run]:
        return call(rand, T, D, **options), Run(launches, configs, num_sms)

    return case


def _gemm(mlp: bool, activation: str = "gelu", config: Any = SPECIALIZED, **options: Any) -> Case:
    """Six tiles of 128 x 256, the last of each axis in part, K in four, on two SMs."""
    B, T, C, N = 4, 65, 200, 392
    own = dict(linear_fwd=config, mlp_bwd_hidden=config)

    def case(rand: Draw) -> tuple[Call, Run]:
        x, weight, bias = rand(B, T, C), rand(N, C), rand(N)  # wide: erf takes both its branches
        if not mlp:
            linear = partial(fk.linear, activation=activation)
            reference = partial(linear_ref, activation=activation)
            inputs = dict(x=x, weight=weight, bias=bias)
            return Call(linear, reference, inputs), Run({"gemm_warp_specialized": 1}, own)
        inputs = dict(x=x, fc1_weight=weight, fc1_bias=bias, residual=rand(B, T, C))
        inputs |= dict(fc2_weight=rand(C, N, scale=N**-0.5), fc2_bias=rand(C))
        function = partial(fk.mlp, activation=activation, **options)
        unpack = (lambda x: _off_16(x) if x.shape == (B, T, N) else x) if options else None
        run = Run({"gemm_warp_specialized": 2}, own, unpack=unpack)  # fc1 and the hidden gradient
        return Call(function, partial(mlp_ref, activation=activation), inputs), run

    return case


def _gated(packed: bool = True, **options: Any) -> Case:
    """Six tiles of 128 x 128 twice, the last of each axis in part, K in four, on two SMs."""
    B, T, C, F = 4, 65, 104, 200
    options |= {} if packed else dict(fc1_bias=None)

    def case(rand: Draw) -> tuple[Call, Run]:
        rows = 2 * F if packed else F
        inputs = dict(x=rand(B, T, C), fc1_weight=rand(rows, C, scale=C**-0.5), fc1_bias=rand(rows))
        inputs |= dict(fc2_weight=rand(C, F, scale=F**-0.5), fc2_bias=rand(C))
        if not packed:
            inputs |= dict(gate_weight=rand(F, C, scale=C**-0.5))
            del inputs["fc1_bias"]
        call = Call(partial(fk.gated_mlp, **options), partial(gated_mlp_ref, **options), inputs)
        return call, Run({"gated_warp_specialized": 1}, dict(gated_mlp_hidden=TMA_STORES))

    return case


KINDS = ("forward", "backward", "five products", "GEMM", "gated MLP")
# By name, which begins with its kind; with dtype and order of the groups: execution.py's Launch.
CASES: dict[str, tuple[Case, str, int]] = {
    "forward, T=257, D=64": (_forward(257, 64), "float16", 1),
    "forward, T=150, D=56": (_forward(150, 56), "float16", 0),
    # By so large a scale the keys' chunks have maxima that differ by more than an exponent can.
    "forward, T=350, large scores": (_forward(350, 64, scale=40.0), "bfloat16", 1),
    "forward, T=197, D=128": (_forward(197, 128), "bfloat16", 1),
    "forward, T=100, D=32": (_forward(100, 32), "bfloat16", 1),
    "backward, T=197": (_backward(197, 64), "bfloat16", 1),
    "backward, T=150": (_backward(150, 64), "float16", 0),
    "backward, T=256, saved off 16 bytes": (_backward(256, 64, unpack=_off_16), "bfloat16", 1),
    "backward of a projection": (_backward(197, 64, _projected), "bfloat16", 1),
    "five products, packed": (_five_products(290, 64, _attention, 2, B=1), "bfloat16", 0),
    "five products, separate": (_five_products(385, 56, _separate, 2), "float16", 1),
    "five products of a projection": (_five_products(290, 56, _projected, 1, B=1), "float16", 1),
    "five products, D=128": (_five_products(258, 128, _attention, 2, B=1), "bfloat16", 1),
    "five products of a projection, D=72": (
        _five_products(258, 72, _projected, 1, B=1),
        "float16",
        1,
    ),
    "five products, D=32": (_five_products(258, 32, _attention, 2, B=1), "float16", 1),
    "GEMM": (_gemm(mlp=False), "bfloat16", 0),
    "GEMM of an MLP": (_gemm(mlp=True), "float16", 1),
    "GEMM of an MLP, rebuilt": (_gemm(True, "gelu_tanh", recompute=True), "bfloat16", 1),
    "GEMM stored by TMA": (_gemm(False, config=TMA_STORES), "float16", 1),
    "GEMM of an MLP, stored by TMA": (_gemm(True, config=TMA_STORES), "bfloat16", 0),
    "GEMM of an MLP, rebuilt, stored by TMA": (
        _gemm(True, "gelu_tanh", TMA_STORES, recompute=True),
        "float16",
        1,
    ),
    "gated MLP": (_gated(), "bfloat16", 0),
    "gated MLP, the gate last": (_gated(activation="gelu", gate_last=True), "float16", 1),
    "gated MLP of separate weights": (_gated(packed=False), "bfloat16", 1),
}


def run(name: str) -> None:
    case, precision, order = CASES[name]
    dtype, generator = getattr(torch, precision), torch.Generator().manual_seed(0)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

    call, how = case(rand)
    reference = Reference(call.reference, call.inputs, dtype=dtype)
    found = []
    with ExitStack() as stack:
        machine = stack.enter_context(ptx_machine("sm_90", order=order))
        gpu = Gpu("sm_90", num_sms=how.num_sms, shared_limit=232448)
        stack.enter_context(on_absent_gpu(gpu))
        for table, config in how.configs.items():
            stack.enter_context(forced(table, config))
        stack.enter_context(poisoned())
        if how.unpack:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, how.unpack)
            stack.enter_context(hooks)
        for _ in range(2):
            outputs, grads = reference.run(call.function)
            found.append([*outputs, *grads.values()])
    for kernel, count in how.launches.items():
        launched = [n for k, n in machine.launches.items() if kernel in k]
        assert sum(launched) == 2 * count, (name, kernel, machine.launches)
    assert all(map(torch.equal, *found)), f"{name}: other bits the second time"
    errors = reference.judge(outputs, grads)
    assert all(e.passed for e in errors), (name, *map(str, errors))


def train(dtype: torch.dtype) -> None:
    """Two steps of SGD of a ViT of two layers, 145 tokens, two heads of 64, on default routes."""
    gpu = Gpu("sm_90", num_sms=4, shared_limit=232448)
    with ptx_machine("sm_90", order=1) as machine, on_absent_gpu(gpu):
        fault = training_fault(dtype, nullcontext, steps=2, img_size=(96, 96), embed_dim=128)
    blocks = 2 * 2  # steps, layers
    for way in ("fwd", "bwd"):
        assert machine.launches[f"_attention_{way}_pingpong_kernel"] == blocks, machine.launches
    assert machine.launches["_gemm_warp_specialized_kernel"] == 2 * blocks  # fc1, hidden gradient
    assert fault is None, fault


if __name__ == "__main__":
    for words in sys.argv[1:]:
        run(words) if words in CASES else train(getattr(torch, words))
        print(f"right: {words}")
