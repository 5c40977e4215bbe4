"""What reads a LayerNorm or RMSNorm may keep the norm's input in place of its output.

    y, x = layer_norm_and_input(x, weight, bias, eps, out_dtype=...)
    with recomputed_norm(y, x, weight, bias, eps):
        x = x + branch(y)

Where an op inside would save y for its backward, it saves nothing: the norm's own backward keeps x
already, and the backward of the op runs the norm's forward kernel again, which gives y's bits.
That is one read of x and one write of y more, for y's memory. Where x is not kept either, it comes
from recomputed_sum.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..runtime.backend import use_triton
from ..runtime.compat import KNOWS_VERSIONS, place_of_storage, saves_are_hooked, version
from .common.deferred import deferred
from .common.rows import MAX_C
from .norm.functions import layer_norm_fwd, rms_norm_fwd


def is_hooked() -> bool:
    """Whether other hooks decide what is saved, or torch counts no changes in place."""
    return saves_are_hooked() or not KNOWS_VERSIONS


def place_of(x: Tensor) -> int:
    """What tells one storage from another."""
    return place_of_storage(x.untyped_storage())


class Kept(NamedTuple):
    """What a hook does not make again. Under hooks autograd itself compares no versions."""

    saved: Tensor
    version: int

    def take(self) -> Tensor:
        if (now := version(self.saved)) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tuple(self.saved.shape)} is at version {now}; expected "
                f"version {self.version} instead"
            )
        return self.saved


@contextmanager
def recomputed_norm(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    recompute_fn: Callable[[], Tensor] | None = None,
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm",
    samples: Tensor | None = None,
) -> Iterator[None]:
    """Inside, what would be saved of y is rebuilt from x in the backward.

    Args:
        y: `layer_norm(x, weight, bias, eps, out_dtype=y.dtype)`, as that returned it; where `norm`
            is "rms_norm", `rms_norm(x, weight, eps, out_dtype=y.dtype)`.
        x, weight, bias, eps, samples: its arguments; none may change in place before the backward.
        recompute_fn: what `recomputed_sum(x)` gave; x comes from it, and autograd keeps none.

    Without effect where the Triton kernels do not run, where no gradient is wanted, inside other
    hooks on saved tensors (a checkpoint computes all again, an offload keeps all elsewhere), and in
    torch.compile, whose partitioner decides what is kept.
    """
    if torch.compiler.is_compiling() or not y.requires_grad or is_hooked():
        yield
        return
    if x.shape[-1] > MAX_C or not use_triton(norm, x, None):
        yield
        return
    kept = (x if recompute_fn is None else None, weight, bias)
    inputs = tuple(None if t is None else t.detach() for t in kept)
    versions = _versions(inputs)
    dtype, device, shape, place, made = y.dtype, y.device, y.shape, place_of(y), version(y)
    fwd = rms_norm_fwd if norm == "rms_norm" else layer_norm_fwd

    def pack(saved: Tensor) -> Any:
        is_y = place_of(saved) == place and version(saved) == made and saved.is_contiguous()
        is_y = is_y and saved.dtype == dtype and saved.numel() == shape.numel()
        return saved.shape if is_y else Kept(saved, version(saved))

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Kept):
            return packed.take()
        if _versions(inputs) != versions:
            raise RuntimeError(
                "recomputed_norm: x, weight or bias of a norm changed in place between its "
                "forward and the backward, which reads them again"
            )

        def make() -> Tensor:
            source, *params = inputs
            source = source if recompute_fn is None else recompute_fn()
            return fwd(source, *params, eps, dtype, False, samples)[0].view(packed)

        return deferred.stand_in(torch.empty((), dtype=dtype, device=device), packed, make)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _versions(tensors: tuple[Tensor | None, ...]) -> list[int]:
    return [0 if t is None else version(t) for t in tensors]
