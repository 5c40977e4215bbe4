"""Which route a call takes where a tensor's memory does not hold its values as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, rand
from private import (
    FakeTensorMode,
    TorchDispatchMode,
    TwoTensor,
    has_no_memory,
    negative_view,
    tree_leaves,
    tree_map_only,
    zero_without_memory,
)
from tiny_calls import every_launch, op_and_inputs, step
from torch import Tensor, library, nn
from torch.autograd.functional import jacobian
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
every_indirect = pytest.mark.parametrize("kind", INDIRECT)


def _plain(x):
    return torch.zeros_like(x) if has_no_memory(x) else (x.as_subclass(Tensor) + 0.0)


@every_indirect
def test_input_lazy_views_resolved(kind):
    """Also where a call of the same shapes is known already."""
    x, weight = rand(2, 3, 16, grad=False), rand(16, 16, seed=1)
    odd = INDIRECT[kind](x)
    for call in (
        lambda t: fk.layer_norm(t),
        lambda t: fk.linear(t, weight),
        lambda t: fk.linear(x, weight, residual=t, activation="gelu"),
        lambda t: fk.mlp(t, weight, None, weight, None),
        lambda t: fk.patch_embed(t.reshape(1, 1, 6, 16), weight.view(64, 1, 2, 2)),
        lambda t: fk.qkv_attention(t, torch.cat([weight] * 3), num_heads=2),
    ):
        wanted = call(_plain(odd))
        torch.testing.assert_close(call(odd).as_subclass(Tensor), wanted, rtol=1e-5, atol=1e-5)


@every_indirect
def test_upstream_lazy_views_resolved(kind):
    x, weight = rand(2, 3, 16), rand(16, 16, seed=1)
    upstream = INDIRECT[kind](rand(2, 3, 16, seed=2, grad=False))
    for call in (
        fk.layer_norm,
        lambda x: fk.linear(x, weight, activation="gelu"),
        lambda x: fk.linear(x, weight),
        lambda x: fk.mlp(x, weight, None, weight, None),
    ):
        (wanted,) = torch.autograd.grad(call(x), x, _plain(upstream))
        (got,) = torch.autograd.grad(call(x), x, upstream)
        torch.testing.assert_close(got.as_subclass(Tensor), wanted, rtol=1e-5, atol=1e-5)
    y, residual = fk.layer_norm_and_input(x)
    outputs = (y, residual)
    dy = rand(2, 3, 16, seed=3, grad=False)
    (wanted,) = torch.autograd.grad(outputs, x, (dy, _plain(upstream)), retain_graph=True)
    (got,) = torch.autograd.grad(outputs, x, (dy, upstream))
    torch.testing.assert_close(got.as_subclass(Tensor), wanted, rtol=1e-5, atol=1e-5)


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


def test_sparse_weight_linear():
    model = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True).eval()
    model.linear1.weight = nn.Parameter(model.linear1.weight.detach().to_sparse())
    model.requires_grad_(False)
    x = rand(2, 3, 16, grad=False).requires_grad_()  # torch's own fast path wants dense weights
    wanted = model(x)
    fk.swap_in(model)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def _strided(x):
    """The values of x, every second element of memory."""
    if x.ndim == 0:
        return x
    return torch.stack([x.detach(), torch.full_like(x, 7)], dim=-1)[..., 0]


OPS = {
    "layer_norm": (lambda x, w: fk.layer_norm(x)),
    "linear": (lambda x, w: fk.linear(x, w)),
    "linear_gelu": (lambda x, w: fk.linear(x, w, activation="gelu")),
    "mlp": (lambda x, w: fk.mlp(x, w, None, w, None)),
    "mlp_recompute": (lambda x, w: fk.mlp(x, w, None, w, None, recompute=True)),
    "attention": (lambda x, w: fk.attention((x @ w).repeat(1, 1, 3).view(2, 3, 3, 2, 8))),
    "qkv_attention": (lambda x, w: fk.qkv_attention(x, w.repeat(3, 1), num_heads=2)),
    "sdpa": (lambda x, w: fk.scaled_dot_product_attention(*[(x @ w).view(2, 3, 2, 8)] * 3)),
    "patch_embed": (lambda x, w: fk.patch_embed(x.view(1, 1, 6, 16), w.view(64, 1, 2, 2))),
}
every_op = pytest.mark.parametrize("op", OPS)


@every_op
def test_saved_tensor_strides(op):
    x, weight = rand(2, 3, 16), rand(16, 16, seed=1)
    inputs = (x,) if op == "layer_norm" else (x, weight)
    wanted = torch.autograd.grad(OPS[op](x, weight).square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _strided):
        got = torch.autograd.grad(OPS[op](x, weight).square().sum(), inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@every_op
def test_vectorized_jacobian(op):
    x, weight = rand(2, 3, 16, grad=False), rand(16, 16, seed=1, grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "There is a performance drop"
        got = jacobian(lambda x: OPS[op](x, weight).flatten()[:2], x, vectorize=True)
    wanted = jacobian(lambda x: OPS[op](x, weight).flatten()[:2], x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@every_launch
def test_float64_gradients_by_finite_differences(op):
    """float64 takes PyTorch's own operations; their dropout has one seed a call."""
    function, inputs = op_and_inputs(op, grad=False)
    inputs = [x.double().requires_grad_() for x in inputs]

    def call(*tensors):
        torch.manual_seed(0)
        return function(*tensors)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


