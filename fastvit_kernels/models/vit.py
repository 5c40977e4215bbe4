"""THE MAP: the whole Vision Transformer in the order an image flows through it.

PatchEmbed -> Block x depth (norm, Attention, norm, Mlp) -> norm -> pool -> head

modules.py has the parts, which call the ops; config.py the arguments. Their names and the
state_dict keys are timm's, so its checkpoints load unchanged.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.recomputed_sum import recomputed_sum
from .config import BlockConfig, ViTConfig, configured_by
from .gated_mlp import MLP_LAYERS
from .initial import WeightInit, fix_weights, init_weights
from .modules import Attention, DropPath, LayerScale, PatchEmbed, is_own
from .norms import can_rebuild, norm_and_input, rebuilt_output
from .packing import Crops
from .patch_dropout import PatchDropout, check_patches, kept_samples, kept_tables, masked
from .positions import resize_positions
from .rope_tables import RotaryEmbedding, Tables


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, C) -> (B, T, C), with LayerScale and DropPath.

    x = x + attn(norm1(x));  x = x + mlp(norm2(x)), each branch times LayerScale and DropPath
    """

    @configured_by(BlockConfig)
    def __init__(self, c: BlockConfig):
        super().__init__()
        self.norm1 = c.norm(c.dim)
        self.attn = Attention(
            c.dim,
            c.num_heads,
            c.attn_head_dim,
            c.qkv_bias,
            attn_drop=c.attn_drop,
            proj_drop=c.proj_drop,
            qk_norm=c.qk_norm,
            norm_layer=c.norm,
            key_bias=c.key_bias,
            num_prefix_tokens=c.num_prefix_tokens,
        )
        self.ls1 = LayerScale(c.dim, c.init_values) if c.init_values else None
        self.drop_path1 = DropPath(c.drop_path, c.drop_path_mode)
        self.norm2 = c.norm(c.dim)
        self.mlp = MLP_LAYERS[c.mlp_layer](
            c.dim, int(c.dim * c.mlp_ratio), act_layer=c.act_layer, drop=c.proj_drop
        )
        self.ls2 = LayerScale(c.dim, c.init_values) if c.init_values else None
        self.drop_path2 = DropPath(c.drop_path, c.drop_path_mode)
        self.memory = c.memory

    def forward(
        self, x: Tensor, rope: Tables | None = None, packing: Crops | None = None
    ) -> Tensor:
        """(B, T, C); with a packing, which takes no rope, (total, C)."""
        if rope is not None and packing is not None:
            raise ValueError("Block: packed images have no rotary positions, got rope and packing")
        if packing is not None and x.shape[0] != packing.ends[-1]:
            raise ValueError(
                f"Block: x must have the {packing.ends[-1]} tokens of packing, got {tuple(x.shape)}"
            )
        given: dict[str, Any] = {"rope": rope} if packing is None else {"packing": packing}
        x = self._add(x, self.norm1, self.attn, self.ls1, self.drop_path1, packing, **given)
        return self._add(x, self.norm2, self.mlp, self.ls2, self.drop_path2, packing)

    def _add(
        self,
        x: Tensor,
        norm: nn.Module,
        branch: nn.Module,
        scale: LayerScale | None,
        drop_path: DropPath,
        packing: Crops | None,
        /,
        **more: Any,
    ) -> Tensor:
        """x + branch(norm(x)); the branch's last product applies LayerScale and DropPath.

        memory="low": the backward rebuilds what norm gave, and the sum that norm2 read.
        """
        if not is_own(scale, LayerScale) or not is_own(drop_path, DropPath):
            if packing is not None:
                raise ValueError("Block: packed images need its own LayerScale and DropPath")
            y = branch(norm(x), **more)
            return x + drop_path(y if scale is None else scale(y))
        gamma = None if scale is None or type(scale) is nn.Identity else scale.gamma
        drop_path = DropPath() if type(drop_path) is nn.Identity else drop_path
        if packing is not None and drop_path.skips():
            tokens, factors, kept = packing.drawn(drop_path.drop_prob, x)
            more = {"packing": kept} if more else more
            y = branch(norm(x[tokens]), None, gamma, factors, **more)
            return x.index_add(0, tokens, y.to(x.dtype))
        samples = None if packing is not None else drop_path.samples(x)
        if samples is not None and more.get("rope") is not None:
            more = {"rope": kept_samples(more["rope"], samples)}
        low = self.memory == "low" and can_rebuild(norm)
        with recomputed_sum(x) if low and norm is self.norm2 else nullcontext() as recompute_fn:
            y, x = norm_and_input(norm, x, samples)
        with rebuilt_output(norm, y, x, recompute_fn, samples) if low else nullcontext():
            if packing is not None:
                rows = packing.factors(drop_path.row_scale, x)
            else:
                rows = drop_path.row_scale(x) if samples is None else samples
            return branch(y, x, gamma, rows, **more)


class Blocks(nn.Sequential):
    """One block after the other; rope, cos and sin of the model's positions, goes to each."""

    def forward(self, input: Tensor, rope: Tables | None = None) -> Tensor:
        for block in self:
            input = block(input) if rope is None else block(input, rope)
        return input


