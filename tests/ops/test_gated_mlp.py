"""gated_mlp in each of its forms; test_linear.py and test_mlp.py have what it shares with them."""

import pytest
import torch
from numerics import DTYPES, dtype_id, rand
from products import FULL, GATED, MLP, PLAIN, bf16, fp16, fp32, only, route, saved_shapes

from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.runtime.backend import backend

__all__ = ["route"]  # a fixture
PACKED, NORMED = GATED["packed"], GATED["normed"]
every_form = pytest.mark.parametrize("form", GATED.values(), ids=GATED)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@every_form
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_backward(activation, form, dtype):
    form.check(form.inputs(dtype=dtype), activation=activation)


@pytest.mark.parametrize("epilogue", [PLAIN, ("residual",), FULL], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["b", "no_b"])
@every_form
def test_gated_mlp_parts(route, form, bias, epilogue):
    form.check(form.inputs((4, 9), 24, 50, 16, bias=bias, epilogue=epilogue))


@pytest.mark.parametrize(
    ("activation", "gate"), [("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh")]
)
def test_mlp_takes_packed_gates_by_name(activation, gate):
    inputs = PACKED.inputs()
    assert mlp(**inputs, activation=activation).equal(gated_mlp(**inputs, activation=gate))
    MLP.check(inputs, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@every_form
def test_gated_mlp_extremes(form, dtype):
    """Gates up to 1e4, past where exp overflows; values small enough for the product in fp16."""
    F = 40
    inputs = form.inputs((2, 8), 48, F, 24, dtype, epilogue=PLAIN)
    with torch.no_grad():
        if form.separate:
            inputs["gate_weight"] *= 2.5e3
        else:
            gate = slice(F, None) if form.options.get("gate_last") else slice(F)
            inputs["fc1_weight"][gate] *= 2.5e3
    upstream = rand(2, 8, 24, dtype=dtype, seed=9, scale=1e-3, grad=False)
    errors = form.check(inputs, upstream=[upstream])
    assert all(e.max < float("inf") for e in errors)


def test_gated_mlp_norm_constant_row():
    """Equal hidden values: the rounding of their mean must not pass for a variance."""
    inputs = NORMED.inputs((4,), 8, 341, 16, epilogue=PLAIN)
    with torch.no_grad():
        inputs["gate_weight"].copy_(inputs["gate_weight"][:1].expand(341, 8))
        inputs["fc1_weight"].copy_(inputs["fc1_weight"][:1].expand(341, 8)).mul_(1e3)
        inputs["fc1_bias"].zero_()
        inputs["gate_bias"].zero_()
        y = gated_mlp(**inputs)
        bias = inputs["norm_bias"] @ inputs["fc2_weight"].t() + inputs["fc2_bias"]
    torch.testing.assert_close(y, bias.expand(4, 16))


@pytest.mark.parametrize("dtype", [fp16, bf16], ids=dtype_id)
def test_gated_mlp_norm_in_fp32_beside_16_bits(dtype):
    NORMED.check(NORMED.inputs(dtype=dtype, epilogue=PLAIN, side_dtype=fp32))


def test_gated_mlp_saves_what_it_says():
    M, C, F, N = 12, 40, 56, 24
    inputs = PACKED.inputs((M,), C, F, N, epilogue=("residual",))
    products = [(M, C), (2 * F, C), (N, F)]
    stored = saved_shapes(lambda: gated_mlp(**inputs, recompute=False))
    assert stored == sorted([*products, (M, F), (M, 2 * F)])
    assert saved_shapes(lambda: gated_mlp(**inputs)) == sorted([*products, (M, 2 * F)])
    of_x = saved_shapes(lambda: gated_mlp(**only(inputs, "x")))
    assert of_x == sorted([(2 * F, C), (N, F), (M, 2 * F)])
    assert saved_shapes(lambda: gated_mlp(**only(inputs, "fc2_weight"))) == [(M, F)]
    normed = NORMED.inputs((M,), C, F, N, epilogue=PLAIN)
    assert saved_shapes(lambda: gated_mlp(**normed)) == sorted(
        [(M, C), (F, C), (F, C), (N, F), (F,), (F,), (2, M), (M, F), (M, F)]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_gated_mlp_norm_wide_rows(packed, dtype):
    """Rows past MAX_KEPT_F in the backward; those of packed weights lie twice as far apart."""
    form = NORMED._replace(separate=not packed)
    form.check(form.inputs((5,), 8, 2730, 12, dtype), recompute=packed)


def test_gated_mlp_wide_norm_falls_back():
    inputs = NORMED.inputs((2,), 4, 4104, 4)
    with backend("triton"), pytest.raises(RuntimeError, match="more than 4096 hidden features"):
        gated_mlp(**inputs)
    NORMED.check(inputs)
