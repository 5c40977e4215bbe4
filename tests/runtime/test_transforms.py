"""torch.func: the kernels have no rules for its transforms, so that the specification runs, with a
warning where the tensor is on a GPU."""

from __future__ import annotations

import pytest
import torch
from numerics import rand
from tiny_calls import every_op, op_and_inputs
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels as fk


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_op
def test_func_vmap_and_per_sample_grad(op):
    function, inputs = op_and_inputs(op, grad=False)
    batch = torch.stack([inputs[0], inputs[0] * 0.5])
    got = torch.func.vmap(lambda x: function(x, *inputs[1:]))(batch)
    torch.testing.assert_close(got, torch.stack([function(x, *inputs[1:]) for x in batch]))

    def loss(x):
        return function(x, *inputs[1:]).square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(batch)
    leaves = [x.clone().requires_grad_() for x in batch]
    wanted = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in leaves])
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


@every_op
def test_func_jvp_and_forward_mode(op):
    """On a CPU torch has no forward mode for its flash attention; its "math" form has."""
    function, inputs = op_and_inputs(op, grad=False)
    tangent = rand(*inputs[0].shape, seed=7, grad=False)
    first, *others = inputs

    def partial(x):
        return function(x, *others)

    with sdpa_kernel(SDPBackend.MATH):
        with fk.backend("torch"):
            wanted = torch.func.jvp(partial, (first,), (tangent,))[1]
        got = torch.func.jvp(partial, (first,), (tangent,))[1]
        torch.testing.assert_close(got, wanted)
        with forward_ad.dual_level():
            dual = partial(forward_ad.make_dual(first, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, wanted)


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
