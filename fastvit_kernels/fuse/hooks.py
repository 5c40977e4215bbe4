"""Hooks that are added to a module after a graph of it was made.

Dynamo could check at every call that each dict of hooks it found empty still is: of a ViT of 12
layers 1,052 dicts, half of what its guards cost. A swapped module looks at them when somebody has
registered a hook anywhere. One that is put into a dict by hand is not seen.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.hooks import RemovableHandle


class EmptyHooks:
    """The dicts of hooks that were empty when a swapped module's graphs were made.

    Attributes:
        filled: whether one of them is empty no more. Each graph is guarded by what it was.
    """

    def __init__(self) -> None:
        # By module and name, for somebody may put a new dict in its place; the model's own graphs
        # hold this, so it must not hold the model.
        self.dicts: dict[tuple[int, str], weakref.ref[nn.Module]] = {}
        self.filled = False
        self.registered = -1  # of all hooks anywhere, when it was last looked at

    def watch(self, module: nn.Module, name: str) -> None:
        self.dicts[id(module), name] = weakref.ref(module)

    def look(self) -> None:
        """Before a call of the graphs."""
        registered = getattr(RemovableHandle, "next_id", None)
        if registered is None or registered != self.registered or self.filled:
            self.registered = registered
            dicts = list(self.dicts.items())  # another thread may compile
            self.filled = any(getattr(module(), name, None) for (_, name), module in dicts)

    def guard(self) -> None:
        """Dynamo guards what a branch reads while it traces."""
        if self.filled:
            return
