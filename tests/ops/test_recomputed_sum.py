"""recomputed_sum: a LayerNorm's input, made again by the linear layer before it, bit for bit."""

import gc

import pytest
import torch
from numerics import DEVICE, rand
from torch.multiprocessing.reductions import StorageWeakRef

from fastvit_kernels.ops import recomputed_sum as module
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.ops.norm.functions import layer_norm_and_input
from fastvit_kernels.ops.recomputed_norm import recomputed_norm
from fastvit_kernels.ops.recomputed_sum import recomputed_sum
from fastvit_kernels.runtime.backend import backend

B, T, C = 2, 5, 32
SHAPES = {
    "x": (B, T, C),
    "norm1": (C,),
    "proj": (C, C),
    "bias": (C,),
    "gamma": (C,),
    "norm2": (C,),
    "fc1": (48, C),
    "fc2": (C, 48),
}


@pytest.fixture
def made(monkeypatch):
    """How often a sum was made again."""
    calls, launcher = [], module.linear_fwd
    monkeypatch.setattr(module, "linear_fwd", lambda *a: calls.append(a) or launcher(*a))
    return calls


def _inputs():
    return {name: rand(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


def _gradients(inputs, low, scaled=True, spoil=None):
    """The gradient of all that a block of linear and mlp reads, and whether its sum was kept."""
    p = inputs
    rows = torch.tensor([2.0, 0.0], device=DEVICE) if scaled else None
    with backend("triton"), torch.autocast(DEVICE.type, torch.float16):
        y, first = layer_norm_and_input(p["x"] * 1.0, p["norm1"], out_dtype=torch.float16)
        x = linear(
            y,
            p["proj"],
            p.get("bias"),
            residual=first,
            row_scale=rows,
            layer_scale=p["gamma"] if scaled else None,
        )
        if low:
            with recomputed_sum(x) as again:
                y, same = layer_norm_and_input(x, p["norm2"], out_dtype=torch.float16)
            kept = recomputed_norm(y, x, p["norm2"], recompute_fn=again)
        else:
            y, same = layer_norm_and_input(x, p["norm2"], out_dtype=torch.float16)
            kept = torch.enable_grad()
        with kept:
            out = same + mlp(y, p["fc1"], None, p["fc2"], None)
    reference = StorageWeakRef(x.untyped_storage())
    del x, y, same, kept
    gc.collect()  # the interpreter of Triton 3.9 leaves a launch's arguments in a cycle
    is_kept = not reference.expired()
    if spoil is not None:
        spoil(first)
    del first
    upstream = rand(*out.shape, dtype=out.dtype, seed=9, grad=False)
    wanted = [t for n, t in inputs.items() if scaled or n != "gamma"]
    return torch.autograd.grad(out, wanted, upstream), is_kept


@pytest.mark.parametrize(("scaled", "bias"), [(True, True), (False, False)], ids=str)
def test_recomputed_sum_bits(scaled, bias, made):
    inputs = {n: x for n, x in _inputs().items() if bias or n != "bias"}
    wanted, default_keeps = _gradients(inputs, False, scaled)
    got, low_keeps = _gradients(inputs, True, scaled)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert default_keeps and not low_keeps
    assert len(made) == 1  # for the norm's output and for the norm's backward together


def test_recomputed_sum_input_modified():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(_inputs(), True, spoil=lambda first: first.detach().zero_())


def test_recomputed_sum_is_no_chain(made):
    """A sum whose residual is itself made again is kept: else each would make all before it."""
    p = _inputs()
    with backend("triton"), torch.autocast(DEVICE.type, torch.float16):
        y, x = layer_norm_and_input(p["x"] * 1.0, p["norm1"], out_dtype=torch.float16)
        found = []
        for _ in range(4):
            x = linear(y, p["proj"], p["bias"], residual=x)
            with recomputed_sum(x) as again:
                y, x = layer_norm_and_input(x, p["norm2"], out_dtype=torch.float16)
            found.append(again is not None)
        assert found == [True, False, True, False]
        x.sum().backward()
    assert len(made) == 2


def test_recomputed_sum_other_inputs():
    p = _inputs()
    with backend("triton"):
        y, first = layer_norm_and_input(p["x"], p["norm1"])
        wide = torch.cat((y, y), -1)
        weight = torch.cat((p["proj"], p["proj"]), -1)
        sums = (
            p["x"],
            y,
            linear(y, p["proj"]),
            linear(y, p["proj"], residual=p["x"]),
            linear(first, p["proj"], layer_scale=p["gamma"], residual=y),
            linear(y, p["proj"], activation="gelu", residual=first),
            linear(wide, weight, layer_scale=p["gamma"], residual=first),
        )
        for x in sums:
            with recomputed_sum(x) as again:
                assert again is None
