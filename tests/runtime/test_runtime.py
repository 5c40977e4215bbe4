"""How the ops live with torch's modes: determinism, anomaly, hooks, checkpoints, export, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from numerics import DEVICE, rand
from tiny_calls import (
    DROPOUTS,
    assert_same_bits,
    every_op,
    op_and_inputs,
    small_vit,
    step,
    train_step,
    train_step_of,
)
from torch.utils.checkpoint import checkpoint

from fastvit_kernels.runtime.compat import TorchDispatchMode


class _Outputs(TorchDispatchMode):
    """Keeps what our operators return."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fastvit_kernels":
            self.outputs += out if isinstance(out, tuple) else (out,)
        return out


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
def test_deterministic_algorithms(op):
    torch.use_deterministic_algorithms(True)  # and NaN in every torch.empty, see conftest.py
    assert torch.utils.deterministic.fill_uninitialized_memory
    first, second = step(*op_and_inputs(op)), step(*op_and_inputs(op))
    assert_same_bits(first, second)
    assert all(x.isfinite().all() for x in first)


def test_anomaly_mode():
    function, inputs = op_and_inputs("layer_norm")
    with torch.autograd.detect_anomaly(check_nan=True):
        out = function(*inputs)
        with pytest.raises(RuntimeError, match=r"Norm\w*Backward.*nan"):
            out.backward(torch.full_like(out, float("nan")))


@every_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_saves_nothing(op, mode):
    function, inputs = op_and_inputs(op)
    wanted = function(*inputs)
    with mode(), _Outputs() as kept:
        out = function(*inputs)
    assert torch.equal(out, wanted)
    assert out.grad_fn is None and not out.requires_grad
    first = sum(x.numel() for x in kept.outputs)
    with _Outputs() as with_gradients:
        function(*inputs)
    second = sum(x.numel() for x in with_gradients.outputs)
    # linear's pre-activation and mlp's are not even computed; statistics and lse where they can be
    assert first < second if op in ("linear", "mlp", "layer_norm") else first <= second


@every_op
def test_frozen_inputs_save_nothing(op):
    function, inputs = op_and_inputs(op, grad=False)
    out = function(*inputs)
    assert out.grad_fn is None and not out.requires_grad


@every_op
def test_saved_tensors_hooks(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    packed = []

    def pack(x):
        packed.append(x)
        return x.detach().to("cpu", copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(DEVICE)):
        assert_same_bits(step(function, inputs), wanted)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(step(function, inputs), wanted)


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
        results.append([*train_step_of(call, model, images), images.grad])
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
