"""The rules of faults.py and the model, on small kernels compiled for GPUs not there.

Each rule is broken by a kernel that is about it; another kernel keeps them all.
"""

import json

import pytest
import triton

from fastvit_kernels.runtime.compat import version_of
from tests.machine import faults
from tests.machine.processes import python
from tests.machine.ptx import Ptx

SOURCE = '''
import triton
import triton.language as tl


@triton.jit
def chain_kernel(
    out_ptr, q_ptr, k_ptr, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, RUNS: tl.constexpr
):
    """out = sum over tiles of (q k^T) k, the last tile by itself.

    With RUNS the compiler knows that the loop is entered; without, ptxas serialises its products.
    """
    offs_m, offs_n, offs_d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :])
    acc = tl.zeros((M, D), dtype=tl.float32)
    if RUNS:
        tl.assume(n > 0)
    for start in range(0, n, N):
        k = tl.load(k_ptr + (start + offs_n)[:, None] * D + offs_d[None, :])
        s = tl.dot(q, tl.trans(k))
        acc = acc * 0.5
        acc = tl.dot(s.to(k.dtype), k, acc)
    k = tl.load(k_ptr + (n + offs_n)[:, None] * D + offs_d[None, :])
    acc = tl.dot(tl.dot(q, tl.trans(k)).to(k.dtype), k, acc)
    tl.store(out_ptr + offs_m[:, None] * D + offs_d[None, :], acc.to(tl.bfloat16))
'''

# name -> (arch, M, N, D, warps, stages, loop runs)
KERNELS = {
    "may be empty": ("sm_90", 64, 64, 64, 4, 3, False),
    "runs": ("sm_90", 64, 64, 64, 4, 1, True),
    "pipelined": ("sm_90", 64, 64, 64, 4, 3, True),
    "eight warps": ("sm_90", 64, 64, 64, 8, 1, True),
    "narrow": ("sm_90", 64, 16, 64, 8, 1, True),
    "spills": ("sm_80", 64, 64, 128, 1, 2, True),
    "tcgen05, pipelined": ("sm_103", 128, 64, 64, 4, 3, True),
    "tcgen05": ("sm_103", 128, 64, 64, 4, 1, True),
}

PROGRAM = """
import json, sys, torch
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
import small_kernels
from tests.machine.launches import tracing
from tests.machine.aot import TARGETS
from tests.machine.examine import ROOFS, examine, timed

found = {}
for name, (arch, M, N, D, warps, stages, runs) in json.loads(sys.argv[2]).items():
    times = []
    for n in (N, 8 * N):
        with tracing(TARGETS[arch]) as trace:
            out, q, k = (torch.empty(r, D, dtype=torch.bfloat16) for r in (M, M, n + N))
            small_kernels.chain_kernel[lambda given: (1000 * given["M"] // M,)](
                out, q, k, n, M=M, N=N, D=D, RUNS=runs, num_warps=warps, num_stages=stages
            )
        if arch in ROOFS:
            times.append(timed(trace.launches[0]).modelled)
    kernel = examine(trace.launches[0])
    found[name] = asdict(kernel) | {
        "us": [m.us for m in times], "products_done": [m.multiply_adds for m in times]
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "small_kernels.py").write_text(SOURCE)
    return json.loads(python("-c", PROGRAM, folder, json.dumps(KERNELS)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("may be empty", ("serialises wgmma (C7515)", "waits 8 times for 8 HGMMA", "cp.async")),
        ("runs", ()),
        ("pipelined", ("tensor cores read 1 buffers of cp.async without fence.proxy.async",)),
        ("tcgen05, pipelined", ("tensor cores read 1 buffers of cp.async",)),
        ("tcgen05", ()),
        ("eight warps", ("2 products computed more than once: 64x64 on 8x1 warps, 2 times",)),
        ("narrow", ("products of 8 columns an instruction (HGMMA.64x8x16.F32.BF16)",)),
    ],
)
def test_each_fault_found(compiled, name, expected):
    found = compiled[name]["faults"]
    if version_of(triton.__version__) >= (3, 7, 1):  # it fences what cp.async wrote
        expected = tuple(part for part in expected if "cp.async" not in part)
    assert len(found) == len(expected)
    assert all(part in fault for part, fault in zip(expected, found, strict=True))


COPY = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10;"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30}, %rd8, %rd9, 1, 1, 1, 0, 0;"
FENCE, WAIT, WAIT_1 = (
    f"{op};" for op in ("fence.proxy.async", "cp.async.wait_group 0", "cp.async.wait_group 1")
)


@pytest.mark.parametrize(
    ("lines", "unfenced"),
    [
        ([COPY, WAIT, PRODUCT], True),
        ([COPY, WAIT_1, FENCE, WAIT_1, PRODUCT], True),  # what was still under way has landed
        ([COPY, WAIT, FENCE, WAIT, PRODUCT], False),  # nothing was
        ([COPY, PRODUCT], False),  # reads another buffer: nothing has landed
        ([COPY, WAIT, "bra ON;", PRODUCT, "ON:"], False),  # never reached
        (["AGAIN:", PRODUCT, COPY, WAIT, "@%p2 bra AGAIN;"], True),  # round the loop
        (["AGAIN:", PRODUCT, COPY, WAIT, FENCE, "@%p2 bra AGAIN;"], False),
    ],
)
def test_unfenced_copies_found(lines, unfenced):
    """On each path, whether or not this triton adds the fence."""
    kernel = Ptx(f".visible .entry k()\n.reqntid 128\n{{\n{chr(10).join(lines)}\nret;\n}}\n")
    assert faults._reads_before_fence(kernel) == unfenced


def test_spills_are_seen(compiled):
    assert compiled["spills"]["spills"] > 0 and compiled["runs"]["spills"] == 0


def test_hot_loop(compiled):
    # 64 x 64 x 64 twice: 8 HGMMA of 32 cycles on a sub-core's tensor core, that nothing exceeds.
    assert compiled["runs"]["hot_loop"] == "tensor 256" and compiled["runs"]["products"] == "2/8"
    assert compiled["may be empty"]["products"] == "8/8"
    assert compiled["spills"]["products"] == ""  # mma.sync does not wait


def test_products_done_are_counted(compiled):
    tile = 2 * 64 * 64 * 64  # multiply-adds of both products, 1000 programs
    assert compiled["runs"]["products_done"] == pytest.approx([2000 * tile, 9000 * tile])
    # By mma, and heads twice as wide.
    assert compiled["spills"]["products_done"] == pytest.approx([4000 * tile, 18000 * tile])
    # Eight warps compute the first of the two twice.
    assert compiled["eight warps"]["products_done"] == pytest.approx([3000 * tile, 13500 * tile])


def test_modelled_time_grows_with_loop_and_faults(compiled):
    for kernel in (kernel for kernel in compiled.values() if kernel["us"]):
        short, long = kernel["us"]
        assert 1.5 * short < long < 9 * short
    assert compiled["eight warps"]["us"][1] > 1.2 * compiled["runs"]["us"][1]
