"""The ViT in plain PyTorch: what our model is compared with, and trained beside.

It is written from torch.nn.functional and shares no op with the package, not even the
specifications; only the names of activations are those of ops/common/activation.py. The weights are
a dictionary with the model's own (timm's) names, so that one set of numbers goes through both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.vit import Block, VisionTransformer
from ..ops.common.activation import ACTIVATIONS
from .accuracy import Error
from .op import Case, in_precision


def _layer_norm(x: Tensor, p: Mapping[str, Tensor], name: str, norm: nn.Module) -> Tensor:
    assert isinstance(norm, nn.LayerNorm)
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"), norm.eps)


def _linear(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _branch(y: Tensor, gamma: Tensor | None, row_scale: Tensor | None) -> Tensor:
    y = y if gamma is None else y * gamma
    return y if row_scale is None else y * row_scale[:, None, None]


def _block(block: Block, x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    row_scale = block.drop_path1.row_scale(x)
    y = _layer_norm(x, p, f"{name}.norm1", block.norm1)
    qkv = _linear(y, p, f"{name}.attn.qkv").unflatten(-1, (3, block.attn.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    y = _linear(y, p, f"{name}.attn.proj")
    x = x + _branch(y, p.get(f"{name}.ls1.gamma"), row_scale)

    row_scale = block.drop_path2.row_scale(x)
    y = _layer_norm(x, p, f"{name}.norm2", block.norm2)
    activation = ACTIVATIONS[str(block.mlp.act_layer)]
    y = activation(_linear(y, p, f"{name}.mlp.fc1"))
    y = _linear(y, p, f"{name}.mlp.fc2")
    return x + _branch(y, p.get(f"{name}.ls2.gamma"), row_scale)


def plain_vit(model: VisionTransformer, p: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Logits (B, num_classes) of the ViT that `model` describes, with the weights `p`.

    Args:
        model: gives the options (heads, eps, pooling, DropPath rates); its weights are not read.
        p: parameters by their names in model.state_dict(), any floating dtype.
        images: (B, in_chans, height, width).
    """
    weight = p["patch_embed.proj.weight"]
    x = F.conv2d(images, weight, p.get("patch_embed.proj.bias"), stride=weight.shape[2:])
    x = x.flatten(2).transpose(1, 2)
    tokens = [p[n].expand(x.shape[0], -1, -1) for n in ("cls_token", "reg_token") if n in p]
    if model.no_embed_class:
        x = torch.cat([*tokens, x + p["pos_embed"]], dim=1)
    else:
        x = torch.cat([*tokens, x], dim=1) + p["pos_embed"]
    if "norm_pre.weight" in p:
        x = _layer_norm(x, p, "norm_pre", model.norm_pre)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = _block(block, x, p, f"blocks.{i}")
    if "norm.weight" in p:
        x = _layer_norm(x, p, "norm", model.norm)
    if model.global_pool == "token":
        x = x[:, 0]
    elif model.global_pool == "avg":
        x = x[:, 0 if model.pool_include_prefix else model.num_prefix_tokens :].mean(1)
    if "fc_norm.weight" in p:
        x = _layer_norm(x, p, "fc_norm", model.fc_norm)
    if "pre_logits.fc.weight" in p:
        x = torch.tanh(_linear(x, p, "pre_logits.fc"))
    return _linear(x, p, "head") if "head.weight" in p else x


def model_case(
    model: VisionTransformer, images: Tensor, autocast: torch.dtype | None = None
) -> Case:
    """The model's logits as a function of the images and of every parameter.

    The oracle is `plain_vit` in float64, the yardstick `plain_vit` in the precision of training.

    Args:
        model: in eval mode, on the device of images; the backend in force runs it.
        images: (B, in_chans, height, width).
        autocast: the dtype of torch.autocast around both, None for none.
    """

    def ours(images: Tensor, **parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (images,))

    def reference(images: Tensor, **parameters: Tensor) -> Tensor:
        return plain_vit(model, parameters, images)

    def make() -> dict[str, Tensor | None]:
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        return {"images": images, **{n: p.requires_grad_() for n, p in parameters.items()}}

    return Case(
        "VisionTransformer", in_precision(ours, autocast), in_precision(reference, autocast), make,
        dtype=autocast,
    )  # fmt: skip


def agreement(
    model: VisionTransformer, images: Tensor, autocast: torch.dtype | None = None
) -> list[Error]:
    """Errors of the model's logits and of every parameter's gradient on one batch.

    Args: as `model_case`.
    Returns: "logits", then "d<parameter>" for each parameter that is trained.
    """
    case = model_case(model, images, autocast)
    errors = case.reference.errors(case.function)
    return [e if e.name != "out" else replace(e, name="logits") for e in errors]


def worst_error(errors: Sequence[Error]) -> Error:
    """The one nearest its limit, or furthest past it."""

    def share(value: float, limit: float) -> float:
        return value / limit if limit > 0 else (math.inf if value > 0 else 0.0)

    return max(errors, key=lambda e: max(share(e.max, e.limit_max), share(e.rms, e.limit_rms)))
