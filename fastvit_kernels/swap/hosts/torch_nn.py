"""torch.nn: what hand-written ViTs are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...ops.linear.functions import linear
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked, is_raw
from ..activations import activation_name
from ..facts import leaves
from . import fused
from .attend import attend_qkv, attend_weights
from .attention import AttentionRoles
from .block import Block, BlockRoles, Step, pre_norm
from .fused import NOTHING, Epilogue, Fused, Given, bound, can_inline, is_dense
from .masks import as_read, example_of_mask, fits
from .mlp import MlpRoles, SequentialMlp


class MultiheadAttention(Fused):
    """nn.MultiheadAttention as self-attention: query is key is value, no weights asked; attn_mask
    perhaps, (T, T) or (B H, T, T), True for what is hidden, or added.

    torch reads out_proj's weight without calling it, and so do we.
    """

    fused_level = "attention"
    fused_extra_kwargs = ("attn_mask",)
    fused_masked = AttentionRoles(
        (),
        "num_heads",
        mask="attn_mask",
        masks=tuple((f"{what}, {n} axes", "") for what in ("added", "boolean") for n in (2, 3)),
    )
    fused_caveat = "fused where it is called with query = key = value and need_weights=False"

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if not module.kdim == module.vdim == module.embed_dim:
            return "its keys or values have another width"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds a key and a value of its own"
        return None

    def fused_blocked(self: Any) -> str | None:
        out = self.out_proj
        if type(out) is not NonDynamicallyQuantizableLinear:
            return f"its out_proj is a {type(out).__name__}"
        for weight in (self.in_proj_weight, out.weight):
            if not is_raw(weight):
                return f"its weight is a {type(weight).__name__}"
        return self.fused_reject(self)

    def fused_accepts_autocast_input(self) -> bool:
        return True

    def fused_planned(self: Any, place: fused.Place) -> fused.Planned:
        at = place(self)
        return lambda modules, x, epilogue, more: modules[at].fused_branch(x, epilogue, **more)

    def fused_branch(
        self: Any, x: Tensor, epilogue: Epilogue = NOTHING, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Without an epilogue with the host's strides: a dropout draws in their order. Its fast
        path, in evaluation without gradients, has others."""
        dropout_p = self.dropout if self.training else 0.0
        weight, bias, H, mask = self.in_proj_weight, self.in_proj_bias, self.num_heads, attn_mask
        if mask is not None:
            mask = ~mask if mask.dtype is torch.bool else as_read(mask, x)
            mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, H))
        if self.batch_first:
            out = attend_weights(x, weight, bias, H, mask=mask, dropout_p=dropout_p)
        else:  # (T, B, C)
            qkv = linear(x, weight, bias).transpose(0, 1).unflatten(-1, (3, H, -1))
            out = attend_qkv(qkv, mask=mask, dropout_p=dropout_p).transpose(0, 1)
        y = linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias, **epilogue)
        slow = not epilogue and self.batch_first and (self.training or y.requires_grad)
        return y.transpose(0, 1).contiguous().transpose(0, 1) if slow else y

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        names, defaults, _ = self.fused_arguments
        if (given := bound(names, args, kwargs)) is None:
            return None
        x = given.pop("query", None)
        same = given.pop("key", None) is x and given.pop("value", None) is x
        asked = given.pop("need_weights", True) is not False
        given.pop("average_attn_weights", None)  # of the weights
        mask = given.pop("attn_mask", None)
        if asked or not same or any(v is not defaults.get(n) for n, v in given.items()):
            return None
        extras = {} if mask is None else {"attn_mask": mask}
        return self.fused_checked(x, extras) if is_dense(x) and self.fused_takes(x) else None

    def fused_checked(self: Any, x: Tensor, extras: dict[str, Any]) -> Given | None:
        mask, seen = extras.get("attn_mask"), x if self.batch_first else x.transpose(0, 1)
        if mask is None:
            return x, extras
        (B, T), known = seen.shape[:2], fits(self.fused_masked, mask, seen)
        return (x, extras) if known and mask.shape in ((T, T), (B * self.num_heads, T, T)) else None

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[-1] == self.embed_dim

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for (x,), _ in super().fused_examples(generator):
            yield (x, x, x), {"need_weights": False}
            B, T = x.shape[:2] if self.batch_first else x.shape[1::-1]
            of_tokens, of_heads = (x.new_empty(n, T, 1) for n in (B, B * self.num_heads))
            added = example_of_mask("added, 2 axes", "", of_tokens, generator)
            each = example_of_mask("boolean, 4 axes", "", of_heads, generator).squeeze(1)
            for mask in (added, ~added.isfinite().tril(), each, added + each):
                yield (x, x, x), {"need_weights": False, "attn_mask": mask}

    def fused_forward(self: Any, x: Tensor, **extras: Any) -> Any:
        return self.fused_branch(x, **extras), None


