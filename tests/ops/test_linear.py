import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.linear import linear, linear_ref
from fastvit_kernels.runtime.backend import backend

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
EPILOGUES = {
    "plain": (),
    "residual": ("residual",),
    "layer_scale": ("layer_scale",),
    "row_scale": ("row_scale",),
    "scales": ("layer_scale", "row_scale"),
    "all": ("residual", "layer_scale", "row_scale"),
}

# numpy, which runs the kernels where there is no GPU, announces every infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(params=["library", "triton"])
def route(request):
    with forced_route(request.param):
        yield request.param


def _inputs(rows=(3, 9), K=65, N=33, dtype=fp32, bias=True, epilogue=(), side_dtype=None):
    side_dtype = side_dtype or dtype
    inputs = {
        "x": rand(*rows, K, dtype=dtype),
        "weight": rand(N, K, dtype=dtype, seed=1, scale=K**-0.5),
        "bias": rand(N, dtype=dtype, seed=2) if bias else None,
    }
    if "residual" in epilogue:
        inputs["residual"] = rand(*rows, N, dtype=side_dtype, seed=3)
    if "layer_scale" in epilogue:
        inputs["layer_scale"] = rand(N, dtype=side_dtype, seed=4)
    if "row_scale" in epilogue:
        keep = torch.arange(rows[0], device=DEVICE) % 3 != 1
        inputs["row_scale"] = (keep / 0.7).to(side_dtype)
    return inputs


def _check(inputs, activation=None, **options):
    return assert_accurate(
        lambda **kw: linear(**kw, activation=activation),
        lambda **kw: linear_ref(**kw, activation=activation),
        inputs,
        **options,
    )


def _gradients(inputs, activation=None, wanted=None):
    y = linear(**inputs, activation=activation)
    wanted = wanted or [x for x in inputs.values() if x is not None and x.requires_grad]
    upstream = rand(*y.shape, dtype=y.dtype, seed=9, grad=False)
    return torch.autograd.grad(y, wanted, upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_linear_backward(route, epilogue, activation, dtype):
    _check(_inputs(dtype=dtype, epilogue=EPILOGUES[epilogue]), activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 65, 33), (1, 1, 1), (300, 130, 200)],
    ids=str,
)
def test_linear_sizes(route, M, K, N, dtype):
    inputs = _inputs((M,), K, N, dtype, epilogue=EPILOGUES["all"])
    _check(inputs, "gelu")
    _check(inputs)


def test_linear_many_row_blocks(route):
    """More row blocks than GROUP_M, and a group that is not full."""
    _check(_inputs((64 * gemm.GROUP_M + 100,), 33, 130, epilogue=["layer_scale"]), "silu")


def test_linear_takes_a_vector(route):
    inputs = {
        k: x[0].detach().requires_grad_() if k in ("x", "residual") else x
        for k, x in _inputs((1,), epilogue=["residual", "layer_scale"]).items()
    }
    _check(inputs, "gelu")


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_layouts(route, activation):
    B, T, K, N = 3, 5, 40, 24
    base = _inputs((B, T), K, N, epilogue=EPILOGUES["all"])
    strided = {
        "x": rand(B, 2 * T, 2 * K, grad=False)[:, ::2, K:],
        "weight": rand(K, N, grad=False, seed=1).t(),
        "bias": rand(2 * N, grad=False, seed=2)[::2],
        "residual": rand(B, N, T, grad=False, seed=3).transpose(1, 2),
        "layer_scale": rand(1, grad=False, seed=4).expand(N),
        "row_scale": rand(B, 2, grad=False, seed=5)[:, 1],
    }
    for name, x in strided.items():
        _check({**base, name: x.requires_grad_(name != "row_scale")}, activation)
    transposed = rand(K, T, grad=False).t().requires_grad_()
    expanded = rand(1, 1, K, grad=False).expand(B, T, K).requires_grad_()
    _check({"x": transposed, "weight": base["weight"], "bias": base["bias"]}, activation)
    _check({**base, "x": expanded}, activation)
    wide = rand(B, T, 2 * N, grad=False)[..., N:].requires_grad_()  # read by its row stride
    _check({**base, "residual": wide}, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_extremes(route, activation, dtype):
    """|z| up to 1e4, and rows of exact zeros."""
    inputs = _inputs((2, 8), 48, 40, dtype, epilogue=EPILOGUES["all"])
    with torch.no_grad():
        inputs["x"] *= 2.5e3
        inputs["x"][0, 3] = 0
    # Small enough for dweight to stay within fp16.
    upstream = rand(2, 8, 40, dtype=dtype, seed=9, scale=0.03, grad=False)
    errors = _check(inputs, activation, upstream=[upstream])
    assert all(e.max < float("inf") for e in errors)


def test_linear_small_layer_scale_fp16(route):
    """layer_scale * W at 1e-5 is below fp16's range: it must not be formed."""
    inputs = _inputs((4, 16), 64, 48, fp16, epilogue=EPILOGUES["all"], side_dtype=fp32)
    with torch.no_grad():
        inputs["layer_scale"] *= 1e-5
        inputs["weight"] *= 0.1
    upstream = rand(4, 16, 48, seed=7, scale=1e4, grad=False)
    with torch.autocast(DEVICE.type, dtype=fp16):
        errors = _check(inputs, upstream=[upstream], dtype=fp16)
    dx = next(e for e in errors if e.name == "dx")
    assert dx.rms < 2e-3 * 1e4 * 1e-5 * 0.1


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("epilogue", ["plain", "residual", "all"])
@pytest.mark.parametrize("x_dtype", [fp32, bf16], ids=dtype_id)
def test_linear_autocast(route, x_dtype, epilogue, activation):
    """fp32 parameters under bf16 autocast: torch's dtypes, and the 2x rule against torch there."""
    inputs = _inputs((3, 20), 96, 72, epilogue=EPILOGUES[epilogue])
    inputs["x"] = inputs["x"].detach().to(x_dtype).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=bf16):
        _check(inputs, activation, dtype=bf16)
        y = linear(**inputs, activation=activation)
    assert y.dtype == (fp32 if "residual" in EPILOGUES[epilogue] else bf16)
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]


