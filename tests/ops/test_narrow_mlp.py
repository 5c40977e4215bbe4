import inspect
import itertools
import re

import pytest
import torch
from guard import guard_pages
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand
from private import tree_leaves
from torch import library

from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.mlp import narrow as narrow_mlp
from fastvit_kernels.ops.mlp.functions import mlp, mlp_ref
from fastvit_kernels.ops.mlp.narrow import (
    FWD_TABLE,
    MAX_OFFSET,
    MAX_WIDTH,
    _rows,
    is_narrow,
    narrow_mlp_fwd,
)
from fastvit_kernels.runtime import configs as launch_configs
from fastvit_kernels.runtime.backend import Gpu, backend
from fastvit_kernels.runtime.compat import TorchDispatchMode
from fastvit_kernels.runtime.operator import LAUNCHERS
from tests.machine.aot import TARGETS

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FULL = (), ("residual", "layer_scale", "row_scale")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def _inputs(rows=(3, 9), C=40, F=72, N=40, dtype=fp32, bias=True, epilogue=FULL, side_dtype=None):
    side_dtype = side_dtype or dtype
    inputs = {
        "x": rand(*rows, C, dtype=dtype, grad=False),
        "fc1_weight": rand(F, C, dtype=dtype, seed=1, scale=C**-0.5, grad=False),
        "fc1_bias": rand(F, dtype=dtype, seed=2, grad=False) if bias else None,
        "fc2_weight": rand(N, F, dtype=dtype, seed=3, scale=F**-0.5, grad=False),
        "fc2_bias": rand(N, dtype=dtype, seed=4, grad=False) if bias else None,
    }
    if "residual" in epilogue:
        inputs["residual"] = rand(*rows, N, dtype=side_dtype, seed=5, grad=False)
    if "layer_scale" in epilogue:
        inputs["layer_scale"] = rand(N, dtype=side_dtype, seed=6, grad=False)
    if "row_scale" in epilogue:
        keep = torch.arange(rows[0], device=DEVICE) % 3 != 1
        inputs["row_scale"] = (keep / 0.7).to(side_dtype)
    return inputs


def _narrow(
    x,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    residual=None,
    layer_scale=None,
    row_scale=None,
    activation="gelu",
):
    """The kernel, whatever `mlp` would choose."""
    out_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return narrow_mlp_fwd(
        x,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        residual,
        layer_scale,
        row_scale,
        activation,
        out_dtype,
    )


