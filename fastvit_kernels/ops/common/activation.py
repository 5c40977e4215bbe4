"""The activations that an epilogue can apply: torch's function, Triton's value and derivative.

gelu        z * Phi(z), exact (erf)          timm, torchvision, HF "gelu"
gelu_tanh   the tanh approximation           HF "gelu_pytorch_tanh", timm SigLIP, JAX's default
quick_gelu  z * sigmoid(1.702 z)             CLIP
silu        z * sigmoid(z)

Confusing them is the main silent mismatch between ViTs: nothing here is approximated unless named.
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


def check_activation(op: str, name: str | None, argument: str = "activation") -> None:
    """Raise unless name is None or one of ACTIVATIONS: TypeError where it is no string."""
    if name is not None and (not isinstance(name, str) or name not in ACTIVATIONS):
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"{op}: {argument} must be None or one of {sorted(ACTIVATIONS)}, got {name!r}")


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _sigmoid_and_slope(z):
    """s = sigmoid(z) and its derivative s (1 - s), without cancellation where s is near 1."""
    e = tl.exp(-z)
    s = 1.0 / (1.0 + e)
    return s, s * tl.where(s > 0.5, e * s, 1.0 - s)  # e may be inf where s is 0


@triton.jit
def _clamp(z):
    """z within [-16, 16], NaN kept: past that tanh is 1 in fp32, and z^2 may overflow."""
    return tl.where(z > 16.0, 16.0, tl.where(z < -16.0, -16.0, z))


@triton.jit
def _tanh_argument(z):
    return 0.7978845608028654 * (z + 0.044715 * z * z * z)


@triton.jit
def _normal_cdf(z):
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of an fp32 tile; ACTIVATION "" is the identity."""
    if ACTIVATION == "gelu":
        return z * _normal_cdf(z)
    elif ACTIVATION == "gelu_tanh":
        return z * _sigmoid(2.0 * _tanh_argument(z))  # 0.5 (1 + tanh(u)) = sigmoid(2u)
    elif ACTIVATION == "quick_gelu":
        return z * _sigmoid(1.702 * z)
    elif ACTIVATION == "silu":
        return z * _sigmoid(z)
    else:
        return z


@triton.jit
def activate_and_derivative(z, ACTIVATION: tl.constexpr):
    """activate(z), with its bits, and d activate(z) / dz, of an fp32 tile.

    z multiplies last: a slope of 0 then stays 0 for any finite z.
    """
    if ACTIVATION == "gelu":
        cdf = _normal_cdf(z)
        return z * cdf, cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s, slope = _sigmoid_and_slope(2.0 * _tanh_argument(z))
        near = _clamp(z)
        return z * s, s + slope * 1.5957691216057308 * (1.0 + 0.134145 * near * near) * z
    elif ACTIVATION == "quick_gelu":
        s, slope = _sigmoid_and_slope(1.702 * z)
        return z * s, s + slope * 1.702 * z
    elif ACTIVATION == "silu":
        s, slope = _sigmoid_and_slope(z)
        return z * s, s + slope * z
    else:
        return z, z * 0.0 + 1.0
