"""recomputed_sum: a LayerNorm's input, made again by the linear layer before it, bit for bit."""

import pytest
import torch
from numerics import DEVICE, rand

from fastvit_kernels.ops import recomputed_sum as module
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.norm.functions import layer_norm_and_input
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
}


@pytest.fixture
def made(monkeypatch):
    """How often a sum was made again."""
    calls, launcher = [], module.linear_fwd
    monkeypatch.setattr(module, "linear_fwd", lambda *a: calls.append(a) or launcher(*a))
    return calls


def _inputs():
    return {name: rand(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


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
