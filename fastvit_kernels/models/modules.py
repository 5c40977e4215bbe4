"""The parts of a block, in the order an image meets them: PatchEmbed, LayerNorm, Attention, Mlp.

Each reads the weights of its torch layers and passes them to a fused op. A layer that somebody has
changed (a hook, LoRA, a quantised weight) is called instead: see runtime/plain.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention.functions import attention, check_head_dim, qkv_attention
from ..ops.common.activation import ACTIVATIONS, check_activation
from ..ops.layer_norm import layer_norm, layer_norm_and_input
from ..ops.linear import linear
from ..ops.mlp import mlp
from ..ops.patch_embed.functions import patch_embed
from ..runtime.arguments import (
    autocast_dtype,
    check_dropout,
    check_eps,
    check_flags,
    check_int,
    check_probability,
    check_tensor,
)
from ..runtime.plain import add_branch, add_tokens, is_hooked, is_plain

Size = int | Sequence[int]  # a square's side, or (height, width)


def _pair(name: str, size: Size) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, Sequence) or isinstance(sides, str) or len(sides) != 2:
        raise TypeError(f"PatchEmbed: {name} must be an int or (height, width), got {size!r}")
    for side in sides:
        check_int("PatchEmbed", name, side)
    return sides[0], sides[1]


def _check_conv_stem(configs: Any) -> None:
    wanted = "a sequence of (out_channels, kernel_size, stride[, norm class, activation class])"
    if not isinstance(configs, Sequence) or isinstance(configs, str):
        raise TypeError(f"PatchEmbed: conv_stem_configs must be {wanted}, got {configs!r}")
    for config in configs:
        if not isinstance(config, Sequence) or isinstance(config, str) or len(config) not in (3, 5):
            raise TypeError(f"PatchEmbed: conv_stem_configs must be {wanted}, got {config!r} in it")
        for size in config[:3]:
            check_int("PatchEmbed", "conv_stem_configs", size)


def _conv_stem(configs: Sequence[Sequence[Any]], in_chans: int) -> nn.Sequential:
    """torchvision's convolutions before the projection, arXiv:2106.14881.

    A config is (out_channels, kernel_size, stride), then optionally norm and activation classes
    (default BatchNorm2d, ReLU); torchvision's ConvStemConfig is one.
    """
    stem = nn.Sequential()
    for out_chans, kernel, stride, *classes in configs:
        norm, activation = classes or (nn.BatchNorm2d, nn.ReLU)
        conv = nn.Conv2d(in_chans, out_chans, kernel, stride, (kernel - 1) // 2, bias=False)
        stem.append(nn.Sequential(conv, norm(out_chans), activation()))
        in_chans = out_chans
    return stem


class PatchEmbed(nn.Module):
    """(B, in_chans, height, width) -> (B, T, C): patches, prefix tokens and positions in one op.

    Ignores rows and columns of pixels that fill no patch, as timm's convolution does. After a
    convolutional stem, which downsamples, a patch is one position of the feature map.
    """

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans: int = 3,
        embed_dim: int = 768, bias=True, conv_stem_configs: Sequence[Sequence[Any]] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.img_size = _pair("img_size", img_size)
        self.patch_size = _pair("patch_size", patch_size)
        check_int("PatchEmbed", "in_chans", in_chans)
        check_int("PatchEmbed", "embed_dim", embed_dim)
        check_flags("PatchEmbed", bias=bias)
        self.in_chans = in_chans
        (height, width), (patch_height, patch_width) = self.img_size, self.patch_size
        self.grid_size = height // patch_height, width // patch_width
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        if self.num_patches == 0:
            raise ValueError(
                f"PatchEmbed: img_size {self.img_size} must be at least patch_size "
                f"{self.patch_size}"
            )
        side = self.patch_size
        self.stem = None
        if conv_stem_configs is not None:
            _check_conv_stem(conv_stem_configs)
        if conv_stem_configs:
            shrink = math.prod(config[2] for config in conv_stem_configs)
            if side != (shrink, shrink):
                raise ValueError(
                    f"PatchEmbed: the strides of conv_stem_configs must multiply to patch_size "
                    f"{side}, got {shrink}"
                )
            self.stem = _conv_stem(conv_stem_configs, in_chans)
            in_chans, side = conv_stem_configs[-1][0], (1, 1)
        self.proj = nn.Conv2d(in_chans, embed_dim, side, side, bias=bias)

    def forward(self, images: Tensor, prefix_tokens=None, pos_embed=None) -> Tensor:
        check_tensor("PatchEmbed", "images", images, ndim=4)
        if images.shape[1] != self.in_chans:
            raise ValueError(
                f"PatchEmbed: images must have {self.in_chans} channels, got {images.shape[1]}"
            )
        if tuple(images.shape[-2:]) != self.img_size:
            raise ValueError(
                f"PatchEmbed: images must be {self.img_size} (height, width), "
                f"got {tuple(images.shape[-2:])}"
            )
        if self.stem is not None:
            images = self.stem(images)
        if type(self.proj) is nn.Conv2d and not is_hooked(self.proj):
            (rows, cols), (patch_height, patch_width) = self.grid_size, self.proj.kernel_size
            images = images[..., : rows * patch_height, : cols * patch_width]
            return patch_embed(
                images, self.proj.weight, self.proj.bias,
                prefix_tokens=prefix_tokens, pos_embed=pos_embed,
            )  # fmt: skip
        patches = self.proj(images).flatten(2).transpose(1, 2)
        return add_tokens(patches, prefix_tokens, pos_embed)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over one axis. `and_input` returns (y, x), to start a pre-norm branch."""

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine=True,
        bias=True, device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        width: Any = normalized_shape
        if isinstance(normalized_shape, Sequence) and len(normalized_shape) == 1:
            width = normalized_shape[0]
        check_int("LayerNorm", "normalized_shape, one axis,", width)
        check_eps("LayerNorm", eps)
        check_flags("LayerNorm", elementwise_affine=elementwise_affine, bias=bias)
        super().__init__(width, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor, and_input: bool = False):
        if self.weight is None:  # layer_norm compares x with a weight itself
            check_tensor("LayerNorm", "x", x)
            if tuple(x.shape[-1:]) != self.normalized_shape:
                raise ValueError(
                    f"LayerNorm: the last axis of x must be {self.normalized_shape[0]}, "
                    f"got shape {tuple(x.shape)}"
                )
        if not and_input:
            return layer_norm(x, self.weight, self.bias, self.eps)
        # A branch begins with a matmul, which under autocast reads the low-precision dtype.
        out_dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
        return layer_norm_and_input(x, self.weight, self.bias, self.eps, out_dtype=out_dtype)


