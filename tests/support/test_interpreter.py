"""That the interpreter, as mended, computes what the hardware computes, on any CPU."""

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.runtime.triton import tl, triton

interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels run on a GPU here")


@triton.jit
def _product_kernel(out_ptr, a_ptr, b_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs)))


@triton.jit
def _copy_kernel(out_ptr, x_ptr, n, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n).to(out_ptr.dtype.element_ty))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_masked_load_poison(dtype):
    x = torch.arange(16, device=DEVICE).to(dtype)
    out = torch.zeros(16, dtype=dtype, device=DEVICE)
    _copy_kernel[(1,)](out, x, 11, N=16)
    assert torch.equal(out[:11], x[:11])
    assert (out[11:].isnan() if dtype.is_floating_point else out[11:] == 1).all()


@interpreted
def test_fp32_dot_order():
    terms = torch.tensor([2.0**26, -(2.0**26)] * 4 + [1.0] * 8)
    generator = torch.Generator().manual_seed(0)
    a = torch.stack([terms[torch.randperm(16, generator=generator)] for _ in range(16)])
    out = torch.empty(16, 16)
    _product_kernel[(1,)](out, a, torch.ones(16, 16), N=16)
    assert torch.equal(out, torch.full((16, 16), 8.0))


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_casts_to_bf16_round_to_nearest_even(source):
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.00390625, 1.01171875, 1e-30]
    x = torch.cat([torch.tensor(special), torch.randn(248)]).to(DEVICE, source)
    out = torch.empty(256, dtype=torch.bfloat16, device=DEVICE)
    _copy_kernel[(1,)](out, x, 256, N=256)
    assert torch.equal(out.nan_to_num(nan=7.0), x.bfloat16().nan_to_num(nan=7.0))
