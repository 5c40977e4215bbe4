from functools import partial

import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels import backend, rope
from fastvit_kernels.ops.rope import rope_ref

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
NORMS = {None: (), "layer_norm": ("weight", "bias"), "rms_norm": ("weight",)}


def _tables(*shape):
    """Cosines and sines of angles that differ in every column: a pair's two as well."""
    angles = 3 * rand(*shape, seed=2, grad=False)
    return {"cos": angles.cos(), "sin": angles.sin()}


def _norms(D, norm):
    names = [f"{x}_norm_{name}" for x in "qk" for name in NORMS[norm]]
    return {name: rand(D, seed=i) for i, name in enumerate(names, 10)}


def _inputs(B, T, H, D, dtype=fp32, R=None, prefix=0, norm=None):
    q, k = (rand(B, T, H, D, dtype=dtype, seed=seed) for seed in (0, 1))
    return {"q": q, "k": k, **_tables(T - prefix, R or D), **_norms(D, norm)}


def _check(inputs, **options):
    """The kernels, whatever backend is chosen outside."""
    with backend("triton"):
        assert_accurate(partial(rope, **options), partial(rope_ref, **options), inputs)


def _learnt(inputs):
    tables = {name: inputs[name].detach().requires_grad_() for name in ("cos", "sin")}
    return {**inputs, **tables}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@PAIRINGS
def test_rope_backward(interleaved, norm, dtype):
    inputs = _inputs(2, 11, 3, 64, dtype, prefix=2, norm=norm)
    _check(inputs, interleaved=interleaved, prefix_tokens=2, norm=norm)


def test_rope_norm_constant_head():
    """Equal numbers: the rounding of their mean must not pass for a variance."""
    inputs = _inputs(1, 3, 2, 72, norm="layer_norm")
    flat = dict.fromkeys("qk", torch.full((1, 3, 2, 72), 1000.1, device=DEVICE))
    biases = {n: inputs[f"{n}_norm_bias"].expand(1, 3, 2, 72) for n in "qk"}
    with backend("triton"), torch.no_grad():
        found = rope(**{**inputs, **flat}, norm="layer_norm")
        wanted = rope(**biases, cos=inputs["cos"], sin=inputs["sin"])
    torch.testing.assert_close(found, wanted)


@PAIRINGS
def test_rope_tokens(interleaved):
    _check(_inputs(1, 261, 1, 64, bf16, prefix=5), interleaved=interleaved, prefix_tokens=5)


@PAIRINGS
def test_rope_in_plain_numbers(interleaved):
    """A quarter turn of (1, 0) gives (0, 1), in the columns of the pairing, after the prefix."""
    q = torch.zeros(1, 2, 1, 4, device=DEVICE)
    q[..., 0] = 1.0
    cos, sin = torch.zeros(1, 4, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    for name in ("triton", "torch"):
        with backend(name):
            out, _ = rope(q, q, cos, sin, interleaved=interleaved, prefix_tokens=1)
        assert out[0, 0, 0].tolist() == [1, 0, 0, 0]
        assert out[0, 1, 0].tolist() == ([0, 1, 0, 0] if interleaved else [0, 0, 1, 0])


@PAIRINGS
@pytest.mark.parametrize("norm", [None, "rms_norm"], ids=str)
def test_rope_layouts(interleaved, norm):
    """Views of a packed qkv; heads before tokens; a last axis that is not contiguous."""
    B, T, H, D = 2, 6, 3, 16
    packed = rand(B, T, 3, H, D, grad=False)
    heads_first = rand(B, H, T, D, grad=False, seed=1).transpose(1, 2)
    apart = rand(B, T, D, H, grad=False, seed=2).transpose(2, 3)
    table = rand(T, 2 * D, grad=False, seed=3)
    tables = {"cos": table[:, D:], "sin": table[:, :D].contiguous()}
    for q, k in ((packed[:, :, 0], packed[:, :, 1]), (heads_first, apart)):
        inputs = {"q": q.detach().requires_grad_(), "k": k.detach().requires_grad_()}
        inputs |= {**tables, **_norms(D, norm)}
        _check(inputs, interleaved=interleaved, norm=norm)


@pytest.mark.parametrize("T", [1, 3])
def test_rope_prefix_only(T):
    inputs = _inputs(2, T, 2, 8, prefix=T, R=8)
    for given in (inputs, _learnt(inputs)):
        _check(given, prefix_tokens=T)


def test_rope_unrotated_columns():
    """Bit for bit, also beside infinity: there a sine of 0 would leave NaN."""
    inputs = _inputs(1, 4, 1, 8, R=4, prefix=2)
    q = inputs["q"].detach().clone()
    q[0, 1, 0, 3] = q[0, 3, 0, 6] = float("inf")
    for interleaved in (False, True):
        with backend("triton"):
            out, _ = rope(**{**inputs, "q": q}, prefix_tokens=2, interleaved=interleaved)
        assert out[:, :2].equal(q[:, :2]) and out[..., 4:].equal(q[..., 4:])


@pytest.mark.parametrize("lead", [(), (2,), (1,), (2, 3), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@PAIRINGS
def test_rope_learnt_tables(interleaved, norm, lead):
    """RoPE-ViT learns its frequencies: sums over the samples and heads that share a table."""
    inputs = _inputs(2, 6, 3, 16, prefix=1, norm=norm) | _tables(*lead, 5, 12)
    _check(_learnt(inputs), interleaved=interleaved, norm=norm, prefix_tokens=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rope_learnt_tables_many_heads(dtype):
    """Forty heads share a table: more than one program sums them."""
    inputs = _learnt(_inputs(20, 4, 2, 16, dtype, prefix=1, norm="rms_norm"))
    inputs["cos"] = inputs["cos"].detach().to(bf16).requires_grad_()
    shifted = inputs["q"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    _check({**inputs, "q": shifted}, prefix_tokens=1, norm="rms_norm")
