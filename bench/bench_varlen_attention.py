"""varlen_attention beside a loop of SDPA, SDPA on padded sequences, nested tensors, flex_attention.

What the host knows of the lengths (indices that pad, block masks) is made once a case, as a model
makes it once a step. The loop reads cu_seqlens at each call and waits for the device.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.bench_attention import LONG_T, by_head
from bench.harness import Draw, Op, itemsize
from bench.providers import Function, Provider, eager, imported, ours, plain
from bench.shapes import Shape, batch, vit
from fastvit_kernels import attention, varlen_attention
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.varlen import varlen_attention_ref

EQUAL, SPREAD = "equal", "spread"  # all of T tokens; from T / 8 to T, in no order


def shapes() -> Iterator[Shape]:
    """T is the longest sequence, B their number."""
    packed = vit("B", 224)
    yield replace(packed, variant=SPREAD)
    yield replace(packed, variant=EQUAL, tier=1)
    yield Shape("NaFlex-B", batch(1024), 1024, 768, 12, 3072, 1, variant=SPREAD)
    yield Shape("SigLIP2-So400m", batch(256), 256, 1152, 16, 4304, 1, variant=SPREAD)
    yield Shape("Qwen2.5-VL", batch(64), 64, 1280, 16, 3420, 1, variant=EQUAL)  # windows
    yield Shape("Qwen2-VL", batch(4096), 4096, 1280, 16, 5120, 2, variant=SPREAD)
    yield Shape("Swin-T", batch(49), 49, 96, 3, 384, 2, variant=EQUAL)


def lengths(shape: Shape) -> list[int]:
    """Of the sequences of a case, the same at every run."""
    if shape.variant != SPREAD or shape.B == 1:
        return [shape.T] * shape.B
    least = shape.T // 8
    found = [least + (shape.T - least) * i // (shape.B - 1) for i in range(shape.B)]
    random.Random(0).shuffle(found)
    return found


def inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> dict[str, Tensor | None]:
    starts = torch.tensor([0, *lengths(shape)]).cumsum(0, dtype=torch.int32)
    qkv = draw(sum(lengths(shape)), 3, shape.H, shape.D)
    return {"qkv": qkv, "cu_seqlens": starts.to(draw.device)}


def reference(shape: Shape, dtype: str) -> Function:
    """Head by head where float64 scores of all heads are too many."""

    def specification(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        if qkv.dtype is torch.float64 and shape.T > LONG_T:
            parts = qkv.unsqueeze(0).split(lengths(shape), dim=1)
            return torch.cat([by_head(part) for part in parts], dim=1).squeeze(0)
        return varlen_attention_ref(qkv, cu_seqlens, shape.T)

    return specification


def flops(shape: Shape, mode: str) -> float:
    """2 H D a product and pair of tokens that see each other."""
    products = {"fwd": 2, "bwd": 5, "both": 7}[mode]
    return 2.0 * products * shape.H * shape.D * sum(n * n for n in lengths(shape))


def bytes_(shape: Shape, dtype: str, mode: str) -> float:
    """Those of attention on as many tokens."""
    tensors = {"fwd": 4, "bwd": 8, "both": 12}[mode]
    lse = 4 * shape.H * (2 if mode == "both" else 1)
    return float(sum(lengths(shape)) * (tensors * shape.C * itemsize(dtype) + lse))


class Padding:
    """(total, ...) to (B, T, ...) and back by indices: of each place its token, and the reverse."""

    def __init__(self, shape: Shape, device: torch.device):
        n = torch.tensor(lengths(shape), device=device)
        offs = torch.arange(shape.T, device=device)
        self.shown = offs < n[:, None]
        starts = n.cumsum(0) - n
        self.token = torch.where(self.shown, starts[:, None] + offs, 0)
        self.place = self.shown.flatten().nonzero().squeeze(1)

    def padded(self, x: Tensor) -> Tensor:
        return x[self.token]

    def packed(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.place]


def on_padded(shape: Shape, attend: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Attention of padded qkv under a mask of keys, (B, 1, 1, T)."""
    padding = functools.cache(lambda device: Padding(shape, device))

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        way = padding(qkv.device)
        return way.packed(attend(way.padded(qkv), way.shown[:, None, None]))

    return run


