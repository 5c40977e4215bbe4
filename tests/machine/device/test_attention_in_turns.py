"""Attention in Gluon (forward_pingpong.py, backward_pingpong.py), whose groups of warps take turns.
It runs here alone."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch, fastvit_kernels as fk
from contextlib import ExitStack
from fastvit_kernels.ops.attention.configs import own_bwd, own_fwd
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.runner import poisoned
from tests.machine.device import ptx_machine

(T, D, order), dtype = map(int, sys.argv[1:4]), getattr(torch, sys.argv[4])
generator = torch.Generator().manual_seed(0)

def rand(*shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

options, forward, backward = {"scale": 0.3}, sys.argv[5:] != ["bwd"], sys.argv[5:] != ["fwd"]
function, specification, inputs = fk.attention, attention_ref, {"qkv": rand(2, T, 3, 3, D)}
if sys.argv[5:] == ["bias"]:  # whose gradient's partials the backward leaves
    function, specification = fk.qkv_attention, qkv_attention_ref
    inputs = {"x": rand(2, T, 40), "weight": rand(9 * D, 40, scale=0.3), "bias": rand(9 * D)}
    options["num_heads"] = 3
moved = ExitStack()
if sys.argv[5:] == ["moved"]:  # a hook brings back what was saved two bytes off its place
    def unpack(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    moved = torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack)
reference = Reference(lambda **given: specification(**given, **options), inputs, dtype=dtype)
found = []
with ExitStack() as stack:
    machine = stack.enter_context(ptx_machine("sm_90", order=order))
    stack.enter_context(on_absent_gpu(Gpu("sm_90", num_sms=2, shared_limit=232448)))
    if not forward:
        stack.enter_context(forced("attention_fwd", own_fwd))
    if not backward:
        stack.enter_context(forced("attention_bwd", own_bwd))
    stack.enter_context(poisoned())
    for _ in range(2):
        with moved:
            outputs, grads = reference.run(lambda **given: function(**given, **options))
        found.append([*outputs, *grads.values()])
print(machine.launches)
assert machine.launches["_attention_fwd_pingpong_kernel"] == 2 * forward
assert machine.launches["_attention_bwd_pingpong_kernel"] == 2 * backward
assert all(map(torch.equal, *found)), "other bits the second time"
errors = reference.judge(outputs, grads)
print(*errors, sep="\\n")
assert all(e.passed for e in errors)
print("right")
"""


@pytest.mark.parametrize(
    ("T", "D", "order", "dtype", "what"),
    [
        (197, 64, 0, "bfloat16", "fwd"),
        (257, 64, 1, "float16", "fwd"),
        (150, 56, 2, "float16", "fwd"),
        (350, 64, 2, "bfloat16", "fwd"),
        (197, 128, 2, "bfloat16", "fwd"),
        (288, 128, 1, "float16", "fwd"),
        (100, 32, 1, "bfloat16", "fwd"),
        (197, 64, 1, "bfloat16", "bwd"),
        (150, 64, 0, "float16", "bwd"),
        (256, 64, 2, "float16", "bwd"),
        (197, 64, 2, "bfloat16", "bias"),
        (256, 64, 1, "bfloat16", "moved"),
    ],
)
def test_attention(T, D, order, dtype, what):
    """By the 2x rule, and the same bits twice: six heads on two SMs, so that each ring goes round
    and groups have tiles of several heads; all keys at once or chunk by chunk; the other direction
    by plain Triton, which shares lse, or by Gluon too, with the bias of a projection; or what was
    saved is brought back off 16 bytes, where no tensor map may begin."""
    assert "right" in python("-c", STEP, str(T), str(D), str(order), dtype, what)
