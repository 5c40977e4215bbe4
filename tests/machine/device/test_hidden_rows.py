"""Rows that a finite additive mask hides, by compiled code: it fuses products with the sums after
them, which the interpreter does not, and so rounds far scores otherwise than their maximum."""

import pytest

from .test_kernels import python

STEP = """
import sys, torch, fastvit_kernels as fk
from tests.machine.device import ptx_machine

dtype, T, D = getattr(torch, sys.argv[2]), 33, 32
generator = torch.Generator().manual_seed(0)

def rand(*shape):
    return torch.randn(shape, generator=generator).to(dtype)

def written(q, k, v, mask):
    return (q @ k.mT * D**-0.5 + mask).softmax(-1) @ v

heads, upstream = [rand(1, 2, T, D).requires_grad_() for _ in range(3)], rand(1, 2, T, D)
for value in (-1e4, -1e9, -1e20, -1e29, torch.finfo(dtype).min):
    mask = rand(2, T, T)
    mask[:, [3, 4, 10, 31, 32]] = value
    inputs = *heads, mask.requires_grad_()
    with ptx_machine(sys.argv[1]):
        out = fk.scaled_dot_product_attention(*inputs)
        found = out, *torch.autograd.grad(out, inputs, upstream)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    formula = written(*wide)
    expected = formula, *torch.autograd.grad(formula, wide, upstream.float())
    for x, y in zip(found, expected, strict=True):
        limit = 2e-3 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(x.float(), y, rtol=limit, atol=limit)
print("right")
"""


@pytest.mark.parametrize(("target", "dtype"), [("sm_80", "float32"), ("sm_90", "bfloat16")])
def test_hidden_rows(target, dtype):
    """softmax(q k^T + mask) v and its gradients, for masks from -1e4 to the least number."""
    assert "right" in python("-c", STEP, target, dtype)
