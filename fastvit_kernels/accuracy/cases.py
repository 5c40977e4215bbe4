"""The registry of ops: one entry each, from which every list of cases is derived.

`check`, `tune`, the benchmarks and the tests of all ops (every config, random calls, bad calls,
numbers that are not finite, life with the rest of torch) read OPS.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from ..models.vit import VisionTransformer
from ..runtime.backend import backend
from ..runtime.dtypes import DTYPES
from .entries.attention import ATTENTION, QKV_ATTENTION, ROPE_ATTENTION, SDPA, VARLEN_ATTENTION
from .entries.gated_mlp import GATED_MLP
from .entries.linear import LINEAR, MLP
from .entries.norms import LAYER_NORM, LAYER_NORM_AND_INPUT, RMS_NORM, RMS_NORM_AND_INPUT
from .entries.patch_embed import PATCH_EMBED
from .entries.rope import ROPE
from .op import LARGE, SMALL, Case, Draw, Inputs, Op, Sizes

# By name, in the order in which an image meets them, the parts of an op before it.
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        LAYER_NORM,
        LAYER_NORM_AND_INPUT,
        RMS_NORM,
        RMS_NORM_AND_INPUT,
        LINEAR,
        ROPE,
        ATTENTION,
        QKV_ATTENTION,
        ROPE_ATTENTION,
        VARLEN_ATTENTION,
        SDPA,
        MLP,
        GATED_MLP,
        PATCH_EMBED,
    )
}


def plain_vit(model: VisionTransformer, p: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Logits (B, num_classes) of `model` by PyTorch's ops, with weights `p` of any floating dtype.

    That it is put together as timm's and transformers' models are, the tests of the models say.
    """
    with backend("torch"):
        return functional_call(model, dict(p), (images,))


def _vision_transformer(v: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """A whole model; it is built when it is first asked for."""

    @functools.cache
    def whole() -> VisionTransformer:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = VisionTransformer(
                img_size=v.img_size,
                patch_size=v.patch_size,
                num_classes=10,
                embed_dim=v.C,
                depth=v.depth,
                num_heads=v.H,
                mlp_ratio=v.F / v.C,
                reg_tokens=1,
                init_values=0.5,
            )
        return model.to(device, dtype).eval()

    def make() -> Inputs:
        images = Draw(device, dtype)(v.B, 3, *v.img_size, grad=False)
        return {
            "images": images,
            **{n: p.detach().requires_grad_() for n, p in whole().named_parameters()},
        }

    return Case(
        "VisionTransformer",
        lambda images, **p: functional_call(whole(), p, (images,)),
        lambda images, **p: plain_vit(whole(), p, images),
        make,
    )


def check_cases(v: Sizes, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """What `check` runs: each op's examples, and a whole model."""
    found = [op.case(example, device, dtype) for op in OPS.values() for example in op.check(v)]
    return [*found, _vision_transformer(v, device, dtype)]


def cases_on(device: torch.device, dtype: str) -> list[Case]:
    """What `check` runs on this device: large on a GPU."""
    return check_cases(LARGE if device.type == "cuda" else SMALL, device, DTYPES[dtype])
