"""The 2x rule itself: that it passes what is right and stops what is wrong."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_accurate, compare, rand

from fastvit_kernels.accuracy.accuracy import (
    ORDERS,
    Error,
    Reference,
    measure,
    measure_all,
    together,
)
from fastvit_kernels.accuracy.orders import AnotherOrder


def _square(x):
    return x * x


REJECTED = {  # what assert_accurate says -> a function, its specification, its arguments
    "inf": (torch.empty_like, _square, 1),  # nobody wrote the output
    "dy": (lambda x, y: x + y.detach(), lambda x, y: x + y, 2),
    "dtype": (lambda x: (x * x).double(), _square, 1),
}


@pytest.mark.parametrize("said", REJECTED)
def test_rejects(said):
    function, specification, count = REJECTED[said]
    inputs = {n: rand(3, 4, grad=count > 1) for n in "xy"[:count]}
    with pytest.raises(AssertionError, match=said):
        assert_accurate(function, specification, inputs)


def test_nan_must_match_oracle():
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert measure("x", nan, nan, nan, torch.float32).passed
    assert not measure("x", nan, one, one, torch.float32).passed
    assert not measure("x", one, nan, nan, torch.float32).passed


@pytest.mark.parametrize(("precision", "other"), [("ieee", "tf32"), ("tf32", "ieee")])
def test_yardstick_conv_precision(precision, other):
    """cuDNN takes TF32 by default, which would make the limit of a convolution that of TF32."""
    seen = []

    def reference(x):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return x * 2.0

    convolutions = torch.backends.cudnn.conv
    former = convolutions.fp32_precision
    try:
        convolutions.fp32_precision = other
        torch.backends.cuda.matmul.fp32_precision = precision
        Reference(reference, {"x": torch.ones(3, requires_grad=True)})
        assert set(seen) == {precision} and convolutions.fp32_precision == other
    finally:
        convolutions.fp32_precision = former
        torch.backends.cuda.matmul.fp32_precision = "none"


def _judged(error, *yardsticks):
    """One tensor that is `error` off, where PyTorch's runs are off by these; and how many ran."""
    runs = iter(yardsticks)
    oracle = {"x": torch.zeros(3, dtype=torch.float64)}
    actual = {"x": torch.full((3,), error)}
    (found,) = measure_all(
        actual, lambda: {"x": torch.full((3,), next(runs))}, oracle, torch.float32
    )
    return found, len(yardsticks) - len(list(runs))


def test_largest_yardstick_counts():
    error, runs = _judged(5.0, 1.0, 0.5, 3.0, 9.0, 9.0)
    assert error.passed and runs == 3
    assert (error.torch_max, error.limit_max) == (3.0, 6.0)
    assert error.torch_rms == pytest.approx(3.0) and error.limit_rms == pytest.approx(6.0)
    assert _judged(1.9, 1.0, 9.0)[1] == 1
    error, runs = _judged(5.0, 1.0, float("nan"), 99.0, 2.0, 1.5, 9.0)  # 99 is no rounding
    assert not error.passed and runs == 1 + ORDERS and error.limit_max == 4.0


# what -> (function, shapes of its arguments, whether it may be permuted)
ORDERED = {
    "linear": (F.linear, [(2, 7, 33), (9, 33), (9,)], True),
    "baddbmm": (torch.baddbmm, [(3, 7, 5), (3, 7, 33), (3, 33, 5)], True),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (33,), w, b), [(2, 7, 33), (33,), (33,)], True),
    "sums": (lambda x: x.sum() + x.sum(-1).sum() + x.sum((0, 2)), [(2, 17, 13)], True),
    "conv2d": (lambda *a: F.conv2d(*a, stride=4), [(3, 5, 16, 16), (8, 5, 4, 4), (8,)], True),
    "conv2d-groups": (lambda *a: F.conv2d(*a, groups=2), [(3, 6, 8, 8), (8, 3, 3, 3), (8,)], False),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 17, 8)] * 3, True),
    "attention-mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, rand(2, 1, 17, 17, grad=False) > 0),
        [(2, 3, 17, 8)] * 3,
        True,
    ),
}


@pytest.mark.parametrize("what", ORDERED)
def test_another_order(what):
    function, shapes, is_permuted = ORDERED[what]

    def run(dtype, context):
        inputs = [rand(*shape, seed=i).detach().to(dtype) for i, shape in enumerate(shapes)]
        leaves = [x.requires_grad_() for x in inputs]
        with context:
            y = function(*leaves)
            upstream = rand(*y.shape, seed=9, grad=False).to(dtype)
            return y.detach(), *torch.autograd.grad(y, leaves, upstream)

    for a, b in zip(
        run(torch.float64, nullcontext()), run(torch.float64, AnotherOrder(0)), strict=True
    ):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    usual, *others = (
        run(torch.float32, AnotherOrder(seed) if seed >= 0 else nullcontext())
        for seed in (-1, 0, 1, 2)
    )
    first, second, _ = others
    for other in (usual, second):
        assert is_permuted != all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    changed = [
        any(not torch.equal(a, b) for b in results)
        for a, *results in zip(usual, *others, strict=True)
    ]
    # gradients that are sums of nothing, or of few
    few = {"baddbmm": [1], "layer_norm": [3]}.get(what, [])
    assert not is_permuted or all(changed[i] for i in range(len(changed)) if i not in few)


