"""A training step of a model through PyTorch and through our kernels: outputs and all gradients by
the 2x rule."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy.accuracy import Error, Tensors, largest, measure_all
from ..fuse.batch import arguments_of, copied
from ..fuse.select import tensors
from ..fuse.swap import swap_in, swap_out
from ..runtime.backend import backend


def run_step(
    model: nn.Module, batch: Any, seed: int = 0, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name, after a seed, with random upstream gradients.

    Args:
        batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
        autocast: run under it.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    args, kwargs = copied(arguments_of(batch), dtype)
    inputs = [*tensors(args, "input"), *tensors(kwargs, "input")]
    wanted = {n: x for n, x in (*inputs, *model.named_parameters()) if x.requires_grad}
    device = next(model.parameters()).device.type
    torch.manual_seed(seed)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        found = dict(tensors(model(*args, **kwargs), "out"))
    outputs = [y for y in found.values() if y.requires_grad]
    results = {name: y.detach() for name, y in found.items()}
    if outputs and wanted:
        numbers = torch.Generator().manual_seed(seed)
        upstream = [torch.randn(y.shape, generator=numbers).to(y) for y in outputs]
        grads = torch.autograd.grad(outputs, [*wanted.values()], upstream, allow_unused=True)
        results |= {f"d{n}": g for n, g in zip(wanted, grads, strict=True) if g is not None}
    return results


def layer_of(name: str) -> str:
    """The block that a parameter belongs to, or its module outside the stack of blocks."""
    parts = name.split(".")
    # The last place number, but for that of a parameter's own module in a Sequential.
    places = [i for i, part in enumerate(parts[:-2]) if part.isdigit()]
    return ".".join(parts[: places[-1] + 1] if places else parts[:-1])


def layer_peaks(found: Mapping[str, Tensor]) -> defaultdict[str, float]:
    """The largest finite value in each layer."""
    peaks: defaultdict[str, float] = defaultdict(float)
    for name, x in found.items():
        peaks[layer_of(name)] = max(peaks[layer_of(name)], largest(x))
    return peaks


def errors_beside(
    actual: Tensors, specification: Callable[[], Tensors], oracle: Tensors, dtype: torch.dtype
) -> list[Error]:
    """`measure_all` of what `run_step` gives. A gradient that is zero but for rounding (the bias of
    the keys) is measured by the largest gradient of its layer: the floor, 2 eps of that.

    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks = layer_peaks(oracle)
    floors = {name: 2 * torch.finfo(dtype).eps * peaks[layer_of(name)] for name in oracle}
    return measure_all(actual, specification, oracle, dtype, floors)


def is_ours(model: nn.Module) -> bool:
    """Whether it has modules of this package, which run our ops without a swap."""
    package = __name__.partition(".")[0]
    return any(type(m).__module__.startswith(f"{package}.models.") for m in model.modules())


def model_errors(
    model: nn.Module,
    batch: Any,
    swap: Callable[[nn.Module], Any] = swap_in,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> list[Error]:
    """Errors of a model's outputs and gradients through our ops against PyTorch's, by the 2x rule.

    The oracle is the model as its library runs it, in float64, the yardstick the same in the
    model's own dtype; of one of ours, its modules on the "torch" backend.

    Args:
        model: swapped or not; it is copied.
        batch: a tensor of images, a tuple of arguments, or keyword arguments.
        swap: what makes a host's copy ours.
        autocast: run both under it; its dtype then sets the floor.
    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    dtype = autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
    own, plain = is_ours(model), copy.deepcopy(model)
    swap_out(plain)

    def by_torch(model: nn.Module, autocast: torch.dtype | None) -> dict[str, Tensor]:
        with backend("torch") if own else nullcontext():
            return run_step(model, batch, seed, autocast)

    oracle = by_torch(copy.deepcopy(plain).double(), None)
    ours = copy.deepcopy(plain)
    if not own:
        swap(ours)
    actual = run_step(ours, batch, seed, autocast)
    return errors_beside(actual, lambda: by_torch(copy.deepcopy(plain), autocast), oracle, dtype)
