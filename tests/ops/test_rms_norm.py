import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.rms_norm import rms_norm, rms_norm_and_input, rms_norm_ref

WIDTHS = (1, 64, 65, 192, 768, 1280, 1408, 4304)
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def _inputs(rows, C, dtype, weight=True, weight_dtype=None):
    return {
        "x": rand(*rows, C, dtype=dtype),
        "weight": rand(C, dtype=weight_dtype or dtype, seed=1) if weight else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("C", WIDTHS, ids=lambda c: f"C{c}")
def test_rms_norm_backward(C, dtype):
    assert_accurate(rms_norm, rms_norm_ref, _inputs((3, 7), C, dtype))


@pytest.mark.parametrize("T", [201, 261, 576, 1370], ids=lambda t: f"T{t}")
def test_rms_norm_of_heads(T):
    """Rows of D = 64: queries of (B, T, 3, H, D), whose rows are no view."""
    qkv = rand(1, T, 3, 2, 64, dtype=bf16, grad=False)
    inputs = {"x": qkv[:, :, 0].requires_grad_(), "weight": rand(64, seed=1)}
    assert_accurate(rms_norm, rms_norm_ref, inputs)


@pytest.mark.parametrize("rows", [(), (1,), (2, 197), (1031,)], ids=str)
def test_rms_norm_rows(rows):
    assert_accurate(rms_norm, rms_norm_ref, _inputs(rows, 64, fp32))


def test_rms_norm_without_weight():
    assert_accurate(rms_norm, rms_norm_ref, _inputs((5,), 96, fp32, weight=False))


@pytest.mark.parametrize("dtypes", [(fp32, bf16), (bf16, fp32), (fp32, fp16)], ids=str)
def test_rms_norm_out_dtype(dtypes):
    x_dtype, out_dtype = dtypes
    assert_accurate(
        lambda **kw: rms_norm(**kw, out_dtype=out_dtype),
        lambda x, weight: rms_norm_ref(
            x, weight, out_dtype=torch.float64 if x.dtype == torch.float64 else out_dtype
        ),
        _inputs((4, 9), 192, x_dtype, weight_dtype=fp32),
    )


def _transformers(x, weight, eps=1e-6):
    """AIMv2's, InternVL's and Pixtral's: x * rstd is rounded to x.dtype before the weight."""
    wide = x.to(torch.promote_types(x.dtype, fp32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _gemma(x, weight, eps=1e-6):
    wide = x.to(torch.promote_types(x.dtype, fp32))
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (wide * weight.to(wide.dtype)).type_as(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("host", [_transformers, _gemma], ids=["transformers", "gemma"])
def test_rms_norm_of_other_libraries(host, dtype):
    """Theirs as yardstick: a rounding more on their side, none on ours."""
    errors = assert_accurate(rms_norm, host, _inputs((9, 11), 320, dtype))
    if dtype is not fp32:
        assert errors[0].rms <= 1.01 * errors[0].torch_rms


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rms_norm_rounds_once(dtype):
    """As torch's own with the weight in fp32: nearly all elements are the nearest there are."""
    inputs = {n: x.detach() for n, x in _inputs((64,), 96, dtype).items()}
    nearest = rms_norm_ref(**{n: x.double() for n, x in inputs.items()}).to(dtype)
    assert (rms_norm(**inputs) != nearest).float().mean() < (0.6 if dtype is fp32 else 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rms_norm_and_input(dtype):
    def reference(x, weight):
        return rms_norm_ref(x, weight), x

    assert_accurate(rms_norm_and_input, reference, _inputs((2, 50), 384, dtype))


def test_rms_norm_and_input_hands_on_the_same_memory():
    x = rand(3, 64)
    _, handed_on = rms_norm_and_input(x)
    assert handed_on.data_ptr() == x.data_ptr()


def test_rms_norm_layouts():
    C = 96
    wide = rand(2, 10, 2 * C, grad=False)
    transposed = rand(C, 8, grad=False).t()
    for x in (wide[:, ::2, :C], transposed, wide[:, 0, C:], rand(1, C, grad=False).expand(6, C)):
        inputs = {"x": x.requires_grad_(), "weight": rand(C, seed=1)}
        assert_accurate(rms_norm, rms_norm_ref, inputs)


def test_rms_norm_expanded_gradient():
    upstream = torch.randn(64, device=DEVICE).expand(4, 6, 64)
    assert_accurate(rms_norm, rms_norm_ref, {"x": rand(4, 6, 64)}, upstream=[upstream])


def test_rms_norm_and_input_gradients_of_different_strides():
    """The residual's gradient has rows of its own stride, not those of dy."""
    wide = torch.randn(4, 6, 130, device=DEVICE)
    upstream = [wide[..., :64], torch.randn(64, device=DEVICE).expand(4, 6, 64)]
    for gradients in (upstream, upstream[::-1]):
        assert_accurate(
            rms_norm_and_input, lambda x: (rms_norm_ref(x), x), {"x": rand(4, 6, 64)},
            upstream=gradients,
        )  # fmt: skip


def test_rms_norm_extremes():
    base = rand(4, 768, grad=False)
    for x in (base + 1e4, torch.zeros_like(base), base * 1e-20, base * 1e15):
        assert_accurate(rms_norm, rms_norm_ref, {"x": x.requires_grad_()})


def test_rms_norm_spreads_nan_within_its_row_only():
    x = rand(5, 64, grad=False)
    x[2, 3] = float("nan")
    assert rms_norm(x).isnan().any(-1).tolist() == [False, False, True, False, False]


def test_rms_norm_empty_batch():
    x, weight = rand(0, 7, 64), rand(64, seed=1)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.eq(0).all()


def test_rms_norm_is_deterministic():
    def gradients():
        inputs = _inputs((700,), 192, fp32)
        y = rms_norm(**inputs)
        return torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_rms_norm_frozen_weight_gets_no_gradient():
    x, weight = rand(3, 64), rand(64, seed=1, grad=False)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_rms_norm_autocast_writes_the_dtype_of_torchs_own():
    for dtype in (bf16, fp32):
        x = rand(3, 64, dtype=dtype)
        with torch.autocast(DEVICE.type, dtype=bf16):
            assert rms_norm(x).dtype == torch.nn.functional.rms_norm(x, (64,)).dtype
            assert rms_norm(x, out_dtype=bf16).dtype == bf16


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a Tensor, got list", lambda: ([1.0],)),
        (TypeError, "x must be floating point, got torch.int64", lambda: (torch.ones(3).long(),)),
        (ValueError, "at least one axis", lambda: (torch.tensor(1.0),)),
        (ValueError, r"weight must have shape \(8,\), got \(4,\)", lambda: (rand(2, 8), rand(4))),
        (TypeError, "dense strided", lambda: (torch.eye(4).to_sparse(),)),
        (ValueError, "eps must be finite", lambda: (rand(2, 8), None, -1.0)),
    ],
)
def test_rms_norm_rejects(error, message, arguments):
    with pytest.raises(error, match=message):
        rms_norm(*arguments())
