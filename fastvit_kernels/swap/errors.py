"""What a host gives and its fused twin: outputs and all gradients, side by side by the 2x rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..verify.accuracy import Error, Tensors, measure_all
from .facts import leaves


class Call(NamedTuple):
    """How a module is called; `inputs` says it in words."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None
    grad: bool = True
    inputs: str = ""


def copied(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Arguments whose tensors are of the call alone: a host may write into them. Floating-point
    ones get the dtype."""
    if isinstance(x, Tensor):
        to = dtype if x.is_floating_point() else None
        return x.detach().to(to, copy=True).requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(copied(v, dtype) for v in x)
    return {k: copied(v, dtype) for k, v in x.items()} if type(x) is dict else x


def device_of(values: Any) -> torch.device:
    """Of the first tensor."""
    return next((x.device for x in leaves(values, Tensor)), torch.device("cpu"))


def step(module: nn.Module, call: Call, seed: int | None = None) -> dict[str, Tensor]:
    """A call, with its backward where there is one: outputs and gradients by name, "dinput0" that
    of the first argument. The upstream gradient is random with a seed, else the outputs."""
    given = list(leaves(call[:2], Tensor))
    device = device_of(given).type
    with (
        torch.set_grad_enabled(call.grad),
        torch.autocast(device, call.autocast, enabled=call.autocast is not None),
    ):
        found = list(leaves(module(*call.args, **call.kwargs), Tensor))
    outputs = [x for x in found if x.requires_grad]
    wanted = {f"d{n}": p for n, p in module.named_parameters() if p.requires_grad}
    wanted |= {f"dinput{i}": x for i, x in enumerate(given) if x.requires_grad}
    results = {f"out{i}": x.detach() for i, x in enumerate(found)}
    if outputs and wanted:
        upstream = [x.detach() for x in outputs]
        if seed is not None:
            numbers = torch.Generator().manual_seed(seed)
            upstream = [torch.randn(x.shape, generator=numbers).to(x) for x in outputs]
        found = torch.autograd.grad(outputs, [*wanted.values()], upstream, allow_unused=True)
        results |= {n: g for n, g in zip(wanted, found, strict=True) if g is not None}
    return results


def run_step(
    model: nn.Module, inputs: Any, seed: int, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`step` of a whole model, with a gradient of each floating-point input, after a seed. Inputs
    are a tensor of images, a tuple of arguments, or keyword arguments."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given: Any = (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    given = ((), dict(inputs)) if isinstance(inputs, Mapping) else given
    args, kwargs = copied(given, dtype)
    call = Call(args, kwargs, autocast)
    for x in leaves(call[:2], Tensor):
        x.requires_grad_(x.is_floating_point())
    torch.manual_seed(seed)
    return step(model, call, seed)


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


def errors_beside(
    actual: Tensors, specification: Callable[[], Tensors], oracle: Tensors, dtype: torch.dtype
) -> list[Error]:
    """`measure_all` of what `step` gives. A gradient that is zero but for rounding (the bias of the
    keys) is measured by the largest gradient of its layer: the floor, 2 eps of that.

    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks = layer_peaks(oracle)
    floors = {name: 2 * torch.finfo(dtype).eps * peaks[layer_of(name)] for name in oracle}
    return measure_all(actual, specification, oracle, dtype, floors)
