"""That the interpreter, as mended, computes what the hardware computes, on any CPU."""

import numpy as np
import pytest
import torch
from numerics import DEVICE, rand

from fastvit_kernels.runtime.triton import tl, triton

NUMBERS = [torch.float32, torch.float16, torch.bfloat16]
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels run on a GPU here")


@triton.jit
def _product_kernel(out_ptr, a_ptr, b_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs))
    tl.store(out_ptr + offs, product.to(out_ptr.dtype.element_ty))


@triton.jit
def _cast_kernel(out_ptr, x_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


@triton.jit
def _masked_kernel(out_ptr, x_ptr, n, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))


@interpreted
@pytest.mark.parametrize("dtype", [*NUMBERS, torch.int32, torch.int64, torch.uint8], ids=str)
def test_masked_load_poison(dtype):
    x = torch.arange(16, device=DEVICE).to(dtype)
    out = torch.zeros(16, dtype=dtype, device=DEVICE)
    _masked_kernel[(1,)](out, x, 11, N=16)
    assert torch.equal(out[:11], x[:11])
    assert (out[11:].isnan() if dtype.is_floating_point else out[11:] == 1).all()


def test_bf16_dot():
    a, b = rand(16, 16, dtype=torch.bfloat16, grad=False), rand(16, 16, seed=1, grad=False)
    b = b.bfloat16()
    out = torch.empty(16, 16, device=DEVICE)
    _product_kernel[(1,)](out, a, b, N=16)
    torch.testing.assert_close(out, a.float() @ b.float())


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
    _cast_kernel[(1,)](out, x, N=256)
    assert torch.equal(out.nan_to_num(nan=7.0), x.bfloat16().nan_to_num(nan=7.0))


@interpreted
def test_every_bf16_bit_pattern_survives_a_round_trip():
    from interpreter import bf16_bits_to_float32, float32_to_bf16_bits

    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bf16_bits_to_float32(bits)
    back = float32_to_bf16_bits(numbers)
    is_nan = np.isnan(numbers)
    assert (back == bits)[~is_nan].all()
    assert np.isnan(bf16_bits_to_float32(back))[is_nan].all()
