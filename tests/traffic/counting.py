"""Counts what runs on fake tensors: operators of torch and launches of Triton kernels.

Each counts once and moves its tensors once: inputs read, outputs written. Counted, not measured:
caches, tiles read again and operators of several kernels are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastvit_kernels.ops import recomputed_norm, recomputed_sum
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import FakeTensorMode, TorchDispatchMode, place_of_storage
from fastvit_kernels.runtime.operator import LAUNCHERS
from tests.machine.aot import TARGETS
from tests.machine.launches import tensor_bytes
from tests.support.private import tree_leaves

GPU = "sm_90"  # its configs and routes


@dataclass
class Count:
    """What each call moved, and the storages that backward keeps."""

    calls: list[int] = field(default_factory=list)  # bytes
    kept: dict[int, Tensor] = field(default_factory=dict)  # by storage; alive: none is reused

    @property
    def bytes(self) -> int:
        return sum(self.calls)


_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "squeeze_")


class _Counting(TorchDispatchMode):
    """Counts operators of torch; runs the launchers of this package's."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastvit_kernels":
            with self:
                return LAUNCHERS[func.overloadpacket.__name__](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        # `to` and `reshape` are views by their schema, and copy where they must
        is_view = func.is_view and _is_view_of(result, args)
        moves = not (is_view or name.startswith(_MOVES_NOTHING))
        if func.namespace == "aten" and moves:
            self.add((args, kwargs, result))
        return result

    def add(self, tree: Any) -> None:
        leaves = [getattr(x, "base", x) for x in tree_leaves(tree)]  # a tensor map's tensor
        moved = sum(tensor_bytes(x) for x in leaves if isinstance(x, Tensor))
        if moved:
            self.count.calls.append(moved)


def _is_view_of(result: Any, args: tuple[Any, ...]) -> bool:
    places = {place_of_storage(x.untyped_storage()) for x in args if isinstance(x, Tensor)}
    results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return all(place_of_storage(x.untyped_storage()) in places for x in results)


_KEPT: list[dict[int, Tensor]] = []  # of the counts under way


def keep(tree: Any) -> Any:
    """Its tensors count as kept, each storage once."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor):
            _KEPT[-1][place_of_storage(x.untyped_storage())] = x
    return tree


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, tensors count as on the GPU whose configs and routes are counted."""
    target = TARGETS[GPU]
    with on_absent_gpu(Gpu(target.name, target.num_sms, target.shared_limit)):
        yield


@contextmanager
def counting() -> Iterator[Count]:
    """Inside, on fake tensors, torch's operators and Triton's launches join the yielded count."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    count = Count()
    mode = _Counting(count)

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mode.add((args, kwargs))

    def product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        mode.add((out, a, b, bias))  # one call of cuBLAS, which a fake CPU tensor is not
        return out

    class Hooks(saved_tensors_hooks):
        """Those that a model sets inside ours take our place: what they keep counts too."""

        def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
            super().__init__(lambda x: keep(pack(x)), unpack)

    with (
        patch.object(JITFunction, "run", launch),
        patch.object(InterpretedFunction, "run", launch),
        patch.object(gemm, "_upcast_product", product),
        as_on_gpu(),
        saved_tensors_hooks(keep, lambda x: x),
        patch.object(torch.autograd.graph, "saved_tensors_hooks", Hooks),
        patch.object(recomputed_norm, "is_hooked", lambda: False),  # by our own
        patch.object(recomputed_sum, "is_hooked", lambda: False),
        FakeTensorMode(),
        mode,
    ):
        _KEPT.append(count.kept)
        try:
            yield count
        finally:
            _KEPT.pop()


class Step(NamedTuple):
    """A training step, by launches, bytes moved and bytes kept."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    kept: int

    def less(self, other: Step) -> Step:
        def minus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
            return a[0] - b[0], a[1] - b[1]

        return Step(
            minus(self.forward, other.forward),
            minus(self.backward, other.backward),
            self.kept - other.kept,
        )
