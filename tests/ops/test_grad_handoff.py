"""A norm's backward leaves d and g with the layer before it, which takes them if it may."""

import itertools
from functools import partial, wraps

import pytest
import torch
from numerics import assert_accurate, rand
from products import GATED, LINEARS, MLP
from replaced import operators, replace_operator
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import layer_norm_and_input, rms_norm_and_input
from fastvit_kernels.ops.common import grad_handoff
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from fastvit_kernels.ops.linear import linear, linear_ref
from fastvit_kernels.ops.mlp import mlp, mlp_ref
from fastvit_kernels.ops.norm.functions import layer_norm_ref, rms_norm_ref

B, T, K, C, F = 3, 7, 24, 40, 48
fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
SCALES = ("layer_scale", "row_scale")
FORMS = {"linear": LINEARS["linear"], "mlp": MLP, "gated_mlp": GATED["packed"]}
OPS = {"linear": linear, "mlp": mlp, "gated_mlp": gated_mlp}
SPECIFICATIONS = {"linear": linear_ref, "mlp": mlp_ref, "gated_mlp": gated_mlp_ref}


def _inputs(op, low, *scales):
    """Of op and of the norm after it; the residual is fp32 and what is multiplied has `low`."""
    inputs = FORMS[op].inputs((B, T), K, F, C, low, epilogue=("residual", *scales), side_dtype=fp32)
    return inputs | {"norm_weight": rand(C, seed=7), "norm_bias": rand(C, seed=8)}


def _run(first, norm, between, norm_weight, norm_bias, **inputs):
    return norm(between(first(**inputs)), norm_weight, norm_bias)


def _fused(op, between=lambda x: x, norm=layer_norm_and_input):
    return partial(_run, OPS[op], norm, between)


def _reference(op, between=lambda x: x, norm=layer_norm_ref):
    return partial(_run, SPECIFICATIONS[op], lambda *a: (norm(*a), a[0]), between)


@pytest.fixture
def seen(monkeypatch):
    """The operators that the layers' backwards called, and the dtype of what they got: that of the
    norm's d, which its layer multiplies, or the residual's fp32."""
    calls = []

    def spied(name, launcher):
        @wraps(launcher)
        def call(*args):
            calls.append((name, args[0].dtype))
            return launcher(*args)

        return call

    for name in ("linear_bwd", "mlp_bwd", "gated_mlp_bwd", "linear_by_library_bwd"):
        replace_operator(monkeypatch, name, eager=spied(name, operators()[name].eager))
    return calls


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scales", [(), ("layer_scale",), ("row_scale",), SCALES], ids="-".join)
@pytest.mark.parametrize("low", [fp16, bf16, fp32], ids=str)
def test_grad_handoff_gradients(op, scales, low, seen):
    inputs = _inputs(op, low, *scales)
    assert_accurate(_fused(op), _reference(op), inputs)
    if low == fp32 and op == "linear" and not scales:
        assert seen == [("linear_by_library_bwd", fp32)]
    else:
        assert seen == [(f"{op}_bwd", low)]


def test_grad_handoff_not_past_activation():
    """The sum of d is no gradient of a bias whose sum is activated."""
    inputs = _inputs("linear", fp32)
    fused, reference = (partial(make("linear"), activation="gelu") for make in (_fused, _reference))
    assert_accurate(fused, reference, inputs)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scales", [(), SCALES], ids=["plain", "scales"])
def test_grad_handoff_from_rms_norm(op, scales, seen):
    inputs = _inputs(op, fp16, *scales) | {"norm_bias": None}
    fused = _fused(op, norm=lambda x, weight, bias: rms_norm_and_input(x, weight))
    reference = _reference(op, norm=lambda x, weight, bias: rms_norm_ref(x, weight))
    assert_accurate(fused, reference, inputs)
    inputs["norm_weight"].requires_grad_(False)
    assert_accurate(fused, reference, inputs)
    assert seen == 2 * [(f"{op}_bwd", fp16)]


@pytest.mark.parametrize("scales", [(), SCALES], ids=["plain", "scales"])
def test_grad_handoff_with_frozen_parts(scales):
    """Each set of inputs that require a gradient, of the layer and of the norm."""
    parts = ["x", "weight", "bias", "norm_weight", *scales[:1]]
    for wanted in itertools.product([False, True], repeat=len(parts)):
        inputs = _inputs("linear", fp16, *scales)
        for name, needed in zip(parts, wanted, strict=True):
            inputs[name].requires_grad_(needed)
        inputs["norm_bias"].requires_grad_(False)
        inputs["residual"].requires_grad_(wanted[0] or not any(wanted[:3] + wanted[4:]))
        assert_accurate(_fused("linear"), _reference("linear"), inputs)


def _with_hook(hook):
    def between(x):
        x.register_hook(hook)
        return x

    return between


def _in_place(grad):
    grad.mul_(2)


BETWEEN = {
    "hook-looks": (_with_hook(lambda grad: None), False),
    "hook-returns": (_with_hook(lambda grad: 2 * grad), False),
    "hook-in-place": (_with_hook(_in_place), False),
    "hook-writes-data": (_with_hook(lambda grad: _in_place(grad.data)), False),
    "retain_grad": (lambda x: x.retain_grad() or x, True),
    "another-op": (lambda x: x * 2, False),
    "view": (lambda x: x.view(B, T, C), False),
}


