"""linear; and what it shares with the MLPs that are made of it."""

import pytest
import torch
from numerics import DEVICE, DTYPES, dtype_id, rand
from products import FORMS, FULL, LINEARS, MLP, PLAIN, leaves, route, saved_shapes

from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.runtime.backend import backend

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
EPILOGUES = [PLAIN, FULL[:1], FULL[1:2], FULL[2:], FULL[1:], FULL]
PLAIN_LINEAR = LINEARS["linear"]

__all__ = ["route"]  # a fixture
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_linear = pytest.mark.parametrize("form", LINEARS.values(), ids=LINEARS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


@every_dtype
@each_linear
@pytest.mark.parametrize("epilogue", EPILOGUES, ids="-".join)
def test_linear_backward(route, epilogue, form, dtype):
    form.check(form.inputs(dtype=dtype, epilogue=epilogue))


@every_dtype
@each_linear
@pytest.mark.parametrize("sizes", [(1, 65, 33), (1, 1, 1), (300, 130, 200)], ids=str)
def test_linear_sizes(route, sizes, form, dtype):
    M, K, N = sizes
    form.check(form.inputs((M,), K, N=N, dtype=dtype))


def test_linear_many_row_blocks(route):
    """More row blocks than GROUP_M, and a group that is not full."""
    rows = (64 * gemm.GROUP_M + 100,)
    PLAIN_LINEAR.check(PLAIN_LINEAR.inputs(rows, 33, N=130, epilogue=FULL[1:2]), activation="silu")


def test_linear_takes_a_vector(route):
    inputs = PLAIN_LINEAR.inputs((1,), epilogue=FULL[:2])
    inputs |= {n: inputs[n][0].detach().requires_grad_() for n in ("x", "residual")}
    PLAIN_LINEAR.check(inputs, activation="gelu")


def _apart(x):
    """Memory between its elements, or its axes in another order."""
    if x.ndim == 1:
        return rand(2 * len(x), grad=False)[::2]
    if x.ndim == 2:
        return rand(*x.shape[::-1], grad=False).t()
    B, T, C = x.shape
    return rand(B, 2 * T, 2 * C, grad=False)[:, ::2, C:]


def _shared(x):
    """Elements that share memory, rows with gaps."""
    if x.ndim == 1:
        return rand(1, grad=False).expand(len(x))
    if x.ndim == 2:
        return rand(len(x), x.shape[1] + 8, grad=False)[:, 8:]
    return rand(1, 1, x.shape[2], grad=False).expand(x.shape)


@pytest.mark.parametrize("layout", [_apart, _shared])
@every_form
def test_layouts(route, form, layout):
    inputs = form.inputs((3, 5), 40, 48, 24)
    laid = {n: layout(x).detach().requires_grad_() for n, x in leaves(inputs).items()}
    form.check({**inputs, **laid})
    form.check({**inputs, **laid, "residual": inputs["residual"]})
    turned = rand(3, 24, 5, grad=False).transpose(1, 2).requires_grad_()
    keep = rand(3, 2, grad=False)[:, 1]
    form.check({**inputs, "residual": turned, "row_scale": keep})


@every_dtype
@pytest.mark.parametrize("form", [*LINEARS.values(), MLP], ids=[*LINEARS, "mlp"])
def test_extremes(route, form, dtype):
    """|z| up to 1e4, and rows of exact zeros; every gradient stays within fp16."""
    inputs = form.inputs((2, 8), 48, 40, 24, dtype)
    with torch.no_grad():
        inputs["x"] *= 2.5e3
        inputs["x"][0, 3] = 0
    upstream = rand(2, 8, 24, dtype=dtype, seed=9, scale=0.01, grad=False)
    errors = form.check(inputs, upstream=[upstream])
    assert all(e.max < float("inf") for e in errors)


@pytest.mark.parametrize("epilogue", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("x_dtype", [fp32, bf16], ids=dtype_id)
@every_form
def test_autocast(route, form, x_dtype, epilogue):
    """fp32 parameters under bf16 autocast: torch's dtypes, and the 2x rule against torch there."""
    inputs = form.inputs((3, 20), 48, 56, 40, epilogue=epilogue)
    inputs["x"] = inputs["x"].detach().to(x_dtype).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=bf16):
        form.check(inputs, dtype=bf16)
        y = form.call(inputs)
    assert y.dtype == (fp32 if epilogue else bf16)
    needed = list(leaves(inputs).values())
    gradients = torch.autograd.grad(y, needed, torch.ones_like(y))
    assert [g.dtype for g in gradients] == [x.dtype for x in needed]


@every_form
def test_row_scale_gradient_falls_back(form):
    inputs = form.inputs()
    inputs["row_scale"].requires_grad_()
    form.check(inputs)
    with backend("triton"), pytest.raises(RuntimeError, match="row_scale requires a gradient"):
        form.call(inputs)


def test_linear_small_layer_scale_fp16(route):
    """layer_scale * W at 1e-5 is below fp16's range: it must not be formed."""
    inputs = PLAIN_LINEAR.inputs((4, 16), 64, N=48, dtype=fp16, side_dtype=fp32)
    with torch.no_grad():
        inputs["layer_scale"] *= 1e-5
        inputs["weight"] *= 0.1
    upstream = rand(4, 16, 48, seed=7, scale=1e4, grad=False)
    with torch.autocast(DEVICE.type, dtype=fp16):
        errors = PLAIN_LINEAR.check(inputs, upstream=[upstream], dtype=fp16)
    dx = next(e for e in errors if e.name == "dx")
    assert dx.rms < 2e-3 * 1e4 * 1e-5 * 0.1


def test_linear_autocast_fp32_dweight():
    inputs = PLAIN_LINEAR.inputs((64, 8), 32, N=24, epilogue=PLAIN)
    with torch.autocast(DEVICE.type, dtype=bf16):
        y = linear(**inputs)
    upstream = rand(64, 8, 24, dtype=bf16, seed=9, grad=False)
    (dweight,) = torch.autograd.grad(y, inputs["weight"], upstream)
    exact = upstream.double().flatten(0, 1).t() @ inputs["x"].to(bf16).double().flatten(0, 1)
    assert (dweight - exact).abs().max() < 1e-4 * exact.abs().max()


def test_linear_bias_gradient_sums_in_fp32(route):
    """4096 ones: a sum in bf16 would stop at 256."""
    x, weight = torch.zeros(4096, 8, dtype=bf16), torch.zeros(3, 8, dtype=bf16)
    bias = torch.zeros(3, dtype=bf16, device=DEVICE, requires_grad=True)
    y = linear(x.to(DEVICE), weight.to(DEVICE), bias, layer_scale=torch.ones_like(bias))
    (dbias,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert dbias.tolist() == [4096.0] * 3


def test_linear_backward_inside_autocast_stays_fp32():
    inputs = PLAIN_LINEAR.inputs((4, 8), 64, N=48, epilogue=FULL[1:2])
    outside = PLAIN_LINEAR.gradients(inputs)
    y = linear(**inputs)
    with torch.autocast(DEVICE.type, dtype=bf16):
        upstream = rand(*y.shape, seed=19, grad=False)
        inside = torch.autograd.grad(y, list(leaves(inputs).values()), upstream)
    assert all(torch.equal(a, b) for a, b in zip(outside.values(), inside, strict=True))


def test_linear_saves_what_it_says():
    M, K, N = 12, 40, 24
    inputs = PLAIN_LINEAR.inputs((M,), K, N=N, epilogue=FULL[:2])
    x_weight = [(M, K), (N, K)]
    plain = {k: inputs[k] for k in ("x", "weight", "bias")}
    assert saved_shapes(lambda: linear(**plain)) == sorted(x_weight)
    assert saved_shapes(lambda: linear(**inputs)) == sorted([*x_weight, (N,), (N,)])
    assert saved_shapes(lambda: linear(**plain, activation="gelu")) == sorted([*x_weight, (M, N)])
    frozen = {**plain, "weight": plain["weight"].detach(), "bias": plain["bias"].detach()}
    assert saved_shapes(lambda: linear(**frozen)) == [(N, K)]


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
    wanted = residual + (bias * layer_scale if layer_scale is not None else bias)
    for way in ("library", "triton") if dtype is fp32 and not scaled else ("library",):
        with forced_route(way), torch.autocast(DEVICE.type, torch.bfloat16):
            y = linear(x, weight, bias, residual=residual, layer_scale=layer_scale)
        torch.testing.assert_close(y.float(), wanted, rtol=tolerance, atol=tolerance)
