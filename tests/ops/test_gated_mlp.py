import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from fastvit_kernels.ops.mlp import mlp, mlp_ref
from fastvit_kernels.runtime.backend import backend

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FULL = (), ("residual", "layer_scale", "row_scale")
FORMS = ("packed", "packed, gate last", "separate", "normed")

# numpy, which runs the kernels where there is no GPU, announces every infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(params=["library", "triton"])
def route(request):
    with forced_route(request.param):
        yield request.param


def _inputs(
    rows=(3, 9),
    C=65,
    F=41,
    N=33,
    dtype=fp32,
    form="packed",
    bias=True,
    epilogue=FULL,
    norm_dtype=None,
):
    separate = form in ("separate", "normed")
    fc1 = F if separate else 2 * F
    inputs = {
        "x": rand(*rows, C, dtype=dtype),
        "fc1_weight": rand(fc1, C, dtype=dtype, seed=1, scale=C**-0.5),
        "fc1_bias": rand(fc1, dtype=dtype, seed=2) if bias else None,
        "fc2_weight": rand(N, F, dtype=dtype, seed=3, scale=F**-0.5),
        "fc2_bias": rand(N, dtype=dtype, seed=4) if bias else None,
    }
    if separate:
        inputs["gate_weight"] = rand(F, C, dtype=dtype, seed=5, scale=C**-0.5)
        inputs["gate_bias"] = rand(F, dtype=dtype, seed=6) if bias else None
    if "normed" in form:
        inputs["norm_weight"] = rand(F, dtype=norm_dtype or dtype, seed=7)
        inputs["norm_bias"] = rand(F, dtype=norm_dtype or dtype, seed=8) if bias else None
    if "residual" in epilogue:
        inputs["residual"] = rand(*rows, N, dtype=dtype, seed=9)
    if "layer_scale" in epilogue:
        inputs["layer_scale"] = rand(N, dtype=dtype, seed=10)
    if "row_scale" in epilogue:
        keep = torch.arange(rows[0], device=DEVICE) % 3 != 1
        inputs["row_scale"] = (keep / 0.7).to(dtype)
    return inputs


def _options(form, activation="silu"):
    return {"activation": activation, "gate_last": form == "packed, gate last"}


def _check(inputs, form="packed", activation="silu", recompute=True, **options):
    given = _options(form, activation)
    return assert_accurate(
        lambda **kw: gated_mlp(**kw, **given, recompute=recompute),
        lambda **kw: gated_mlp_ref(**kw, **given),
        inputs,
        **options,
    )


def _leaves(inputs):
    return {k: x for k, x in inputs.items() if x is not None and x.requires_grad}


def _gradients(inputs, form="packed", activation="silu", recompute=True):
    y = gated_mlp(**inputs, **_options(form, activation), recompute=recompute)
    upstream = rand(*y.shape, dtype=y.dtype, seed=19, grad=False)
    leaves = _leaves(inputs)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_backward(activation, form, dtype):
    _check(_inputs(dtype=dtype, form=form), form, activation)


@pytest.mark.parametrize("epilogue", [PLAIN, ("residual",), FULL], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["b", "no_b"])
@pytest.mark.parametrize("form", FORMS)
def test_gated_mlp_parts(route, form, bias, epilogue):
    _check(_inputs((4, 9), 24, 50, 16, form=form, bias=bias, epilogue=epilogue), form)


def test_gated_mlp_gate_order():
    """The gate is the first half; with gate_last, and beside a gate_weight, it is the other one."""
    x, fc2 = rand(5, 8), torch.eye(6, device=DEVICE)
    a, b = rand(6, 8, seed=1), rand(6, 8, seed=2)
    packed = torch.cat([a, b])
    wanted = torch.nn.functional.silu(x @ a.t()) * (x @ b.t())
    swapped = torch.nn.functional.silu(x @ b.t()) * (x @ a.t())
    for y, expected in (
        (gated_mlp(x, packed, None, fc2, None), wanted),
        (gated_mlp(x, packed, None, fc2, None, gate_last=True), swapped),
        (gated_mlp(x, b, None, fc2, None, gate_weight=a), wanted),
        (gated_mlp(x, a, None, fc2, None, gate_weight=b), swapped),
    ):
        torch.testing.assert_close(y, expected)
    assert not torch.allclose(wanted, swapped)


