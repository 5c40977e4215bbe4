"""THE MAP: the whole Vision Transformer in the order an image flows through it.

PatchEmbed -> Block x depth (norm, Attention, norm, Mlp) -> norm -> pool -> head

modules.py has the parts, which call the ops. Constructor arguments and state_dict keys are timm's,
so its checkpoints load unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..ops.common.samples import DropPathMode, check_drop_path
from ..ops.rebuilt_norm import rebuilt_norm
from ..ops.rebuilt_sum import rebuilt_sum
from ..runtime.arguments import check_flags
from ..runtime.plain import is_hooked
from .checks import (
    GlobalPool,
    Memory,
    PosEmbed,
    check_block,
    check_choice,
    check_counts,
    check_pool,
    check_pos_embed,
    check_rates,
)
from .gated_mlp import create_mlp
from .initial import WeightInit, fix_weights, init_weights
from .modules import Attention, DropPath, LayerScale, PatchEmbed, Size
from .norms import NORM_LAYERS, LayerNorm, RmsNorm
from .patch_dropout import PatchDropout, kept_tables
from .positions import resize_positions
from .refused import refuse
from .rope_tables import Tables
from .rotary import GridIndexing, RopeType, RotaryEmbedding


class Block(nn.Module):
    """x = x + attn(norm1(x));  x = x + mlp(norm2(x)), each branch times LayerScale and DropPath."""

    memory: Memory = "default"  # "low": the backward rebuilds what the norms gave

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False,
        proj_bias: bool = True, proj_drop=0.0, attn_drop=0.0, init_values: float | None = None,
        drop_path=0.0, act_layer: str = "gelu", norm_eps=1e-6, attn_head_dim: int | None = None,
        memory: Memory = "default", mlp_layer: str = "Mlp", scale_mlp_norm: bool = False,
        norm_layer: str = "LayerNorm", qk_norm: bool = False, key_bias: bool = True,
        rotate_half: bool = False, num_prefix_tokens: int = 0,
        drop_path_mode: DropPathMode = "mask",
    ):  # fmt: skip
        super().__init__()
        check_block(
            "Block", mlp_ratio, init_values, norm_eps, memory, mlp_layer, scale_mlp_norm,
            norm_layer, dim=dim, num_heads=num_heads,
        )  # fmt: skip
        check_rates("Block", drop_path=drop_path)
        norm = partial(NORM_LAYERS[norm_layer], eps=norm_eps)
        self.norm1 = norm(dim)
        self.attn = Attention(
            dim, num_heads, attn_head_dim, qkv_bias, proj_bias, attn_drop, proj_drop, qk_norm, norm,
            key_bias, rotate_half, num_prefix_tokens,
        )  # fmt: skip
        self.ls1 = LayerScale(dim, init_values) if init_values else None
        self.drop_path1 = DropPath(drop_path, drop_path_mode)
        self.norm2 = norm(dim)
        self.mlp = create_mlp(
            mlp_layer, dim, int(dim * mlp_ratio), act_layer, norm if scale_mlp_norm else None,
            proj_bias, proj_drop,
        )  # fmt: skip
        self.ls2 = LayerScale(dim, init_values) if init_values else None
        self.drop_path2 = DropPath(drop_path, drop_path_mode)
        self.memory = memory

    def forward(self, x: Tensor, rope: Tables | None = None) -> Tensor:
        gamma1 = None if self.ls1 is None else self.ls1.gamma
        gamma2 = None if self.ls2 is None else self.ls2.gamma
        some = self.drop_path1.samples(x)
        y, x = self.norm1(x, and_input=True, **_of(some))
        with self._kept(self.norm1, y, x, samples=some):
            rows = self.drop_path1.row_scale(x) if some is None else some
            x = self.attn(y, x, gamma1, rows, rope=rope)
        some = self.drop_path2.samples(x)
        with self._kept_sum(x) as again:
            y, x = self.norm2(x, and_input=True, **_of(some))
        with self._kept(self.norm2, y, x, again, some):
            rows = self.drop_path2.row_scale(x) if some is None else some
            return self.mlp(y, x, gamma2, rows)

    def _kept(
        self, norm: nn.Module, y: Tensor, x: Tensor, again: Callable[[], Tensor] | None = None,
        samples: Tensor | None = None,
    ) -> AbstractContextManager[None]:  # fmt: skip
        """Where a branch keeps y = norm(x) for its backward: as it is, or to be rebuilt from x."""
        if not self._rebuilds(norm):
            return nullcontext()
        assert isinstance(norm, LayerNorm | RmsNorm)
        kind = "rms_norm" if isinstance(norm, RmsNorm) else "layer_norm"
        bias = getattr(norm, "bias", None)
        return rebuilt_norm(y, x, norm.weight, bias, norm.eps, again, kind, samples)

    def _kept_sum(self, x: Tensor) -> AbstractContextManager[Callable[[], Tensor] | None]:
        """The same where norm2 keeps its input x, the sum of the first branch."""
        return rebuilt_sum(x) if self._rebuilds(self.norm2) else nullcontext()

    def _rebuilds(self, norm: nn.Module) -> bool:
        return self.memory == "low" and type(norm) in (LayerNorm, RmsNorm) and not is_hooked(norm)


def _of(samples: Tensor | None) -> dict[str, Tensor]:
    """The argument of a norm, where some samples are skipped: one that stands in may lack it."""
    return {} if samples is None else {"samples": samples}


class Blocks(nn.Sequential):
    """One block after the other; rope, cos and sin of the model's positions, goes to each."""

    def forward(self, input: Tensor, rope: Tables | None = None) -> Tensor:
        for block in self:
            input = block(input) if rope is None else block(input, rope)
        return input


