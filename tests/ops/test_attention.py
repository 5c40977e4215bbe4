import functools
import operator
from functools import partial

import numpy as np
import pytest
import torch
from fuzz import in_precision
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand
from philox import philox_keep

from fastvit_kernels.ops.attention import functions as attention_functions
from fastvit_kernels.ops.attention.configs import BwdForm
from fastvit_kernels.ops.attention.functions import attention, attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention, qkv_attention_ref
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.configs import forced

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def _qkv(B, T, H, D, dtype):
    return {"qkv": rand(B, T, 3, H, D, dtype=dtype)}


@pytest.mark.parametrize(
    ("T", "D", "dtype"),
    [
        *((T, 64, bf16) for T in (1, 5, 50, 196, 197, 257, 577)),
        *((T, 64, fp16) for T in (65, 129, 193, 256)),
        (273, 32, bf16),  # 16-bit, D <= 64 and T > 256: a separate tail of 16
        (150, 64, fp32),
    ],
    ids=str,
)
def test_attention_tokens(T, D, dtype):
    assert_accurate(attention, attention_ref, _qkv(1, T, 2 if T < 500 else 1, D, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("D", [8, 32, 40, 64, 72, 80, 96, 104, 128], ids=lambda d: f"D{d}")
def test_attention_head_dims(D, dtype):
    assert_accurate(attention, attention_ref, _qkv(1, 53, 2, D, dtype))


def qkv_layouts(D, dtype):
    B, T, H = 2, 21, 2
    draw = partial(rand, dtype=dtype, grad=False)
    layouts = (
        draw(B, T, H, 3, D).transpose(2, 3),  # interleaved as some fused QKVs are
        draw(B, H, T, 3, D).permute(0, 2, 3, 1, 4),  # heads first
        draw(B, T + 3, 3, H, 2 * D)[:, 1:-2, :, :, D:],
        draw(1, T, 3, H, D).expand(B, T, 3, H, D),
        draw(B, T, 3, D, H).transpose(3, 4),  # last axis not contiguous
        draw(B, T, 3, H, 8 * D)[..., ::8],  # nor here, all strides multiples of 8
    )
    return [qkv.requires_grad_() for qkv in layouts]


def test_attention_layouts():
    for qkv in qkv_layouts(32, fp32):
        assert_accurate(attention, attention_ref, {"qkv": qkv})


def _in_equal_strides(x):
    """In memory that ends with the last element; on a CPU with NaN behind it."""
    if x.is_cuda or x.dtype is not fp32:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    memory = np.full(count + 64, np.nan, np.float32)
    flat = torch.frombuffer(memory, dtype=fp32, count=count)
    return flat.as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.parametrize("unpack", [torch.Tensor.contiguous, _in_equal_strides])
@pytest.mark.parametrize("T", [37, 150], ids=["one_pass", "split"])
def test_attention_saved_tensor_layouts(T, unpack):
    """lse is saved in padded rows: a hook that moves it away and back need not keep them."""

    def hooked(qkv):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            return attention(qkv)

    assert_accurate(hooked, attention_ref, _qkv(1, T, 2, 32, fp32))


@pytest.mark.parametrize(
    ("T", "dtype", "bias"),
    [(50, fp32, False), (150, fp16, False), (150, fp32, False), (37, fp32, True)],
    ids=["one_part", "two_parts", "split", "bias"],
)
def test_attention_dropout(T, dtype, bias, monkeypatch):
    """Forward and gradients against the explicit formula with the mask rebuilt by Philox."""
    B, H, D, p, seed = 2, 2, 32, 0.3, 0x1234_5678_9ABC
    monkeypatch.setattr(
        attention_functions, "draw_seed", lambda device: torch.tensor([seed], device=device)
    )
    keep = torch.from_numpy(philox_keep(seed, B, H, T, T, p)).to(DEVICE)
    assert abs(keep.float().mean().item() - (1 - p)) < 0.02

    def reference(qkv, attn_mask=0.0):
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        probabilities = ((q @ k.mT) * D**-0.5 + attn_mask).softmax(-1) * keep / (1 - p)
        return (probabilities @ v).transpose(1, 2)

    inputs = _qkv(B, T, H, D, dtype)
    if bias:
        inputs["attn_mask"] = rand(1, H, T, T, seed=3)
    with backend("triton"):
        assert_accurate(partial(attention, dropout_p=p), reference, inputs)


def test_attention_dropout_seed_bits():
    seeds = [int(attention_functions.draw_seed(DEVICE)) for _ in range(64)]
    assert functools.reduce(operator.or_, seeds) == 2**62 - 1

    qkv, masks = rand(1, 9, 3, 1, 16, grad=False), []
    ops = torch.ops.fastvit_kernels
    for bit in (0, 15, 16, 31, 32, 47, 61):
        out, _ = ops.attention_fwd(qkv, torch.tensor([1 << bit], device=DEVICE), 0.25, 0.5)
        assert not any(torch.equal(out, former) for former in masks), f"bit {bit} is not read"
        masks.append(out)


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=dtype_id)
def test_qkv_attention_autocast(dtype):
    """fp32 parameters under autocast, with torch's own ops under the same autocast beside; their
    gradients are rounded once, to their own dtype."""
    inputs = {"x": rand(2, 30, 64), "weight": rand(192, 64, scale=1 / 8, seed=1)}
    inputs["bias"] = rand(192, seed=2)
    function, reference = (
        in_precision(partial(f, num_heads=2), dtype) for f in (qkv_attention, qkv_attention_ref)
    )
    assert_accurate(function, reference, inputs, dtype=dtype)
    out = function(**inputs)
    assert out.dtype == dtype
    parameters = inputs["weight"], inputs["bias"]
    for gradient in torch.autograd.grad(out.float().square().sum(), parameters):
        assert not torch.equal(gradient, gradient.to(dtype).float())


@pytest.mark.parametrize("one_pass", [True, False], ids=["one_pass", "split"])
@pytest.mark.parametrize("T", [7, 130], ids=["one part", "two parts"])
def test_qkv_bias_gradient(T, one_pass):
    """Summed where dq is produced, or from dqkv; that of k's bias is 0 but for rounding."""
    C, H = 32, 2
    inputs = {
        "x": rand(2, T, C, dtype=fp16),
        "weight": rand(3 * C, C, dtype=fp16, seed=1, scale=0.2),
        "bias": rand(3 * C, dtype=fp16, seed=2),
    }
    with forced("attention_bwd", BwdForm(one_pass=one_pass)):
        pair = (partial(f, num_heads=H) for f in (qkv_attention, qkv_attention_ref))
        assert_accurate(*pair, inputs)
        out = qkv_attention(**inputs, num_heads=H)
        (dbias,) = torch.autograd.grad(out, inputs["bias"], torch.randn_like(out))
    of_k = dbias.view(3, C)[1].abs().max()
    assert of_k == 0 if one_pass else of_k < 0.01 * dbias.abs().max()


def test_qkv_bias_gradient_with_dropout():
    """Dropped probabilities do not add up to 1: the bias gets the sums of dqkv itself."""
    qkv, dout = rand(2, 20, 3, 2, 32, grad=False), rand(2, 20, 2, 32, seed=1, grad=False)
    seed, ops = torch.tensor([5], device=DEVICE), torch.ops.fastvit_kernels
    out, lse = ops.attention_fwd(qkv, seed, 0.2, 0.5)
    dqkv, _, dbias = ops.attention_bwd(dout, qkv, out, lse, seed, 0.2, 0.5, bias_dtype=fp32)
    torch.testing.assert_close(dbias, dqkv.flatten(2).sum((0, 1)), rtol=1e-5, atol=1e-5)
