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
from fastvit_kernels.tools.aot import TARGETS

kernel = _load(Path(sys.argv[1])).chain_kernel
with tracing(TARGETS["sm_90"]) as trace, best_of_autotuned(trace):
    out, q, k = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (64, 64, 4096))
    kernel[(2000,)](out, q, k, 4096, M=64, D=64)
print(json.dumps([launch.kernel.config for launch in trace.launches]))
"""


def test_the_best_of_an_autotuned_kernel(tmp_path):
    (tmp_path / "small-peer.py").write_text(SOURCE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "small-peer.py")],
        env=environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # Eight warps on 64 rows do the first product twice, one warp has no wgmma.
    assert json.loads(result.stdout) == ["M=64 D=64 w4 s1"]


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
