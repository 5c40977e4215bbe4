"""mlp; test_linear.py has what it shares with linear: layouts, extremes, autocast."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from numerics import DTYPES, dtype_id, rand
from products import FORMS, FULL, MLP, PLAIN, bf16, leaves, only, route, saved_shapes

from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.runtime.compat import reads_last

__all__ = ["route"]  # a fixture


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("epilogue", [PLAIN, FULL], ids=["plain", "full"])
def test_mlp_backward(route, epilogue, activation, dtype):
    MLP.check(MLP.inputs(dtype=dtype, epilogue=epilogue), activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["mlp", "packed", "packed, gate last", "separate"])
def test_recompute_bits(route, form, activation):
    inputs = FORMS[form].inputs(dtype=bf16)
    stored, rebuilt = (
        FORMS[form].gradients(inputs, activation=activation, recompute=r) for r in (False, True)
    )
    for name in stored:
        assert torch.equal(stored[name], rebuilt[name]), name


def test_mlp_saves_what_it_says():
    M, C, F, N = 12, 40, 56, 24
    inputs = MLP.inputs((M,), C, F, N, epilogue=FULL[:1])
    products = [(M, C), (F, C), (N, F)]
    stored = saved_shapes(lambda: mlp(**inputs, recompute=False))
    assert stored == sorted([*products, (M, F), (M, F)])
    assert saved_shapes(lambda: mlp(**inputs)) == sorted([*products, (M, F)])
    assert saved_shapes(lambda: mlp(**only(inputs, "x"))) == sorted([(F, C), (N, F), (M, F)])
    assert saved_shapes(lambda: mlp(**only(inputs, "fc2_weight"))) == [(M, F)]


def test_mlp_dz_in_place(route):
    """Not where a hook has seen z or may, nor where a second backward reads it."""
    inputs = MLP.inputs((12,), 24, 40, 16)
    gradients = MLP.gradients(inputs).values()

    def written(hooks=None, retain=False):
        with hooks or nullcontext():
            y = mlp(**inputs)
        z = next(x for x in y.grad_fn.saved_tensors if x is not None and x.shape == (12, 40))
        before, needed = z.clone(), list(leaves(inputs).values())
        upstream = rand(*y.shape, seed=19, grad=False)
        for last in (False, True) if retain else (True,):
            found = torch.autograd.grad(y, needed, upstream, retain_graph=not last)
            assert all(map(torch.equal, found, gradients))
            if not last:
                assert torch.equal(z, before)
        return not torch.equal(z, before)

    def same(x):
        return x

    assert written() == (route == "triton")
    assert written(retain=True) == (route == "triton")
    assert not written(torch.autograd.graph.saved_tensors_hooks(same, same))


def test_mlp_keeps_z_where_a_graph_records(monkeypatch):
    """Its backward may be replayed twice for one forward."""
    found, on_gpu = [], SimpleNamespace(is_cuda=True)
    for records in (False, True):
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda now=records: now)
        x = rand(1)
        x.register_hook(lambda _: found.append(reads_last(on_gpu)))
        x.sum().backward()
    assert found == [True, False]