@pytest.mark.parametrize(
    ("activation", "gate"), [("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh")]
)
def test_mlp_takes_packed_gates_by_name(activation, gate):
    inputs = _inputs()
    assert mlp(**inputs, activation=activation).equal(gated_mlp(**inputs, activation=gate))
    assert_accurate(
        lambda **kw: mlp(**kw, activation=activation),
        lambda **kw: mlp_ref(**kw, activation=activation),
        inputs,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("form", FORMS[:3])
def test_gated_mlp_recompute_bits(form, dtype):
    inputs = _inputs(dtype=dtype, form=form)
    stored, rebuilt = (_gradients(inputs, form, recompute=r) for r in (False, True))
    for name in stored:
        assert torch.equal(stored[name], rebuilt[name]), name


@pytest.mark.parametrize("form", ["packed", "separate"])
def test_gated_mlp_layouts(route, form):
    B, T, C, F, N = 3, 5, 40, 48, 24
    base = _inputs((B, T), C, F, N, form=form)
    fc1 = F if form == "separate" else 2 * F
    strided = {
        "x": rand(B, 2 * T, 2 * C, grad=False)[:, ::2, C:],
        "fc1_weight": rand(C, fc1, grad=False, seed=1).t(),
        "fc1_bias": rand(2 * fc1, grad=False, seed=2)[::2],
        "fc2_weight": rand(F, N, grad=False, seed=3).t(),
        "fc2_bias": rand(1, grad=False, seed=4).expand(N),
        "residual": rand(B, N, T, grad=False, seed=5).transpose(1, 2),
        "layer_scale": rand(N, 2, grad=False, seed=6)[:, 1],
        "row_scale": rand(B, 2, grad=False, seed=7)[:, 1],
    }
    if form == "separate":
        strided["gate_weight"] = rand(C, F, grad=False, seed=8).t()
        strided["gate_bias"] = rand(2 * F, grad=False, seed=9)[::2]
        strided["norm_weight"] = rand(2 * F, grad=False, seed=10)[::2]
        strided["norm_bias"] = rand(1, grad=False, seed=11).expand(F)
        base["norm_weight"] = rand(F, seed=12)
    for name, x in strided.items():
        _check({**base, name: x.requires_grad_(name != "row_scale")}, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["silu"])
def test_gated_mlp_extremes(activation, form, dtype):
    """Gates up to 1e4, past where exp overflows; values small enough for the product in fp16."""
    F = 40
    inputs = _inputs((2, 8), 48, F, 24, dtype, form, epilogue=PLAIN)
    with torch.no_grad():
        if "gate_weight" in inputs:
            inputs["gate_weight"] *= 2.5e3
        elif form == "packed":
            inputs["fc1_weight"][:F] *= 2.5e3
        else:
            inputs["fc1_weight"][F:] *= 2.5e3
    upstream = rand(2, 8, 24, dtype=dtype, seed=9, scale=1e-3, grad=False)
    errors = _check(inputs, form, activation, upstream=[upstream])
    assert all(e.max < float("inf") for e in errors)


def test_gated_mlp_norm_constant_row():
    """Equal hidden values: the rounding of their mean must not pass for a variance."""
    inputs = _inputs((4,), 8, 341, 16, form="normed", epilogue=PLAIN)
    with torch.no_grad():
        inputs["gate_weight"].copy_(inputs["gate_weight"][:1].expand(341, 8))
        inputs["fc1_weight"].copy_(inputs["fc1_weight"][:1].expand(341, 8)).mul_(1e3)
        inputs["fc1_bias"].zero_()
        inputs["gate_bias"].zero_()
    with torch.no_grad():
        y = gated_mlp(**inputs)
        bias = inputs["norm_bias"] @ inputs["fc2_weight"].t() + inputs["fc2_bias"]
    torch.testing.assert_close(y, bias.expand(4, 16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("x_dtype", [fp32, bf16], ids=dtype_id)
def test_gated_mlp_autocast(route, x_dtype, form):
    """fp32 parameters under bf16 autocast: torch's dtypes, and the 2x rule against torch there."""
    inputs = _inputs((3, 20), 48, 56, 40, form=form)
    inputs["x"] = inputs["x"].detach().to(x_dtype).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=bf16):
        _check(inputs, form, dtype=bf16)
        y = gated_mlp(**inputs, **_options(form))
    assert y.dtype == fp32
    leaves = list(_leaves(inputs).values())
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.dtype for g in gradients] == [x.dtype for x in leaves]


@pytest.mark.parametrize("dtype", [fp16, bf16], ids=dtype_id)
def test_gated_mlp_norm_in_fp32_beside_16_bits(dtype):
    _check(_inputs(dtype=dtype, form="normed", norm_dtype=fp32), "normed")


def _saved_shapes(function):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(tuple(x.shape)), lambda x: x
    ):
        function()
    return sorted(shapes)


def test_gated_mlp_saves_what_it_says():
    M, C, F, N = 12, 40, 56, 24
    inputs = _inputs((M,), C, F, N, epilogue=("residual",))
    products = [(M, C), (2 * F, C), (N, F)]
    stored = _saved_shapes(lambda: gated_mlp(**inputs, recompute=False))
    assert stored == sorted([*products, (M, F), (M, 2 * F)])
    assert _saved_shapes(lambda: gated_mlp(**inputs)) == sorted([*products, (M, 2 * F)])
    only_x = {k: x.detach().requires_grad_(k == "x") for k, x in inputs.items()}
    assert _saved_shapes(lambda: gated_mlp(**only_x)) == sorted([(2 * F, C), (N, F), (M, 2 * F)])
    only_fc2 = {k: x.detach().requires_grad_(k == "fc2_weight") for k, x in inputs.items()}
    assert _saved_shapes(lambda: gated_mlp(**only_fc2)) == [(M, F)]
    with torch.no_grad():
        assert _saved_shapes(lambda: gated_mlp(**inputs)) == []
    normed = _inputs((M,), C, F, N, form="normed", epilogue=())
    assert _saved_shapes(lambda: gated_mlp(**normed)) == sorted(
        [(M, C), (F, C), (F, C), (N, F), (F,), (F,), (2, M), (M, F), (M, F)]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("recompute", [False, True])
def test_gated_mlp_norm_wide_rows(recompute, dtype):
    """Rows past MAX_KEPT_F in the backward; those of packed weights lie twice as far apart."""
    form = "packed, normed" if recompute else "normed"
    _check(_inputs((5,), 8, 2730, 12, dtype, form), form, recompute=recompute)


def test_gated_mlp_wide_norm_falls_back():
    inputs = _inputs((2,), 4, 4104, 4, form="normed")
    with backend("triton"), pytest.raises(RuntimeError, match="more than 4096 hidden features"):
        gated_mlp(**inputs)
    _check(inputs, "normed")
