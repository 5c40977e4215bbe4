"""The 2x rule itself: that it passes what is right and stops what is wrong."""

import pytest
import torch
from numerics import assert_accurate, compare, rand

from fastvit_kernels.verify.accuracy import Reference, measure


def _square(x):
    return x * x


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 1.999 * x * dy


def test_the_reference_passes_against_itself():
    assert all(e.passed for e in compare(_square, _square, {"x": rand(5, 7)}))


def test_a_wrong_gradient_is_stopped():
    with pytest.raises(AssertionError, match=r"dx: .*FAILED"):
        assert_accurate(lambda x: _WrongGradient.apply(x), _square, {"x": rand(5, 7)})


def test_a_wrong_element_is_stopped_by_the_maximum():
    def one_wrong(x):
        y = x * x
        return y + torch.zeros_like(y).index_fill(0, torch.tensor([3], device=x.device), 1e-3)

    with pytest.raises(AssertionError, match=r"out: .*FAILED"):
        assert_accurate(one_wrong, _square, {"x": rand(10_000, grad=False)})


def test_a_small_error_everywhere_is_stopped_by_the_rms():
    errors = compare(lambda x: x * (1 + 1e-6), lambda x: x * 1, {"x": rand(1000, grad=False)})
    assert not errors[0].passed


def test_an_unwritten_output_is_stopped():
    with pytest.raises(AssertionError, match="inf"):
        assert_accurate(torch.empty_like, _square, {"x": rand(4, grad=False)})


def test_a_missing_gradient_is_stopped():
    with pytest.raises(AssertionError, match="dy"):
        assert_accurate(
            lambda x, y: x + y.detach(), lambda x, y: x + y, {"x": rand(3), "y": rand(3)}
        )


def test_a_wrong_output_dtype_is_stopped():
    with pytest.raises(AssertionError, match="dtype"):
        assert_accurate(lambda x: (x * x).double(), _square, {"x": rand(3, grad=False)})


def test_nan_counts_as_right_only_where_the_oracle_has_one():
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert measure("x", nan, nan, nan, torch.float32).passed
    assert not measure("x", nan, one, one, torch.float32).passed
    assert not measure("x", one, nan, nan, torch.float32).passed


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        measure("x", torch.ones(2), torch.ones(3), torch.ones(3), torch.float32)


@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("high", True)])
def test_the_yardstick_convolves_as_fp32_products_do(monkeypatch, precision, tf32):
    """cuDNN takes TF32 by default, which would make the limit of a convolution that of TF32."""
    seen = []

    def reference(x):
        seen.append(torch.backends.cudnn.allow_tf32)
        return x * 2.0

    former = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    try:
        torch.set_float32_matmul_precision(precision)
        Reference(reference, {"x": torch.ones(3, requires_grad=True)})
    finally:
        torch.set_float32_matmul_precision(former)
    assert set(seen) == {tf32} and torch.backends.cudnn.allow_tf32 is True
