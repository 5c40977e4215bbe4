"""The gate of whole models: logits and gradients beside the host's in float64, by the 2x rule.

The gradients of all parameters are judged as one vector, and each by itself with EACH times the
limit, so that a small one is not lost. Parameter by parameter is what the tests do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastvit_kernels.verify.accuracy import Error, Tensors, measure

EACH = 4.0


def overall(name: str, errors: Sequence[Error], sizes: Sequence[int]) -> Error:
    """The error of several tensors as of one vector: its maximum, its RMS, its floor."""
    total = sum(sizes)

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v * n for v, n in zip(values, sizes, strict=True)) / total)

    torch_max, torch_rms = max(e.torch_max for e in errors), mean([e.torch_rms for e in errors])
    floor_max = max(e.limit_max - 2 * e.torch_max for e in errors)
    floor_rms = mean([e.limit_rms - 2 * e.torch_rms for e in errors])
    return Error(
        name, max(e.max for e in errors), mean([e.rms for e in errors]), torch_max, torch_rms,
        2 * torch_max + floor_max, 2 * torch_rms + floor_rms,
    )  # fmt: skip


def model_errors(actual: Tensors, yardstick: Tensors, oracle: Tensors) -> list[Error]:
    """Of the logits, of the gradients as one vector, and of each with wider limits.

    Each side by name, the logits first, alone in inference. A gradient that only one side lacks
    counts as zeros there; one that the oracle lacks is no part.
    """

    def of(side: Tensors, name: str) -> Tensor:
        return side[name] if name in side else torch.zeros_like(oracle[name])

    logits, *each = [
        measure(name, of(actual, name), of(yardstick, name), wanted, torch.bfloat16)
        for name, wanted in oracle.items()
    ]
    if not each:
        return [logits]
    sizes = [oracle[e.name].numel() for e in each]
    wider = [replace(e, limit_max=EACH * e.limit_max, limit_rms=EACH * e.limit_rms) for e in each]
    return [logits, overall("gradients", each, sizes), *wider]
