"""peers.py: a peer's autotuned kernel takes the config of the least modelled time."""

import json
import os
import subprocess
import sys

import pytest

from tests.machine import peers

SOURCE = """
import triton
import triton.language as tl


@triton.autotune([triton.Config({}, num_warps=w, num_stages=1) for w in (8, 4, 1)], key=[])
@triton.jit
def chain_kernel(out_ptr, q_ptr, k_ptr, n, M: tl.constexpr, D: tl.constexpr):
    offs_m, offs_d = tl.arange(0, M), tl.arange(0, D)
    offs = offs_m[:, None] * D + offs_d[None, :]
    q, acc = tl.load(q_ptr + offs), tl.zeros((M, D), dtype=tl.float32)
    tl.assume(n > 0)
    for start in range(0, n, M):
        k = tl.load(k_ptr + start * D + offs)
        acc = tl.dot(tl.dot(q, tl.trans(k)).to(k.dtype), k, acc)
    tl.store(out_ptr + offs, acc.to(tl.bfloat16))
"""

PROGRAM = """
import json, sys, torch
from pathlib import Path
from tests.machine.peers import _load, best_of_autotuned
from tests.machine.launches import tracing
from tests.machine.aot import TARGETS

kernel = _load(Path(sys.argv[1])).chain_kernel
with tracing(TARGETS["sm_90"]) as trace, best_of_autotuned(trace):
    out, q, k = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (64, 64, 4096))
    kernel[(2000,)](out, q, k, 4096, M=64, D=64)
print(json.dumps([launch.kernel.config for launch in trace.launches]))
"""


