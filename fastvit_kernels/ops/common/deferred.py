"""What a hook makes of a saved tensor again, made where a backward reads it, not where it unpacks.

with deferred:
    x, z = ctx.saved_tensors  # the hook gives `deferred.stand_in(...)` for x: no memory yet
    ...                       # what takes memory, and reads no x
    x = deferred.read(x)
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ...runtime.compat import place_of_storage


class _Deferred(threading.local):
    makers: dict[int, Callable[[], Tensor]] | None = None  # by the place of what stands in

    def __enter__(self) -> None:
        self.makers = {}

    def __exit__(self, *error: object) -> None:
        self.makers = None

    def stand_in(self, like: Tensor, shape: torch.Size, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives; inside, one element like it in its place."""
        if self.makers is None:
            return make()
        self.makers[place_of_storage(like.untyped_storage())] = make
        return like.expand(shape)

    def read(self, x: Tensor) -> Tensor:
        if not self.makers:
            return x
        make = self.makers.pop(place_of_storage(x.untyped_storage()), None)
        return x if make is None else make()


deferred = _Deferred()
