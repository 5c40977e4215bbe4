"""THE MAP: the whole Vision Transformer in the order an image flows through it.

PatchEmbed -> Block x depth (LayerNorm, Attention, LayerNorm, Mlp) -> LayerNorm -> pool -> head

Constructor arguments and state_dict keys are timm's, so that its checkpoints load as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fastvit_kernels.activation import ACTIVATIONS, check_activation
from fastvit_kernels.arguments import autocast_dtype
from fastvit_kernels.attention import attention, qkv_attention
from fastvit_kernels.layer_norm import layer_norm, layer_norm_and_input
from fastvit_kernels.linear import linear
from fastvit_kernels.mlp import mlp
from fastvit_kernels.patch_embed import patch_embed
from fastvit_kernels.plain import add_branch, add_tokens, is_hooked, is_plain

Size = int | Sequence[int]  # a square's side, or (height, width)


def _pair(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class PatchEmbed(nn.Module):
    """(B, in_chans, height, width) -> (B, T, C): patches, prefix tokens and positions in one op.

    Rows and columns of pixels that fill no patch are not read, as by timm's convolution.
    """

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans: int = 3,
        embed_dim: int = 768, bias=True,
    ):  # fmt: skip
        super().__init__()
        self.img_size, self.patch_size = _pair(img_size), _pair(patch_size)
        (height, width), (patch_height, patch_width) = self.img_size, self.patch_size
        self.grid_size = height // patch_height, width // patch_width
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        if self.num_patches == 0:
            raise ValueError(
                f"PatchEmbed: img_size {self.img_size} must be at least patch_size "
                f"{self.patch_size}"
            )
        self.proj = nn.Conv2d(in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias)

    def forward(self, images: Tensor, prefix_tokens=None, pos_embed=None) -> Tensor:
        if tuple(images.shape[-2:]) != self.img_size:
            raise ValueError(
                f"PatchEmbed: images must be {self.img_size} (height, width), "
                f"got {tuple(images.shape[-2:])}"
            )
        if type(self.proj) is nn.Conv2d and not is_hooked(self.proj):
            (rows, cols), (patch_height, patch_width) = self.grid_size, self.patch_size
            images = images[..., : rows * patch_height, : cols * patch_width]
            return patch_embed(
                images, self.proj.weight, self.proj.bias,
                prefix_tokens=prefix_tokens, pos_embed=pos_embed,
            )  # fmt: skip
        patches = self.proj(images).flatten(2).transpose(1, 2)
        return add_tokens(patches, prefix_tokens, pos_embed)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, one axis. `and_input` makes it the head of a pre-norm branch: (y, x)."""

    def forward(self, x: Tensor, and_input: bool = False):
        if not and_input:
            return layer_norm(x, self.weight, self.bias, self.eps)
        # A branch begins with a matmul, which under autocast reads the low-precision dtype.
        return layer_norm_and_input(
            x, self.weight, self.bias, self.eps, out_dtype=autocast_dtype(x)
        )


class Attention(nn.Module):
    """(B, T, C) -> (B, T, C): qkv projection, attention, output projection and what follows it."""

    def __init__(
        self, dim: int, num_heads: int = 8, attn_head_dim: int | None = None,
        qkv_bias: bool = False, proj_bias: bool = True, attn_drop=0.0, proj_drop=0.0,
    ):  # fmt: skip
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"Attention: dim {dim} must be a multiple of num_heads {num_heads}")
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
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
    """(B, T, C) -> (B, T, C): fc1, activation, fc2 and what follows it."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: str = "gelu", bias=True, drop=0.0
    ):
        super().__init__()
        check_activation("Mlp", act_layer)
        self.fc1 = nn.Linear(in_features, hidden_features, bias)
        self.act_layer = act_layer
        self.fc2 = nn.Linear(hidden_features, in_features, bias)
        self.drop = nn.Dropout(drop)
        self.recompute = False  # True stores the pre-activation alone and rebuilds the rest

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
        self.drop_prob = drop_prob

    def row_scale(self, x: Tensor) -> Tensor | None:
        """(B,) of 0 or 1 / keep, or None where nothing is dropped."""
        if not self.training or self.drop_prob == 0:
            return None
        keep = 1 - self.drop_prob
        scale = x.new_empty(x.shape[0]).bernoulli_(keep)
        return scale.div_(keep) if keep > 0 else scale


class Block(nn.Module):
    """x = x + attn(norm1(x));  x = x + mlp(norm2(x)), each branch times LayerScale and DropPath."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False,
        proj_bias: bool = True, proj_drop=0.0, attn_drop=0.0, init_values: float | None = None,
        drop_path=0.0, act_layer: str = "gelu", norm_eps=1e-6, attn_head_dim: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.norm1 = LayerNorm(dim, norm_eps)
        self.attn = Attention(
            dim, num_heads, attn_head_dim, qkv_bias, proj_bias, attn_drop, proj_drop
        )
        self.ls1 = LayerScale(dim, init_values) if init_values else None
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer, proj_bias, proj_drop)
        self.ls2 = LayerScale(dim, init_values) if init_values else None
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        gamma1 = None if self.ls1 is None else self.ls1.gamma
        gamma2 = None if self.ls2 is None else self.ls2.gamma
        y, x = self.norm1(x, and_input=True)
        x = self.attn(y, x, gamma1, self.drop_path1.row_scale(x))
        y, x = self.norm2(x, and_input=True)
        return self.mlp(y, x, gamma2, self.drop_path2.row_scale(x))


