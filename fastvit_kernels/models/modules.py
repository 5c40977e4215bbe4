"""The parts of a block, in the order an image meets them: PatchEmbed, a norm, Attention, Mlp.

Each reads the weights of its torch layers and passes them to a fused op. A changed layer (a hook,
LoRA, a quantised weight) is called instead: see runtime/plain.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention.functions import attention, check_head_dim
from ..ops.attention.projected import qkv_attention
from ..ops.attention.rotary import rope_attention
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.attention.varlen import varlen_attention
from ..ops.common.activation import ACTIVATIONS
from ..ops.common.samples import DropPathMode, add_branch, keep_samples
from ..ops.linear import linear
from ..ops.mlp import mlp
from ..ops.patch_embed.functions import add_tokens, patch_embed
from ..ops.rope import rope as apply_rope
from ..runtime.arguments import check_int, check_tensor
from ..runtime.plain import is_hooked, is_plain, is_raw
from .checks import Activation, Count, Dropout, Flag, Number, Rate, checked
from .norms import LayerNorm, NormLayer, RmsNorm
from .packing import Crops
from .rope_tables import Tables

Size = int | Sequence[int]  # a square's side, or (height, width)


def _pair(name: str, size: Size) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, Sequence) or isinstance(sides, str) or len(sides) != 2:
        raise TypeError(f"PatchEmbed: {name} must be an int or (height, width), got {size!r}")
    for side in sides:
        check_int("PatchEmbed", name, side)
    return sides[0], sides[1]


class PatchEmbed(nn.Module):
    """Patch embedding, prefix tokens and positions: (B, in_chans, height, width) -> (B, T, C).

    Ignores rows and columns of pixels that do not fill a patch, as timm's convolution does. With
    strict_img_size=False images of any size pass, and `pos_embed` must fit their grid. `keep`
    (B, K) lists the patches of each image to keep.
    """

    @checked
    def __init__(
        self,
        img_size: Size = 224,
        patch_size: Size = 16,
        in_chans: Count = 3,
        embed_dim: Count = 768,
        bias: Flag = True,
        strict_img_size: Flag = True,
    ):
        super().__init__()
        self.img_size = _pair("img_size", img_size)
        self.patch_size = _pair("patch_size", patch_size)
        self.in_chans, self.strict_img_size = in_chans, strict_img_size
        (height, width), (patch_height, patch_width) = self.img_size, self.patch_size
        self.grid_size = height // patch_height, width // patch_width
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        if self.num_patches == 0:
            raise ValueError(
                f"PatchEmbed: img_size {self.img_size} must be at least patch_size "
                f"{self.patch_size}"
            )
        self.proj = nn.Conv2d(in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of the images' patches.

        Raises: ValueError, TypeError for images that are not the model's.
        """
        check_tensor("PatchEmbed", "images", images, ndim=4)
        if images.shape[1] != self.in_chans:
            raise ValueError(
                f"PatchEmbed: images must have {self.in_chans} channels, got {images.shape[1]}"
            )
        size = images.shape[-2], images.shape[-1]
        if size == self.img_size:
            return self.grid_size
        grid = size[0] // self.patch_size[0], size[1] // self.patch_size[1]
        if self.strict_img_size or not all(grid):
            wanted = "" if self.strict_img_size else "at least "
            sides = self.img_size if self.strict_img_size else self.patch_size
            raise ValueError(
                f"PatchEmbed: images must be {wanted}{sides} (height, width), got {tuple(size)}"
            )
        return grid

    def forward(
        self,
        images: Tensor,
        prefix_tokens: Tensor | None = None,
        pos_embed: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        rows, cols = self.grid_of(images)
        proj = self.proj
        if _cuts(proj):
            patch_height, patch_width = proj.kernel_size
            images = images[..., : rows * patch_height, : cols * patch_width]
            tokens = dict(prefix_tokens=prefix_tokens, pos_embed=pos_embed, keep=keep)
            return patch_embed(images, proj.weight, proj.bias, **tokens)
        patches = proj(images).flatten(2).transpose(1, 2)
        return add_tokens(patches, prefix_tokens, pos_embed, keep)


def rate_of(dropout: Any) -> float:
    """Its probability in training; an nn.Identity may stand for it."""
    return 0.0 if type(dropout) is nn.Identity else dropout.p


def is_idle(dropout: nn.Module) -> bool:
    """Whether a dropout does nothing now, and no hook waits for it."""
    if is_hooked(dropout) or type(dropout) not in (nn.Dropout, nn.Identity):
        return False
    return not dropout.training or rate_of(dropout) == 0


def is_own(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether an epilogue can do what the module does: one of ours, or none, without a hook."""
    if module is None:
        return True
    return type(module) in (kind, nn.Identity) and not is_hooked(module)


def _cuts(proj: Any) -> bool:
    """Whether a projection cuts patches side by side, and has no hook."""
    usual = type(proj) is nn.Conv2d and proj.groups == 1 and proj.dilation == (1, 1)
    usual = usual and proj.padding in ((0, 0), "valid") and proj.kernel_size == proj.stride
    return usual and not is_hooked(proj) and is_raw(proj.weight)


def _head_norms(q_norm: nn.Module, k_norm: nn.Module) -> dict[str, Any] | None:
    """The arguments of rope_attention for both norms, or None where they have to be called."""
    kind = type(q_norm)
    if type(k_norm) is not kind or is_hooked(q_norm) or is_hooked(k_norm):
        return None
    if kind is nn.Identity:
        return {}
    if kind not in (LayerNorm, RmsNorm) or q_norm.eps != k_norm.eps:
        return None
    parameters = {
        f"{which}_norm_{name}": getattr(norm, name, None)
        for which, norm in (("q", q_norm), ("k", k_norm))
        for name in ("weight", "bias")
    }
    if not all(p is None or is_raw(p) for p in parameters.values()):
        return None
    norm = "layer_norm" if kind is LayerNorm else "rms_norm"
    return dict(norm=norm, eps=q_norm.eps, **parameters)


class Attention(nn.Module):
    """Self-attention with QKV and output projection, then scales and residual: (B, T, C) -> same.

    timm's Attention, AttentionRope and EvaAttention. `qk_norm` normalises each head's queries and
    keys by `norm_layer`; then `rope` in the forward, cos and sin of `RotaryEmbedding`, rotates all
    tokens past the first `num_prefix_tokens`. With key_bias=False (EVA, DINOv3), only queries and
    values have a bias, the parameters q_bias and v_bias.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        num_heads: Count = 8,
        attn_head_dim: Count | None = None,
        qkv_bias: Flag = False,
        proj_bias: Flag = True,
        attn_drop: Dropout = 0.0,
        proj_drop: Rate = 0.0,
        qk_norm: Flag = False,
        norm_layer: NormLayer = LayerNorm,
        key_bias: Flag = True,
        num_prefix_tokens: Number = 0,
    ):
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"Attention: dim {dim} must be a multiple of num_heads {num_heads}")
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        check_head_dim("Attention", self.head_dim)
        if not callable(norm_layer):
            raise TypeError(f"Attention: norm_layer must be a class, got {norm_layer!r}")
        width, apart = num_heads * self.head_dim, qkv_bias and not key_bias
        self.num_prefix_tokens = num_prefix_tokens
        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias and key_bias)
        self.q_bias = nn.Parameter(torch.zeros(width)) if apart else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if apart else None
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(width, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def _bias_apart(self) -> Tensor | None:
        """The bias of qkv where it is in parts, (3 H D,): 0 for the keys."""
        if self.q_bias is None or self.v_bias is None:
            return None
        return torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))

    def _packed(self, projected: Tensor) -> Tensor:
        """What the module qkv gave -> (B, T, 3, H, D), with the bias that stands apart."""
        bias = self._bias_apart()
        if bias is not None:
            projected = projected + bias.to(projected.dtype)
        return projected.unflatten(-1, (3, self.num_heads, self.head_dim))

    def heads(self, projected: Tensor, rope: Tables | None = None) -> tuple[Tensor, ...]:
        """What the module qkv gave -> q, k, v (B, T, H, D), q and k normed, then turned."""
        q, k, v = self._packed(projected).unbind(2)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q, k = apply_rope(q, k, *rope, prefix_tokens=self.num_prefix_tokens)
        return q, k, v

    def _attend(self, x: Tensor, rope: Tables | None) -> Tensor:
        """(B, T, C) -> (B, T, H, D), in one op unless a layer has to be called."""
        dropout_p = rate_of(self.attn_drop) if self.training else 0.0
        norms = _head_norms(self.q_norm, self.k_norm)
        if norms is None or not is_plain(self.qkv):
            projected = self.qkv(x)
            if rope is None and norms == {}:
                return attention(self._packed(projected), dropout_p=dropout_p)
            q, k, v = (t.transpose(1, 2) for t in self.heads(projected, rope))
            return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).transpose(1, 2)
        weight, bias = self.qkv.weight, self._bias_apart()
        bias = self.qkv.bias if bias is None else bias
        shared: dict[str, Any] = dict(num_heads=self.num_heads, dropout_p=dropout_p)
        if rope is None and not norms:
            return qkv_attention(x, weight, bias, **shared)
        if rope is None:  # no token turns
            cos, sin = x.new_empty((2, 0, 2), dtype=torch.float32).unbind(0)
            prefix_tokens = x.shape[1]
        else:
            (cos, sin), prefix_tokens = rope, self.num_prefix_tokens
        return rope_attention(
            x, weight, bias, cos=cos, sin=sin, prefix_tokens=prefix_tokens, **shared, **norms
        )

    def _attend_packed(self, x: Tensor, packing: Crops) -> Tensor:
        """(total, C) -> (total, H, D), within each sequence."""
        qkv = self._packed(self.qkv(x))
        if type(self.q_norm) is not nn.Identity or type(self.k_norm) is not nn.Identity:
            q, k, v = qkv.unbind(1)
            qkv = torch.stack((self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), 1)
        dropout_p = rate_of(self.attn_drop) if self.training else 0.0
        return varlen_attention(qkv, packing.cu_seqlens, packing.longest, dropout_p=dropout_p)

    def forward(
        self,
        x: Tensor,
        residual=None,
        layer_scale=None,
        row_scale=None,
        rope: Tables | None = None,
        packing: Crops | None = None,
    ) -> Tensor:
        if packing is None:
            out = self._attend(x, rope).flatten(2)
        else:
            out = self._attend_packed(x, packing).flatten(1)
        if is_plain(self.proj) and is_idle(self.proj_drop):
            return linear(
                out,
                self.proj.weight,
                self.proj.bias,
                residual=residual,
                layer_scale=layer_scale,
                row_scale=row_scale,
            )
        return add_branch(self.proj_drop(self.proj(out)), residual, layer_scale, row_scale)


