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

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastvit_kernels import backend
from fastvit_kernels.ops.common.gemm_configs import forced_route

Function = Callable[..., Tensor]
BASELINE = "eager"


@dataclass(frozen=True)
class Provider:
    """A way to compute an op. `make` builds its function when it is first needed."""

    name: str
    make: Callable[[], Function]
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    backward: bool = True
    compiled: bool = False  # takes seconds to build
    package: str = ""  # that must be installed
    ours: bool = False


def plain(name: str, function: Function, **options: Any) -> Provider:
    """A function that is there already."""
    return Provider(name, lambda: function, **options)


def eager(reference: Function) -> Provider:
    return plain(BASELINE, reference)


def compiled(reference: Function) -> Provider:
    """torch.compile of the reference, for the one shape of its case."""

    def make() -> Function:
        import torch._dynamo

        torch._dynamo.reset()  # of each code object only a few shapes are compiled
        return torch.compile(reference, dynamic=False)

    def kept_buffers() -> AbstractContextManager[Any]:
        """The backward is timed alone, many times over one forward: donated buffers forbid it."""
        import torch._functorch.config

        return torch._functorch.config.patch(donated_buffer=False)

    return Provider("compile", make, kept_buffers, compiled=True)


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
    package = module.partition(".")[0]
    return Provider(
        name, lambda: adapt(importlib.import_module(module)), package=package, **options
    )


def installed(provider: Provider) -> bool:
    """Whether the provider's package is here."""
    return not provider.package or importlib.util.find_spec(provider.package) is not None
