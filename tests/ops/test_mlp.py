from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.mlp import mlp, mlp_ref
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.compat import reads_last

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FULL = (), ("residual", "layer_scale", "row_scale")

# numpy, which runs the kernels where there is no GPU, announces every infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(params=["library", "triton"])
def route(request):
    with forced_route(request.param):
        yield request.param


def _inputs(rows=(3, 9), C=65, F=41, N=33, dtype=fp32, bias=True, epilogue=FULL, side_dtype=None):
    side_dtype = side_dtype or dtype
    inputs = {
        "x": rand(*rows, C, dtype=dtype),
        "fc1_weight": rand(F, C, dtype=dtype, seed=1, scale=C**-0.5),
        "fc1_bias": rand(F, dtype=dtype, seed=2) if bias else None,
        "fc2_weight": rand(N, F, dtype=dtype, seed=3, scale=F**-0.5),
        "fc2_bias": rand(N, dtype=dtype, seed=4) if bias else None,
    }
    if "residual" in epilogue:
        inputs["residual"] = rand(*rows, N, dtype=side_dtype, seed=5)
    if "layer_scale" in epilogue:
        inputs["layer_scale"] = rand(N, dtype=side_dtype, seed=6)
    if "row_scale" in epilogue:
        keep = torch.arange(rows[0], device=DEVICE) % 3 != 1
        inputs["row_scale"] = (keep / 0.7).to(side_dtype)
    return inputs


def _check(inputs, activation="gelu", recompute=True, **options):
    return assert_accurate(
        lambda **kw: mlp(**kw, activation=activation, recompute=recompute),
        lambda **kw: mlp_ref(**kw, activation=activation),
        inputs,
        **options,
    )


def _leaves(inputs):
    return {k: x for k, x in inputs.items() if x is not None and x.requires_grad}


def _gradients(inputs, activation="gelu", recompute=True):
    y = mlp(**inputs, activation=activation, recompute=recompute)
    upstream = rand(*y.shape, dtype=y.dtype, seed=9, grad=False)
    leaves = _leaves(inputs)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("epilogue", [PLAIN, FULL], ids=["plain", "full"])
def test_mlp_backward(route, epilogue, activation, dtype):
    _check(_inputs(dtype=dtype, epilogue=epilogue), activation)


@pytest.mark.parametrize("dtype", [bf16], ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_recompute_bits(route, activation, dtype):
    inputs = _inputs(dtype=dtype)
    stored, rebuilt = (_gradients(inputs, activation, recompute) for recompute in (False, True))
    for name in stored:
        assert torch.equal(stored[name], rebuilt[name]), name


def test_mlp_layouts(route):
    B, T, C, F, N = 3, 5, 40, 48, 24
    base = _inputs((B, T), C, F, N)
    strided = {
        "x": rand(B, 2 * T, 2 * C, grad=False)[:, ::2, C:],
        "fc1_weight": rand(C, F, grad=False, seed=1).t(),
        "fc1_bias": rand(2 * F, grad=False, seed=2)[::2],
        "fc2_weight": rand(F, N, grad=False, seed=3).t(),
        "fc2_bias": rand(1, grad=False, seed=4).expand(N),
        "residual": rand(B, N, T, grad=False, seed=5).transpose(1, 2),
        "layer_scale": rand(N, 2, grad=False, seed=6)[:, 1],
        "row_scale": rand(B, 2, grad=False, seed=7)[:, 1],
    }
    for name, x in strided.items():
        _check({**base, name: x.requires_grad_(name != "row_scale")})


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ["gelu"])
def test_mlp_extremes(route, activation, dtype):
    """|z| up to 1e4; the upstream gradient is small enough for dfc2_weight to stay within fp16."""
    inputs = _inputs((2, 8), 48, 40, 24, dtype)
    with torch.no_grad():
        inputs["x"] *= 2.5e3
    upstream = rand(2, 8, 24, dtype=dtype, seed=9, scale=0.01, grad=False)
    errors = _check(inputs, activation, upstream=[upstream])
    assert all(e.max < float("inf") for e in errors)


@pytest.mark.parametrize(
    "epilogue", [PLAIN, ("residual",), FULL], ids=["plain", "residual", "full"]
)
@pytest.mark.parametrize("x_dtype", [fp32, bf16], ids=dtype_id)
def test_mlp_autocast(route, x_dtype, epilogue):
    """fp32 parameters under bf16 autocast: torch's dtypes, and the 2x rule against torch there."""
    inputs = _inputs((3, 20), 96, 128, 72, epilogue=epilogue)
    inputs["x"] = inputs["x"].detach().to(x_dtype).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=bf16):
        _check(inputs, dtype=bf16)
        y = mlp(**inputs)
    assert y.dtype == (fp32 if "residual" in epilogue else bf16)
    leaves = list(_leaves(inputs).values())
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.dtype for g in gradients] == [x.dtype for x in leaves]


def _saved_shapes(function):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(tuple(x.shape)), lambda x: x
    ):
        function()
    return sorted(shapes)


def test_mlp_saves_what_it_says():
    M, C, F, N = 12, 40, 56, 24
    inputs = _inputs((M,), C, F, N, epilogue=("residual",))
    products = [(M, C), (F, C), (N, F)]
    stored = _saved_shapes(lambda: mlp(**inputs, recompute=False))
    assert stored == sorted([*products, (M, F), (M, F)])
    assert _saved_shapes(lambda: mlp(**inputs)) == sorted([*products, (M, F)])
    only_x = {k: x.detach().requires_grad_(k == "x") for k, x in inputs.items()}
    assert _saved_shapes(lambda: mlp(**only_x)) == sorted([(F, C), (N, F), (M, F)])
    only_fc2 = {k: x.detach().requires_grad_(k == "fc2_weight") for k, x in inputs.items()}
    assert _saved_shapes(lambda: mlp(**only_fc2)) == [(M, F)]
    with torch.no_grad():
        assert _saved_shapes(lambda: mlp(**inputs)) == []


def test_mlp_dz_in_place(route):
    """Not where a hook has seen z or may, nor where a second backward reads it."""
    inputs = _inputs((12,), 24, 40, 16)
    gradients = _gradients(inputs).values()

    def written(hooks=None, retain=False):
        with hooks or nullcontext():
            y = mlp(**inputs)
        z = next(x for x in y.grad_fn.saved_tensors if x is not None and x.shape == (12, 40))
        before, leaves = z.clone(), list(_leaves(inputs).values())
        upstream = rand(*y.shape, seed=9, grad=False)
        for last in (False, True) if retain else (True,):
            found = torch.autograd.grad(y, leaves, upstream, retain_graph=not last)
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


def test_mlp_row_scale_gradient_falls_back():
    inputs = _inputs()
    inputs["row_scale"].requires_grad_()
    _check(inputs)
    with backend("triton"), pytest.raises(RuntimeError, match="row_scale requires a gradient"):
        mlp(**inputs)
