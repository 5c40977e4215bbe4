"""A host's model and its swapped copy side by side: outputs, gradients, numbers drawn."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastvit_kernels.swap.apply import swap_in
from fastvit_kernels.swap.errors import largest, layer_of, layer_peaks, run_step
from fastvit_kernels.swap.hosts import host_path
from fastvit_kernels.swap.hosts.fused import Fused

from .shrink import NotShrunk

EXACT = 1e-9  # of the largest value, in float64
ROUNDING = 1e-13  # of the largest value of a layer, in float64


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its initial value, so that no gradient is zero for want of one.

    Fresh models have zero biases, LayerScale of 1e-5 and zero-initialised heads, which would hide
    an error in what they multiply.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.add_(noise, alpha=0.2 if p.ndim < 2 else 0.05)
    return model


def fingerprint(model: nn.Module, inputs: Any) -> str:
    """Equal for two small models that are the same: classes, settings, shapes, in order."""
    simple = (bool, int, float, str, tuple, type(None))
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    parts = [str([tuple(t.shape) for t in tensors])]
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, simple)}
        shapes = [(n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None]
        parts.append(f"{name} {host_path(type(module))} {sorted(settings.items())} {shapes}")
    return "\n".join(parts)


def _training_step(model: nn.Module, inputs: Any) -> dict[str, Tensor] | Exception:
    """`run_step` of a model that may refuse, with the state of the random generator."""
    try:
        found = run_step(model, inputs, 3)
    except Exception as error:
        return error
    return found | {"the random generator": torch.get_rng_state().double()}


def difference(model: nn.Module, inputs: Any) -> str:
    """What the swapped model does otherwise than its host in a training step in float64, with
    DropPath and dropout as the model has them and the same seed; "" where it is the same to 1e-9,
    and to 1e-5 where the host itself rounds to fp32.

    Raises: NotShrunk where the host refuses this training step, or does not repeat it.
    """
    host = copy.deepcopy(model).double().train()
    swapped = copy.deepcopy(host)
    try:
        swap_in(swapped)
    except Exception as error:
        return f"swap_in raises {type(error).__name__}: {error}"
    wanted, actual = _training_step(host, inputs), _training_step(swapped, inputs)
    if isinstance(wanted, Exception):
        if isinstance(actual, Exception):
            raise NotShrunk(f"the host raises {type(wanted).__name__}: {wanted}"[:100])
        return f"the host raises {wanted}"
    if isinstance(actual, Exception):
        return f"raises {type(actual).__name__}: {actual}"
    if actual.keys() != wanted.keys():
        return f"other gradients: {sorted(actual.keys() ^ wanted.keys())}"
    # A host that was swapped may itself round to fp32, in a softmax or a norm. A gradient that is
    # zero but for rounding is measured by the largest of its layer.
    tolerance = max(
        (m.fused_tolerance for m in swapped.modules() if isinstance(m, Fused)), default=0
    )
    rounding = tolerance if tolerance > EXACT else ROUNDING
    peaks = layer_peaks(wanted)
    for name, a in wanted.items():
        b = actual[name]
        same = (a == b) | (a.isnan() & b.isnan())  # infinities too
        limit = tolerance * (1 + largest(a)) + rounding * peaks[layer_of(name)]
        if not (a - b).masked_fill(same, 0).abs().le(limit).all():
            again = _training_step(host, inputs)
            if isinstance(again, Exception) or not torch.equal(
                a.nan_to_num(), again[name].nan_to_num()
            ):
                raise NotShrunk("the host does not repeat a training step with the same seed")
            return f"{name} differs by {(a - b).masked_fill(same, 0).abs().max():.1e} in float64"
    return ""
