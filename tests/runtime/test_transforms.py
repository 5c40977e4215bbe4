"""torch.func: the kernels have no rules for its transforms, so that the specification runs, with a
warning where the tensor is on a GPU."""

from __future__ import annotations

import pytest
import torch
from numerics import rand
from tiny_calls import assert_same_bits, every_op, op_and_inputs, small_vit, train_step
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels as fk


def reference(function, *inputs):
    with fk.backend("torch"):
        return function(*inputs)


@every_op
def test_func_grad(op):
    function, inputs = op_and_inputs(op, grad=False)
    everything = tuple(range(len(inputs)))

    def loss(*tensors):
        return function(*tensors).square().sum()

    got = torch.func.grad(loss, everything)(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(list(got), list(wanted), rtol=1e-5, atol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_op
def test_func_vmap_and_per_sample_grad(op):
    function, inputs = op_and_inputs(op, grad=False)
    batch = torch.stack([inputs[0], inputs[0] * 0.5])
    got = torch.func.vmap(lambda x: function(x, *inputs[1:]))(batch)
    torch.testing.assert_close(got, torch.stack([function(x, *inputs[1:]) for x in batch]))

    # By the specification on one side: of sums without vector extensions 2e-4 was seen.
    gradient = torch.func.grad(lambda x: function(x, *inputs[1:]).square().sum())
    got, wanted = torch.func.vmap(gradient)(batch), torch.stack([gradient(x) for x in batch])
    atol = 1e-3 * wanted.abs().max().item()
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=atol)


@every_op
def test_func_jvp_and_forward_mode(op):
    """On a CPU torch has no forward mode for its flash attention; its "math" form has."""
    function, inputs = op_and_inputs(op, grad=False)
    tangent = rand(*inputs[0].shape, seed=7, grad=False)
    first, *others = inputs

    def partial(x):
        return function(x, *others)

    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.func.jvp(lambda x: reference(partial, x), (first,), (tangent,))[1]
        got = torch.func.jvp(partial, (first,), (tangent,))[1]
        torch.testing.assert_close(got, wanted)
        with forward_ad.dual_level():
            dual = partial(forward_ad.make_dual(first, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients():
    model, images = small_vit(), rand(3, 1, 8, 8, grad=False)
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(params, image):
        return functional_call(model, params, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, images)
    for i, image in enumerate(images):
        grads = torch.autograd.grad(loss(dict(model.named_parameters()), image), model.parameters())
        for (name, got), wanted in zip(each.items(), grads, strict=True):
            torch.testing.assert_close(got[i], wanted, msg=name, rtol=1e-4, atol=1e-5)


def test_functional_call():
    model, images = small_vit(), rand(2, 1, 8, 8)
    wanted = train_step(model, images)
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with fk.backend("triton"):
        out = functional_call(model, params, (images,))
    grads = torch.autograd.grad(out.square().mean(), list(params.values()))
    assert_same_bits([out.detach(), *grads], wanted)


def test_triton_backend_rejects_transforms():
    function, inputs = op_and_inputs("linear", grad=False)
    with fk.backend("triton"):
        with pytest.raises(RuntimeError, match=r"linear: .* but a torch\.func transform is active"):
            torch.func.vmap(lambda x: function(x, *inputs[1:]))(inputs[0][None])
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match="but forward-mode differentiation is active"),
        ):
            function(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


def mapped_over_the_first_axis(function, inputs):
    """vmap over x and what has its shape."""
    x = inputs[0]
    torch.func.vmap(function, tuple(0 if t.shape == x.shape else None for t in inputs))(*inputs)


@pytest.mark.gpu
def test_transform_warns_once_on_gpu():
    from fastvit_kernels.runtime import backend

    backend._say_once.cache_clear()
    function, inputs = op_and_inputs("layer_norm", grad=False)
    with pytest.warns(UserWarning, match=r"layer_norm takes the PyTorch path: a torch\.func"):
        mapped_over_the_first_axis(function, inputs)
