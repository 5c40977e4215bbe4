"""The smallest call of every op, a tiny model, a step of each: tests of the runtime share them."""

from __future__ import annotations

import pytest
import torch
from numerics import DEVICE, rand
from op_facts import FACTS

import fastvit_kernels as fk
from fastvit_kernels.accuracy.cases import OPS as REGISTRY


def _op(op, **options):
    """(function of the tensors of the smallest call that get a gradient, their shapes)"""
    shapes = op.shapes_of(FACTS[op.name].tiny)
    names = [name for name in shapes if op.args[name].grad]
    fixed = {
        name: rand(*shape, grad=False)
        for name, shape in shapes.items()
        if op.args[name].required and name not in names
    }
    options = {**op.settings_of(FACTS[op.name].tiny, DEVICE), **options, **fixed}

    def function(*tensors):
        result = op.function(**dict(zip(names, tensors, strict=True)), **options)
        return sum(result) if op.outputs > 1 else result

    return function, [shapes[name] for name in names]


OPS = {
    name: _op(op, **({"activation": "gelu"} if "activation" in FACTS[name].options else {}))
    for name, op in REGISTRY.items()
}
DROPOUTS = {
    f"{name}_dropout": _op(op, dropout_p=0.5)
    for name, op in REGISTRY.items()
    if "dropout_p" in FACTS[name].options
}
every_op = pytest.mark.parametrize("op", OPS)
every_launch = pytest.mark.parametrize("op", [*OPS, *DROPOUTS])


def op_and_inputs(op, seed=0, grad=True):
    function, shapes = (OPS | DROPOUTS)[op]
    return function, [rand(*shape, seed=seed + i, grad=grad) for i, shape in enumerate(shapes)]


def step(function, inputs):
    """Output and input gradients under a random upstream gradient."""
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, rand(*out.shape, seed=99, grad=False))
    return [out.detach(), *grads]


def small_vit(**options):
    torch.manual_seed(0)
    options = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2) | options
    return fk.create_vit("vit_mnist", **options).to(DEVICE)


def train_step(model, images, call=None):
    """Output and gradients; `call` is what calls the model, if not the step itself."""
    model.zero_grad(set_to_none=True)
    out = (call or model)(images)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def assert_same_bits(actual, wanted):
    assert len(actual) == len(wanted)
    for i, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        assert torch.equal(a, w), f"tensor {i}: {(a != w).sum()} of {a.numel()} differ"