@pytest.mark.parametrize("op", ["linear", "mlp"])
@pytest.mark.parametrize("between", BETWEEN)
def test_grad_handoff_is_taken_only_where_nothing_came_between(op, between, seen):
    twist, taken = BETWEEN[between]
    assert_accurate(_fused(op, twist), _reference(op, twist), _inputs(op, fp16, *SCALES))
    assert seen == [(f"{op}_bwd", fp16 if taken else fp32)]


@pytest.mark.parametrize("use", ["before", "after", "norm"])
def test_grad_handoff_of_an_input_with_another_use(use, seen):
    def run(function, norm, norm_weight, norm_bias, **inputs):
        x = function(**inputs)
        other = x * 3 if use == "before" else None
        y, handed_on = norm(x, norm_weight, norm_bias)
        if use == "after":
            other = x * 3
        if use == "norm":
            other = norm(x, norm_bias, norm_weight)[0]
        return y, handed_on, other

    inputs = _inputs("mlp", fp16, "row_scale")
    assert_accurate(
        partial(run, mlp, layer_norm_and_input),
        partial(run, mlp_ref, lambda *a: (layer_norm_ref(*a), a[0])),
        inputs,
    )
    assert seen == [("mlp_bwd", fp32)]


def test_grad_handoff_at_two_backwards_and_at_one_that_stops(seen):
    inputs = _inputs("linear", fp16, *SCALES)
    leaves = [x for x in inputs.values() if x.requires_grad]
    between = []
    y, x = _fused("linear", lambda t: between.append(t) or t)(**inputs)
    loss = (y * y).sum() + x.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.autograd.grad(loss, between, retain_graph=True)  # ends before the layer: nobody takes
    stale = torch.autograd.grad(
        between[0], leaves, torch.ones_like(x), retain_graph=True, allow_unused=True
    )
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [call[1] for call in seen] == [fp16, fp32, fp16]
    assert torch.equal(stale[3], torch.ones_like(x))


def test_grad_handoff_under_a_checkpoint(seen):
    """A block inside, the norm that reads its output in the next one."""
    inputs = _inputs("mlp", fp16, *SCALES)

    def run(keep, **inputs):
        norm = inputs.pop("norm_weight"), inputs.pop("norm_bias")
        through = checkpoint if keep else (lambda f, *a, use_reentrant: f(*a))
        x = through(lambda t: mlp(t, **inputs), inputs.pop("x"), use_reentrant=False)
        return through(lambda t: layer_norm_and_input(t, *norm), x, use_reentrant=False)

    def gradients(keep):
        y, x = run(keep, **inputs)
        leaves = [t for t in inputs.values() if t.requires_grad]
        return torch.autograd.grad((y * y).sum() + x.sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))
    assert [call[1] for call in seen] == [fp16, fp16]


def test_grad_handoff_between_streams(seen, monkeypatch):
    """Autograd frees dx with regard to the stream that reads it; d and g it does not know."""
    streams = iter((1, 2))
    monkeypatch.setattr(grad_handoff, "_stream", lambda x: next(streams))
    assert_accurate(_fused("mlp"), _reference("mlp"), _inputs("mlp", fp16, *SCALES))
    assert seen == [("mlp_bwd", fp32)]


def test_grad_handoff_in_another_backward():
    """One ends at the norm's input; what came of it changes, past its version, before the next."""

    def gradients(run):
        inputs, made = _inputs("linear", fp32, "layer_scale"), []
        y, _ = run("linear", lambda x: made.append(x) or x)(**inputs)
        (dx,) = torch.autograd.grad((y * y).sum(), made, retain_graph=True)
        dx.data.mul_(0.5)
        made[0].backward(dx)
        return [inputs[n].grad for n in ("weight", "bias", "layer_scale")]

    torch.testing.assert_close(gradients(_fused), gradients(_reference), rtol=1e-4, atol=1e-4)


def test_grad_handoff_where_hooks_keep_an_older_row_scale():
    """A buffer that is drawn anew after the forward; a hook kept its numbers."""

    def gradients(run):
        inputs = _inputs("mlp", fp32, "row_scale")
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            y, _ = run("mlp")(**inputs)
        inputs["row_scale"].neg_()
        leaves = [x for x in inputs.values() if x.requires_grad]
        return torch.autograd.grad((y * rand(*y.shape, seed=9)).sum(), leaves)

    torch.testing.assert_close(gradients(_fused), gradients(_reference), rtol=1e-4, atol=1e-4)


def test_grad_handoff_in_torch_compile():
    """Its graphs have no nodes to look at: the layer reads dx itself."""
    torch.compiler.reset()
    run = torch.compile(lambda kw: _fused("linear")(**kw), fullgraph=True, backend="aot_eager")
    inputs = _inputs("linear", fp16, *SCALES)
    assert_accurate(lambda **kw: run(kw), _reference("linear"), inputs)