# How a block calls an nn.MultiheadAttention.
SELF: dict[str, Any] = {"arguments": (("x", "x", "x"), (("need_weights", False),)), "item": 0}
_MLP = MlpRoles("linear1", "linear2", drop="dropout", after="dropout2", act="activation")
_BEFORE: BlockRoles = pre_norm(
    "norm1", "self_attn", "dropout1", "norm2", _MLP, "", **SELF
).fused_roles
_ATTENDS, _COMPUTES = (step._replace(norm="") for step in _BEFORE.steps)
_BEHIND = BlockRoles(
    (
        _ATTENDS,
        Step(2, 1, body="norm1"),
        _COMPUTES._replace(output=3, source=2, residual=2),
        Step(4, 3, body="norm2"),
    )
)


class TransformerEncoderLayer(Block):
    """nn.TransformerEncoderLayer, pre-norm or post-norm, without masks."""

    @property
    def fused_roles(self: Any) -> BlockRoles:  # type: ignore[override]
        return _BEFORE if self.norm_first else _BEHIND

    fused_children = frozenset(leaves(_BEFORE, str))

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if not module.self_attn.batch_first:
            return "batch_first is False"
        if activation_name(module.activation) is None:
            name = getattr(module.activation, "__name__", type(module.activation).__name__)
            return f"no kernel for {name}"
        return None

    def fused_blocked(self: Any) -> str | None:
        for name in ("self_attn", "norm1", "norm2"):
            if not can_inline(getattr(self, name)):
                return f"{name} keeps its own forward"
        return None if activation_name(self.activation) else "no kernel for its activation"


class PatchConv(Fused):
    """A Conv2d whose kernel is its stride, on images: (B, in, height, width) -> (B, C, h, w); or a
    Conv3d on videos: (B, in, frames, height, width) -> (B, C, t, h, w)."""

    fused_level = "patch_embed"

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if tuple(module.kernel_size) != tuple(module.stride) or module.in_channels > 4:
            return ""  # some other convolution
        if (module.padding != "valid" and any(module.padding)) or module.groups != 1:
            return "a patch embedding with padding or groups"
        return None if set(module.dilation) == {1} else "a dilated patch embedding"

    def fused_blocked(self) -> str | None:
        return self.fused_reject(self)  # read while tracing, so that compilers guard on it

    def fused_takes(self: Any, x: Tensor) -> bool:
        fits = x.ndim == self.weight.ndim and x.shape[1] == self.in_channels
        return fits and all(n % p == 0 for n, p in zip(x.shape[2:], self.kernel_size, strict=True))

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        C, (*frames, p, q) = self.in_channels, self.kernel_size
        return [(2, C, *(2 * t for t in frames), 2 * p, 3 * q), (1, C, *frames, p, q)]

    def fused_grid(self: Any, images: Tensor) -> Tensor:
        """The op writes (B, h*w, C): the result is a view of that. Videos of one patch each, as
        Qwen-VL's processor makes them, are the rows of a Linear."""
        if images.ndim == 5 and tuple(images.shape[2:]) == tuple(self.kernel_size):
            rows = linear(images.flatten(1), self.weight.flatten(1), self.bias)
            return rows[:, :, None, None, None]
        tokens = patch_embed(images, self.weight, self.bias)
        grid = (n // p for n, p in zip(images.shape[2:], self.kernel_size, strict=True))
        return tokens.transpose(1, 2).unflatten(2, tuple(grid))

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        return self.fused_grid(x).contiguous()  # as the host's, for view()


class PatchConvOfTokens(PatchConv):
    """PatchConv in a class that takes flatten(2).transpose(1, 2) of it: that costs nothing."""

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        grid = self.fused_grid(x)
        return grid.contiguous() if is_hooked(self) else grid


PatchConv.fused_of_tokens = PatchConvOfTokens


TABLE: dict[str, Any] = {
    "torch.nn.modules.normalization.LayerNorm": fused.LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": fused.RmsNorm,
    "torch.nn.modules.conv.Conv2d": PatchConv,
    "torch.nn.modules.conv.Conv3d": PatchConv,
    "torch.nn.modules.container.Sequential": SequentialMlp,
    "torch.nn.modules.activation.MultiheadAttention": MultiheadAttention,
    "torch.nn.modules.transformer.TransformerEncoderLayer": TransformerEncoderLayer,
}