def _printed(program, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_best_of_an_autotuned_kernel(tmp_path):
    (tmp_path / "small-peer.py").write_text(SOURCE)
    # Eight warps on 64 rows do the first product twice, one warp has no wgmma.
    assert _printed(PROGRAM, str(tmp_path / "small-peer.py")) == ["M=64 D=64 w4 s1"]


FLASH = """
import triton
import triton.language as tl

CONFIGS = [triton.Config({"M": M}, num_warps=4, num_stages=s) for M in (64, 128) for s in (2, 3)]


@triton.autotune(CONFIGS, key=[])
@triton.jit
def flash_kernel(out_ptr, q_ptr, k_ptr, v_ptr, rows, T, scale, D: tl.constexpr, M: tl.constexpr):
    N: tl.constexpr = 64
    q_desc = tl.make_tensor_descriptor(q_ptr, [rows, D], [D, 1], [M, D])
    k_desc = tl.make_tensor_descriptor(k_ptr, [rows, D], [D, 1], [N, D])
    v_desc = tl.make_tensor_descriptor(v_ptr, [rows, D], [D, 1], [N, D])
    first = tl.program_id(1) * T
    row = first + tl.program_id(0) * M
    q = q_desc.load([row, 0])
    largest = tl.full((M,), float("-inf"), dtype=tl.float32)
    total = tl.full((M,), 1.0, dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    for start in range(0, T, N):
        scores = tl.dot(q, k_desc.load([first + start, 0]).T)
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - larger[:, None])
        alpha = tl.math.exp2(largest - larger)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(q.dtype), v_desc.load([first + start, 0]), acc)
        largest = larger
    offs = (row + tl.arange(0, M))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out_ptr + offs, (acc / total[:, None]).to(q.dtype))
"""

FLASH_PROGRAM = """
import json, sys, torch
from pathlib import Path
from tests.machine.examine import timed
from tests.machine.launches import tracing
from tests.machine.peers import _load, best_of_autotuned
from tests.machine.aot import TARGETS

kernel, heads, rates = _load(Path(sys.argv[1])).flash_kernel, 1024, {}
for T in (512, 1024, 2048):
    out, q, k, v = (torch.empty(heads * T, 64, dtype=torch.float16) for _ in range(4))
    with tracing(TARGETS["sm_90"]) as trace, best_of_autotuned(trace):
        kernel[lambda given: (T // given["M"], heads)](out, q, k, v, heads * T, T, 0.1, D=64)
    rates[T] = 4 * heads * T * T * 64 / timed(trace.launches[0]).modelled.us * 1e-6
print(json.dumps(rates))
"""


def test_the_model_gives_the_published_rate_of_attention(tmp_path):
    """Plain flash attention in Triton, forward, D = 64, on an H100: arXiv:2407.08608, figure 5."""
    (tmp_path / "flash.py").write_text(FLASH)
    modelled = _printed(FLASH_PROGRAM, str(tmp_path / "flash.py"))
    assert modelled == pytest.approx({"512": 340, "1024": 382, "2048": 396}, rel=0.05)


GEMM_PROGRAM = """
import json, torch
from fastvit_kernels import linear
from fastvit_kernels.ops.common.gemm_configs import forced_route
from tests.machine.aot import TARGETS
from tests.machine.examine import timed
from tests.machine.launches import tracing

rates, half = {}, {"dtype": torch.bfloat16}
for K in (512, 1024, 2048):
    with tracing(TARGETS["sm_90"]) as trace, forced_route("triton"), torch.no_grad():
        x, weight = (torch.empty(8192, K, **half) for _ in range(2))
        linear(x, weight, torch.empty(8192, **half), activation="silu")
    rates[K] = 2 * 8192 * 8192 * K / timed(trace.launches[-1]).modelled.us * 1e-6
print(json.dumps(rates))
"""


def test_the_model_gives_the_published_rate_of_products():
    """Ours with SiLU beside triton's tutorial gluon/07, persistent, without one, on an H100."""
    assert _printed(GEMM_PROGRAM) == pytest.approx({"512": 540, "1024": 603, "2048": 626}, rel=0.15)


TURNS_PROGRAM = """
import torch
from fastvit_kernels import attention
from fastvit_kernels.ops.attention.configs import PINGPONG_FWD
from fastvit_kernels.runtime.configs import forced
from tests.machine.aot import TARGETS
from tests.machine.examine import timed
from tests.machine.launches import tracing

with tracing(TARGETS["sm_90"]) as trace, forced("attention_fwd", PINGPONG_FWD):
    attention(torch.empty(16, 8448, 3, 16, 128, dtype=torch.float16))
(launch,) = trace.launches
assert "pingpong" in launch.kernel.kernel
print(64 * 16 * 8448**2 * 128 / timed(launch).modelled.us * 1e-6)
"""


def test_the_model_gives_the_published_rate_of_groups_side_by_side():
    """FlashAttention-3 on an H100 with warp specialisation, but no products under a group's own
    softmax (arXiv:2407.08608, table 2), TFLOP/s."""
    assert _printed(TURNS_PROGRAM) == pytest.approx(582, rel=0.12)


MEASURED_PROGRAM = """
import json, torch
from contextlib import ExitStack
from fastvit_kernels import attention, linear
from fastvit_kernels.ops.common.gemm_configs import SPECIALIZED, TMA_PAIR, TMA_TILE
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.runtime.configs import forced
from tests.machine.aot import TARGETS
from tests.machine import loop_model
from tests.machine.examine import timed
from tests.machine.launches import tracing

loop_model.ROOFS["sm_90"] = loop_model.H100

def tensor(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)

def us(name, step, **tables):
    with tracing(TARGETS["sm_90"]) as trace, ExitStack() as stack:
        for table, config in tables.items():
            stack.enter_context(forced(table, config))
        step()
    return next(timed(x).modelled.us for x in trace.launches if name in x.kernel.kernel)

name = "gemm_warp_specialized"

def linear_of(K, N, **options):
    x = tensor(256, 197, K)
    residual = None if options else tensor(256, 197, N).float()
    linear(x, tensor(N, K), tensor(N), residual=residual, **options)

def fc1():
    linear_of(768, 3072, activation="gelu")

def hidden():
    x = tensor(256, 197, 768)
    mlp(x, tensor(3072, 768), tensor(3072), tensor(768, 3072), tensor(768)).backward(x)

print(json.dumps({
    "fc1": us("linear", fc1, linear_fwd=TMA_PAIR),
    "fc1 by roles": us(name, fc1, linear_fwd=SPECIALIZED),
    "proj": us("linear", lambda: linear_of(768, 768)),
    "fc2": us("linear", lambda: linear_of(3072, 768)),
    "hidden gradient": us("hidden", hidden, mlp_bwd_hidden=TMA_TILE),
    "dz by roles": us(name, hidden, linear_fwd=TMA_PAIR, mlp_bwd_hidden=SPECIALIZED),
    **{f"attention, T = {T}": us("attention_fwd", lambda: attention(tensor(B, T, 3, 12, 64)))
       for T, B in ((197, 256), (577, 44))},
}))
"""


def test_the_model_is_near_what_an_h100_measured():
    """bench/results/h100-80gb-hbm3, by that GPU's copies and clock; ours, ViT-B."""
    measured = {
        "fc1": 553,
        "fc1 by roles": 451,
        "proj": 189,
        "fc2": 408,
        "hidden gradient": 764,
        "dz by roles": 487,
        "attention, T = 197": 118,
        "attention, T = 577": 141,
    }
    assert _printed(MEASURED_PROGRAM) == pytest.approx(measured, rel=0.2)


def test_the_command_compares_by_the_model_alone():
    """Ours is compiled for a GPU that is absent; a backward takes longer than its forward."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.machine.peers", "--tokens", "197"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    assert "modelled microseconds, not measured; batch\n256, 12 heads of 64, bf16" in result.stdout
    *_, line = result.stdout.splitlines()
    name, tokens, forward, backward, *_, faults = line.split()
    assert (name, tokens, faults) == ("ours", "197", "0") and 0 < int(forward) < int(backward)


@pytest.mark.parametrize("flag", ["--tokens", "--heads", "--head-dim", "--batch"])
def test_sizes_that_are_none(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers", flag, "0"])
    with pytest.raises(SystemExit):
        peers.main()
    assert f"error: argument {flag}" in capsys.readouterr().err.splitlines()[-1]
