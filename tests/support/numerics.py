"""What the tests share: the 2x rule, random inputs, readable ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit_kernels.accuracy.accuracy import Error, Function, Inputs, Reference
from fastvit_kernels.runtime.dtypes import DTYPE_NAMES

__all__ = ["DEVICE", "DTYPES", "Error", "assert_accurate", "compare", "dtype_id", "rand"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = tuple(DTYPE_NAMES)


def dtype_id(dtype: torch.dtype) -> str:
    return DTYPE_NAMES[dtype]


def compare(function: Function, reference: Function, inputs: Inputs, **options: Any) -> list[Error]:
    """`Reference.errors` of one function; options as for Reference."""
    return Reference(reference, inputs, **options).errors(function)


def assert_accurate(
    function: Function, reference: Function, inputs: Inputs, **options: Any
) -> list[Error]:
    """`compare`, and an AssertionError that lists every error where one breaks the 2x rule."""
    errors = compare(function, reference, inputs, **options)
    if not all(e.passed for e in errors):
        raise AssertionError("the 2x rule is broken:\n" + "\n".join(f"  {e}" for e in errors))
    return errors


def rand(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 1.0,
    grad: bool = True,
) -> Tensor:
    """Normal numbers times scale on the test device; the same at every run."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape) + len(shape))
    x = torch.randn(*shape, generator=generator) * scale
    return x.to(DEVICE, dtype).requires_grad_(grad)
