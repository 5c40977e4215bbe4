"""The model of a kernel's time, and the readers of SASS and PTX under it: on small recorded pieces,
and against what is published and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.machine import faults, ptx, sass, scalar
from tests.machine.loop_model import ROOFS, Work, launch_time
from tests.machine.ptx import Ptx

# A wait stands behind the kernel's end: it jumps back into the loop, and is not another one.
WAITS = """
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R2], R3 ;
        /*0020*/              @!P3 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   FADD R4, R4, R4 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R2], R3 ;
        /*0070*/              @!P3 BRA `(.L_x_2) ;
        /*0080*/                   BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize("branch", ["@!P3 BRA", "@!UP3 BRA", "BRA UP3,"])
def test_sass_predicated_branch_falls_through(branch):
    """Whether it stands before the instruction or, a uniform one, among its operands."""
    text = WAITS.replace("@!P3 BRA", branch)
    outer, spin = sass.loops(sass.instructions(text))
    assert (outer.first, spin.first) == (0x10, 0x60)


# for (k = 0; k < cdiv(n, 64); k++) where program 3 of 4 leaves at once.
PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid 128
{
	.reg .pred 	%p<5>;
	.loc	1 3 0
	ld.param.b32 	%r1, [kernel_param_1];
	mov.u32 	%r2, %ctaid.x;
	setp.eq.s32 	%p1, %r2, 3;
	@%p1 bra 	$L__BB0_3;
// %bb.1:
	add.s32 	%r3, %r1, 63;
	shr.s32 	%r4, %r3, 6;
	mov.b32 	%r5, 0;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
$L__tmp7:
	setp.lt.s32 	%p3, %r5, 2;
	selp.b32 	%r7, 16, 0, %p3;
	cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10, %r7;
	ld.shared.v4.b32 	{%r20, %r21, %r22, %r23}, [%r9];
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30,%r31}, %rd8, %rd9, 1, 1, 1, 0, 0;
	ex2.approx.ftz.f32 	%r40, %r41;
	add.s32 	%r5, %r5, 1;
	setp.lt.s32 	%p2, %r5, %r4;
	@%p2 bra 	$L__BB0_2;
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
$L__BB0_3:
	ret;
}
"""


@pytest.mark.parametrize(("n", "trips"), [(1, 1), (64, 1), (65, 2), (577, 10)])
def test_ptx_trip_counts(n, trips):
    kernel = ptx.Ptx(PTX)
    assert kernel.num_warps == 4 and len(kernel.loops) == 1
    ((first, blocks),) = kernel.loops
    run = kernel.executions([None, n], (0,), (4,))
    assert blocks == {first} and run.blocks[first] == trips and not run.guessed
    assert run.copied == 16 * min(trips, 2)  # masked copies move nothing
    assert kernel.executions([None, n], (3,), (4,)).blocks[first] == 0
    assert kernel.executions([None, None], (0,), (4,)).guessed


@pytest.mark.parametrize("leaves", [False, True], ids=["jumps-back", "jumps-out"])
def test_ptx_loop_bounds_in_memory(leaves):
    text = PTX.replace(
        "setp.lt.s32 \t%p2, %r5, %r4;", "ld.shared.b32 %r4, [%r9]; setp.lt.s32 %p2, %r5, %r4;"
    )
    if leaves:
        text = text.replace("@%p2 bra \t$L__BB0_2;", "@!%p2 bra $L__BB0_3; bra.uni $L__BB0_2;")
    kernel = ptx.Ptx(text)
    ((first, _),) = kernel.loops
    for trips in (1, 4):
        run = kernel.executions([None, 577], (0,), (4,), trips=trips)
        assert run.blocks[first] == trips and not run.guessed


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("add.s32 %r9, %r1, -3", 4),
        ("mul.wide.s32 %rd9, %r2, %r1", -14),
        ("mad.lo.s32 %r9, %r1, %r1, 1", 50),
        ("div.s32 %r9, -7, %r2", 3),
        ("rem.s32 %r9, -7, 4", -3),
        ("div.u32 %r9, %r1, 0", None),
        ("shr.s32 %r9, %r2, 1", -1),
        ("shr.u32 %r9, %r2, 31", 1),
        ("and.b32 %r9, %r1, 3", 3),
        ("bfe.u32 %r9, %r1, 1, 2", 3),
        ("mul.hi.u32 %r9, %r1, %r1", None),
        ("setp.ge.s32 %p9, %r1, 7", 1),
        ("setp.hi.u32 %p9, %r2, %r1", 1),
        ("selp.b32 %r9, 5, 6, %p7", None),
        ("ld.param.b32 %r9, [%r1]", 7),
        ("cvt.s64.s32 %rd9, %r2", -2),
        ("not.b32 %r9, %r2", 1),
        ("selp.b32 %r9, 5, 6, %p1", 5),
        ("setp.lt.u32 %p9, %r1, %r2", 1),  # -2 is large without its sign
        ("setp.lt.s32 %p9, %r1, %r2", 0),
        ("and.pred %p9, %p1, %p1", 1),
        ("add.f32 %r9, %r1, %r1", None),
    ],
    ids=str,
)
def test_ptx_arithmetic(line, value):
    name, _, operands = line.partition(" ")
    op = ptx.Op("", name, tuple(part.strip() for part in operands.split(",")))
    registers = {"%r1": 7, "%r2": -2, "%p1": 1, "%rd1": 64}
    assert scalar.evaluator(op)(registers) == value


def test_resident_programs_hide_chains():
    """300 programs on 132 SMs come in three turns; where two are resident in two."""
    done = Work({"tensor": 1000.0}, 5000.0, 1e6, 6e5, False)
    given = dict(programs=300, num_warps=8, tensor_bytes=0)
    parts = [launch_time(done, ROOFS["sm_90"], resident=n, **given).parts for n in (1, 2)]
    assert [part["chain"] * 1.52e3 for part in parts] == pytest.approx([15000, 10000])


def _ptx(*lines):
    body = "\n".join(f"\t{line};" if not line.endswith(":") else line for line in lines)
    return Ptx(f".visible .entry k(\n)\n.reqntid 128\n{{\n{body}\n\tret;\n}}\n")


COPY = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30}, %rd8, %rd9, 1, 1, 1, 0, 0"
FENCE, ALL, SUBSET = "fence.proxy.async", "cp.async.wait_group 0", "cp.async.wait_group 1"
BACK = ["@%p2 bra $L__BB0_1"]


@pytest.mark.parametrize(
    ("lines", "unfenced"),
    [
        ([COPY, ALL, PRODUCT], True),
        ([COPY, ALL, FENCE, PRODUCT], False),
        ([COPY, "cp.async.wait_all", PRODUCT], True),
        ([COPY, SUBSET, FENCE, PRODUCT], False),
        ([COPY, SUBSET, FENCE, SUBSET, PRODUCT], True),  # what was still under way has landed
        ([COPY, ALL, FENCE, ALL, PRODUCT], False),  # nothing was
        ([COPY, "cp.async.wait_all", FENCE, "cp.async.wait_all", PRODUCT], False),
        ([ALL, PRODUCT], False),
        ([COPY, ALL, "bra $L__BB0_1", PRODUCT, "$L__BB0_1:"], False),  # never reached
        ([COPY, ALL, "@%p2 bra $L__BB0_1", PRODUCT, "$L__BB0_1:"], True),
        ([COPY, PRODUCT], False),  # reads another buffer: nothing has landed
        (["$L__BB0_1:", PRODUCT, COPY, ALL, *BACK], True),  # round the loop
        (["$L__BB0_1:", PRODUCT, COPY, ALL, FENCE, *BACK], False),
    ],
)
def test_unfenced_copies_found(lines, unfenced):
    assert faults._reads_before_fence(_ptx(*lines)) == unfenced


def _code(**parts):
    return SimpleNamespace(**{"remarks": "", "loops": [], "instructions": [], "ttgir": ""} | parts)


def _dot(version, down, across, M, N, rows, columns):
    return _code(
        ttgir=(
            f"#mma = #ttg.nvidia_mma<{{versionMajor = {version}, versionMinor = 0, "
            f"warpsPerCTA = [{down}, {across}], instrShape = [{M}, {N}, 16]}}>\n"
            f"%9 = tt.dot %1, %2, %3 : x -> tensor<{rows}x{columns}xf32, #mma>\n"
        )
    )


@pytest.mark.parametrize(
    ("dot", "times"),
    [
        (_dot(2, 4, 1, 16, 8, 64, 64), 0),
        (_dot(2, 8, 1, 16, 8, 64, 64), 2),
        (_dot(2, 2, 4, 16, 8, 64, 16), 2),
        (_dot(2, 8, 1, 16, 8, 16, 32), 0),  # a tail: fewer tiles than warps
        (_dot(3, 8, 1, 16, 64, 64, 64), 2),
        (_dot(3, 8, 1, 16, 16, 64, 16), 0),  # of wgmma a tile has 16 columns
        (_dot(3, 4, 1, 16, 64, 64, 64), 0),
    ],
)
def test_duplicated_products_found(dot, times):
    found = list(faults.duplicated_products(dot))
    assert len(found) == (times > 0) and (not found or found[0].endswith(f"{times} times"))


# Published and measured


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


def test_model_near_published_flash_attention_3():
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


def test_model_near_measured_h100():
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
