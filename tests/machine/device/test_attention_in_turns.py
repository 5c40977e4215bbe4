"""Attention in Gluon (ops/attention/pingpong.py), whose groups take turns. It runs here alone."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch, fastvit_kernels as fk
from contextlib import ExitStack
from fastvit_kernels.ops.attention.configs import PINGPONG_FWD
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.verify.accuracy import Reference
from fastvit_kernels.verify.runner import poisoned
from tests.machine.device import ptx_machine

T, D, dtype, order = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
generator = torch.Generator().manual_seed(0)
qkv = torch.randn(2, T, 3, 3, D, generator=generator).to(dtype).requires_grad_()
specification = lambda qkv: attention_ref(qkv, scale=0.3)  # large scores
reference = Reference(specification, {"qkv": qkv}, dtype=dtype)
found = []
with ExitStack() as stack:
    machine = stack.enter_context(ptx_machine("sm_90", order=order))
    stack.enter_context(on_absent_gpu(Gpu("sm_90", num_sms=2, shared_limit=232448)))
    stack.enter_context(forced("attention_fwd", PINGPONG_FWD))
    stack.enter_context(poisoned())
    for _ in range(2):
        outputs, grads = reference.run(lambda qkv: fk.attention(qkv, scale=0.3))
        found.append([*outputs, *grads.values()])
print(machine.launches)
assert machine.launches["_attention_fwd_pingpong_kernel"] == 2
assert all(map(torch.equal, *found)), "other bits the second time"
errors = reference.judge(outputs, grads)  # the plain backward reads lse
print(*errors, sep="\\n")
assert all(e.passed for e in errors)
print("right")
"""


@pytest.mark.parametrize(("T", "D", "dtype", "order"), [
    (197, 64, "bfloat16", 0), (257, 64, "float16", 1), (150, 64, "float16", 2),
    (197, 128, "bfloat16", 2), (288, 128, "float16", 1), (150, 56, "bfloat16", 0),
])  # fmt: skip
def test_attention(T, D, dtype, order):
    """By the 2x rule, and the same bits twice: six heads on two SMs, so that each ring goes round
    and the groups have tiles of several heads; all keys at once, or chunk by chunk."""
    assert "right" in python("-c", STEP, str(T), str(D), dtype, str(order))
