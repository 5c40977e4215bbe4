import pytest
import torch
from numerics import DEVICE, assert_accurate

from fastvit_kernels.ops.common.activation import ACTIVATIONS, activate_and_derivative
from fastvit_kernels.runtime.triton import tl, triton


@triton.jit
def _kernel(a_ptr, derivative_ptr, z_ptr, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    a, derivative = activate_and_derivative(z, ACTIVATION, a_ptr.dtype.element_ty)
    tl.store(a_ptr + offs, a, mask=mask)
    tl.store(derivative_ptr + offs, derivative, mask=mask)


def _value_and_derivative(z, activation):
    a, derivative = torch.empty_like(z), torch.empty_like(z)
    grid = (triton.cdiv(z.numel(), 256),)
    _kernel[grid](a, derivative, z, z.numel(), ACTIVATION=activation, BLOCK=256)
    return a, derivative


def _torch_value_and_derivative(z, activation):
    z = z.detach().requires_grad_()
    a = ACTIVATIONS[activation](z) if activation else z.clone()
    return a.detach(), torch.autograd.grad(a.sum(), z)[0]


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("reach", [1.0, 6.0, 30.0])
def test_activation_value_and_derivative(activation, reach):
    z = torch.linspace(-reach, reach, 1001, device=DEVICE)
    assert_accurate(
        lambda z: _value_and_derivative(z, activation),
        lambda z: _torch_value_and_derivative(z, activation),
        {"z": z},
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_16_bit_inputs(activation, dtype):
    """The ways of their own that such results take cost no more than an eighth of a rounding."""
    z = torch.arange(2**16, device=DEVICE).to(torch.int16).view(dtype)
    z = z[z.isfinite()]
    a, derivative = _value_and_derivative(z, activation)
    exact, slope = _torch_value_and_derivative(z.double(), activation)
    if activation == "gelu":  # 1 + erf has no tail, in float64 either
        exact = 0.5 * z.double() * torch.erfc(z.double() * -(0.5**0.5))
    info = torch.finfo(dtype)
    rounding = 0.5 * info.eps * exact.abs() + 0.5 * info.smallest_normal * info.eps
    # Past 88 exp(-z) overflows in fp32. 1 + tanh has no tail.
    tail = 1e-15 if activation == "gelu_tanh" else 1e-36
    assert ((a.double() - exact).abs() <= 1.125 * rounding + tail).all()
    assert ((derivative.double() - slope).abs() <= 0.5 * info.eps * slope.abs() + 2e-5).all()
