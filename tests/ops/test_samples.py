"""Ops on the samples that `keep_samples` drew, beside index_select and index_add of PyTorch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, assert_accurate, rand

import fastvit_kernels as fk
from fastvit_kernels import keep_samples, layer_norm_and_input, linear, mlp, rms_norm_and_input
from fastvit_kernels.ops.common import epilogue
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp_ref
from fastvit_kernels.ops.linear import linear_ref
from fastvit_kernels.ops.mlp import mlp_ref

bf16, fp32 = torch.bfloat16, torch.float32
B, T, C = 5, 7, 24


def _samples(batch=B, rate=0.4):
    torch.manual_seed(2)
    return keep_samples(batch, rate, DEVICE)


@pytest.mark.parametrize("way", ["triton", "torch"])
@pytest.mark.parametrize(
    ("batch", "rate", "kept"),
    [(5, 0.4, 3), (7, 0.5, 3), (1, 0.9, 1), (4, 1.0, 1), (3, 0.0, 3), (300, 0.3, 210)],
)
def test_keep_samples_matches_dinov2(batch, rate, kept, way, monkeypatch):
    scatters = []
    scatter = torch.Tensor.scatter_
    monkeypatch.setattr(
        torch.Tensor, "scatter_", lambda *given: scatters.append(1) or scatter(*given)
    )
    torch.manual_seed(2)
    index = torch.randperm(batch, device=DEVICE)[: max(int(batch * (1 - rate)), 1)]
    after = torch.rand(3, device=DEVICE)
    with fk.backend(way):
        samples = _samples(batch, rate)
    assert torch.equal(torch.rand(3, device=DEVICE), after)
    assert len(scatters) == (way == "torch")
    assert len(index) == kept and torch.equal(samples[:kept], index)
    place = samples[kept:]
    assert torch.equal(place[index], torch.arange(kept, device=DEVICE))
    assert place.shape == (batch,) and (place >= kept).sum() == batch - kept
    assert keep_samples(batch, rate, "meta").is_meta


def _norm_ref(norm, x, samples, weight, bias=None):
    S = len(samples) - len(x)
    y = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6) if norm == "layer_norm" else None
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6) if y is None else y
    return y[samples[:S]], x.view_as(x)


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norm_forward_backward(norm, dtype):
    inputs = dict(
        x=rand(T, B, C + 8, dtype=dtype)[..., :C].transpose(0, 1).detach().requires_grad_(),
        samples=_samples(),
        weight=rand(C, seed=1),
    )
    if norm == "layer_norm":
        inputs["bias"] = rand(C, seed=2)
    inputs = {
        n: x if n == "samples" else x.to(dtype).detach().requires_grad_() for n, x in inputs.items()
    }
    function = layer_norm_and_input if norm == "layer_norm" else rms_norm_and_input

    def run(x, samples, **params):
        return function(x, **params, samples=samples)

    with fk.backend("triton"):
        assert_accurate(run, partial(_norm_ref, norm), inputs)
        y, _ = run(**inputs)
        whole = function(inputs["x"], **{n: inputs[n] for n in params(inputs)})[0]
    assert torch.equal(y, whole[inputs["samples"][:3]])  # each row as if all were there


@pytest.mark.parametrize(("batch", "rate"), [(3, 0.0), (1, 0.9)])
def test_keep_all_samples(batch, rate):
    samples, x = _samples(batch, rate), rand(batch, T, C)
    with fk.backend("triton"):
        y, _ = layer_norm_and_input(x, torch.ones(C), samples=samples)
        z = linear(y, torch.eye(C), residual=x, row_scale=samples)
    wanted = F.layer_norm(x, (C,), eps=1e-6)
    torch.testing.assert_close(y, wanted[samples[:batch]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z, x + wanted, rtol=1e-4, atol=1e-5)


def params(inputs):
    return [n for n in inputs if n in ("weight", "bias")]


def _epilogue(N, dtype=fp32, samples=None):
    return dict(
        residual=rand(B, T, N + 8, seed=7)[..., :N].detach().requires_grad_(),  # rows with gaps
        layer_scale=rand(N, seed=8, dtype=dtype),
        row_scale=_samples(),
    )


def _linear(N=20, dtype=fp32):
    weight = (rand(N, C, seed=4, grad=False) / 5).to(dtype).requires_grad_()
    x = rand(3, T, C, seed=3, dtype=dtype)
    return dict(x=x, weight=weight, bias=rand(N, seed=5, dtype=dtype), **_epilogue(N, dtype))


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("route", ["library", "triton"])
def test_linear_forward_backward(route, activation, dtype):
    with fk.backend("triton"), forced_route(route):
        assert_accurate(
            partial(linear, activation=activation),
            partial(linear_ref, activation=activation),
            _linear(dtype=dtype),
        )


def _mlp(gated=False, F=40):
    matrix = {"fc1_weight": (2 * F if gated else F, C), "fc2_weight": (C, F)}
    inputs = {
        n: (rand(*s, seed=i, grad=False) / 5).requires_grad_()
        for i, (n, s) in enumerate(matrix.items())
    }
    biases = {"fc1_bias": matrix["fc1_weight"][:1], "fc2_bias": (C,)}
    inputs |= {n: rand(*s, seed=i + 2) for i, (n, s) in enumerate(biases.items())}
    return dict(x=rand(3, T, C, seed=9), **inputs, **_epilogue(C))


@pytest.mark.parametrize("route", ["library", "triton"])
def test_mlp_forward_backward(route):
    with fk.backend("triton"), forced_route(route):
        assert_accurate(mlp, mlp_ref, _mlp())


def test_gated_mlp_forward_backward():
    with fk.backend("triton"):
        assert_accurate(fk.gated_mlp, gated_mlp_ref, _mlp(gated=True))


@pytest.mark.parametrize("route", ["library", "triton"])
def test_dropped_samples_unchanged(route):
    """Zeros keep their signs, infinities do not spread."""
    inputs = {n: x.detach() for n, x in _linear(N=C).items()}
    index = inputs["row_scale"][:3]
    dropped = [b for b in range(B) if b not in index.tolist()]
    inputs["residual"][dropped[0]] = -0.0
    inputs["residual"][dropped[1], 2] = float("inf")
    inputs["bias"][1] = float("inf")
    with fk.backend("triton"), forced_route(route):
        y = linear(**inputs)
    for b in dropped:
        expected, found = inputs["residual"][b].contiguous(), y[b].contiguous()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_grad_handoff_of_kept_samples(norm, monkeypatch):
    """Two branches, each with samples of its own: what the first linear reads comes from the second
    norm's backward, and the first pass of its own goes away."""
    torch.manual_seed(4)
    draws = [keep_samples(B, 0.4, DEVICE), keep_samples(B, 0.6, DEVICE)]
    own = layer_norm_and_input if norm == "layer_norm" else rms_norm_and_input
    passes, first_pass = [], epilogue.backward_epilogue
    monkeypatch.setattr(
        epilogue, "backward_epilogue", lambda *a, **k: passes.append(1) or first_pass(*a, **k)
    )
    inputs = dict(
        x=rand(B, T, C),
        weight=rand(C, C, seed=1),
        bias=rand(C, seed=2),
        layer_scale=rand(C, seed=3),
        norm_weight=rand(C, seed=4),
    )

    def run(normed, product, x, weight, bias, layer_scale, norm_weight):
        for samples in draws:
            y, x = normed(x, norm_weight, samples=samples)
            x = product(y, weight, bias, residual=x, layer_scale=layer_scale, row_scale=samples)
        return x

    def norm_ref(x, weight, samples):
        return _norm_ref(norm, x, samples, weight)

    with fk.backend("triton"):
        assert_accurate(partial(run, own, linear), partial(run, norm_ref, linear_ref), inputs)
    assert passes == [1]  # that of the last linear, which no norm reads


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 0.1), ValueError),
        ((2.0, 0.1), TypeError),
        ((2, 1.5), ValueError),
        ((2, "a"), TypeError),
    ],
)
def test_keep_samples_rejects(arguments, error):
    with pytest.raises(error, match=r"^keep_samples: (B|rate) must"):
        keep_samples(*arguments)
