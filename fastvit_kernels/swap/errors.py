"""A host's model and its swapped copy side by side: outputs and all gradients, by the 2x rule."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..verify.accuracy import Error, measure_all
from .apply import swap_in


def _outputs(result: Any) -> list[Tensor]:
    """The tensors of a model's output with a gradient, in order."""
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result
    return [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def run_step(
    model: nn.Module, inputs: Any, upstream_seed: int, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name: of the images and of every parameter."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = inputs if isinstance(inputs, Mapping) else {"": inputs}
    leaves = {
        k: v.detach().clone().to(dtype).requires_grad_() if v.is_floating_point() else v
        for k, v in inputs.items()
    }
    torch.manual_seed(upstream_seed)
    device = next(iter(leaves.values())).device.type
    with torch.autocast(device, autocast, enabled=autocast is not None):
        outputs = _outputs(model(leaves[""]) if "" in leaves else model(**leaves))
    generator = torch.Generator().manual_seed(upstream_seed)
    upstream = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    torch.autograd.backward(outputs, upstream)
    found = {f"out{i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"d{k or 'images'}": v.grad for k, v in leaves.items() if v.grad is not None}
    found |= {f"d{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


def layer_of(name: str) -> str:
    """The block that a parameter belongs to, or its module outside the stack of blocks."""
    parts = name.split(".")
    # The last place number, but for that of a parameter's own module in a Sequential.
    places = [i for i, part in enumerate(parts[:-2]) if part.isdigit()]
    return ".".join(parts[: places[-1] + 1] if places else parts[:-1])


def largest(x: Tensor) -> float:
    """The largest of the finite values, 0 where there are none."""
    return x[x.isfinite()].abs().amax().item() if x.isfinite().any() else 0.0


def layer_peaks(found: Mapping[str, Tensor]) -> defaultdict[str, float]:
    """The largest finite value in each layer."""
    peaks: defaultdict[str, float] = defaultdict(float)
    for name, x in found.items():
        peaks[layer_of(name)] = max(peaks[layer_of(name)], largest(x))
    return peaks


def model_errors(
    model: nn.Module,
    inputs: Any,
    swap: Callable[[nn.Module], Any] = swap_in,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> list[Error]:
    """Outputs and all gradients of the swapped model beside the host's, by the 2x rule.

    The oracle is the host in float64, the yardstick the host in the model's own dtype. A gradient
    that is zero but for rounding (the bias of the keys) is measured by the largest gradient of its
    layer: the floor, 2 eps of that.

    Args:
        model: a host's model, not swapped; it is copied.
        inputs: a tensor of images, or keyword arguments.
        swap: what makes the copy ours.
        autocast: run host and copy under it; its dtype then sets the floor.
    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    dtype = autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
    oracle = run_step(copy.deepcopy(model).double(), inputs, seed)
    swapped = copy.deepcopy(model)
    swap(swapped)
    actual = run_step(swapped, inputs, seed, autocast)
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks = layer_peaks(oracle)
    floors = {name: 2 * torch.finfo(dtype).eps * peaks[layer_of(name)] for name in oracle}

    def specification() -> dict[str, Tensor]:
        return run_step(copy.deepcopy(model), inputs, seed, autocast)

    return measure_all(actual, specification, oracle, dtype, floors)
