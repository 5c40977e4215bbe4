"""The GEMM whose warps have roles (ops/common/gemm_warp_specialized.py). It runs here alone."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch, fastvit_kernels as fk
from contextlib import ExitStack
from fastvit_kernels.ops.common.gemm_configs import SPECIALIZED
from fastvit_kernels.ops.linear import linear_ref
from fastvit_kernels.ops.mlp import mlp_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.runner import poisoned
from tests.machine.device import ptx_machine

what, dtype, order = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
generator = torch.Generator().manual_seed(0)

def rand(*shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

B, T, C, N = 4, 65, 200, 392  # six tiles of 128 x 256, the last of each axis in part, K in four
x, weight, bias = rand(B, T, C), rand(N, C), rand(N)  # wide: erf takes both its branches
def off_16(saved):  # z at an address that TMA cannot take, as a hook may bring it back
    if saved.shape != (B, T, N):
        return saved
    return torch.empty(saved.numel() + 1, dtype=dtype)[1:].view(B, T, N).copy_(saved)

plain = dict(x=x, weight=weight)
fc2 = dict(fc2_weight=rand(C, N, scale=N**-0.5), fc2_bias=rand(C), residual=rand(B, T, C))
mlp = dict(x=x, fc1_weight=weight, fc1_bias=bias, **fc2)

def of_linear(**options):
    return lambda **given: fk.linear(**given, **options), lambda **g: linear_ref(**g, **options)

def of_mlp(activation, recompute):
    return (
        lambda **given: fk.mlp(**given, activation=activation, recompute=recompute),
        lambda **given: mlp_ref(**given, activation=activation),
    )

CASES = {
    "gelu": (of_linear(activation="gelu"), dict(plain, bias=bias), 1),
    "mlp": (of_mlp("gelu", recompute=False), mlp, 2),  # fc1 and the hidden gradient
    "mlp, rebuilt": (of_mlp("gelu_tanh", recompute=True), mlp, 2),
}
(function, specification), inputs, launches = CASES[what]
reference = Reference(specification, inputs, dtype=dtype)
found = []
with ExitStack() as stack:
    machine = stack.enter_context(ptx_machine("sm_90", order=order))
    stack.enter_context(on_absent_gpu(Gpu("sm_90", num_sms=2, shared_limit=232448)))
    stack.enter_context(forced("linear_fwd", SPECIALIZED))
    stack.enter_context(forced("mlp_bwd_hidden", SPECIALIZED))
    stack.enter_context(poisoned())
    if what == "mlp, rebuilt":
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, off_16))
    for _ in range(2):
        outputs, grads = reference.run(function)
        found.append([*outputs, *grads.values()])
    if what == "gelu":  # sizes that have been planned, and another activation
        launches += 0.5
        with torch.no_grad():
            y = fk.linear(**inputs, activation="quick_gelu")
        wanted = linear_ref(**inputs, activation="quick_gelu")
        torch.testing.assert_close(y, wanted, rtol=0.02, atol=0.02)
print(machine.launches)
assert machine.launches["_gemm_warp_specialized_kernel"] == 2 * launches
assert all(map(torch.equal, *found)), "other bits the second time"
errors = reference.judge(outputs, grads)
print(*errors, sep="\\n")
assert all(e.passed for e in errors)
print("right")
"""


@pytest.mark.parametrize(
    ("what", "dtype", "order"),
    [
        ("gelu", "bfloat16", 0),
        ("mlp", "float16", 2),
        ("mlp, rebuilt", "bfloat16", 1),
    ],
)
def test_roles(what, dtype, order):
    """Forward and backward by the 2x rule, the same bits twice; two programs of three tiles, so
    that the ring goes round; the groups run in other orders."""
    assert "right" in python("-c", STEP, what, dtype, str(order))
