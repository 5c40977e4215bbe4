"""Who is measured: PyTorch, its compiler and SDPA backends, peers that can be imported, ours.

A provider is a function of the op's inputs by keyword, with the context that forces its route; or
the reason why it is not here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.private import keeps_buffers
from fastvit_kernels import backend
from fastvit_kernels.ops.common.gemm_configs import forced_route

Function = Callable[..., Any]  # a Tensor, or several
BASELINE = "eager"


@dataclass(frozen=True)
class Provider:
    """A way to compute an op. `make` builds its function when it is first needed."""

    name: str
    make: Callable[[], Function]
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    backward: bool = True
    compiled: bool = False  # takes seconds to build
    package: str = ""  # or module, that must be installed
    ours: bool = False
    reference: Function | None = None  # what a compiler is given


def plain(name: str, function: Function, **options: Any) -> Provider:
    """A function that is there already."""
    return Provider(name, lambda: function, **options)


def eager(reference: Function) -> Provider:
    return plain(BASELINE, reference)


def compiled(reference: Function, mode: str | None = None) -> Provider:
    """torch.compile of the reference, for the one shape of its case.

    Whoever makes several resets the compiler once before: of each code object it keeps a few only.
    """

    def make() -> Function:
        return torch.compile(reference, dynamic=False, mode=mode)

    name = "compile" if mode is None else "compile-max-autotune"
    return Provider(name, make, keeps_buffers, compiled=True, reference=reference)


def with_autotuned(providers: list[Provider]) -> list[Provider]:
    """The providers, and beside each compiled one the same with the compiler's search for kernels.

    Without its CUDA graphs: `graph_ms` replays every provider through one of ours.
    """
    mode = "max-autotune-no-cudagraphs"
    twins = [compiled(p.reference, mode) for p in providers if p.reference is not None]
    return [*providers, *twins]


def ours(
    name: str, function: Function, context: Callable[[], Any] = nullcontext, **options: Any
) -> Provider:
    """One of this package's ops through its kernels, on the CPU through Triton's interpreter."""

    @contextmanager
    def forced() -> Iterator[None]:
        with backend("triton"), context():
            yield

    return plain(name, function, context=forced, ours=True, **options)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` inside: how a route is forced."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def gemm_route(route: str) -> Callable[[], Any]:
    """A context in which every GEMM with an epilogue takes this route."""
    return lambda: forced_route(route)


SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


def sdpa_backends(reference: Function) -> list[Provider]:
    """The reference with each backend of torch's SDPA forced: the default order hides cuDNN."""
    return [
        plain(name, reference, context=lambda chosen=chosen: sdpa_kernel(chosen))
        for name, chosen in SDPA_BACKENDS.items()
    ]


def imported(name: str, module: str, adapt: Callable[[Any], Function], **options: Any) -> Provider:
    """A peer: `adapt` makes a function of its module."""
    return Provider(name, lambda: adapt(importlib.import_module(module)), package=module, **options)


def installed(provider: Provider) -> bool:
    """Whether the provider's package is here."""
    try:
        return not provider.package or importlib.util.find_spec(provider.package) is not None
    except ImportError:  # the package is absent, or cannot be imported itself
        return False
