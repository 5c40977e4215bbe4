"""What the host must know of values on a device, read once for all modules that share a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...runtime.compat import FakeTensor, is_recorded, version

_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (its version, what was read of it)


def is_readable(tensor: Tensor) -> bool:
    """Whether there are values, and the host may wait for them: no compiler traces, and no graph
    records."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not is_recorded(tensor)


def read_once(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """read(tensor), kept until somebody writes to the tensor; a tensor made in inference mode does
    not know that, and is read at each call."""
    if tensor.is_inference():
        return read(tensor)
    known = _read.get(tensor)
    if known is None or known[0] != version(tensor):
        known = _read[tensor] = version(tensor), {}
    values = known[1]
    if read not in values:
        values[read] = read(tensor)
    return values[read]
