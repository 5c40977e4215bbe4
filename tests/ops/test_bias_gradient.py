from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import DTYPES, assert_accurate, dtype_id, rand
from test_sdpa import heads

from fastvit_kernels import attention, backend, scaled_dot_product_attention
from fastvit_kernels.ops.attention.functions import attention_ref

MASKS = [(3, 19, 21), (5, 3, 19, 21), (5, 1, 19, 21), (19, 21), (3, 1, 21)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bias_gradient_broadcast(mask):
    inputs = heads(5, 3, 19, 21, 16, torch.bfloat16)
    inputs["attn_mask"] = rand(*mask, dtype=torch.bfloat16, seed=3)
    with backend("triton"):
        assert_accurate(scaled_dot_product_attention, F.scaled_dot_product_attention, inputs)


def _packed(B: int, T: int, H: int, D: int, mask: tuple[int, ...], dtype=torch.float32):
    return {"qkv": rand(B, T, 3, H, D, dtype=dtype), "attn_mask": rand(*mask, dtype=dtype, seed=3)}


def _check(inputs, **options):
    with backend("triton"):
        assert_accurate(partial(attention, **options), partial(attention_ref, **options), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    "mask", [(2, 17, 17), (6, 1, 17, 17), (3, 2, 17, 17), (3, 1, 17, 17), (1, 1, 1, 17)], ids=str
)
def test_bias_gradient_windows(mask, dtype):
    _check(_packed(6, 17, 2, 16, mask, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_bias_gradient_wide_heads(dtype):
    _check(_packed(1, 150, 1, 80, (1, 150, 150), dtype), scale=0.2)


def test_bias_gradient_deterministic():
    """Nine heads of each bias, four a program: partials of three are added in order."""
    inputs = _packed(9, 20, 2, 16, (2, 20, 20))
    _check(inputs)
    upstream = rand(9, 20, 2, 16, seed=7, grad=False)
    first, second = (
        torch.autograd.grad(attention(**inputs), list(inputs.values()), upstream) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_bias_gradient_fp32_bias_bf16_qkv():
    """As under autocast: its gradient is fp32 too, and is not rounded on the way."""
    inputs = _packed(3, 17, 2, 16, (2, 17, 17), torch.bfloat16)
    inputs["attn_mask"] = rand(2, 17, 17, seed=3)
    _check(inputs)
