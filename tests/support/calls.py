"""Which operators run."""

from __future__ import annotations

from typing import Any

from fastvit_kernels.runtime.compat import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Each operator that runs inside, below autograd: itself, its arguments, what it gave."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made.append((func, args, out))
        return out

    @property
    def ours(self) -> list[tuple[Any, Any, Any]]:
        """Those of the package; what takes the PyTorch path is not among them."""
        return [call for call in self.made if call[0].namespace == "fastvit_kernels"]
