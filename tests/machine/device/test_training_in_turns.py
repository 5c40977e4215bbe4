"""A training step whose products and attention all run in turns, in Gluon: losses and weights."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch
from contextlib import ExitStack, nullcontext
from fastvit_kernels.ops.attention.configs import PINGPONG_BWD, PINGPONG_FWD
from fastvit_kernels.ops.common.gemm_configs import PINGPONG, PINGPONG_PARTS
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from tests.machine.device import ptx_machine
from tests.machine.device.kernels import training_fault

with ExitStack() as stack:
    machine = stack.enter_context(ptx_machine("sm_90", order=int(sys.argv[2])))
    stack.enter_context(on_absent_gpu(Gpu("sm_90", num_sms=4, shared_limit=232448)))
    for table, config in {
        "attention_fwd": PINGPONG_FWD, "attention_bwd": PINGPONG_BWD,
        "linear_fwd": PINGPONG, "mlp_bwd_hidden": PINGPONG_PARTS,
    }.items():
        stack.enter_context(forced(table, config))
    dtype = getattr(torch, sys.argv[1])
    fault = training_fault(dtype, nullcontext, steps=2, img_size=(96, 96), embed_dim=128)
print(machine.launches, fault)
blocks = 2 * 2  # steps, layers
assert machine.launches["_attention_fwd_pingpong_kernel"] == blocks
assert machine.launches["_attention_bwd_pingpong_kernel"] == blocks
assert machine.launches["_pingpong_kernel"] == 4 * blocks  # proj, fc1, fc2, hidden gradient
assert fault is None
print("right")
"""


@pytest.mark.parametrize(("dtype", "order"), [("bfloat16", 1), ("float16", 2)])
def test_training(dtype, order):
    """Two steps of SGD of a ViT of two layers, 145 tokens, two heads of 64, by the 2x rule."""
    assert "right" in python("-c", STEP, dtype, str(order))