class VisionTransformer(nn.Module):
    """A Vision Transformer on the fused ops; arXiv:2010.11929.

    Arguments have timm's names and meaning (one that timm alone has raises TypeError), except
    these; docs/models.md has them all:

    act_layer     a name: "gelu", "gelu_tanh", "quick_gelu", "silu" (for SwiGLU)
    mlp_layer     timm's class by name: "Mlp", "GluMlp", "SwiGLUPacked", "SwiGLU"
    norm_eps      of every norm; they are LayerNorms
    rope_type     "dinov3", or "" for none
    drop_path     "skip": dropped samples are not computed; docs/drop_path.md
    memory        "low": the backward rebuilds what a block's norms gave, bit for bit, and the sum
                  after attention: under bf16 autocast 20 C bytes a token and block, not 28 C
    """

    @configured_by(ViTConfig)
    def __init__(self, c: ViTConfig):
        super().__init__()
        self.embed_dim, self.num_classes = c.embed_dim, c.num_classes
        self.global_pool, self.pool_include_prefix = c.global_pool, c.pool_include_prefix
        self.no_embed_class, self.num_prefix_tokens = c.no_embed_class, c.num_prefix_tokens

        self.patch_embed = PatchEmbed(
            c.img_size,
            c.patch_size,
            c.in_chans,
            c.embed_dim,
            not c.pre_norm,
            strict_img_size=not c.dynamic_img_size,
        )
        self.cls_token = self._tokens(1 if c.class_token else None)
        self.reg_token = self._tokens(c.reg_tokens or None)
        self.mask_token = self._tokens(1 if c.mask_token else None)
        positions = self.patch_embed.num_patches + c.num_prefix_tokens * (not c.no_embed_class)
        self.pos_embed = self._tokens(positions if c.pos_embed == "learn" else None)
        self.pos_drop = nn.Dropout(c.pos_drop_rate)
        self.patch_drop = PatchDropout(c.patch_drop_rate)
        self.norm_pre = c.norm(c.embed_dim) if c.pre_norm else nn.Identity()

        self.blocks = Blocks(*(Block(**c.block(i)) for i in range(c.depth)))
        self.rope = None
        if c.rope_type:
            head_dim = c.attn_head_dim or c.embed_dim // c.num_heads
            self.rope = RotaryEmbedding(head_dim, self.patch_embed.grid_size)

        norm = c.norm(c.embed_dim)
        after_pool = c.global_pool == "avg" if c.fc_norm is None else c.fc_norm
        self.norm, self.fc_norm = (nn.Identity(), norm) if after_pool else (norm, nn.Identity())
        self.head_drop = nn.Dropout(c.drop_rate)
        features = c.representation_size or c.embed_dim
        self.pre_logits = nn.Sequential()
        if c.representation_size:
            self.pre_logits.add_module("fc", nn.Linear(c.embed_dim, features))
            self.pre_logits.add_module("act", nn.Tanh())
        self.head = nn.Linear(features, c.num_classes) if c.num_classes else nn.Identity()

        self.weight_init_mode = "reset" if c.weight_init == "skip" else c.weight_init
        self.fix_init = c.fix_init
        if c.weight_init != "skip":
            self.init_weights()
        if c.device is not None or c.dtype is not None:
            self.to(device=c.device, dtype=c.dtype)

    def _tokens(self, count: int | None) -> nn.Parameter | None:
        return None if count is None else nn.Parameter(torch.zeros(1, count, self.embed_dim))

    def init_weights(self, mode: WeightInit = "") -> None:
        """Draw them by a scheme of timm's, by default `weight_init`, the constructor's."""
        init_weights(self, mode or self.weight_init_mode, self.num_classes)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token, self.mask_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        if self.fix_init:
            fix_weights(self.blocks)

    def no_weight_decay(self) -> set[str]:
        """Parameters that an optimizer should not decay; timm's optimizers ask for them."""
        return {"cls_token", "reg_token", "pos_embed", "mask_token"}

    def forward_features(
        self, images: Tensor, *, keep: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, in_chans, height, width) -> (B, T, C), the tokens after the last block and norm.

        Args:
            keep: (B, K) int64, distinct patches of each image: the others are not read, and T is
                the prefix and K (MAE, a context of JEPA).
            mask: (B, P) boolean: True is a patch in whose place `mask_token` stands (SimMIM, iBOT).
        Raises: ValueError, TypeError: one that does not fit, both, a mask without `mask_token`.
        """
        grid = self.patch_embed.grid_of(images)
        check_patches(self, images, grid[0] * grid[1], keep, mask)
        if keep is None and mask is None:
            keep = self.patch_drop(images, grid[0] * grid[1])
        x = self.embed(images, keep=keep, mask=mask)
        rope = self.rope
        x = self.blocks(x) if rope is None else self.blocks(x, kept_tables(rope(grid), keep))
        return self.norm(x)

    def embed(
        self, images: Tensor, *, keep: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """What the first block reads, (B, T, C): patches and positions behind the prefix. Unchecked
        arguments of forward_features; no patch is dropped but those that `keep` leaves out."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = torch.cat(tokens, dim=1) if tokens else None
        positions = self._positions(self.patch_embed.grid_of(images))
        x = self.patch_embed(images, prefix, positions, keep)
        if mask is not None and self.mask_token is not None:
            x = masked(x, mask, self.mask_token, positions)
        return self.norm_pre(self.pos_drop(x))

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
        """(B, in_chans, height, width) -> logits, (B, num_classes).

        Raises: ValueError, TypeError for images that are not the model's.
        """
        return self.forward_head(self.forward_features(images))
