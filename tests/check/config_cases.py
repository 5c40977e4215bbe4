"""What reaches every launch config that ships: examples of each op, small, and large for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.entries.attention import packed_sizes
from fastvit_kernels.accuracy.entries.gated_mlp import gated_sizes
from fastvit_kernels.accuracy.entries.patch_embed import patch_sizes
from fastvit_kernels.accuracy.entries.rope import TABLES
from fastvit_kernels.accuracy.op import Case, Draw, Example, Shape, Sizes


def padded(draw: Draw, shape: Shape) -> Tensor:
    """Rows that are part of wider ones."""
    return draw(*shape[:-1], shape[-1] + 8)[..., : shape[-1]].detach().requires_grad_()


def in_memory(*order: int) -> Callable[[Draw, Shape], Tensor]:
    """Axes that lie in memory in this order."""

    def make(draw: Draw, shape: Shape) -> Tensor:
        back = [order.index(axis) for axis in range(len(shape))]
        return draw(*(shape[axis] for axis in order)).permute(back).detach().requires_grad_()

    return make


def sized(op_sizes: Mapping[str, Any], *words: str, **example: Any) -> Example:
    """An Example whose label says its sizes."""
    text = " ".join(f"{name}={_short(value)}" for name, value in op_sizes.items())
    return Example(op_sizes, ", ".join([text, *words]), **example)


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _norms(large: bool) -> list[Example]:
    widths = (60, 96, 200, 384, 768, 1280, 3000, *((8192,) if large else ()))
    rows, found = (8 * 197 + 3 if large else 5,), []
    for C in widths:
        sizes = dict(rows=rows, C=C)
        strided = C % 128 == 0
        found.append(sized(sizes, "strided", strided=padded) if strided else sized(sizes))
    return found


def _linear(large: bool) -> list[Example]:
    def gelu(rows: Shape, K: int, N: int) -> Example:
        sizes, options = dict(rows=rows, K=K, N=N), dict(activation="gelu")
        return sized(sizes, "gelu", options=options, only=("x", "weight", "bias"))

    def residual(rows: Shape, K: int, N: int) -> Example:
        return sized(dict(rows=rows, K=K, N=N), "residual")

    if not large:
        return [gelu((2, 37), 72, 136), residual((2, 37), 136, 72)]
    return [
        *(gelu((8, 197), K, N) for K, N in ((768, 3072), (200, 328))),
        *(residual((8, 197), K, N) for K, N in ((768, 768), (328, 200))),
        *(gelu((1, T), 192, 768) for T in (1, 50)),
    ]


def _rope(large: bool) -> list[Example]:
    B, T = (4, 261) if large else (1, 11)
    heads = ((3, 16, 16), (2, 64, 60), (2, 80, 80), (1, 128, 128), (1, 512, 512))

    def case(H: int, D: int, R: int, *words: str, **example: Any) -> Example:
        sizes = dict(B=B, T=T, H=H, D=D, R=R, prefix=5, lead=(), norm="layer_norm")
        return sized(sizes, *words, options=dict(interleaved=R < D), **example)

    learnt = [case(*head, "learnt tables") for head in (heads[0], heads[1], heads[-1])]
    return [*(case(*head, frozen=TABLES) for head in heads), *learnt]


def _attention(large: bool) -> list[Example]:
    def packed(B: int, T: int, H: int, D: int, *words: str, **example: Any) -> Example:
        return sized(dict(B=B, T=T, H=H, D=D), *words, **example)

    def strided(B: int, T: int, H: int, D: int) -> Example:
        return packed(B, T, H, D, "heads first", strided=in_memory(0, 2, 3, 1, 4))

    if large:
        return [
            *(packed(3, T, 5, 64) for T in (1, 50, 197, 257, 577, 1025)),
            *(packed(128, T, 17, D) for T, D in ((19, 32), (50, 64))),
            *(packed(29, T, 5, D) for T, D in ((197, 32), (197, 64), (577, 64), (257, 128))),
            *(strided(2, 197, 3, D) for D in (32, 64, 72, 80, 96, 128, 256)),
        ]
    return [
        packed(1, 50, 2, 64),
        packed(1, 1, 1, 64),
        *(strided(1, 35, 1, D) for D in (32, 72, 128, 256)),
        packed(8, 19, 4, 16),
        packed(1, 197, 1, 64, slow=True),
        packed(1, 300, 1, 16, slow=True),
    ]


def _varlen(large: bool) -> list[Example]:
    windows, images = (64, 48, 64, 1, 0, 32) * 8, (197, 577, 1025, 1, 0, 260)
    packs = [(windows, D) for D in (32, 64, 80)] + [(images, D) for D in (64, 72, 80, 128)]
    if not large:
        packs = [((5, 0, 35), 16), ((40,), 72), ((35, 1), 128)]
    heads_first = in_memory(0, 2, 1, 3)
    return [sized(packed_sizes(p, 5 if large else 1, D), strided=heads_first) for p, D in packs]


def _sdpa(large: bool) -> list[Example]:
    def each(T: int, S: int, D: int) -> list[Example]:
        sizes = dict(B=1, H=2, T=T, S=S, D=D)
        mask = (1, 1, T, S)
        return [
            sized({**sizes, "mask": None}),
            sized({**sizes, "mask": mask}, "boolean", boolean=True),
            sized({**sizes, "mask": (1, 1, 1, S)}, "mask of keys", boolean=True),
            sized({**sizes, "mask": mask}, "additive"),
            sized({**sizes, "mask": None}, "causal", options=dict(is_causal=True)),
        ]

    return [*each(197, 261, 64), each(130, 197, 128)[1]] if large else each(37, 42, 32)


def _mlp(large: bool) -> list[Example]:
    def both(rows: Shape, C: int, hidden: int) -> list[Example]:
        sizes = dict(rows=rows, C=C, F=hidden, N=C)
        return [sized(sizes), sized(sizes, "stored", options=dict(recompute=False))]

    def inference(rows: Shape, C: int, hidden: int) -> Example:
        """Where the hidden activations need not be kept."""
        return sized(dict(rows=rows, C=C, F=hidden, N=C), "inference", inference=True)

    if not large:
        return [*both((2, 19), 40, 72), inference((2, 19), 100, 72), inference((1, 50), 192, 80)]
    trained = [example for C in (96, 192, 768) for example in both((8, 197), C, 4 * C)]
    return [*trained, *(inference((3, 197), C, 4 * C) for C in (64, 100, 192, 256))]


def _gated_mlp(large: bool) -> list[Example]:
    sizes = [((2, 5), 8, 72), ((1, 5), 8, 600)]
    if large:
        sizes = [((8, 197), C, hidden) for C, hidden in ((96, 72), (192, 512), (768, 2048))]
    normed = [
        sized(gated_sizes(rows, C, hidden, C, separate=True, norm=True))
        for rows, C, hidden in sizes
    ]
    rows, C, hidden = sizes[-1 if large else 0]
    return [*normed, sized(gated_sizes(rows, C, hidden, C), "packed")]


def _patch_embed(large: bool) -> list[Example]:
    def example(B: int, size: Shape, patch: int, C: int, **more: Any) -> Example:
        return sized(patch_sizes(Sizes(B, 0, C, 0, 0, (size[0], size[1]), patch)) | more)

    if not large:
        return [example(2, (24, 16), 8, 40)]
    return [
        example(5, (224, 192), 16, 192),
        example(5, (224, 192), 16, 768),
        example(3, (56, 42), 14, 200),
        example(5, (224, 192), 16, 768, kept=42),
    ]


# The norms that hand their input on have the same kernels, and a second gradient: they reach the
# configs of both. qkv_attention and rope_attention have the kernels of attention and rope.
EXAMPLES: dict[str, Callable[[bool], list[Example]]] = {
    "layer_norm_and_input": _norms,
    "rms_norm_and_input": _norms,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "varlen_attention": _varlen,
    "scaled_dot_product_attention": _sdpa,
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
    "patch_embed": _patch_embed,
}


def config_cases(large: bool, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """What reaches every launch config that ships, the slow ones last: a test takes the first."""
    pairs = [(OPS[name], example) for name, of in EXAMPLES.items() for example in of(large)]
    pairs.sort(key=lambda pair: pair[1].slow)
    return [op.case(example, device, dtype) for op, example in pairs]
