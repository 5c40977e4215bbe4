"""Who is measured at which shapes: ViTs in use and sweeps; PyTorch, its compiler, peers, ours.

A provider is a function of an op's inputs by keyword, with the context that forces its route; or
the reason why it is not here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fastvit_kernels import backend
from fastvit_kernels.commands.sweep import SDPA
from fastvit_kernels.ops.common.gemm_configs import forced_route

# width C, depth, heads H, MLP width F. arXiv:2010.11929, arXiv:2012.12877; g: arXiv:2106.04560
VITS = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
}
TOKENS = 128 * 197  # B T of every shape: ViT-B at 224 with 128 images
T_SWEEP = (50, 197, 257, 577, 785, 1025, 1370, 2305, 4097, 16385)
D_SWEEP = ((32, 24), (80, 16), (96, 8), (128, 6))  # head dim, heads: C = 768, and ViT-H's 1280

Function = Callable[..., Any]  # a Tensor, or several
Inputs = dict[str, Tensor | None]
BASELINE = "eager"
SEARCH = "compile-max-autotune"


@dataclass(frozen=True)
class Shape:
    """What an op is measured at. Smaller `tier`: more telling, measured earlier."""

    model: str
    B: int
    T: int
    C: int
    H: int
    F: int
    tier: int = 0
    size: int = 0  # image side and patch, 0 in the sweeps
    patch: int = 0
    variant: str = ""  # an op's own cases: linear's proj and fc1

    @property
    def D(self) -> int:
        return self.C // self.H

    @property
    def id(self) -> str:
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.model}-B{self.B}-T{self.T}-C{self.C}-H{self.H}{variant}"


def batch(T: int) -> int:
    """Images of T tokens that make about TOKENS."""
    return max(1, round(TOKENS / T))


def vit(model: str, size: int, tier: int = 0) -> Shape:
    """The shape inside a ViT on size x size images, with a class token. Patches are 16 x 16, but
    14 x 14 for H and g and at 518 (DINOv2)."""
    C, _, H, F = VITS[model]
    patch = 14 if model in ("H", "g") or size == 518 else 16
    side = size // patch
    T = side * side + 1
    return Shape(f"ViT-{model}", batch(T), T, C, H, F, tier, side * patch, patch)


def vits() -> Iterator[Shape]:
    """Ti, S, B, L, H, g at 224, 384 and 518."""
    yield vit("B", 224, 0)
    for model in ("L", "S"):
        yield vit(model, 224, 1)
    yield vit("B", 384, 1)
    for model in ("H", "Ti", "g"):
        yield vit(model, 224, 2)
    yield vit("B", 518, 2)
    for size in (384, 518):
        for model in ("Ti", "S", "L", "H", "g"):
            yield vit(model, size, 4)


def token_sweep(most: int = T_SWEEP[-1]) -> Iterator[Shape]:
    """T at constant B T, the other sizes ViT-B's."""
    C, _, H, F = VITS["B"]
    for T in T_SWEEP:
        if most >= T:
            yield Shape("sweep-T", batch(T), T, C, H, F, tier=2)


def head_sweep(*tokens: int) -> Iterator[Shape]:
    """D in 32, 80, 96, 128 at each T; 64 is ViT-B's own."""
    for D, H in D_SWEEP:
        for T in tokens:
            yield Shape(f"sweep-D{D}", batch(T), T, D * H, H, 4 * D * H, tier=3)


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
    takes: Callable[[Inputs], Inputs] = dict  # what its function takes, made of the op's inputs

    @property
    def installed(self) -> bool:
        try:
            return not self.package or importlib.util.find_spec(self.package) is not None
        except ImportError:  # the package is absent, or cannot be imported itself
            return False


def plain(name: str, function: Function, **options: Any) -> Provider:
    """A function that is there already."""
    return Provider(name, lambda: function, **options)


def eager(reference: Function) -> Provider:
    return plain(BASELINE, reference)


def keeps_buffers() -> AbstractContextManager[Any]:
    """A compiled backward may run many times over one forward: donated buffers forbid it."""
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)


def compiled(reference: Function, mode: str | None = None) -> Provider:
    """torch.compile of the reference, for the one shape of its case.

    Reset the compiler once before making several: it keeps only a few of each code object.
    """

    def make() -> Function:
        return torch.compile(reference, dynamic=False, mode=mode)

    name = "compile" if mode is None else SEARCH
    return Provider(name, make, keeps_buffers, compiled=True, reference=reference)


def with_autotuned(providers: Sequence[Provider]) -> list[Provider]:
    """The providers, and for each compiled one the same with the compiler's search for kernels.

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


def gemm_routes(function: Function) -> list[Provider]:
    """Ours with every GEMM that has an epilogue on one route."""
    return [
        ours(f"ours-{route}", function, functools.partial(forced_route, route))
        for route in ("library", "triton")
    ]


SDPA_BACKENDS = {f"sdpa-{name}": chosen for name, chosen in SDPA.items()}


def sdpa_backends(reference: Function) -> list[Provider]:
    """The reference with each backend of torch's SDPA forced: the default order hides cuDNN."""
    return [
        plain(name, reference, context=functools.partial(sdpa_kernel, chosen))
        for name, chosen in SDPA_BACKENDS.items()
    ]


def sdpa_unpacked() -> list[Provider]:
    """SDPA on separate q, k, v of (B, H, T, D), as a model without a packed projection has them.

    On packed qkv, timm's way, its backward also stacks dq, dk and dv into dqkv.
    """

    def takes(inputs: Inputs) -> Inputs:
        qkv = inputs["qkv"]
        assert qkv is not None
        return {
            n: x.transpose(1, 2).contiguous() for n, x in zip("qkv", qkv.unbind(2), strict=True)
        }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return [
        replace(provider, name=f"{provider.name}-unpacked", takes=takes)
        for provider in sdpa_backends(attend)
        if provider.name in ("sdpa-flash", "sdpa-cudnn")
    ]


def imported(name: str, module: str, adapt: Callable[[Any], Function], **options: Any) -> Provider:
    """A peer: `adapt` makes a function of its module."""
    return Provider(name, lambda: adapt(importlib.import_module(module)), package=module, **options)
