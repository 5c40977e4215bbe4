"""The ViT in plain PyTorch: what our model is compared with, and trained beside.

It is written from torch.nn.functional and shares no op with the package, not even the
specifications; only the names of activations are those of ops/common/activation.py. The weights are
a dictionary with the model's own (timm's) names, so that one set of numbers goes through both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.gated_mlp import GluMlp, SwiGLU
from ..models.modules import Attention
from ..models.rope_tables import Tables
from ..models.vit import Block, VisionTransformer
from ..ops.common.activation import ACTIVATIONS
from .accuracy import Error
from .op import Case, in_precision


def _norm(x: Tensor, p: Mapping[str, Tensor], name: str, norm: nn.Module) -> Tensor:
    """LayerNorm or nothing."""
    if isinstance(norm, nn.Identity):
        return x
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    assert isinstance(norm, nn.LayerNorm)
    return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)


def _linear(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _branch(y: Tensor, gamma: Tensor | None, row_scale: Tensor | None) -> Tensor:
    y = y if gamma is None else y * gamma
    return y if row_scale is None else y * row_scale[:, None, None]


def _turned(x: Tensor, attn: Attention, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, H, T, D): every token past the prefix, turned by the angles of its place."""
    prefix, x = x[:, :, : attn.num_prefix_tokens], x[:, :, attn.num_prefix_tokens :]
    a, b = x.chunk(2, -1)
    partner = torch.cat((-b, a), -1)
    return torch.cat((prefix, (x * cos + partner * sin).to(x.dtype)), 2)


def _attention(
    attn: Attention, x: Tensor, p: Mapping[str, Tensor], name: str, rope: Tables | None
) -> Tensor:
    bias = p.get(f"{name}.qkv.bias")
    if f"{name}.q_bias" in p:
        q_bias, v_bias = p[f"{name}.q_bias"], p[f"{name}.v_bias"]
        bias = torch.cat((q_bias, torch.zeros_like(q_bias), v_bias))
    qkv = F.linear(x, p[f"{name}.qkv.weight"], bias).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = _norm(q, p, f"{name}.q_norm", attn.q_norm), _norm(k, p, f"{name}.k_norm", attn.k_norm)
    if rope is not None:
        q, k = _turned(q, attn, *rope), _turned(k, attn, *rope)
    y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
    return _linear(y.transpose(1, 2).flatten(2), p, f"{name}.proj")


def _mlp(mlp: nn.Module, x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    activation = ACTIVATIONS[str(mlp.act_layer)]
    if isinstance(mlp, SwiGLU):
        y = activation(_linear(x, p, f"{name}.fc1_g")) * _linear(x, p, f"{name}.fc1_x")
    elif isinstance(mlp, GluMlp):
        first, second = _linear(x, p, f"{name}.fc1").chunk(2, -1)
        y = first * activation(second) if mlp.gate_last else activation(first) * second
    else:
        y = activation(_linear(x, p, f"{name}.fc1"))
    return _linear(y, p, f"{name}.fc2")


def _block(
    block: Block, x: Tensor, p: Mapping[str, Tensor], name: str, rope: Tables | None
) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        y = _norm(x, p, f"{name}.norm1", block.norm1)
        return _attention(block.attn, y, p, f"{name}.attn", rope)

    def feed(x: Tensor) -> Tensor:
        return _mlp(block.mlp, _norm(x, p, f"{name}.norm2", block.norm2), p, f"{name}.mlp")

    for branch, drop_path, scale in (
        (attend, block.drop_path1, "ls1"),
        (feed, block.drop_path2, "ls2"),
    ):
        gamma, samples = p.get(f"{name}.{scale}.gamma"), drop_path.samples(x)
        if samples is not None:
            kept = samples[: len(samples) - len(x)]
            y = _branch(branch(x[kept]), gamma, None)
            dtype = torch.promote_types(x.dtype, y.dtype)
            x = x.to(dtype).index_add(0, kept, y.to(dtype), alpha=len(x) / len(kept))
        else:
            row_scale = drop_path.row_scale(x)
            x = x + _branch(branch(x), gamma, row_scale)
    return x


def plain_vit(model: VisionTransformer, p: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Logits (B, num_classes) of the ViT that `model` describes, with the weights `p`.

    Args:
        model: gives the options (heads, eps, pooling, DropPath rates) and the angles of rotary
            positions; its weights are not read.
        p: parameters by their names in model.state_dict(), any floating dtype.
        images: (B, in_chans, height, width).
    """
    weight = p["patch_embed.proj.weight"]
    x = F.conv2d(images, weight, p.get("patch_embed.proj.bias"), stride=weight.shape[2:])
    x = x.flatten(2).transpose(1, 2)
    tokens = [p[n].expand(x.shape[0], -1, -1) for n in ("cls_token", "reg_token") if n in p]
    positions = p.get("pos_embed", torch.zeros((), dtype=x.dtype, device=x.device))
    if model.no_embed_class:
        x = torch.cat([*tokens, x + positions], dim=1)
    else:
        x = torch.cat([*tokens, x], dim=1) + positions
    x = _norm(x, p, "norm_pre", model.norm_pre)
    rope = None if model.rope is None else model.rope(model.patch_embed.grid_size)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x = _block(block, x, p, f"blocks.{i}", rope)
    x = _norm(x, p, "norm", model.norm)
    if model.global_pool == "token":
        x = x[:, 0]
    elif model.global_pool == "avg":
        x = x[:, 0 if model.pool_include_prefix else model.num_prefix_tokens :].mean(1)
    x = _norm(x, p, "fc_norm", model.fc_norm)
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
        copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        return {"images": images, **copies}

    return Case(
        "VisionTransformer",
        in_precision(ours, autocast),
        in_precision(reference, autocast),
        make,
        dtype=autocast,
    )


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
    return max(errors, key=lambda e: e.share)
