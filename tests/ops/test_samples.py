"""Ops on the samples that `keep_samples` drew, beside index_select and index_add of PyTorch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, assert_accurate, rand
from products import FORMS, route
from torch.utils.flop_counter import FlopCounterMode

import fastvit_kernels as fk
from fastvit_kernels import keep_samples, layer_norm_and_input, linear, rms_norm_and_input
from fastvit_kernels.runtime.values import checked_values

__all__ = ["route"]  # a fixture
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
def test_keep_samples_matches_dinov2(batch, rate, kept, way):
    torch.manual_seed(2)
    index = torch.randperm(batch, device=DEVICE)[: max(int(batch * (1 - rate)), 1)]
    after = torch.rand(3, device=DEVICE)
    torch.set_default_dtype(torch.float64)  # which no kernel has
    try:
        with fk.backend(way):
            samples = _samples(batch, rate)
    finally:
        torch.set_default_dtype(fp32)
    assert torch.equal(torch.rand(3, device=DEVICE), after)
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
    x = rand(T, B, C + 8, dtype=dtype)[..., :C].transpose(0, 1).detach().requires_grad_()
    names = ("weight", "bias") if norm == "layer_norm" else ("weight",)
    params = {n: rand(C, seed=i, dtype=dtype) for i, n in enumerate(names, 1)}
    samples = _samples()
    function = layer_norm_and_input if norm == "layer_norm" else rms_norm_and_input

    def run(x, samples, **params):
        return function(x, **params, samples=samples)

    with fk.backend("triton"):
        assert_accurate(run, partial(_norm_ref, norm), dict(x=x, samples=samples, **params))
        y, _ = run(x, samples, **params)
        whole = function(x, **params)[0]
    assert torch.equal(y, whole[samples[:3]])  # each row as if all were there


def _kept(form, N=C, dtype=fp32):
    """Inputs of three samples of five; rows of the residual with gaps."""
    inputs = form.inputs((3, T), C, 40, N, dtype)
    residual = rand(B, T, N + 8, seed=7)[..., :N].detach().requires_grad_()
    return inputs | dict(residual=residual, row_scale=_samples())


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_products_forward_backward(route, form, dtype):
    with fk.backend("triton"):
        form.check(_kept(form, 20, dtype))


def test_dropped_samples_unchanged(route):
    """Zeros keep their signs, infinities do not spread."""
    inputs = {n: x.detach() for n, x in _kept(FORMS["linear"]).items()}
    index = inputs["row_scale"][:3]
    dropped = [b for b in range(B) if b not in index.tolist()]
    inputs["residual"][dropped[0]] = -0.0
    inputs["residual"][dropped[1], 2] = float("inf")
    inputs["bias"][1] = float("inf")
    with fk.backend("triton"):
        y = linear(**inputs)
    for b in dropped:
        expected, found = inputs["residual"][b].contiguous(), y[b].contiguous()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


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


@pytest.mark.parametrize("op", [layer_norm_and_input, rms_norm_and_input, linear, fk.mlp])
def test_another_batchs_draw_is_refused_where_values_are_checked(op):
    """Six numbers: two samples of four, or all of three."""
    x, weight = rand(3, T, C), rand(*([C] if "norm" in op.__name__ else [C, C]), seed=1)

    def call(samples):
        if op.__name__ in ("linear", "mlp"):
            weights = (weight,) if op is linear else (weight, None, weight, None)
            return op(x, *weights, residual=x, row_scale=samples)
        return op(x, weight, samples=samples)

    with checked_values():
        call(_samples(3, 0.0))
        with pytest.raises(ValueError, match=f"{op.__name__}: .* gave for 3 samples, got"):
            call(_samples(4, 0.5))


def test_dropped_samples_are_not_read(route):
    """NaN in them, and in their gradient, reaches no kept sample and no parameter."""
    inputs, x, weight = _kept(FORMS["linear"]), rand(B, T, C), rand(C, seed=1)
    samples = inputs["row_scale"]
    dropped = [b for b in range(B) if b not in samples[:3].tolist()]
    upstream = rand(B, T, C, seed=3, grad=False)
    upstream[dropped] = x.data[dropped] = float("nan")
    with fk.backend("triton"):
        y, inputs["residual"] = layer_norm_and_input(x, weight, samples=samples)
        out = linear(**inputs | {"x": y})
    parameters = [weight, *(inputs[n] for n in ("weight", "bias", "layer_scale"))]
    found = torch.autograd.grad(out, parameters, upstream)
    assert all(t.isfinite().all() for t in (y, out[samples[:3]], *found))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_flops_are_those_of_kept_samples(form):
    totals = []
    for name in ("triton", "torch"):
        with fk.backend(name), FlopCounterMode(display=False) as counter:
            form.call(_kept(form)).square().sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0