class Attention(nn.Module):
    """(B, T, C) -> (B, T, C): qkv, attention, output projection; then scales and residual."""

    def __init__(
        self, dim: int, num_heads: int = 8, attn_head_dim: int | None = None,
        qkv_bias: bool = False, proj_bias: bool = True, attn_drop=0.0, proj_drop=0.0,
    ):  # fmt: skip
        super().__init__()
        check_int("Attention", "dim", dim)
        check_int("Attention", "num_heads", num_heads)
        check_flags("Attention", qkv_bias=qkv_bias, proj_bias=proj_bias)
        check_dropout("Attention", attn_drop, "attn_drop")
        check_probability("Attention", "proj_drop", proj_drop)
        if attn_head_dim is not None:
            check_int("Attention", "attn_head_dim", attn_head_dim)
        elif dim % num_heads:
            raise ValueError(f"Attention: dim {dim} must be a multiple of num_heads {num_heads}")
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        check_head_dim("Attention", self.head_dim)
        self.qkv = nn.Linear(dim, 3 * num_heads * self.head_dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * self.head_dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, residual=None, layer_scale=None, row_scale=None) -> Tensor:
        dropout_p = self.attn_drop.p if self.training else 0.0
        if is_plain(self.qkv):
            qkv = self.qkv
            out = qkv_attention(
                x, qkv.weight, qkv.bias, num_heads=self.num_heads, dropout_p=dropout_p
            )
        else:
            qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
            out = attention(qkv, dropout_p=dropout_p)
        out = out.flatten(2)
        if is_plain(self.proj) and (not self.training or self.proj_drop.p == 0):
            return linear(
                out, self.proj.weight, self.proj.bias,
                residual=residual, layer_scale=layer_scale, row_scale=row_scale,
            )  # fmt: skip
        return add_branch(self.proj_drop(self.proj(out)), residual, layer_scale, row_scale)


class Mlp(nn.Module):
    """(B, T, C) -> (B, T, C): fc1, activation, fc2; then scales and residual."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: str = "gelu", bias=True, drop=0.0
    ):
        super().__init__()
        check_int("Mlp", "in_features", in_features)
        check_int("Mlp", "hidden_features", hidden_features)
        if act_layer is None:
            raise TypeError(f"Mlp: act_layer must be one of {sorted(ACTIVATIONS)}, got None")
        check_activation("Mlp", act_layer, "act_layer")
        check_flags("Mlp", bias=bias)
        check_probability("Mlp", "drop", drop)
        self.fc1 = nn.Linear(in_features, hidden_features, bias)
        self.act_layer = act_layer
        self.fc2 = nn.Linear(hidden_features, in_features, bias)
        self.drop = nn.Dropout(drop)
        self.recompute = True  # False saves the activation too and rebuilds nothing

    def forward(self, x: Tensor, residual=None, layer_scale=None, row_scale=None) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if is_plain(fc1) and is_plain(fc2) and (not self.training or self.drop.p == 0):
            return mlp(
                x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=self.act_layer,
                residual=residual, layer_scale=layer_scale, row_scale=row_scale,
                recompute=self.recompute,
            )  # fmt: skip
        hidden = self.drop(ACTIVATIONS[self.act_layer](fc1(x)))
        return add_branch(self.drop(fc2(hidden)), residual, layer_scale, row_scale)


class LayerScale(nn.Module):
    """Holds gamma (C,); the epilogue of the branch's last matmul applies it."""

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_values))


class DropPath(nn.Module):
    """Stochastic depth: drops a branch for whole samples; arXiv:1603.09382."""

    def __init__(self, drop_prob: float = 0.0):
        super().__init__()
        check_probability("DropPath", "drop_prob", drop_prob)
        self.drop_prob = drop_prob

    def row_scale(self, x: Tensor) -> Tensor | None:
        """(B,) of 0 or 1 / keep, or None if nothing is dropped."""
        if not self.training or self.drop_prob == 0:
            return None
        keep = 1 - self.drop_prob
        scale = x.new_empty(x.shape[0]).bernoulli_(keep)
        return scale.div_(keep) if keep > 0 else scale