ROUNDED = 2**-10  # what PyTorch's result is off by, however it sums: far above the floor


def _rounded(x):
    """The specification; in fp32 PyTorch is a thousandth off."""
    return x * 1 if x.dtype is torch.float64 else x * (1 + ROUNDED)


class _Off(torch.autograd.Function):
    """x, off by a share of it; its gradient off by another."""

    @staticmethod
    def forward(ctx, x, share, share_of_gradient):
        ctx.share = share_of_gradient
        return x * (1 + share)

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + ctx.share), None, None


@pytest.mark.parametrize(("times", "passes"), [(1.5, True), (-1.5, True), (3, False), (-3, False)])
@pytest.mark.parametrize("place", ["output", "gradient"])
def test_two_times_rule(place, times, passes):
    shares = (times * ROUNDED, 0) if place == "output" else (0, times * ROUNDED)
    errors = compare(lambda x: _Off.apply(x, *shares), _rounded, {"x": rand(50, 20)})
    assert [e.passed for e in errors] == ([passes, True] if place == "output" else [True, passes])


def _off_in_the_first(rows):
    """The specification, off by ROUNDED in so many rows, but in float64."""

    def function(x):
        off = torch.zeros_like(x)
        off[:rows] = ROUNDED
        return x * 1 if x.dtype is torch.float64 else x + off

    return function


@pytest.mark.parametrize(("times", "passes"), [(1.5, True), (3, False)])
def test_max_error_limit(times, passes):
    """PyTorch is off in every row, the kernel in one."""

    def one(x):
        y = x.clone()
        y[7] += times * ROUNDED
        return y

    (error,) = compare(one, _off_in_the_first(900), {"x": torch.zeros(900, 1)})
    assert error.rms <= error.limit_rms and error.passed == passes
    assert error.share == pytest.approx(times / 2)


@pytest.mark.parametrize(("eps", "passes"), [(1.5, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floor_two_eps(dtype, eps, passes):
    """Of the largest magnitude, and of the RMS."""
    x = torch.ones(64, dtype=torch.float64)
    share = eps * torch.finfo(dtype).eps
    (error,) = Reference(lambda x: x * 1, {"x": x}, dtype=dtype).errors(lambda x: x * (1 + share))
    assert error.passed == passes == (error.max <= error.limit_max)
    assert passes == (error.rms <= error.limit_rms)


@pytest.mark.parametrize(("factor", "passes"), [(1.9, True), (2.1, False)])
def test_many_errors_are_judged_as_one_vector(factor, passes):
    """A small tensor beyond its limit does not decide; a large one does."""
    few = Error("few", 3.0, 3.0, 1.0, 1.0, 2.0, 2.0)
    many = Error("many", 0.5 * factor, factor, 2.0, 1.0, 4.0, 2.0)
    whole = together("both", [few, many], [1, 299])
    assert (whole.max, whole.torch_max, whole.limit_max) == (3.0, 2.0, 4.0)
    assert whole.rms == pytest.approx(((9 + 299 * factor**2) / 300) ** 0.5)
    assert whole.passed is passes and not few.passed and few.within(2).passed


def test_floor_dtype():
    """A kernel with 16-bit inputs and an fp32 output is as coarse as its inputs."""
    inputs = {"x": rand(8, grad=False), "w": rand(8, dtype=torch.float16, grad=False)}
    off = 1 + torch.finfo(torch.float16).eps
    (error,) = compare(lambda x, w: x * w * off, lambda x, w: x * w, inputs)
    assert error.passed
    (error,) = compare(lambda x, w: x * off, lambda x, w: x * 1.0, {**inputs, "w": None})
    assert not error.passed


class _Averaged(torch.autograd.Function):
    """x; its gradient is right where the upstream is the same everywhere."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.mean().expand_as(dy)


def test_upstream_gradients_are_random():
    x = rand(50)
    assert not compare(lambda x: _Averaged.apply(x), lambda x: x * 1, {"x": x})[1].passed
    one, other = (Reference(lambda x: x * 1, {"x": x}, seed=i).upstream[0] for i in (0, 1))
    assert 0.5 < one.std() < 1.5 and not torch.equal(one, other)
