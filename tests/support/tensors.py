"""What tensors hold."""

from __future__ import annotations

import math

from torch import Tensor


def tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor, elements that an expansion repeats once."""
    sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sizes)
