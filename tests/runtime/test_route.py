"""Which route a call takes where a tensor's memory does not hold its values as they are."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from calls import Calls
from numerics import rand
from private import TwoTensor, has_no_memory, negative_view, zero_without_memory
from tiny_calls import every_launch, every_op, op_and_inputs, step
from torch import Tensor, library
from torch.autograd.functional import jacobian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fastvit_kernels as fk


class Tagged(Tensor):
    """A subclass with nothing of its own."""


class Doubling(Tensor):
    """A weight that means twice its memory to F.linear and F.layer_norm, by __torch_function__
    alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, 2.0 * weight.as_subclass(Tensor), *bias)
        if func is F.layer_norm:
            weight = 2.0 * kwargs["weight"].as_subclass(Tensor)
            return F.layer_norm(*args, **{**kwargs, "weight": weight})
        return super().__torch_function__(func, types, args, kwargs or {})


def leaked(x):
    """x as torch.func.grad saw it, after its end."""
    kept = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
    return kept[0]


INDIRECT = {
    "negated": lambda x: negative_view(-x),
    "negated-imaginary": lambda x: torch.complex(x, -x).conj().imag,
    "zero": lambda x: zero_without_memory(x.shape, device=x.device),
    "leaked": leaked,
    "subclass": lambda x: x.as_subclass(Tagged),
}


def _plain(x):
    return torch.zeros_like(x) if has_no_memory(x) else (x.as_subclass(Tensor) + 0.0)


WEIGHT = rand(16, 16, seed=1)
OF_ONE = {
    "layer_norm": fk.layer_norm,
    "linear": lambda x: fk.linear(x, WEIGHT),
    "gelu": lambda x: fk.linear(x, WEIGHT, activation="gelu"),
    "residual": lambda x: fk.linear(torch.ones_like(x), WEIGHT, residual=x, activation="gelu"),
    "mlp": lambda x: fk.mlp(x, WEIGHT, None, WEIGHT, None),
    "patch_embed": lambda x: fk.patch_embed(x.reshape(1, 1, 6, 16), WEIGHT.view(64, 1, 2, 2)),
    "qkv_attention": lambda x: fk.qkv_attention(x, torch.cat([WEIGHT] * 3), num_heads=2),
}


@pytest.mark.parametrize("op", OF_ONE)
@pytest.mark.parametrize("kind", INDIRECT)
def test_lazy_views_resolved(kind, op):
    """An input, an upstream gradient; also where a call of the same shapes is known already."""
    call, x = OF_ONE[op], rand(2, 3, 16)
    odd = INDIRECT[kind](x.detach())
    torch.testing.assert_close(call(odd).as_subclass(Tensor), call(_plain(odd)))
    y = call(x)
    upstream = INDIRECT[kind](rand(*y.shape, seed=2, grad=False))
    (wanted,) = torch.autograd.grad(y, x, _plain(upstream))
    (got,) = torch.autograd.grad(call(x), x, upstream)
    torch.testing.assert_close(got.as_subclass(Tensor), wanted)


def test_torch_dispatch_subclass_falls_back():
    """Also where a call of the same shapes is known already."""
    x, weight = rand(2, 3, 16, grad=False), rand(16, 16, seed=1, grad=False)
    both = TwoTensor(x, 2.0 * x)
    fk.layer_norm(x)
    assert isinstance(fk.layer_norm(both), TwoTensor)
    fk.linear(x, weight, activation="gelu")
    got = fk.linear(both, weight, activation="gelu")
    torch.testing.assert_close(got.b, F.gelu(F.linear(2.0 * x, weight)))
    images, patches = x.view(1, 1, 6, 16), weight.view(64, 1, 2, 2)
    fk.patch_embed(images, patches)
    assert isinstance(fk.patch_embed(images, TwoTensor(patches, patches)), TwoTensor)


def test_torch_function_weight():
    """Also where a call of the same shapes is known already."""
    x, weight = rand(2, 3, 16, grad=False), rand(16, 16, seed=1, grad=False)
    fk.linear(x, weight, activation="gelu")
    got = fk.linear(x, weight.as_subclass(Doubling), activation="gelu")
    torch.testing.assert_close(got, F.gelu(F.linear(x, 2.0 * weight)))
    gamma = rand(16, seed=2, grad=False)
    wanted = fk.layer_norm(x, 2.0 * gamma)
    torch.testing.assert_close(fk.layer_norm(x, gamma.as_subclass(Doubling)), wanted)
    qkv = torch.cat([weight] * 3)
    wanted = fk.qkv_attention(x, 2.0 * qkv, num_heads=2)
    got = fk.qkv_attention(x, qkv.as_subclass(Doubling), num_heads=2)
    torch.testing.assert_close(got, wanted)


def test_layer_norm_dtensor():
    """As SequenceParallel calls it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, weight = torch.randn(2, 4, 16), torch.randn(16)
        got = fk.layer_norm(
            distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()])
        )
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.to_local(), F.layer_norm(x, (16,), weight, eps=1e-6))
    finally:
        dist.destroy_process_group()


@every_op
def test_vectorized_jacobian(op):
    function, (x, *others) = op_and_inputs(op, grad=False)

    def first_two(x):
        return function(x, *others).flatten()[:2]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "There is a performance drop"
        got = jacobian(first_two, x, vectorize=True)
    torch.testing.assert_close(got, jacobian(first_two, x), rtol=1e-5, atol=1e-5)


@every_launch
def test_float64_gradients_by_finite_differences(op):
    """float64 takes PyTorch's own operations; their dropout has one seed a call."""
    function, inputs = op_and_inputs(op, grad=False)
    inputs = [x.double().requires_grad_() for x in inputs]

    def call(*tensors):
        torch.manual_seed(0)
        return function(*tensors)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@every_launch
def test_opcheck(op):
    """With every gradient, and with each alone."""
    function, inputs = op_and_inputs(op)
    with Calls() as calls:
        step(function, inputs)
        for x in inputs:
            some = [t.detach().requires_grad_(t is x) for t in inputs]
            out = function(*some)
            out.backward(torch.ones_like(out))
    first = {operator: args for operator, args, _ in reversed(calls.ours)}
    assert first
    for operator, args in first.items():
        library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


@every_op
def test_flop_counts(op):
    """Forward and backward as torch counts its own operations; attention as torch counts that of a
    GPU, whose backward makes the scores again, for a mask's gradient twice more."""
    function, inputs = op_and_inputs(op)

    def counted():
        with FlopCounterMode(display=False) as counter:
            step(function, inputs)
        by_operator = counter.get_flop_counts().get("Global", {})
        return counter.get_total_flops(), by_operator.get(torch.ops.aten.bmm, 0)

    with fk.backend("torch"), sdpa_kernel(SDPBackend.MATH):
        total, batched = counted()
    product = batched // 6  # of six
    again = product * (3 if op in ("attention", "scaled_dot_product_attention") else 1)
    if op == "varlen_attention":  # which counts the longest sequence for each
        assert counted()[0] >= total + again
    else:
        assert counted()[0] == total + again
