"""THE MAP: the whole Vision Transformer in the order an image flows through it.

PatchEmbed -> Block x depth (LayerNorm, Attention, LayerNorm, Mlp) -> LayerNorm -> pool -> head

modules.py has the parts, which call the ops. Constructor arguments and state_dict keys are timm's,
so its checkpoints load unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..ops.rebuilt_norm import rebuilt_norm
from ..ops.rebuilt_sum import rebuilt_sum
from ..runtime.arguments import (
    check_eps,
    check_flags,
    check_int,
    check_number,
    check_probability,
)
from ..runtime.plain import is_hooked
from .gated_mlp import GluMlp, SwiGLU, check_mlp_layer, create_mlp
from .modules import Attention, DropPath, LayerNorm, LayerScale, PatchEmbed, Size

Memory = Literal["default", "low"]


def _check_common(op: str, mlp_ratio: Any, init_values: Any, norm_eps: Any, **counts: Any) -> None:
    """The checks that Block and VisionTransformer share; their parts check the rest."""
    for name, count in counts.items():
        check_int(op, name, count)
    check_number(op, "mlp_ratio", mlp_ratio, sys.float_info.min, wanted="finite and above 0")
    if init_values is not None:
        check_number(op, "init_values", init_values)
    check_eps(op, norm_eps, "norm_eps")


def _check_memory(op: str, memory: Any) -> None:
    if not isinstance(memory, str) or memory not in get_args(Memory):
        raise ValueError(f"{op}: memory must be one of {get_args(Memory)}, got {memory!r}")


class Block(nn.Module):
    """x = x + attn(norm1(x));  x = x + mlp(norm2(x)), each branch times LayerScale and DropPath."""

    memory: Memory = "default"  # "low": the backward rebuilds what the norms gave

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False,
        proj_bias: bool = True, proj_drop=0.0, attn_drop=0.0, init_values: float | None = None,
        drop_path=0.0, act_layer: str = "gelu", norm_eps=1e-6, attn_head_dim: int | None = None,
        memory: Memory = "default", mlp_layer: str = "Mlp", scale_mlp_norm: bool = False,
    ):  # fmt: skip
        super().__init__()
        _check_memory("Block", memory)
        check_mlp_layer("Block", mlp_layer, scale_mlp_norm)
        _check_common("Block", mlp_ratio, init_values, norm_eps, dim=dim, num_heads=num_heads)
        check_probability("Block", "drop_path", drop_path)
        self.norm1 = LayerNorm(dim, norm_eps)
        self.attn = Attention(
            dim, num_heads, attn_head_dim, qkv_bias, proj_bias, attn_drop, proj_drop
        )
        self.ls1 = LayerScale(dim, init_values) if init_values else None
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, norm_eps)
        self.mlp = create_mlp(
            mlp_layer, dim, int(dim * mlp_ratio), act_layer, norm_eps if scale_mlp_norm else None,
            proj_bias, proj_drop,
        )  # fmt: skip
        self.ls2 = LayerScale(dim, init_values) if init_values else None
        self.drop_path2 = DropPath(drop_path)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        gamma1 = None if self.ls1 is None else self.ls1.gamma
        gamma2 = None if self.ls2 is None else self.ls2.gamma
        y, x = self.norm1(x, and_input=True)
        with self._kept(self.norm1, y, x):
            x = self.attn(y, x, gamma1, self.drop_path1.row_scale(x))
        with self._kept_sum(x) as again:
            y, x = self.norm2(x, and_input=True)
        with self._kept(self.norm2, y, x, again):
            return self.mlp(y, x, gamma2, self.drop_path2.row_scale(x))

    def _kept(
        self, norm: LayerNorm, y: Tensor, x: Tensor, again: Callable[[], Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Where a branch keeps y = norm(x) for its backward: as it is, or to be rebuilt from x."""
        if not self._rebuilds(norm):
            return nullcontext()
        return rebuilt_norm(y, x, norm.weight, norm.bias, norm.eps, again)

    def _kept_sum(self, x: Tensor) -> AbstractContextManager[Callable[[], Tensor] | None]:
        """The same where norm2 keeps its input x, the sum of the first branch."""
        return rebuilt_sum(x) if self._rebuilds(self.norm2) else nullcontext()

    def _rebuilds(self, norm: LayerNorm) -> bool:
        return self.memory == "low" and type(norm) is LayerNorm and not is_hooked(norm)


