"""The coverage command: which models of the installed host libraries swap_in understands, and how.

Each model is built at its own size without memory, swapped, and given a row: its level and, where
that is not the block level, why. `--verify` also builds each name small and compares the swapped
model with the host's, forward and all gradients, by the 2x rule, through the kernels and through
PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.metadata
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastvit_kernels import zoo
from fastvit_kernels.accuracy import Error, measure
from fastvit_kernels.backend import Backend, backend
from fastvit_kernels.swap import SwapReport, swap_in

VERIFIED = ("vit_", "deit", "beit", "eva", "swin", "dinov")  # timm's names that --verify runs


@dataclasses.dataclass
class Row:
    host: str
    model: str
    level: str
    reason: str
    verified: str = ""


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


def model_errors(
    model: nn.Module,
    inputs: Any,
    swap: Callable[[nn.Module], Any] = swap_in,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> list[Error]:
    """Outputs and all gradients of the swapped model beside the host's, by the 2x rule.

    The oracle is the host in float64, the yardstick the host in the model's own dtype. A gradient
    that is zero but for rounding (the bias of the keys) is measured by the largest gradient of the
    module's parameters: its floor is theirs.

    Args:
        model: a host's model, not swapped; it is copied.
        inputs: a tensor of images, or keyword arguments.
        swap: what makes the copy ours.
        autocast: run host and copy under it; its dtype then sets the floor.
    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    dtype = autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
    oracle = _run(copy.deepcopy(model).double(), inputs, seed)
    yardstick = _run(copy.deepcopy(model), inputs, seed, autocast)
    swapped = copy.deepcopy(model)
    swap(swapped)
    actual = _run(swapped, inputs, seed, autocast)
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks: Counter[str] = Counter()
    for name, o in oracle.items():
        if not o.numel():
            continue
        owner = name.rpartition(".")[0].rpartition(".")[0]
        peaks[owner] = max(peaks[owner], o.abs().max().item())
    errors = []
    for name, o in oracle.items():
        error = measure(name, actual[name], yardstick[name], o, dtype)
        floor = torch.finfo(dtype).eps * peaks[name.rpartition(".")[0].rpartition(".")[0]]
        errors.append(
            dataclasses.replace(
                error,
                limit_max=error.limit_max + 2 * floor,
                limit_rms=error.limit_rms + 2 * floor,
            )
        )
    return errors