class VisionTransformer(nn.Module):
    """A Vision Transformer on the fused ops; arXiv:2010.11929.

    Arguments have timm's names and meaning, except that `act_layer` is a name ("gelu", "gelu_tanh",
    "quick_gelu", "silu"), `norm_eps` is the eps of every norm, and `attn_head_dim` decouples
    the attention width from embed_dim. torchvision has `representation_size` (Linear + tanh before
    the head) and `conv_stem_configs` (convolutions before the projection). memory="low" keeps no
    LayerNorm output of a block for the backward, which rebuilds it with the same bits, nor the sum
    after attention, which it computes again: under bf16 autocast 20 C bytes a token and block
    instead of 28 C, for one more LayerNorm forward each and one more product of the projection.
    `mlp_layer` is the name of timm's class: "Mlp", "GluMlp", "SwiGLUPacked" (DINOv2 giant) or
    "SwiGLU"; as there, act_layer is the gate's, so that a SwiGLU wants "silu", and mlp_ratio counts
    gate and value of the packed two. `norm_layer` and `embed_norm_layer`, which norms the patches,
    are "LayerNorm" or "RmsNorm". `rope_type` turns queries and keys by their patch's place: "cat"
    as EVA02, Perception Encoder and RoPE-ViT do, "dinov3", or "" for none; the other `rope_` names
    and `ref_feat_shape` are those of timm's Eva. `qk_norm` norms each head's queries and keys by
    norm_layer; key_bias=False biases queries and values alone, as EVA and DINOv3 do.
    drop_path="skip": in training a block's branches compute nothing for samples that they drop, of
    which there are as many at every step, as DINOv2 does; docs/drop_path.md.
    dynamic_img_size=True takes images of any size: learned positions are resampled to their grid,
    rotary ones computed for it. With `mean` and `std`, numbers for each channel, the model also
    takes uint8 images and normalises them as it reads them. A training step with `patch_drop_rate`
    keeps that much less of each image's patches, and reads no pixel of the others. Arguments that
    timm alone has raise TypeError and say what to do instead.
    """

    weight_init_mode: WeightInit = ""
    fix_init = False

    def __init__(
        self, img_size: Size = 224, patch_size: Size = 16, in_chans=3, num_classes: int = 1000,
        global_pool: GlobalPool = "token", embed_dim: int = 768, depth: int = 12,
        num_heads: int = 12, mlp_ratio: float = 4.0, qkv_bias: bool = True, proj_bias: bool = True,
        init_values: float | None = None, class_token: bool = True, no_embed_class: bool = False,
        reg_tokens: int = 0, pre_norm: bool = False, final_norm: bool = True,
        fc_norm: bool | None = None, pool_include_prefix: bool = False, drop_rate=0.0,
        pos_drop_rate=0.0, proj_drop_rate=0.0, attn_drop_rate=0.0, drop_path_rate=0.0,
        act_layer: str = "gelu", norm_eps=1e-6, attn_head_dim: int | None = None,
        representation_size: int | None = None,
        conv_stem_configs: Sequence[Sequence[Any]] | None = None, memory: Memory = "default",
        mlp_layer: str = "Mlp", scale_mlp_norm: bool = False, norm_layer: str = "LayerNorm",
        embed_norm_layer: str | None = None, qk_norm: bool = False, key_bias: bool = True,
        pos_embed: PosEmbed = "learn", rope_type: RopeType = "",
        rope_temperature: float = 10000.0, rope_rotate_half: bool = False,
        rope_grid_indexing: GridIndexing = "ij", rope_grid_offset: float = 0.0,
        ref_feat_shape: Size | None = None, dynamic_img_size: bool = False,
        drop_path: DropPathMode = "mask",
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
        patch_drop_rate: float = 0.0, weight_init: WeightInit = "", fix_init: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **timm: Any,
    ):  # fmt: skip
        super().__init__()
        op = "VisionTransformer"
        refuse(op, timm)
        check_block(
            op, mlp_ratio, init_values, norm_eps, memory, mlp_layer, scale_mlp_norm, norm_layer,
            in_chans=in_chans, embed_dim=embed_dim, num_heads=num_heads,
        )  # fmt: skip
        check_counts(op, 0, num_classes=num_classes, depth=depth, reg_tokens=reg_tokens)
        check_counts(op, 0, representation_size=representation_size or 0)
        check_flags(
            op, qkv_bias=qkv_bias, proj_bias=proj_bias, class_token=class_token,
            no_embed_class=no_embed_class, pre_norm=pre_norm, final_norm=final_norm,
            fc_norm=False if fc_norm is None else fc_norm, pool_include_prefix=pool_include_prefix,
            dynamic_img_size=dynamic_img_size, fix_init=fix_init,
        )  # fmt: skip
        check_rates(
            op, drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate, drop_path_rate=drop_path_rate,
        )  # fmt: skip
        check_pool(op, global_pool, class_token)
        check_pos_embed(op, pos_embed)
        check_drop_path(op, "drop_path", drop_path)
        check_choice(op, "rope_type", rope_type, get_args(RopeType))
        check_choice(op, "weight_init", weight_init, get_args(WeightInit))
        if embed_norm_layer is not None:
            check_choice(op, "embed_norm_layer", embed_norm_layer, sorted(NORM_LAYERS))
        self.embed_dim, self.num_classes, self.global_pool = embed_dim, num_classes, global_pool
        self.no_embed_class, self.pool_include_prefix = no_embed_class, pool_include_prefix
        self.num_prefix_tokens = int(class_token) + reg_tokens

        norm = partial(NORM_LAYERS[norm_layer], eps=norm_eps)
        embed_norm = NORM_LAYERS[embed_norm_layer] if embed_norm_layer else None
        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, embed_dim, not pre_norm, conv_stem_configs,
            embed_norm and partial(embed_norm, eps=norm_eps), not dynamic_img_size, mean, std,
        )  # fmt: skip
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        num_positions = self.patch_embed.num_patches
        num_positions += 0 if no_embed_class else self.num_prefix_tokens
        learned = pos_embed == "learn"
        self.pos_embed = nn.Parameter(torch.zeros(1, num_positions, embed_dim)) if learned else None
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.patch_drop = PatchDropout(patch_drop_rate)
        self.norm_pre = norm(embed_dim) if pre_norm else nn.Identity()

        drop_paths = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = Blocks(*(
            Block(
                embed_dim, num_heads, mlp_ratio, qkv_bias, proj_bias, proj_drop_rate,
                attn_drop_rate, init_values, rate, act_layer, norm_eps, attn_head_dim, memory,
                mlp_layer, scale_mlp_norm, norm_layer, qk_norm, key_bias, rope_rotate_half,
                self.num_prefix_tokens, drop_path,
            )
            for rate in drop_paths
        ))  # fmt: skip
        self.rope = None
        if rope_type:
            self.rope = RotaryEmbedding(
                attn_head_dim or embed_dim // num_heads, self.patch_embed.grid_size, rope_type,
                rope_temperature, rope_rotate_half, rope_grid_indexing, rope_grid_offset,
                ref_feat_shape,
            )  # fmt: skip

        use_fc_norm = global_pool == "avg" if fc_norm is None else fc_norm
        normed = norm(embed_dim) if final_norm else nn.Identity()
        self.norm = nn.Identity() if use_fc_norm else normed
        self.fc_norm = normed if use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        features = representation_size or embed_dim
        self.pre_logits = nn.Sequential()
        if representation_size:
            self.pre_logits.add_module("fc", nn.Linear(embed_dim, features))
            self.pre_logits.add_module("act", nn.Tanh())
        self.head = nn.Linear(features, num_classes) if num_classes else nn.Identity()
        self.weight_init_mode = "reset" if weight_init == "skip" else weight_init
        self.fix_init = fix_init
        if weight_init != "skip":
            self.init_weights()
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def init_weights(self, mode: WeightInit = "") -> None:
        """Draw them by a scheme of timm's, by default `weight_init`, the constructor's."""
        init_weights(self, mode or self.weight_init_mode, self.num_classes)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        if self.fix_init:
            fix_weights(self.blocks)

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay; timm's optimizers ask for them."""
        return {"cls_token", "reg_token", "pos_embed"}

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, in_chans, height, width) -> (B, T, C), the tokens after the last block and norm."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else None
        grid = self.patch_embed.grid_of(images)
        keep = self.patch_drop(images, grid[0] * grid[1])
        x = self.pos_drop(self.patch_embed(images, prefix, self._positions(grid), keep))
        x = self.norm_pre(x)
        rope = self.rope
        x = self.blocks(x) if rope is None else self.blocks(x, kept_tables(rope(grid), keep))
        return self.norm(x)

    def _positions(self, grid: tuple[int, int]) -> Tensor | None:
        """pos_embed, resampled for images of another size than the model's."""
        own = self.patch_embed.grid_size
        if self.pos_embed is None or grid == own:
            return self.pos_embed
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        return resize_positions(self.pos_embed, own, grid, prefix)

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
