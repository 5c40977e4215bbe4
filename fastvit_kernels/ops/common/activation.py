"""The activations that an epilogue can apply: torch's function, Triton's value and derivative.

gelu        z * Phi(z), exact (erf)          timm, torchvision, HF "gelu"
gelu_tanh   the tanh approximation           HF "gelu_pytorch_tanh", timm SigLIP, JAX's default
quick_gelu  z * sigmoid(1.702 z)             CLIP
silu        z * sigmoid(z)

Confusing them is the main silent mismatch between ViTs: nothing here is approximated unless named,
but for what a result of 16 bits cannot show (`_normal`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.triton import tl, triton


def quick_gelu(z: Tensor) -> Tensor:
    """z * sigmoid(1.702 z), CLIP's GELU."""
    return z * torch.sigmoid(1.702 * z)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


def check_activation(op: str, name: str | None) -> None:
    """Raise unless name is None or one of ACTIVATIONS: TypeError where it is no string."""
    if name is not None and (not isinstance(name, str) or name not in ACTIVATIONS):
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"{op}: activation must be None or one of {sorted(ACTIVATIONS)}, got {name!r}")


@triton.jit
def _sigmoid(z, DTYPE: tl.constexpr):
    """s = sigmoid(z), and exp(-z)."""
    if DTYPE.primitive_bitwidth == 16:  # within 1e-6: two instructions where a division has nine
        e = tl.exp2(z * -1.4426950408889634)
        r = tl.rsqrt(1.0 + e)
        return r * r, e
    e = tl.exp(-z)
    return 1.0 / (1.0 + e), e


@triton.jit
def _sigmoid_and_slope(z, DTYPE: tl.constexpr):
    """s = sigmoid(z) and its derivative s (1 - s), without cancellation where s is near 1."""
    s, e = _sigmoid(z, DTYPE)
    return s, s * tl.where(s > 0.5, e * s, 1.0 - s)  # e may be inf where s is 0


@triton.jit
def _clamp(z):
    """z within [-16, 16], NaN kept: past that tanh is 1 in fp32, and z^2 may overflow."""
    return tl.where(z > 16.0, 16.0, tl.where(z < -16.0, -16.0, z))


@triton.jit
def _tanh_argument(z):
    return 0.7978845608028654 * (z + 0.044715 * z * z * z)


@triton.jit
def _normal(z, DTYPE: tl.constexpr):
    """The normal cdf, and exp(-z^2 / 2). For 16 bits the cdf of -|z| is that times a polynomial in
    1 / sqrt(1 + 0.68 |z| + 0.14 z^2), fit to within 3.1e-5 of itself, an eighth of what fp16
    rounds: 14 instructions, where erf makes 31."""
    if DTYPE.primitive_bitwidth == 16:
        density, far = tl.exp2(z * z * -0.7213475204444817), tl.abs(z)
        r = tl.rsqrt(1.0 + far * (0.68 + 0.14 * far))
        tail = r * density * (0.14923159 + r * (0.1367399 + r * (0.1063831 + r * 0.10763015)))
        return tl.where(z < 0.0, tail, 1.0 - tail), density
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)), tl.exp(-0.5 * z * z)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of an fp32 tile that becomes one of DTYPE; ACTIVATION "" is the identity."""
    if ACTIVATION == "gelu":
        return z * _normal(z, DTYPE)[0]
    elif ACTIVATION == "gelu_tanh":
        return z * _sigmoid(2.0 * _tanh_argument(z), DTYPE)[0]  # 0.5 (1 + tanh(u)) = sigmoid(2u)
    elif ACTIVATION == "quick_gelu":
        return z * _sigmoid(1.702 * z, DTYPE)[0]
    elif ACTIVATION == "silu":
        return z * _sigmoid(z, DTYPE)[0]
    else:
        return z


@triton.jit
def activate_and_derivative(z, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """activate(z), with its bits, and d activate(z) / dz, of an fp32 tile.

    z multiplies last: a slope of 0 then stays 0 for any finite z.
    """
    if ACTIVATION == "gelu":
        cdf, density = _normal(z, DTYPE)
        return z * cdf, cdf + z * 0.3989422804014327 * density
    elif ACTIVATION == "gelu_tanh":
        s, slope = _sigmoid_and_slope(2.0 * _tanh_argument(z), DTYPE)
        near = _clamp(z)
        return z * s, s + slope * 1.5957691216057308 * (1.0 + 0.134145 * near * near) * z
    elif ACTIVATION == "quick_gelu":
        s, slope = _sigmoid_and_slope(1.702 * z, DTYPE)
        return z * s, s + slope * 1.702 * z
    elif ACTIVATION == "silu":
        s, slope = _sigmoid_and_slope(z, DTYPE)
        return z * s, s + slope * z
    else:
        return z, z * 0.0 + 1.0
