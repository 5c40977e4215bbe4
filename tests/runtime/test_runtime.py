"""How the ops live with torch's modes: determinism, hooks, checkpoints, export, copies; what a
call's decision may look at, which is remembered by shapes, dtypes, devices and scalars."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import tracemalloc
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from calls import Calls
from numerics import DEVICE, rand
from private import tree_leaves
from tiny_calls import (
    DROPOUTS,
    assert_same_bits,
    every_launch,
    every_op,
    op_and_inputs,
    small_vit,
    step,
    train_step,
)
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.runtime import configs


@pytest.mark.parametrize("op", DROPOUTS)
def test_dropout_seed_from_torch_generator(op):
    function, inputs = op_and_inputs(op)
    torch.manual_seed(5)
    first, second = function(*inputs), function(*inputs)
    torch.manual_seed(5)
    again = function(*inputs)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@every_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_no_grad_saves_nothing(op, mode):
    """Nor do inputs that are frozen."""
    function, inputs = op_and_inputs(op)
    with Calls() as with_gradients:
        wanted = function(*inputs)
    if mode is nullcontext:
        inputs = [x.detach() for x in inputs]
    with mode(), Calls() as kept:
        out = function(*inputs)
    assert torch.equal(out, wanted)
    assert out.grad_fn is None and not out.requires_grad
    first, second = (
        sum(x.numel() for _, _, out in calls.ours for x in tree_leaves(out))
        for calls in (kept, with_gradients)
    )
    # linear's pre-activation and mlp's are not even computed; statistics and lse where they can be
    assert first < second if op in ("linear", "mlp", "layer_norm") else first <= second


@every_op
def test_saved_tensors_hooks(op):
    """What is saved may come back from elsewhere, and with other strides."""
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(step(function, inputs), wanted)
    packed = []

    def pack(x):  # its values in every second element of memory
        packed.append(x)
        x = x.detach()
        return torch.stack([x, torch.full_like(x, 7)], dim=-1)[..., 0] if x.ndim else x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.testing.assert_close(step(function, inputs), wanted, rtol=1e-5, atol=1e-5)
    assert packed


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_redraws_dropout(use_reentrant):
    model = small_vit(attn_drop_rate=0.3, drop_path_rate=0.5, depth=2).train()
    images = rand(3, 1, 8, 8)

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    results = []
    for call in (model, checkpointed):
        torch.manual_seed(3)
        images.grad = None
        results.append([*train_step(model, images, call), images.grad])
    assert_same_bits(results[1], results[0])


def test_model_copy_and_pickle():
    model, images = small_vit(), rand(2, 1, 8, 8)
    wanted = train_step(model, images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(train_step(twin, images), wanted)


def test_export_of_our_model():
    model, images = small_vit().eval(), rand(2, 1, 8, 8, grad=False)
    torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        exported = torch.export.export(model, (images,))
        torch.testing.assert_close(exported.module()(images), model(images))


@every_op
def test_default_dtype_and_device(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    upstream = rand(*wanted[0].shape, seed=99, grad=False)
    former = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        out = function(*inputs)
        got = [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(former)
    assert_same_bits(got, wanted)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]


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
    yield "turned", lambda: call(lambda x: x if x.ndim < 2 else x.mT.contiguous().mT)
    yield "half", lambda: call(lambda x: x.half())
    yield "double", lambda: call(lambda x: x.double())
    yield "autocast", torch.autocast(DEVICE.type, torch.float16)(call)
    yield "torch", fk.backend("torch")(call)
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


def test_cached_decision_per_scalar_type():
    qkv = rand(1, 5, 3, 2, 8)
    fk.attention(qkv, scale=1)
    with pytest.raises(TypeError, match="scale must be a number, got bool True"):
        fk.attention(qkv, scale=True)


def test_steps_leave_nothing_in_the_memory_of_python():
    """What the package's own lines hold does not grow with every six steps."""

    def steps(count):
        for _ in range(count):
            qkv = rand(1, 3, 3, 1, 8)
            y = fk.layer_norm(fk.attention(qkv, dropout_p=0.1))
            torch.autograd.grad(y.square().sum(), qkv)
        gc.collect()
        ours = tracemalloc.Filter(True, str(Path(fk.__file__).parent / "*"))
        trace = tracemalloc.take_snapshot().filter_traces([ours])
        return sum(s.size for s in trace.statistics("filename"))

    tracemalloc.start()
    try:
        held = [steps(2), *(steps(6) for _ in range(5))]
    finally:
        tracemalloc.stop()
    grown = [after - before for before, after in pairwise(held)]
    assert min(grown) < 1200, f"{grown} bytes in 6 steps"  # what leaks grows each time
