"""What a call's decision may look at: it is remembered by shapes, dtypes, devices and scalars."""

from __future__ import annotations

import contextlib

import pytest
import torch
from numerics import DEVICE, rand
from tiny_calls import every_launch, every_op, op_and_inputs, step

import fastvit_kernels as fk
from fastvit_kernels.runtime import configs


def _turned(x):
    return x if x.ndim < 2 else x.mT.contiguous().mT


def _by_torch(call):
    with fk.backend("torch"):
        call()


def _first_calls(function, inputs):
    """Calls like the one to come but for what a decision must look at, or must not."""
    plain = [x.detach() for x in inputs]

    def call(change=lambda x: x.clone(), wanted=True):
        some = [change(x) for x in plain]
        for i, x in enumerate(some):
            x.requires_grad_(wanted is True or wanted == i)
        out = function(*some)
        if out.requires_grad and out.device == DEVICE:
            out.backward(torch.ones_like(out))

    yield "no_grad", torch.no_grad()(call)
    yield "frozen", lambda: call(wanted=False)
    for i in (0, len(inputs) - 1):
        yield f"input {i} alone trained", lambda i=i: call(wanted=i)
    yield "turned", lambda: call(_turned)
    yield "half", lambda: call(lambda x: x.half())
    yield "double", lambda: call(lambda x: x.double())
    yield "autocast", torch.autocast(DEVICE.type, torch.float16)(call)
    yield "torch", lambda: _by_torch(call)
    yield "meta", lambda: call(lambda x: x.to("meta"))


@every_launch
def test_cached_decision_per_call_kind(op):
    function, inputs = op_and_inputs(op)

    def bits():
        torch.manual_seed(0)
        return step(function, inputs)

    configs._forget()
    wanted = bits()
    for name, first in _first_calls(function, inputs):
        configs._forget()
        with contextlib.suppress(*[ValueError] * (name == "meta")):  # some stay on their device
            first()
        for a, b in zip(bits(), wanted, strict=True):
            assert torch.equal(a, b), name


@every_op
def test_cached_decision_per_autocast_dtype(op):
    function, inputs = op_and_inputs(op, grad=False)

    def run(dtype):
        torch.manual_seed(0)
        with torch.autocast(DEVICE.type, dtype):
            return function(*inputs)

    wanted = []
    for dtype in (torch.float16, torch.bfloat16):
        configs._forget()
        wanted.append(run(dtype))
    for dtype, out in zip((torch.float16, torch.bfloat16), wanted, strict=True):
        assert torch.equal(run(dtype), out)


def test_cached_decision_per_scalar_type():
    qkv = rand(1, 5, 3, 2, 8)
    fk.attention(qkv, scale=1)
    with pytest.raises(TypeError, match="scale must be a number, got bool True"):
        fk.attention(qkv, scale=True)


def test_cached_decision_per_backend():
    """float64 goes to PyTorch by itself; who asks for kernels is told that there are none."""
    x = rand(3, 16, dtype=torch.float64, grad=False)
    fk.layer_norm(x)
    with fk.backend("triton"), pytest.raises(RuntimeError, match="float64"):
        fk.layer_norm(x)
