import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.layer_norm import layer_norm, layer_norm_and_input, layer_norm_ref

WIDTHS = (1, 65, 192, 384, 768, 1024, 1280, 1408, 1536, 4304)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def _inputs(rows, C, dtype, weight=True, bias=True, param_dtype=None):
    param_dtype = param_dtype or dtype
    return {
        "x": rand(*rows, C, dtype=dtype),
        "weight": rand(C, dtype=param_dtype, seed=1) if weight else None,
        "bias": rand(C, dtype=param_dtype, seed=2) if bias else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("C", WIDTHS, ids=lambda c: f"C{c}")
def test_layer_norm_backward(C, dtype):
    assert_accurate(layer_norm, layer_norm_ref, _inputs((3, 7), C, dtype))


@pytest.mark.parametrize("weight", [True, False], ids=["w", "no_w"])
@pytest.mark.parametrize("bias", [True, False], ids=["b", "no_b"])
def test_layer_norm_optional_parameters(weight, bias):
    assert_accurate(layer_norm, layer_norm_ref, _inputs((5,), 96, fp32, weight, bias))


@pytest.mark.parametrize("dtypes", [(fp32, bf16), (bf16, fp32), (fp32, fp16)], ids=str)
def test_layer_norm_out_dtype(dtypes):
    x_dtype, out_dtype = dtypes
    assert_accurate(
        lambda **kw: layer_norm(**kw, out_dtype=out_dtype),
        lambda x, weight, bias: layer_norm_ref(
            x, weight, bias, out_dtype=torch.float64 if x.dtype == torch.float64 else out_dtype
        ),
        _inputs((4, 9), 192, x_dtype, param_dtype=fp32),
    )


@pytest.mark.parametrize("rows", [(1,), (2, 197), (1031,)], ids=str)
def test_layer_norm_rows(rows):
    assert_accurate(layer_norm, layer_norm_ref, _inputs(rows, 64, fp32))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_layer_norm_and_input(dtype):
    def reference(x, weight, bias):
        return layer_norm_ref(x, weight, bias), x

    assert_accurate(layer_norm_and_input, reference, _inputs((2, 50), 384, dtype))


def test_layer_norm_and_input_hands_on_the_same_memory():
    x = rand(3, 64)
    _, handed_on = layer_norm_and_input(x)
    assert handed_on.data_ptr() == x.data_ptr()


def test_layer_norm_layouts():
    C = 96
    wide = rand(2, 10, 2 * C, grad=False)
    transposed = rand(C, 8, grad=False).t()
    for x in (wide[:, ::2, :C], transposed, wide[:, 0, C:], rand(1, C, grad=False).expand(6, C)):
        params = {"weight": rand(C, seed=1), "bias": rand(C, seed=2)}
        assert_accurate(layer_norm, layer_norm_ref, {"x": x.requires_grad_(), **params})


def test_layer_norm_expanded_gradient():
    x = rand(4, 6, 64)
    upstream = torch.randn(64, device=DEVICE).expand(4, 6, 64)
    assert_accurate(layer_norm, layer_norm_ref, {"x": x}, upstream=[upstream])


def test_layer_norm_and_input_gradients_of_different_strides():
    """The residual's gradient has rows of its own stride, not those of dy."""
    wide = torch.randn(4, 6, 130, device=DEVICE)
    upstream = [wide[..., :64], torch.randn(64, device=DEVICE).expand(4, 6, 64)]
    for gradients in (upstream, upstream[::-1]):
        assert_accurate(
            layer_norm_and_input, lambda x: (layer_norm_ref(x), x), {"x": rand(4, 6, 64)},
            upstream=gradients,
        )  # fmt: skip


def test_layer_norm_extremes():
    C = 768
    base = rand(4, C, grad=False)
    for x in (base * 1e-2 + 1e4, torch.full_like(base, 3.0), base * 1e-20, base * 1e15):
        assert_accurate(layer_norm, layer_norm_ref, {"x": x.requires_grad_()})


def test_layer_norm_spreads_nan_within_its_row_only():
    x = rand(5, 64, grad=False)
    x[2, 3] = float("nan")
    assert layer_norm(x).isnan().any(-1).tolist() == [False, False, True, False, False]


def test_layer_norm_empty_batch():
    x, weight = rand(0, 7, 64), rand(64, seed=1)
    layer_norm(x, weight).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.eq(0).all()


def test_layer_norm_is_deterministic():
    def gradients():
        inputs = _inputs((700,), 192, fp32)
        y = layer_norm(**inputs)
        return torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_layer_norm_frozen_parameters_get_no_gradient():
    x, weight = rand(3, 64), rand(64, seed=1, grad=False)
    layer_norm(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_layer_norm_autocast_writes_the_dtype_of_torchs_own():
    """On a CPU torch's autocast leaves layer_norm in the dtype of its input."""
    for dtype in (bf16, fp32):
        x = rand(3, 64, dtype=dtype)
        with torch.autocast(DEVICE.type, dtype=bf16):
            assert layer_norm(x).dtype == torch.nn.functional.layer_norm(x, (64,)).dtype
            assert layer_norm(x, out_dtype=bf16).dtype == bf16


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a Tensor, got list", lambda: ([1.0],)),
        (TypeError, "x must be floating point, got torch.int64", lambda: (torch.ones(3).long(),)),
        (ValueError, "at least one axis", lambda: (torch.tensor(1.0),)),
        (ValueError, r"weight must have shape \(8,\), got \(4,\)", lambda: (rand(2, 8), rand(4))),
        (ValueError, r"bias must have shape \(8,\)", lambda: (rand(2, 8), None, rand(8, 1))),
        (TypeError, "dense strided", lambda: (torch.eye(4).to_sparse(),)),
    ],
)
def test_layer_norm_rejects(error, message, arguments):
    with pytest.raises(error, match=message):
        layer_norm(*arguments())
