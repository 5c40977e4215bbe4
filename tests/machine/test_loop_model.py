"""The model of a kernel's time, against what is published and measured."""

from __future__ import annotations

import json

import pytest

from tests.machine.loop_model import ROOFS, Work, launch_time
from tests.machine.processes import python
from tests.machine.ptx import Ptx

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


def test_loops_as_often_as_the_launch_says():
    """By its arguments; where memory holds the end, as often as the caller says."""
    kernel = Ptx(PTX)
    ((first, _),) = kernel.loops
    for n, trips in ((1, 1), (64, 1), (65, 2), (577, 10)):
        run = kernel.executions([None, n], (0,), (4,))
        assert run.blocks[first] == trips and not run.guessed
        assert run.copied == 16 * min(trips, 2)  # masked copies move nothing
    assert kernel.executions([None, 577], (3,), (4,)).blocks[first] == 0
    assert kernel.executions([None, None], (0,), (4,)).guessed
    compare = "setp.lt.s32 \t%p2, %r5, %r4;"
    in_memory = PTX.replace(compare, f"ld.shared.b32 %r4, [%r9]; {compare}")
    jumps_out = in_memory.replace("@%p2 bra \t$L__BB0_2;", "@!%p2 bra $L__BB0_3; bra $L__BB0_2;")
    for text in (in_memory, jumps_out):
        run = Ptx(text).executions([None, 577], (0,), (4,), trips=4)
        assert run.blocks[first] == 4 and not run.guessed


def test_resident_programs_hide_chains():
    """300 programs on 132 SMs come in three turns; where two are resident in two."""
    done = Work({"tensor": 1000.0}, 5000.0, 1e6, 6e5)
    given = dict(programs=300, num_warps=8, tensor_bytes=0)
    parts = [launch_time(done, ROOFS["sm_90"], resident=n, **given).parts for n in (1, 2)]
    assert [part["chain"] * 1.52e3 for part in parts] == pytest.approx([15000, 10000])


# Published and measured


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


@pytest.mark.minutes
def test_model_near_published_flash_attention_3():
    """FlashAttention-3 on an H100 with warp specialisation, but no products under a group's own
    softmax (arXiv:2407.08608, table 2), TFLOP/s."""
    assert json.loads(python("-c", TURNS_PROGRAM)) == pytest.approx(582, rel=0.12)


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


@pytest.mark.minutes
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
    assert json.loads(python("-c", MEASURED_PROGRAM)) == pytest.approx(measured, rel=0.2)
