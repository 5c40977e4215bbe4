from functools import partial

import pytest
import torch
from numerics import DTYPES, assert_accurate, dtype_id, rand
from test_rope import NORMS, _norms, _tables

from fastvit_kernels import backend, rope, rope_attention, scaled_dot_product_attention
from fastvit_kernels.ops.attention.rotary import rope_attention_ref

fp32 = torch.float32


def _inputs(B, T, H, D, dtype=fp32, R=None, prefix=1, norm=None, C=24):
    return {
        "x": rand(B, T, C, dtype=dtype),
        "weight": rand(3 * H * D, C, dtype=dtype, seed=1, scale=C**-0.5),
        "bias": rand(3 * H * D, dtype=dtype, seed=2),
        **_tables(T - prefix, R or D),
        **_norms(D, norm),
    }


def _check(inputs, **options):
    with backend("triton"):
        return assert_accurate(
            partial(rope_attention, **options), partial(rope_attention_ref, **options), inputs
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_rope_attention_backward(norm, dtype):
    for interleaved in (False, True):
        inputs = _inputs(2, 19, 2, 16, dtype, norm=norm)
        _check(inputs, num_heads=2, prefix_tokens=1, norm=norm, interleaved=interleaved)


def test_rope_attention_dropout_and_scale():
    inputs, options = _inputs(1, 19, 2, 16), dict(dropout_p=0.3, scale=0.9)

    def parts(x, weight, bias, cos, sin):
        q, k, v = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (3, 2, 16)).unbind(2)
        q, k = rope(q, k, cos, sin, prefix_tokens=1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    found, ours = [], partial(rope_attention, num_heads=2, prefix_tokens=1)
    for function in (partial(ours, **options), parts):
        torch.manual_seed(3)
        with backend("triton"):
            out = function(**inputs)
            leaves = [inputs[name] for name in ("x", "weight", "bias")]
            found.append([out, *torch.autograd.grad(out, leaves, torch.cos(out).detach())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    with backend("torch"):
        drawn = [ours(**inputs, dropout_p=p) for p in (0.3, 0.0)]
    assert not torch.allclose(*drawn)


def test_rope_attention_backward_twice():
    """Queries, keys and gradients turn in their own memory: what is saved stays."""
    inputs = _inputs(1, 9, 2, 16, norm="layer_norm")
    leaves = [x for x in inputs.values() if x.requires_grad]
    with backend("triton"):
        out = rope_attention(**inputs, num_heads=2, prefix_tokens=1, norm="layer_norm")
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        second = torch.autograd.grad(out, leaves, dout)
    assert all(map(torch.equal, first, second))