def test_linear_autocast_fp32_dweight():
    inputs = _inputs((64, 8), 32, 24)
    with torch.autocast(DEVICE.type, dtype=bf16):
        y = linear(**inputs)
    upstream = rand(64, 8, 24, dtype=bf16, seed=9, grad=False)
    (dweight,) = torch.autograd.grad(y, inputs["weight"], upstream)
    exact = upstream.double().flatten(0, 1).t() @ inputs["x"].to(bf16).double().flatten(0, 1)
    assert (dweight - exact).abs().max() < 1e-4 * exact.abs().max()


def test_linear_backward_inside_autocast_stays_fp32():
    inputs = _inputs((4, 8), 64, 48, epilogue=["layer_scale"])
    outside = _gradients(inputs)
    y = linear(**inputs)
    wanted = [inputs[name] for name in ("x", "weight", "bias", "layer_scale")]
    with torch.autocast(DEVICE.type, dtype=bf16):
        inside = torch.autograd.grad(y, wanted, rand(*y.shape, seed=9, grad=False))
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def _saved_shapes(function):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(tuple(x.shape)), lambda x: x
    ):
        function()
    return sorted(shapes)


def test_linear_saves_what_it_says():
    M, K, N = 12, 40, 24
    inputs = _inputs((M,), K, N, epilogue=["residual", "layer_scale"])
    x_weight = [(M, K), (N, K)]
    plain = {k: inputs[k] for k in ("x", "weight", "bias")}
    assert _saved_shapes(lambda: linear(**plain)) == sorted(x_weight)
    assert _saved_shapes(lambda: linear(**inputs)) == sorted([*x_weight, (N,), (N,)])
    assert _saved_shapes(lambda: linear(**plain, activation="gelu")) == sorted([*x_weight, (M, N)])
    frozen = {**plain, "weight": plain["weight"].detach(), "bias": plain["bias"].detach()}
    assert _saved_shapes(lambda: linear(**frozen)) == [(N, K)]
    with torch.no_grad():
        assert _saved_shapes(lambda: linear(**plain, activation="gelu")) == []


def test_linear_row_scale_gradient_falls_back():
    inputs = _inputs(epilogue=EPILOGUES["all"])
    inputs["row_scale"].requires_grad_()
    _check(inputs, "gelu")
    with backend("triton"), pytest.raises(RuntimeError, match="row_scale requires a gradient"):
        linear(**inputs)


def test_linear_compiles_without_graph_breaks():
    inputs = _inputs((2, 5), 24, 16, epilogue=EPILOGUES["all"])
    compiled = torch.compile(
        lambda kw: linear(**kw, activation="gelu"), fullgraph=True, backend="aot_eager"
    )
    y, expected = compiled(inputs), linear(**inputs, activation="gelu")
    leaves = [x for x in inputs.values() if x.requires_grad]
    upstream = rand(*y.shape, seed=9, grad=False)
    assert torch.equal(y, expected)
    for a, b in zip(
        torch.autograd.grad(y, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_linear_autocast_bias_fp32():
    x, weight = rand(3, 16, grad=False), torch.zeros(8, 16, device=DEVICE)
    bias = torch.full((8,), 1 + 2.0**-12, device=DEVICE)  # bf16 has no such number
    residual = torch.zeros(3, 8, device=DEVICE)
    with forced_route("triton"), torch.autocast(DEVICE.type, dtype=bf16):
        assert torch.equal(linear(x, weight, bias, residual=residual), bias.expand(3, 8))


@pytest.mark.parametrize(
    ("scaled", "dtype", "tolerance"),
    [(False, fp32, 1e-6), (True, fp32, 1e-6), (False, bf16, 2.0**-6)],
    ids=["residual", "layer_scale", "bf16 residual"],
)
def test_linear_bias_dtype(scaled, dtype, tolerance):
    """By the library's route too, where an epilogue follows and no pre-activation is saved. Beside
    a residual of the compute dtype alone nothing follows, and the bias is rounded with the sum."""
    x, weight = rand(2, 5, 16, grad=False).zero_(), rand(24, 16, seed=1, grad=False)
    bias, residual = rand(24, seed=2, grad=False), rand(2, 5, 24, seed=3, grad=False, dtype=dtype)
    layer_scale = rand(24, seed=4, grad=False) if scaled else None
    with forced_route("library"), torch.autocast(DEVICE.type, torch.bfloat16):
        y = linear(x, weight, bias, residual=residual, layer_scale=layer_scale)
    wanted = residual + (bias * layer_scale if layer_scale is not None else bias)
    torch.testing.assert_close(y.float(), wanted, rtol=tolerance, atol=tolerance)