def on_nested(shape: Shape) -> Function:
    """SDPA of torch's nested tensors, laid out (total, H, D): q, k and v are copies."""

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                x.contiguous(), cu_seqlens, min_seqlen=min(lengths(shape)), max_seqlen=shape.T
            ).transpose(1, 2)
            for x in qkv.unbind(1)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    return run


def by_flex(shape: Shape) -> Function:
    """flex_attention, compiled, whose block mask keeps documents apart."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    total = sum(lengths(shape))

    @functools.cache
    def mask(device: torch.device) -> Any:
        n = torch.tensor(lengths(shape), device=device)
        document = torch.arange(shape.B, device=device).repeat_interleave(n)

        def together(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return document[q] == document[kv]

        return flex.create_block_mask(together, None, None, total, total, device=device)

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv.unbind(1))
        return compiled(q, k, v, block_mask=mask(qkv.device)).squeeze(0).transpose(0, 1)

    return run


def _torch_varlen(shape: Shape) -> Callable[[Any], Function]:
    return lambda module: (
        lambda qkv, cu_seqlens: module.varlen_attn(
            *qkv.unbind(1), cu_seqlens, cu_seqlens, shape.T, shape.T
        )
    )


def _flash_attn(shape: Shape) -> Callable[[Any], Function]:
    return lambda module: (
        lambda qkv, cu_seqlens: module.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, shape.T)
    )


def _separate(shape: Shape) -> Callable[[Any], Function]:
    """FlashAttention 3 and 4: the output, or it and the lse."""

    def adapt(module: Any) -> Function:
        def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
            given = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"}
            given |= {f"max_seqlen_{x}": shape.T for x in "qk"}
            out = module.flash_attn_varlen_func(*qkv.unbind(1), **given)
            return out if isinstance(out, Tensor) else out[0]

        return run

    return adapt


def _xformers(shape: Shape) -> Callable[[Any], Function]:
    def adapt(module: Any) -> Function:
        mask = module.fmha.attn_bias.BlockDiagonalMask.from_seqlens(lengths(shape))

        def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
            q, k, v = (x.unsqueeze(0) for x in qkv.unbind(1))
            return module.memory_efficient_attention(q, k, v, attn_bias=mask).squeeze(0)

        return run

    return adapt


def providers(shape: Shape, dtype: str) -> list[Provider]:
    by_masks = on_padded(shape, lambda qkv, mask: attention_ref(qkv, attn_mask=mask))
    found = [
        eager(lambda qkv, cu_seqlens: varlen_attention_ref(qkv, cu_seqlens, shape.T)),
        plain("sdpa-padded", by_masks), plain("nested", on_nested(shape)),
    ]  # fmt: skip
    if dtype != "fp32":
        found += [
            imported("torch-varlen", "torch.nn.attention.varlen", _torch_varlen(shape)),
            imported("flash_attn", "flash_attn", _flash_attn(shape)),
            imported("flash_attn_3", "flash_attn_interface", _separate(shape)),
            imported("flash_attn_4", "flash_attn.cute", _separate(shape)),
            imported("xformers", "xformers.ops", _xformers(shape)),
        ]
    ours_padded = on_padded(shape, lambda qkv, mask: attention(qkv, attn_mask=mask))
    return [
        *found,
        ours("ours", lambda qkv, cu_seqlens: varlen_attention(qkv, cu_seqlens, shape.T)),
        ours("ours-padded", ours_padded),
        Provider("compile", lambda: by_flex(shape), compiled=True),
    ]


OP = Op("varlen_attention", shapes, inputs, reference, providers, flops, bytes_)
