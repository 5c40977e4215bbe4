"""The shapes that are measured: ViTs in use, and sweeps over T and D, most telling first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


def patch_of(model: str, size: int) -> int:
    """16, but 14 for H and g and at 518 (DINOv2)."""
    return 14 if model in ("H", "g") or size == 518 else 16


def vit(model: str, size: int, tier: int = 0) -> Shape:
    """The shape inside a ViT on size x size images, with a class token."""
    C, _, H, F = VITS[model]
    patch = patch_of(model, size)
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


def token_sweep() -> Iterator[Shape]:
    """T at constant B T, the other sizes ViT-B's."""
    C, _, H, F = VITS["B"]
    for T in T_SWEEP:
        yield Shape("sweep-T", batch(T), T, C, H, F, tier=2)


def head_sweep() -> Iterator[Shape]:
    """D in 32, 80, 96, 128 at T = 197; 64 is ViT-B's own."""
    for D, H in D_SWEEP:
        yield Shape(f"sweep-D{D}", batch(197), 197, D * H, H, 4 * D * H, tier=3)


def variants(shapes: Iterator[Shape], *names: str) -> Iterator[Shape]:
    """Each shape once for each name of a case."""
    for shape in shapes:
        for name in names:
            yield replace(shape, variant=name)