class Mlp(nn.Module):
    """MLP, timm's Mlp: (B, T, C) -> (B, T, C), fc1, activation, fc2, then scales and residual."""

    @checked
    def __init__(
        self,
        in_features: Count,
        hidden_features: Count,
        act_layer: Activation = "gelu",
        bias: Flag = True,
        drop: Rate = 0.0,
    ):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features, bias)
        self.act_layer = act_layer
        self.fc2 = nn.Linear(hidden_features, in_features, bias)
        self.drop = nn.Dropout(drop)
        self.recompute = True  # False saves the activation too and rebuilds nothing

    def forward(self, x: Tensor, residual=None, layer_scale=None, row_scale=None) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if is_plain(fc1) and is_plain(fc2) and is_idle(self.drop):
            return mlp(
                x,
                fc1.weight,
                fc1.bias,
                fc2.weight,
                fc2.bias,
                activation=self.act_layer,
                residual=residual,
                layer_scale=layer_scale,
                row_scale=row_scale,
                recompute=self.recompute,
            )
        hidden = self.drop(ACTIVATIONS[self.act_layer](fc1(x)))
        return add_branch(self.drop(fc2(hidden)), residual, layer_scale, row_scale)


class LayerScale(nn.Module):
    """Holds gamma (C,); the epilogue of the branch's last matmul applies it."""

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init_values)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: drops a branch for whole samples; arXiv:1603.09382.

    mode="skip" drops as DINOv2 does, a fixed count of samples, for which the branch computes
    nothing; "mask" drops each by chance, as does a call of the module.
    """

    @checked
    def __init__(self, drop_prob: Rate = 0.0, mode: DropPathMode = "mask"):
        super().__init__()
        self.drop_prob, self.mode = drop_prob, mode

    def skips(self) -> bool:
        return self.mode == "skip" and self.training and self.drop_prob > 0

    def samples(self, x: Tensor) -> Tensor | None:
        """What `keep_samples` gives, or None if nothing is skipped."""
        if not self.skips() or x.shape[0] == 0:
            return None
        return keep_samples(x.shape[0], self.drop_prob, x.device)

    def row_scale(self, x: Tensor) -> Tensor | None:
        """(B,) of 0 or 1 / keep, or None if nothing is dropped."""
        if not self.training or self.drop_prob == 0:
            return None
        keep = 1 - self.drop_prob
        scale = x.new_empty(x.shape[0]).bernoulli_(keep)
        return scale.div_(keep) if keep > 0 else scale

    def forward(self, x: Tensor) -> Tensor:
        return add_branch(x, row_scale=self.row_scale(x))