class VisionTransformer(nn.Module):
    """A Vision Transformer made of the kernels; arXiv:2010.11929.

    Arguments have timm's names and meaning. What timm spells differently: `act_layer` is a name
    ("gelu", "gelu_tanh", "quick_gelu", "silu"), `norm_eps` is the eps of every LayerNorm,
    `attn_head_dim` frees the attention width from embed_dim, and `representation_size` puts
    Linear + tanh before the head, as torchvision does.
    """

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans=3, num_classes: int = 1000,
        global_pool: Literal["", "avg", "token"] = "token", embed_dim: int = 768, depth: int = 12,
        num_heads: int = 12, mlp_ratio: float = 4.0, qkv_bias: bool = True, proj_bias: bool = True,
        init_values: float | None = None, class_token: bool = True, no_embed_class: bool = False,
        reg_tokens: int = 0, pre_norm: bool = False, final_norm: bool = True,
        fc_norm: bool | None = None, pool_include_prefix: bool = False, drop_rate=0.0,
        pos_drop_rate=0.0, proj_drop_rate=0.0, attn_drop_rate=0.0, drop_path_rate=0.0,
        act_layer: str = "gelu", norm_eps=1e-6, attn_head_dim: int | None = None,
        representation_size: int | None = None,
    ):  # fmt: skip
        super().__init__()
        if global_pool not in ("", "avg", "token"):
            raise ValueError(f"global_pool must be '', 'avg' or 'token', got {global_pool!r}")
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool 'token' needs class_token=True")
        self.embed_dim, self.num_classes, self.global_pool = embed_dim, num_classes, global_pool
        self.no_embed_class, self.pool_include_prefix = no_embed_class, pool_include_prefix
        self.num_prefix_tokens = int(class_token) + reg_tokens

        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, bias=not pre_norm)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        num_positions = self.patch_embed.num_patches
        num_positions += 0 if no_embed_class else self.num_prefix_tokens
        self.pos_embed = nn.Parameter(torch.zeros(1, num_positions, embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.norm_pre = LayerNorm(embed_dim, norm_eps) if pre_norm else nn.Identity()

        drop_paths = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(
            Block(
                embed_dim, num_heads, mlp_ratio, qkv_bias, proj_bias, proj_drop_rate,
                attn_drop_rate, init_values, drop_path, act_layer, norm_eps, attn_head_dim,
            )
            for drop_path in drop_paths
        ))  # fmt: skip

        use_fc_norm = global_pool == "avg" if fc_norm is None else fc_norm
        normed = LayerNorm(embed_dim, norm_eps) if final_norm else nn.Identity()
        self.norm = nn.Identity() if use_fc_norm else normed
        self.fc_norm = normed if use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        features = representation_size or embed_dim
        self.pre_logits = nn.Sequential()
        if representation_size:
            self.pre_logits.add_module("fc", nn.Linear(embed_dim, features))
            self.pre_logits.add_module("act", nn.Tanh())
        self.head = nn.Linear(features, num_classes) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """timm's defaults: truncated normal 0.02 for Linear and positions, zero biases."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, in_chans, height, width) -> (B, T, C), the tokens after the last block and norm."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else None
        x = self.pos_drop(self.patch_embed(images, prefix, self.pos_embed))
        return self.norm(self.blocks(self.norm_pre(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, T, C) -> (B, num_classes), or the pooled features where pre_logits."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, 0 if self.pool_include_prefix else self.num_prefix_tokens :].mean(1)
        x = self.pre_logits(self.head_drop(self.fc_norm(x)))
        return x if pre_logits else self.head(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))
