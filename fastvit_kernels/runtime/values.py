"""A debug switch for checks that read a tensor's values, such as indices: each waits for the GPU.

Off, an op looks at shapes, dtypes and devices alone, and its kernels read no memory that is not
theirs, whatever the values are, but for samples that were drawn for another batch. Also here:
whether equal inputs must give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

checked = False
poisoned = False  # torch's deterministic algorithms are on to fill memory alone: accuracy/runner.py


def bits_must_repeat() -> bool:
    """Whether the user asks torch for deterministic algorithms."""
    return torch.are_deterministic_algorithms_enabled() and not poisoned


def values_are_checked() -> bool:
    """Whether to look at values now: inside `checked_values`, and not while a compiler traces."""
    return checked and not torch.compiler.is_compiling()


@contextmanager
def checked_values() -> Iterator[None]:
    """Inside, an index that is out of range or listed twice raises ValueError, and so do samples
    that `keep_samples` drew for another batch."""
    global checked
    former, checked = checked, True
    try:
        yield
    finally:
        checked = former