class Fakes(TorchDispatchMode):
    """Each call of an operator once more without values: what a compiler expects of it."""

    def __init__(self):
        super().__init__()
        self.calls: dict[Any, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fastvit_kernels":
            self.calls.setdefault(func, args)
            with FakeTensorMode() as mode:
                expected = func(*tree_map_only(Tensor, mode.from_tensor, args))
            for real, fake in zip(tree_leaves(out), tree_leaves(expected), strict=True):
                assert (fake.shape, fake.dtype) == (real.shape, real.dtype), func
                assert not real.numel() or fake.stride() == real.stride(), func
        return out


@every_launch
def test_operator_fakes_and_schemas(op):
    """With every gradient, and with each alone."""
    function, inputs = op_and_inputs(op)
    with Fakes() as fakes:
        step(function, inputs)
        for x in inputs:
            some = [t.detach().requires_grad_(t is x) for t in inputs]
            out = function(*some)
            out.backward(torch.ones_like(out))
    assert fakes.calls
    for operator, args in fakes.calls.items():
        library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


# What a step multiplies: a call, its tensors' shapes, and the numbers of its attention, B H T T D.
_FC1, _FC2 = dict(fc1_weight=(12, 8), fc1_bias=(12,)), dict(fc2_weight=(4, 12), fc2_bias=(4,))
_GATE = dict(gate_weight=(12, 8), gate_bias=(12,))
_KEPT = dict(x=(2, 3, 8), residual=(4, 3, 4))  # two samples of four
_QKV = dict(x=(2, 3, 8), weight=(48, 8), bias=(48,))
_TABLES = dict(cos=(3, 8), sin=(3, 8))
_HEADS = dict(query=(2, 2, 3, 8), key=(2, 2, 5, 8), value=(2, 2, 5, 8))
FLOPS: dict[str, tuple[Callable[..., Any], Mapping[str, tuple[int, ...]], int]] = {
    "linear": (fk.linear, dict(x=(2, 3, 8), weight=(4, 8), bias=(4,)), 0),
    "linear gelu": (
        partial(fk.linear, activation="gelu"),
        dict(x=(2, 3, 8), weight=(4, 8), bias=(4,)),
        0,
    ),
    "linear kept": (fk.linear, dict(_KEPT, weight=(4, 8)), 0),
    "mlp": (fk.mlp, dict(x=(2, 3, 8), **_FC1, **_FC2), 0),
    "mlp kept": (fk.mlp, dict(_KEPT, **_FC1, **_FC2), 0),
    "packed gate": (fk.gated_mlp, dict(x=(2, 3, 8), fc1_weight=(24, 8), fc1_bias=(24,), **_FC2), 0),
    "gate": (fk.gated_mlp, dict(x=(2, 3, 8), **_FC1, **_FC2, **_GATE), 0),
    "gate kept": (fk.gated_mlp, dict(_KEPT, **_FC1, **_FC2, **_GATE), 0),
    "attention": (fk.attention, dict(qkv=(2, 5, 3, 2, 8)), 2 * 2 * 5 * 5 * 8),
    "attention mask": (
        fk.attention,
        dict(qkv=(2, 5, 3, 2, 8), attn_mask=(5, 5)),
        2 * 2 * 5 * 5 * 8,
    ),
    "varlen": (partial(fk.varlen_attention, max_seqlen=4), dict(qkv=(6, 3, 2, 8)), 2 * 6 * 4 * 8),
    "qkv": (partial(fk.qkv_attention, num_heads=2), _QKV, 2 * 2 * 3 * 3 * 8),
    "rope": (partial(fk.rope_attention, num_heads=2), _QKV | _TABLES, 2 * 2 * 3 * 3 * 8),
    "sdpa": (fk.scaled_dot_product_attention, _HEADS, 2 * 2 * 3 * 5 * 8),
    "sdpa mask": (
        fk.scaled_dot_product_attention,
        dict(_HEADS, attn_mask=(3, 5)),
        2 * 2 * 3 * 5 * 8,
    ),
    "patches": (fk.patch_embed, dict(images=(2, 3, 4, 6), weight=(8, 3, 2, 2)), 0),
    "kept patches": (fk.patch_embed, dict(images=(2, 3, 4, 6), weight=(8, 3, 2, 2)), 0),
}


def _flops(call, inputs):
    """Forward, and backward where something wants a gradient."""
    with Fakes(), FlopCounterMode(display=False) as counter:
        out = call(**inputs)
        if out.requires_grad:
            out.square().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FLOPS)
def test_flop_counts(name, monkeypatch):
    """Without gradients, with all of them, and with each alone. Attention by the formulas that
    torch has for a GPU: it counts nothing for that of a CPU before 2.15."""
    call, shapes, pairs = FLOPS[name]
    fixed = {}
    if name.endswith(" kept"):
        fixed = {"row_scale": torch.tensor([2, 0, 1, 2, 0, 3], device=DEVICE)}
    elif name == "varlen":
        fixed = {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)}
    elif name == "kept patches":
        fixed = {"keep": torch.tensor([[0, 5], [1, 2]], device=DEVICE)}
    for trained in ((), tuple(shapes), *((name,) for name in shapes)):
        inputs = {
            n: rand(*shape, seed=i, grad=n in trained)
            for i, (n, shape) in enumerate(shapes.items())
        }
        got = _flops(call, inputs | fixed)
        if pairs:
            wanted = 4 * pairs
            if trained:
                wanted += (14 if "attn_mask" in trained else 10) * pairs
            if "weight" in shapes:  # of the projection
                wanted += 2 * 6 * 8 * 48 * (1 + ("x" in trained) + ("weight" in trained))
        else:
            with fk.backend("torch"):
                wanted = _flops(call, inputs | fixed)
            if name == "kept patches":
                wanted = wanted * 2 // 6  # torch's way gathers from all of them
        assert wanted and got == wanted, trained