class VisionTransformer(nn.Module):
    """A Vision Transformer on the fused ops; arXiv:2010.11929.

    Arguments have timm's names and meaning, except that `act_layer` is a name ("gelu", "gelu_tanh",
    "quick_gelu", "silu"), `norm_eps` is the eps of every LayerNorm, and `attn_head_dim` decouples
    the attention width from embed_dim. torchvision has `representation_size` (Linear + tanh before
    the head) and `conv_stem_configs` (convolutions before the projection). memory="low" keeps no
    LayerNorm output of a block for the backward, which rebuilds it with the same bits, nor the sum
    after attention, which it computes again: under bf16 autocast 20 C bytes a token and block
    instead of 28 C, for one more LayerNorm forward each and one more product of the projection.
    `mlp_layer` is the name of timm's class: "Mlp", "GluMlp", "SwiGLUPacked" (DINOv2 giant) or
    "SwiGLU"; as there, act_layer is the gate's, so that a SwiGLU wants "silu", and mlp_ratio counts
    gate and value of the packed two.
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
        conv_stem_configs: Sequence[Sequence[Any]] | None = None, memory: Memory = "default",
        mlp_layer: str = "Mlp", scale_mlp_norm: bool = False,
    ):  # fmt: skip
        super().__init__()
        op = "VisionTransformer"
        _check_memory(op, memory)
        check_mlp_layer(op, mlp_layer, scale_mlp_norm)
        _check_common(
            op, mlp_ratio, init_values, norm_eps, in_chans=in_chans, embed_dim=embed_dim,
            num_heads=num_heads,
        )  # fmt: skip
        for name, count in dict(
            num_classes=num_classes, depth=depth, reg_tokens=reg_tokens
        ).items():
            check_int(op, name, count, least=0)
        if representation_size is not None:
            check_int(op, "representation_size", representation_size, least=0)
        check_flags(
            op, qkv_bias=qkv_bias, proj_bias=proj_bias, class_token=class_token,
            no_embed_class=no_embed_class, pre_norm=pre_norm, final_norm=final_norm,
            fc_norm=False if fc_norm is None else fc_norm, pool_include_prefix=pool_include_prefix,
        )  # fmt: skip
        for name, rate in dict(
            drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate, drop_path_rate=drop_path_rate,
        ).items():  # fmt: skip
            check_probability(op, name, rate)
        if not isinstance(global_pool, str) or global_pool not in ("", "avg", "token"):
            raise ValueError(f"{op}: global_pool must be '', 'avg' or 'token', got {global_pool!r}")
        if global_pool == "token" and not class_token:
            raise ValueError(f"{op}: global_pool 'token' needs class_token=True")
        self.embed_dim, self.num_classes, self.global_pool = embed_dim, num_classes, global_pool
        self.no_embed_class, self.pool_include_prefix = no_embed_class, pool_include_prefix
        self.num_prefix_tokens = int(class_token) + reg_tokens

        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, embed_dim, not pre_norm, conv_stem_configs
        )
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
                attn_drop_rate, init_values, drop_path, act_layer, norm_eps, attn_head_dim, memory,
                mlp_layer, scale_mlp_norm,
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
        for module in self.modules():
            if isinstance(module, (GluMlp, SwiGLU)):
                module.init_weights()
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay; timm's optimizers ask for them."""
        return {"cls_token", "reg_token", "pos_embed"}

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, in_chans, height, width) -> (B, T, C), the tokens after the last block and norm."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else None
        x = self.pos_drop(self.patch_embed(images, prefix, self.pos_embed))
        return self.norm(self.blocks(self.norm_pre(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, T, C) -> (B, num_classes), or the pooled features if pre_logits."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, 0 if self.pool_include_prefix else self.num_prefix_tokens :].mean(1)
        x = self.pre_logits(self.head_drop(self.fc_norm(x)))
        return x if pre_logits else self.head(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))
