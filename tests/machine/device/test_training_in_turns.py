"""A training step on sm_90's default routes, Gluon's among them: losses and weights."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch
from contextlib import nullcontext
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from tests.machine.device import ptx_machine
from tests.machine.device.kernels import training_fault

gpu = Gpu("sm_90", num_sms=4, shared_limit=232448)
with ptx_machine("sm_90", order=int(sys.argv[2])) as machine, on_absent_gpu(gpu):
    dtype = getattr(torch, sys.argv[1])
    fault = training_fault(dtype, nullcontext, steps=2, img_size=(96, 96), embed_dim=128)
print(machine.launches, fault)
blocks = 2 * 2  # steps, layers
assert machine.launches["_attention_fwd_pingpong_kernel"] == blocks
assert machine.launches["_attention_bwd_pingpong_kernel"] == blocks
assert machine.launches["_gemm_warp_specialized_kernel"] == 2 * blocks  # fc1, the hidden gradient
assert fault is None
print("right")
"""


@pytest.mark.parametrize(("dtype", "order"), [("bfloat16", 1), ("float16", 2)])
def test_training(dtype, order):
    """Two steps of SGD of a ViT of two layers, 145 tokens, two heads of 64, by the 2x rule."""
    assert "right" in python("-c", STEP, dtype, str(order))
