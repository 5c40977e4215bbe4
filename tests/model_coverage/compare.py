"""A host's model and its swapped copy side by side: outputs, gradients, numbers drawn."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastvit_kernels.swap.apply import swap_in
from fastvit_kernels.swap.hosts import host_path
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.verify.accuracy import Error, measure_all

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


def _outputs(result: Any) -> list[Tensor]:
    """The tensors of a model's output with a gradient, in order."""
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result
    return [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def _run(
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


def _layer(name: str) -> str:
    """The block that a parameter belongs to, or its module outside the stack of blocks."""
    parts = name.split(".")
    # The last place number, but for that of a parameter's own module in a Sequential.
    places = [i for i, part in enumerate(parts[:-2]) if part.isdigit()]
    return ".".join(parts[: places[-1] + 1] if places else parts[:-1])


def _largest(x: Tensor) -> float:
    """The largest of the finite values, 0 where there are none."""
    return x[x.isfinite()].abs().amax().item() if x.isfinite().any() else 0.0


def _peaks(found: Mapping[str, Tensor]) -> defaultdict[str, float]:
    """The largest finite value in each layer."""
    peaks: defaultdict[str, float] = defaultdict(float)
    for name, x in found.items():
        peaks[_layer(name)] = max(peaks[_layer(name)], _largest(x))
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
    oracle = _run(copy.deepcopy(model).double(), inputs, seed)
    swapped = copy.deepcopy(model)
    swap(swapped)
    actual = _run(swapped, inputs, seed, autocast)
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks = _peaks(oracle)
    floors = {name: 2 * torch.finfo(dtype).eps * peaks[_layer(name)] for name in oracle}

    def specification() -> dict[str, Tensor]:
        return _run(copy.deepcopy(model), inputs, seed, autocast)

    return measure_all(actual, specification, oracle, dtype, floors)


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
    """`_run` of a model that may refuse: the numbers drawn are in it."""
    try:
        found = _run(model, inputs, 3)
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
    peaks = _peaks(wanted)
    for name, a in wanted.items():
        b = actual[name]
        same = (a == b) | (a.isnan() & b.isnan())  # infinities too
        limit = tolerance * (1 + _largest(a)) + rounding * peaks[_layer(name)]
        if not (a - b).masked_fill(same, 0).abs().le(limit).all():
            again = _training_step(host, inputs)
            if isinstance(again, Exception) or not torch.equal(
                a.nan_to_num(), again[name].nan_to_num()
            ):
                raise NotShrunk("the host does not repeat a training step with the same seed")
            return f"{name} differs by {(a - b).masked_fill(same, 0).abs().max():.1e} in float64"
    return ""
