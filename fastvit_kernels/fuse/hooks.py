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
    """The dicts of hooks that were empty when the graphs of swapped modules were made.

    Attributes:
        roots: the modules that run the graphs.
        names: each dict's module, by its name in a root, and the dict's own.
        filled: whether one of them is empty no more. Each graph is guarded by what it was.
    """

    def __init__(self) -> None:
        # By name, for somebody may put a new module or dict in its place; the graphs hold this, so
        # it must not hold the modules that run them.
        self.roots: list[weakref.ref[nn.Module]] = []
        self.names: set[tuple[str, str]] = set()
        self.filled = False
        self.full: tuple[weakref.ref[nn.Module], str] | None = None  # one that is
        self.registered: int | None = None  # of all hooks anywhere, when it was last looked at

    def join(self, root: nn.Module) -> None:
        """Another module that runs these graphs."""
        self.roots.append(weakref.ref(root))
        self.registered = None
        self.look()

    def paths(self) -> dict[int, str]:
        """Of each of their modules the id, and the name in the module that is swapped."""
        return {id(m): name for root in self.modules() for name, m in root.named_modules()}

    def modules(self) -> list[nn.Module]:
        return [root for ref in self.roots if (root := ref()) is not None]

    def look(self) -> None:
        """Before a call of the graphs."""
        registered = getattr(RemovableHandle, "next_id", None)
        if registered is None or registered != self.registered or self.is_emptied():
            self.registered = registered
            self.full = self.find()
            self.filled = self.full is not None

    def is_emptied(self) -> bool:
        """Whether the dict that was found with a hook has none any more."""
        return self.full is not None and not getattr(self.full[0](), self.full[1], None)

    def find(self) -> tuple[weakref.ref[nn.Module], str] | None:
        """A dict with a hook: its module and its name."""
        names = list(self.names)  # another thread may compile
        for root in self.modules():
            modules = dict(root.named_modules())
            for path, name in names:
                if getattr(modules.get(path), name, None):
                    return weakref.ref(modules[path]), name
        return None

    def guard(self) -> None:
        """Dynamo guards what a branch reads while it traces."""
        if self.filled:
            return
