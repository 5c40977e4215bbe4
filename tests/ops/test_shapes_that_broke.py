"""Shapes and masks on which other attention kernels gave NaN, errors or wrong numbers.

docs/numerics.md has the reports, and names the tests of other files that hold the rest.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from numerics import DEVICE, assert_accurate, rand

from fastvit_kernels import backend, scaled_dot_product_attention


def _check(T_q, T_kv, D, mask, shift=0.0):
    """Gradients too. shift: added to every score, by a column of queries and keys."""
    query, key = rand(1, 1, T_q, D, scale=0.1), rand(1, 1, T_kv, D, scale=0.1, seed=1)
    if shift:
        with torch.no_grad():
            query[..., 0], key[..., 0] = 1.0, shift * D**0.5
    inputs = {"query": query, "key": key, "value": rand(1, 1, T_kv, D, seed=2)}
    inputs = {name: x.detach().half().requires_grad_() for name, x in inputs.items()}

    def reference(query, key, value):
        scores = query @ key.mT * D**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value

    with backend("triton"):
        assert_accurate(partial(scaled_dot_product_attention, attn_mask=mask), reference, inputs)
        out = scaled_dot_product_attention(**inputs, attn_mask=mask)
        found = torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))
    assert all(x.isfinite().all() for x in (out, *found))


@pytest.mark.parametrize("T", [64, 192], ids=lambda t: f"T{t}")
def test_half_tile_of_keys_low_scores(T):
    """Every logsumexp is near -120: exp(0 - lse) of a key that is not there overflows fp32."""
    mask = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
    _check(T, T, 32, mask, shift=-120.0)


def test_one_query_under_low_scores():
    _check(1, 128, 64, None, shift=-120.0)


@pytest.mark.parametrize("D", [64, 72], ids=lambda d: f"D{d}")
def test_261_tokens_with_a_mask(D):
    """256 patches, a class token, 4 registers; the last 32 patches are padding."""
    mask = torch.ones(1, 261, dtype=torch.bool, device=DEVICE)
    mask[:, 229:] = False
    _check(261, 261, D, mask)


def test_mask_rows_unaligned():
    """43 keys: no row of a boolean mask of 43 columns begins at a multiple of 8 bytes."""
    mask = rand(43, 43, grad=False) > -0.5
    mask[:, 0] = True
    _check(43, 43, 32, mask)