def _check(inputs, activation="gelu", function=_narrow, **options):
    return assert_accurate(
        lambda **kw: function(**kw, activation=activation),
        lambda **kw: mlp_ref(**kw, activation=activation),
        inputs,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("epilogue", [PLAIN, FULL], ids=["plain", "full"])
def test_narrow_mlp_forward(epilogue, activation, dtype):
    _check(_inputs(dtype=dtype, epilogue=epilogue), activation)


@pytest.mark.parametrize("epilogue", [("residual",), ("layer_scale",), ("row_scale",)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["b", "no_b"])
def test_narrow_mlp_parts(bias, epilogue):
    _check(_inputs(bias=bias, epilogue=epilogue))
    _check(_inputs(dtype=bf16, bias=bias, epilogue=epilogue, side_dtype=fp32))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("M", "C", "F", "N"),
    [
        (1, 1, 1, 1),
        (5, 64, 256, 64),
        (33, 192, 96, 192),
        (70, 256, 64, 256),
        (130, 40, 100, 24),
        (9, 65, 33, 129),
        (16, 129, 64, 63),
        (17, 200, 31, 160),
    ],
    ids=str,
)
def test_narrow_mlp_sizes(M, C, F, N, dtype):
    _check(_inputs((M,), C, F, N, dtype))


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=dtype_id)
@pytest.mark.parametrize("config", FWD_TABLE.configs, ids=lambda config: "-".join(map(str, config)))
def test_narrow_mlp_every_config(config, dtype):
    """M, C, N and F with tails of every tile; F of one step, of whole steps and of a rest."""
    for C, N, F in ((96, 128, 64), (128, 72, 128), (40, 40, 200)):
        inputs = _inputs((2, config.block_m // 2 + 3), C, F, N, dtype)
        with launch_configs.forced("narrow_mlp_fwd", config), launch_configs.recording() as taken:
            _check(inputs)
            first, second = _narrow(**inputs), _narrow(**inputs)
        (choice,) = taken
        assert FWD_TABLE.fits(choice.gpu, config, *choice.key)  # else another one ran
        assert torch.equal(first, second)


def test_narrow_mlp_default_fits_every_target():
    sizes = list(itertools.product((64, 128, 192, 256), repeat=2))
    for target in TARGETS.values():
        gpu = Gpu(target.name, target.num_sms, target.shared_limit)
        for (C, N), dtype, rows in itertools.product(sizes, ("bf16", "fp16"), (16, 32, 64, 128)):
            tiles = FWD_TABLE.default(gpu, C, N, dtype, rows)
            assert tiles in FWD_TABLE.configs and tiles.block_m <= rows
            assert FWD_TABLE.fits(gpu, tiles, C, N, dtype, rows), (target.name, C, N, dtype, rows)
            if target.name in ("sm_90", "sm_100"):
                assert tiles.block_f >= 64  # the rows of a wgmma tile


def test_narrow_mlp_multiplies_loaded_weights_by_computed_tiles():
    """wgmma may take a computed first operand from registers: a race (triton #9433, #9514)."""
    source = inspect.getsource(narrow_mlp)
    factors = re.findall(r"tl\.dot\((\w+), (\w+)", source)
    assert {first for first, _ in factors} == {"fc1_weight", "fc2_weight"}
    assert {second for _, second in factors} == {"x0", "x1", "act"}
    assert len(factors) == source.count("tl.dot(") and "trans(" not in source


def test_narrow_mlp_layouts():
    B, T, C, F, N = 3, 5, 40, 48, 24
    for dtype in (fp32, bf16):
        base = _inputs((B, T), C, F, N, dtype)
        strided = {
            "x": rand(B, 2 * T, 2 * C, dtype=dtype, grad=False)[:, ::2, C:],
            "fc1_weight": rand(C, F, dtype=dtype, grad=False, seed=1).t(),
            "fc1_bias": rand(2 * F, dtype=dtype, grad=False, seed=2)[::2],
            "fc2_weight": rand(2 * N, 2 * F, dtype=dtype, grad=False, seed=3)[::2, F:],
            "fc2_bias": rand(1, dtype=dtype, grad=False, seed=4).expand(N),
            "residual": rand(B, N, T, dtype=dtype, grad=False, seed=5).transpose(1, 2),
            "layer_scale": rand(N, 2, dtype=dtype, grad=False, seed=6)[:, 1],
            "row_scale": rand(B, 2, dtype=dtype, grad=False, seed=7)[:, 1],
        }
        for name, x in strided.items():
            _check({**base, name: x})
        _check({**base, **strided})
        _check({**base, "x": rand(C, B, T, dtype=dtype, grad=False).permute(1, 2, 0)})
        _check({**base, "x": rand(1, T, C, dtype=dtype, grad=False).expand(B, T, C)})


def test_narrow_mlp_copies_rows_that_are_far_apart():
    """Offsets of 256 rows of this weight would not fit in 32 bits."""
    inputs = _inputs((4,), 16, 20, 2, bf16, epilogue=())
    stride = MAX_OFFSET // MAX_WIDTH + 1
    weight = torch.zeros(stride + 64, dtype=bf16, device=DEVICE).as_strided((2, 20), (stride, 1))
    weight.copy_(inputs["fc2_weight"])
    assert _rows(weight, MAX_WIDTH).stride() == (20, 1)
    near = inputs["fc2_weight"]
    assert _rows(near, MAX_WIDTH).data_ptr() == near.data_ptr()
    assert torch.equal(_narrow(**{**inputs, "fc2_weight": weight}), _narrow(**inputs))


def _inside_nan(x):
    """x as a view with NaN on all its sides."""
    larger = torch.full([n + 130 for n in x.shape], float("nan"), dtype=x.dtype, device=x.device)
    view = larger[tuple(slice(65, 65 + n) for n in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("F", [64, 100])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=dtype_id)
def test_narrow_mlp_reads_nothing_outside(dtype, F):
    inputs = _inputs((21,), 48, F, 40, dtype)
    # as_rows copies a vector that is not contiguous, so that only matrices are worth it
    surrounded = {k: _inside_nan(x) if x.ndim == 2 else x for k, x in inputs.items()}
    assert torch.equal(_narrow(**surrounded), _narrow(**inputs))


@pytest.mark.parametrize(("M", "F"), [(19, 41), (64, 64)], ids=str)
def test_narrow_mlp_writes_nothing_outside(M, F):
    inputs = _inputs((M,), 72, F, 40, bf16)
    expected = _narrow(**inputs)
    with guard_pages() as guard:
        placed = {name: guard.place(x, name) for name, x in inputs.items()}
        assert torch.equal(_narrow(**placed), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_narrow_mlp_extremes(activation, dtype):
    inputs = _inputs((2, 8), 48, 40, 24, dtype)
    inputs["x"] = inputs["x"] * 2.5e3
    errors = _check(inputs, activation)
    assert all(e.max < float("inf") for e in errors)


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=dtype_id)
def test_narrow_mlp_spreads_infinity_as_the_reference(dtype):
    """Infinity stays infinity where F and C end within a tile; NaN in W2 reaches its column."""
    inputs = _inputs((19,), 40, 41, 24, dtype, epilogue=())
    for name in ("fc1_weight", "fc2_weight"):
        inputs[name] = inputs[name].abs()
    inputs["x"][3, 5] = float("inf")
    inputs["fc2_weight"][2, 40] = float("nan")
    y = _narrow(**inputs)
    assert y[3, 3:].eq(float("inf")).all() and y[:, 2].isnan().all()
    assert y[:, 3:].isfinite().sum() == 18 * 21
    _check(inputs)


@pytest.mark.parametrize("rows", [(0, 7), (7, 0)], ids=str)
def test_narrow_mlp_empty(rows):
    inputs = _inputs(rows, 16, 32, 24, bf16, epilogue=("residual", "layer_scale"))
    assert mlp(**inputs).shape == (*rows, 24)
    assert _narrow(**inputs).shape == (*rows, 24)


class _Sizes(TorchDispatchMode):
    """The elements of each tensor that the package or torch allocates, and which operators ran."""

    def __init__(self):
        super().__init__()
        self.sizes, self.operators = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastvit_kernels":
            self.operators.append(func.overloadpacket.__name__)
            with self:
                return LAUNCHERS[func.overloadpacket.__name__](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.sizes += [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out


def test_mlp_without_gradient_keeps_the_hidden_activations_on_chip():
    M, F = 200, 256
    inputs = _inputs((M,), 32, F, 24, bf16, side_dtype=fp32)
    with _Sizes() as seen:
        mlp(**inputs)
    assert seen.operators == ["narrow_mlp_fwd"]
    assert seen.sizes and max(seen.sizes) < M * F // 2
    inputs["x"].requires_grad_()
    with torch.no_grad(), _Sizes() as seen:
        mlp(**inputs)
    assert seen.operators == ["narrow_mlp_fwd"]


@pytest.mark.parametrize(
    "name", ["x", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "residual", "layer_scale"]
)
def test_mlp_with_gradient_takes_two_products(name):
    M, F = 64, 256
    inputs = _inputs((M,), 32, F, 24, bf16)
    inputs[name].requires_grad_()
    with _Sizes() as seen:
        y = mlp(**inputs)
    assert seen.operators == ["linear_fwd", "linear_fwd"]
    assert M * F in seen.sizes
    (gradient,) = torch.autograd.grad(y, [inputs[name]], torch.ones_like(y))
    assert gradient.shape == inputs[name].shape


@pytest.mark.parametrize("x_dtype", [fp32, bf16], ids=dtype_id)
@pytest.mark.parametrize("epilogue", [PLAIN, FULL], ids=["plain", "full"])
def test_mlp_narrow_under_autocast(x_dtype, epilogue):
    inputs = _inputs((3, 20), 96, 128, 72, epilogue=epilogue)
    inputs["x"] = inputs["x"].to(x_dtype)
    with torch.autocast(DEVICE.type, dtype=bf16):
        _check(inputs, function=mlp, dtype=bf16)
        with _Sizes() as seen:
            y = mlp(**inputs)
    assert seen.operators == ["narrow_mlp_fwd"]
    assert y.dtype == (fp32 if epilogue else bf16)


def test_mlp_takes_the_narrow_kernel_where_it_is_one():
    for dtype, C, N, narrow in (
        (bf16, 256, 256, True),
        (fp16, 8, 256, True),
        (fp32, 64, 64, False),
        (bf16, 257, 64, False),
        (bf16, 64, 257, False),
    ):
        assert is_narrow(dtype, C, N) == narrow
        inputs = _inputs((2,), C, 16, N, dtype)
        with _Sizes() as seen:
            mlp(**inputs)
        assert ("narrow_mlp_fwd" in seen.operators) == narrow
    with backend("torch"), _Sizes() as seen:
        mlp(**_inputs(dtype=bf16))
    assert not seen.operators


def test_narrow_mlp_operator_passes_opcheck():
    inputs = _inputs((2, 5), 24, 40, 16, bf16)
    names = (
        "x",
        "fc1_weight",
        "fc1_bias",
        "fc2_weight",
        "fc2_bias",
        "residual",
        "layer_scale",
        "row_scale",
    )
    arguments = [inputs[name] for name in names]
    library.opcheck(narrow_mlp_fwd.registered, (*arguments, "gelu", bf16))
    library.opcheck(narrow_mlp_fwd.registered, (*arguments[:5], None, None, None, "silu", bf16))


def test_mlp_narrow_compiles_without_graph_breaks():
    inputs = _inputs((2, 5), 24, 40, 16, bf16)
    compiled = torch.compile(lambda kw: mlp(**kw), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs), mlp(**inputs))
