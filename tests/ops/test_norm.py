from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

import fastvit_kernels as fk
from fastvit_kernels.ops.norm.functions import layer_norm_ref, rms_norm_ref

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


class Norm(NamedTuple):
    op: Callable[..., Any]
    and_input: Callable[..., Any]
    ref: Callable[..., Any]
    parameters: tuple[str, ...]
    widths: tuple[int, ...]


NORMS = (
    Norm(
        fk.layer_norm,
        fk.layer_norm_and_input,
        layer_norm_ref,
        ("weight", "bias"),
        (1, 65, 192, 384, 768, 1024, 1280, 1408, 1536, 4304),
    ),
    Norm(
        fk.rms_norm,
        fk.rms_norm_and_input,
        rms_norm_ref,
        ("weight",),
        (1, 64, 65, 192, 768, 1280, 1408, 4304),
    ),
)
both_norms = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.op.__name__)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def _inputs(norm, rows, C, dtype, param_dtype=None):
    x, own = rand(*rows, C, dtype=dtype), param_dtype or dtype
    return {"x": x, **{n: rand(C, dtype=own, seed=i) for i, n in enumerate(norm.parameters, 1)}}


def test_layer_norm_by_torch_has_fp32_statistics():
    """Under autocast a norm of 16-bit x is one in fp32; torch's own on a CPU would round rstd."""
    x, dy, weight = (rand(*size, 2, dtype=bf16, seed=i) for i, size in enumerate([[64], [64], []]))
    found = {}
    for name, wide in (("ours", bf16), ("torch", fp32), ("oracle", torch.float64)):
        given = x.to(wide).requires_grad_()
        norm = fk.layer_norm if name == "ours" else layer_norm_ref
        with fk.backend("torch"):
            y = norm(given, weight.to(torch.promote_types(wide, fp32)), eps=1e-6)
            (found[name],) = torch.autograd.grad(y, given, dy.to(wide))
    errors = {n: (found[n].double() - found["oracle"]).abs() for n in ("ours", "torch")}
    rounded = found["oracle"].to(bf16).double() - found["oracle"]
    assert errors["ours"].max() <= 2 * errors["torch"].max() + 2 * rounded.abs().max()


@pytest.mark.parametrize("first", [fp16, fp32], ids=dtype_id)
def test_norm_bias_dtype(first):
    """Each has its own dtype's precision and range."""
    second = fp32 if first is fp16 else fp16
    x, weight, bias = rand(64, 96), rand(96, dtype=first), rand(96, dtype=second)
    upstream = rand(64, 96, seed=9, grad=False) * 1e4
    with fk.backend("triton"):
        fk.layer_norm(x, weight, bias).backward(upstream)
    assert (weight.grad.dtype, bias.grad.dtype) == (first, second)
    wide = bias if second is fp32 else weight
    exact = upstream if second is fp32 else upstream * fk.layer_norm(x.detach())
    torch.testing.assert_close(wide.grad, exact.sum(0), rtol=1e-4, atol=10.0)


@all_dtypes
@pytest.mark.parametrize(
    ("norm", "C"),
    [pytest.param(n, C, id=f"{n.op.__name__}-C{C}") for n in NORMS for C in n.widths],
)
def test_norm_backward(norm, C, dtype):
    assert_accurate(norm.op, norm.ref, _inputs(norm, (3, 7), C, dtype))


@all_dtypes
@both_norms
def test_norm_adds_a_residual(norm, dtype):
    """In the wider of both dtypes; its rows apart, in another order, or dense."""
    B, T, C = 2, 5, 72
    inputs = _inputs(norm, (B, T), C, dtype)
    wide, turned = rand(B, T, C + 8, grad=False)[..., :C], rand(T, B, C, grad=False).transpose(0, 1)
    dense = (rand(B, T, C, dtype=d, grad=False) for d in (dtype, bf16))
    for residual in (wide, turned, *dense):
        residual = residual.detach().requires_grad_()
        assert_accurate(norm.op, norm.ref, {**inputs, "residual": residual})
        promoted = torch.promote_types(dtype, residual.dtype)
        assert norm.op(**inputs, residual=residual).dtype is promoted


@both_norms
def test_norm_residual_after_linear(norm):
    """x of a linear: the norm leaves it the sums of its gradient, and the residual's is dy."""
    inputs = _inputs(norm, (2, 5), 40, bf16)
    inputs |= {"w": rand(40, 40, dtype=bf16, scale=40**-0.5), "b": rand(40, dtype=bf16, seed=8)}
    residual = rand(2, 5, 40, seed=9)

    def run(norm_op, product):
        def call(x, w, b, residual, **params):
            return norm_op(product(x, w, b), **params, residual=residual)

        return call

    given = {**inputs, "residual": residual}
    assert_accurate(run(norm.op, fk.linear), run(norm.ref, F.linear), given)


@pytest.mark.parametrize("dtypes", [(fp32, bf16), (bf16, fp32), (fp32, fp16)], ids=str)
@both_norms
def test_norm_out_dtype(norm, dtypes):
    x_dtype, out_dtype = dtypes
    assert_accurate(
        lambda **kw: norm.op(**kw, out_dtype=out_dtype),
        lambda x, **kw: norm.ref(
            x, **kw, out_dtype=torch.float64 if x.dtype == torch.float64 else out_dtype
        ),
        _inputs(norm, (4, 9), 192, x_dtype, param_dtype=fp32),
    )


@all_dtypes
def test_rms_norm_rounds_once(dtype):
    """As torch's own with the weight in fp32: nearly all elements are the nearest there are."""
    inputs = {n: x.detach() for n, x in _inputs(NORMS[1], (64,), 96, dtype).items()}
    nearest = rms_norm_ref(**{n: x.double() for n, x in inputs.items()}).to(dtype)
    assert (fk.rms_norm(**inputs) != nearest).float().mean() < (0.6 if dtype is fp32 else 0.01)


@both_norms
def test_norm_layouts(norm):
    C = 96
    wide = rand(2, 10, 2 * C, grad=False)
    transposed = rand(C, 8, grad=False).t()
    for x in (wide[:, ::2, :C], transposed, wide[:, 0, C:], rand(1, C, grad=False).expand(6, C)):
        inputs = _inputs(norm, (), C, fp32) | {"x": x.requires_grad_()}
        assert_accurate(norm.op, norm.ref, inputs)
    apart = {n: rand(C, 2, grad=False, seed=i)[:, 0] for i, n in enumerate(inputs) if n != "x"}
    assert_accurate(norm.op, norm.ref, inputs | {n: p.requires_grad_() for n, p in apart.items()})


@both_norms
def test_norm_and_input_gradient_strides(norm):
    """The residual's gradient has rows of its own stride, not those of dy."""
    wide = torch.randn(4, 6, 130, device=DEVICE)
    upstream = [wide[..., :64], torch.randn(64, device=DEVICE).expand(4, 6, 64)]
    for gradients in (upstream, upstream[::-1]):
        assert_accurate(
            norm.and_input, lambda x: (norm.ref(x), x), {"x": rand(4, 6, 64)}, upstream=gradients
        )


@both_norms
def test_norm_autocast_dtype(norm):
    """On a CPU torch's autocast leaves norms in the dtype of their input."""
    for dtype in (bf16, fp32):
        x = rand(3, 64, dtype=dtype)
        with torch.autocast(DEVICE.type, dtype=bf16):
            assert norm.op(x).dtype == getattr(F, norm.op.__name__)(x, (64,)).dtype
            assert norm.op(x, out_dtype=bf16).dtype == bf16
