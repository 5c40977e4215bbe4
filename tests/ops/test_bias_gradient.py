from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels import attention, backend, scaled_dot_product_attention
from fastvit_kernels.ops.attention.functions import attention_ref


def _inputs(B: int, H: int, T: int, D: int, mask: tuple[int, ...], dtype=torch.float32, S=None):
    keys = (B, H, T if S is None else S, D)
    return {
        "query": rand(B, H, T, D, dtype=dtype),
        "key": rand(*keys, dtype=dtype, seed=1),
        "value": rand(*keys, dtype=dtype, seed=2),
        "attn_mask": rand(*mask, dtype=dtype, seed=3),
    }


def _check(inputs, **options):
    with backend("triton"):
        assert_accurate(
            partial(scaled_dot_product_attention, **options),
            partial(F.scaled_dot_product_attention, **options), inputs,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "mask", [(3, 19, 21), (5, 3, 19, 21), (5, 1, 19, 21), (19, 21), (3, 1, 21)],
    ids=str,
)  # fmt: skip
def test_bias_gradient_is_summed_over_what_shares_it(mask, dtype):
    _check(_inputs(5, 3, 19, 16, mask, dtype, S=21))


def _packed(B: int, T: int, H: int, D: int, mask: tuple[int, ...], dtype=torch.float32):
    return {"qkv": rand(B, T, 3, H, D, dtype=dtype), "attn_mask": rand(*mask, dtype=dtype, seed=3)}


def _check_packed(inputs, **options):
    with backend("triton"):
        assert_accurate(partial(attention, **options), partial(attention_ref, **options), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "mask", [(2, 17, 17), (6, 1, 17, 17), (3, 2, 17, 17), (3, 1, 17, 17), (1, 1, 1, 17)], ids=str
)
def test_bias_gradient_of_packed_qkv_and_windows(mask, dtype):
    _check_packed(_packed(6, 17, 2, 16, mask, dtype))
