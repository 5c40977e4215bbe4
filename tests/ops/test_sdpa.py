import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels import attention, backend, scaled_dot_product_attention
from fastvit_kernels.ops.attention.configs import BwdForm, FwdConfig, SplitConfig
from fastvit_kernels.runtime.configs import forced


def heads(B, H, T_q, T_kv, D, dtype=torch.float32, kv_heads=None) -> dict[str, Any]:
    of_keys = B, kv_heads or H, T_kv, D
    shapes = {"query": (B, H, T_q, D), "key": of_keys, "value": of_keys}
    return {n: rand(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}


def check(inputs, way="triton", **options):
    def reference(query, key, value):
        cast: dict[str, Any] = dict(options)
        mask = cast.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            cast["attn_mask"] = mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, **cast)

    with backend(way):  # "triton": the PyTorch path must not stand in for the kernel
        assert_accurate(partial(scaled_dot_product_attention, **options), reference, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("lengths", [(37, 37), (5, 70), (70, 5), (1, 33), (33, 2)], ids=str)
def test_sdpa_lengths(lengths, dtype):
    T_q, T_kv = lengths
    check(heads(2, 2, T_q, T_kv, 32, dtype))


@pytest.mark.parametrize(
    "lengths", [(40, 40), (20, 50), (50, 20), (130, 130), (40, 300), (5, 150)], ids=str
)
def test_sdpa_causal(lengths):
    T_q, T_kv = lengths
    check(heads(1, 2, T_q, T_kv, 32), is_causal=True)


def test_sdpa_causal_in_three_parts():
    """What sm_90 takes above 256 queries: positions of the parts of 128, 128 and 16."""
    with forced("attention_bwd", BwdForm(one_pass=True)):
        check(heads(1, 1, 270, 270, 16, torch.bfloat16), is_causal=True)


@pytest.mark.parametrize(
    "shape", [(2, 3, 20, 36), (1, 1, 20, 36), (2, 1, 1, 36), (20, 36)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_sdpa_masks(shape, kind):
    mask = rand(*shape, seed=5, grad=False)
    mask = mask > -0.5 if kind == "bool" else mask
    check(heads(2, 3, 20, 36, 32), attn_mask=mask)


@pytest.mark.parametrize(
    ("T", "D", "one_row"), [(20, 32, True), (140, 16, True), (140, 72, False)], ids=str
)
def test_sdpa_masks_of_keys(T, D, one_row):
    """No (T, T) mask: (B, 1, 1, T), or expanded to (B, 1, T, T). Holes, tiles without a key."""
    mask = rand(4, 1, 1, T, seed=5, grad=False) > 0
    mask[1, ..., :70], mask[2, ..., 70:], mask[3] = False, False, False
    inputs = heads(4, 1, T, T, D, torch.bfloat16)
    seen = mask if one_row else mask.expand(4, 1, T, T)
    check(inputs, attn_mask=seen)
    leaves = [x.requires_grad_() for x in inputs.values()]
    out = scaled_dot_product_attention(*leaves, attn_mask=seen)
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert all(x[3].eq(0).all() for x in (out, *grads)), "a sample without a key gives zeros"


@pytest.mark.parametrize("T_kv", [300, 1100], ids=["a tile", "two tiles"])
def test_sdpa_key_mask_skips_tiles(T_kv):
    """Before, between and behind those that are shown. Keys that no program may load are NaN: their
    products would be. A program has 32 bits for tiles of 32 keys: above 1024, a bit is two tiles.
    """
    mask = torch.zeros(1, 1, 1, T_kv, dtype=torch.bool, device=DEVICE)
    mask[..., 70:110] = mask[..., 200:202] = mask[..., T_kv - 70 : T_kv - 66] = True
    inputs = heads(1, 1, 20, T_kv, 16, torch.bfloat16)
    # whole tiles, or pairs of them, that the mask hides
    each = 32 * -(-T_kv // 1024)
    tiles = F.pad(mask.flatten(), (0, -T_kv % each)).unflatten(0, (-1, each)).any(1)
    unread = ~tiles.repeat_interleave(each)[:T_kv]
    assert unread[:64].all() and unread[128:192].all() and unread[-4:].all()
    clean = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    for x in (inputs["key"], inputs["value"]):
        x.data[:, :, unread] = float("nan")
    forward, dq = FwdConfig(64, 32, 32, 1, 4, 1), SplitConfig(64, 32, 32, 4, 1)
    found = []
    with backend("triton"), forced("attention_fwd", forward), forced("attention_bwd_dq", dq):
        for given in (clean, inputs):
            leaves = [x.detach().requires_grad_() for x in given.values()]
            out = scaled_dot_product_attention(*leaves, attn_mask=mask)
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        check(clean, attn_mask=mask)
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted, got)


def test_sdpa_layouts():
    B, H, T, D = 2, 2, 23, 32
    q = rand(B, T, H, D, grad=False).transpose(1, 2)
    k = rand(B, H, D, T, grad=False, seed=1).transpose(2, 3)
    v = rand(B, H, 2 * T, D, grad=False, seed=2)[:, :, ::2]
    check({"query": q.requires_grad_(), "key": k.requires_grad_(), "value": v.requires_grad_()})
    for given in ((q, k, v), heads(B, H, T, T, D).values()):
        out = scaled_dot_product_attention(*given)
        assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()


def test_sdpa_row_bias_gradient_falls_back():
    """It is 0 but for rounding, of which the kernels' is larger than torch's."""
    inputs, mask = heads(1, 1, 6, 6, 16), rand(6, 1, seed=4)
    with backend("triton"), pytest.raises(RuntimeError, match="attn_mask needs a gradient and"):
        scaled_dot_product_attention(**inputs, attn_mask=mask)
    ours = scaled_dot_product_attention(**inputs, attn_mask=mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(**inputs, attn_mask=mask))
    assert torch.autograd.grad(ours.sum(), mask)[0].shape == (6, 1)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (lambda: heads(1, 1, 6, 6, 20), "D must be a multiple of 8"),
        (lambda: heads(1, 1, 6, 6, 4), "D must be a multiple of 8"),
        (lambda: heads(1, 1, 6, 6, 264), "D must be a multiple of 8 up to 256, got 264"),
        (lambda: {n: x[0] for n, x in heads(1, 2, 6, 6, 16).items()}, r"must be \(B, H, T, D\)"),
        (lambda: heads(1, 1, 6, 0, 16), "there are no keys"),
        (lambda: heads(1, 1, 6, 6, 16) | {"value": rand(1, 1, 6, 24)}, "differ in batch"),
        (lambda: heads(2, 1, 6, 6, 16) | {"query": rand(1, 1, 6, 16)}, "differ in batch"),
        (lambda: heads(1, 1, 6, 6, 16) | {"dropout_p": 1.0}, r"must be in \[0, 1\), got 1.0"),
        (lambda: heads(1, 1, 6, 6, 16) | {"scale": 0.0}, "scale must be at least"),
    ],
)
def test_sdpa_unsupported_falls_back(inputs, reason):
    tensors = inputs()
    with backend("triton"), pytest.raises(RuntimeError, match=reason):
        scaled_dot_product_attention(**tensors)
    expected = F.scaled_dot_product_attention(**tensors)
    torch.testing.assert_close(scaled_dot_product_attention(**tensors), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_of_grouped_queries(kv_heads):
    check(heads(2, 4, 3, 5, 8, kv_heads=kv_heads), "auto", enable_gqa=True)


def test_sdpa_mask_and_causal():
    q, k, v = (rand(1, 2, 5, 8, seed=i, grad=False) for i in range(3))
    mask = rand(5, 5, seed=3, grad=False)
    try:
        wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    except RuntimeError as error:  # torch from 2.15 on
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            scaled_dot_product_attention(q, k, v, mask, is_causal=True)
        return
    got = scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    torch.testing.assert_close(got, wanted)


def test_sdpa_no_queries():
    q, k, v = rand(1, 2, 0, 8), rand(1, 2, 5, 8, seed=1), rand(1, 2, 5, 8, seed=2)
    out = scaled_dot_product_attention(q, k, v)
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    assert not dk.count_nonzero() and not dv.count_nonzero()


def test_sdpa_as_drop_in(monkeypatch):
    q, k, v = (rand(1, 2, 3, 12, seed=i, grad=False) for i in range(3))  # D that torch alone takes
    wanted = F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), wanted)
    with backend("torch"):
        assert attention(rand(1, 3, 3, 2, 8, grad=False)).shape == (1, 3, 2, 8)
