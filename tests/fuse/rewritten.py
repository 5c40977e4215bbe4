"""A module through the graph rewriting, against itself without: values, gradients, rules."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch.utils._pytree import tree_leaves

from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.report import reports_of


def compiled(module, **options):
    options = {"compiler": "eager", **options}
    return torch.compile(module, backend=fastvit_kernels, options=options, fullgraph=True)


def step(call, module, inputs, autocast=False, seed=0):
    """Results, and the gradients of parameters and inputs of a sum that tells elements apart."""
    inputs = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    torch.default_generator.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = tree_leaves(call(*inputs))
    results = [x for x in results if isinstance(x, torch.Tensor)]
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results:
        if x.requires_grad:
            factor = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            loss = loss + (x.double() * factor).sum()
    if loss.requires_grad:
        loss.backward()
    return results, [x.grad for x in (*module.parameters(), *inputs)]


def rules_of(module) -> Counter:
    return sum((r.rules for r in reports_of(module)), Counter())


def assert_same(actual, wanted, rtol=1e-9, atol=1e-9):
    """Values, dtypes, strides and which of them need a gradient."""
    for a, b in zip(actual, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_stride=True)
            assert a.requires_grad == b.requires_grad


def fired(module, *inputs, autocast=False, grad=True, rtol=1e-9, atol=1e-9, **options) -> Counter:
    """The rules that fired, once results and gradients are seen to be the module's own."""
    torch._dynamo.reset()
    host = copy.deepcopy(module)
    with torch.set_grad_enabled(grad):
        results, grads = step(compiled(module, **options), module, inputs, autocast)
        wanted, wanted_grads = step(host, host, inputs, autocast)
    assert_same(results, wanted, rtol, atol)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    return rules_of(module)
