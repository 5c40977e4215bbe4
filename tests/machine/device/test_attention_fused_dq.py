"""The backward of five products in Gluon (backward_fused_dq.py), which runs here alone."""

import pytest

from .test_kernels import python

STEP = """
import os, sys, torch, fastvit_kernels as fk
from contextlib import ExitStack
from fastvit_kernels.ops.attention.configs import own_fwd
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import torch_sdpa
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.runner import poisoned
from tests.machine.device import ptx_machine

(T, D, order, num_sms), dtype = map(int, sys.argv[1:5]), getattr(torch, sys.argv[5])
generator = torch.Generator().manual_seed(0)

def rand(*shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

os.environ["FASTVIT_KERNELS_FUSED_DQ"] = "1"
options = {"scale": 0.3}
if sys.argv[6] == "packed":
    function, specification, inputs = fk.attention, attention_ref, {"qkv": rand(1, T, 3, 3, D)}
elif sys.argv[6] == "separate":  # heads before tokens in memory
    function, specification = fk.scaled_dot_product_attention, torch_sdpa
    inputs = {name: rand(1, 3, T, D) for name in ("query", "key", "value")}
else:
    function, specification = fk.qkv_attention, qkv_attention_ref
    inputs = {"x": rand(1, T, 40), "weight": rand(9 * D, 40, scale=0.3), "bias": rand(9 * D)}
    options["num_heads"] = 3
reference = Reference(lambda **given: specification(**given, **options), inputs, dtype=dtype)
found = []
with ExitStack() as stack:
    machine = stack.enter_context(ptx_machine("sm_90", order=order))
    stack.enter_context(on_absent_gpu(Gpu("sm_90", num_sms=num_sms, shared_limit=232448)))
    stack.enter_context(forced("attention_fwd", own_fwd))
    stack.enter_context(poisoned())
    for _ in range(2):
        outputs, grads = reference.run(lambda **given: function(**given, **options))
        found.append([*outputs, *grads.values()])
print(machine.launches)
assert machine.launches["_attention_bwd_fused_dq_kernel"] == 2
assert machine.launches["_attention_bwd_sum_parts_kernel"] == 2 * (num_sms == 2)
assert all(map(torch.equal, *found)), "other bits the second time"
errors = reference.judge(outputs, grads)
print(*errors, sep="\\n")
assert all(e.passed for e in errors)
print("right")
"""


@pytest.mark.parametrize(
    ("T", "D", "order", "num_sms", "dtype", "what"),
    [
        (290, 64, 0, 2, "bfloat16", "packed"),
        (385, 56, 1, 2, "float16", "separate"),
        (290, 64, 2, 2, "bfloat16", "bias"),
        (290, 64, 1, 1, "float16", "bias"),
        (258, 32, 2, 2, "float16", "packed"),
        (258, 24, 1, 1, "bfloat16", "separate"),
    ],
)
def test_gradients(T, D, order, num_sms, dtype, what):
    """By the 2x rule, and the same bits twice. Three heads on one SM go round the rings; on two a
    head is dealt whole to each, and the third in parts, which a second kernel sums."""
    given = (str(n) for n in (T, D, order, num_sms))
    assert "right" in python("-c", STEP, *given, dtype, what)
