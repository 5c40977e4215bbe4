"""torch.nn: what hand-written ViTs are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...ops.linear.functions import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_plain, is_raw
from .. import hosts
from ..activations import activation_name
from .attend import attend_packed, attend_weights
from .fused import (
    NOTHING,
    Child,
    Epilogue,
    Fused,
    Given,
    LayerNorm,
    bypassed,
    inert,
    inputs,
    is_dense,
    left_dropouts,
    left_linears,
    names,
)
from .parts import (
    Mlp,
    PatchConv,
    PatchConv3d,
    PatchConv3dOfTokens,
    PatchConvOfTokens,
    SequentialMlp,
)


class MultiheadAttention(Fused):
    """nn.MultiheadAttention as self-attention: query is key is value, no mask, no weights asked.

    torch reads out_proj's weight without calling it, and so do we.
    """

    fused_level = "attention"
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

    def fused_reads_low(self) -> bool:
        return True

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        weight, bias, H = self.in_proj_weight, self.in_proj_bias, self.num_heads
        if self.batch_first:
            out = attend_weights(x, weight, bias, H, dropout_p=dropout_p)
        else:  # (T, B, C)
            qkv = linear(x, weight, bias).transpose(0, 1)
            out = attend_packed(qkv, H, dropout_p=dropout_p).transpose(0, 1)
        return linear(out.flatten(2), self.out_proj.weight, self.out_proj.bias, **epilogue)

    def fused_given(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        names, defaults, _ = self.fused_arguments
        if len(args) > len(names):
            return None  # the host's error
        given = {**defaults, **dict(zip(names, args)), **kwargs}  # noqa: B905
        x = given.pop("query", None)
        same = given.pop("key", None) is x and given.pop("value", None) is x
        unasked = given.pop("need_weights", True) is False
        given.pop("average_attn_weights", None)  # of the weights
        if not (same and unasked):
            return None
        if any(v is not defaults.get(n) for n, v in given.items()):
            return None
        return (x, {}) if is_dense(x) and self.fused_takes(x) else None

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[-1] == self.embed_dim

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for x in inputs(self, generator):
            yield (x, x, x), {"need_weights": False}

    def fused_forward(self: Any, x: Tensor) -> Any:
        return self.fused_as_host(self.fused_branch(x)), None

    def fused_as_host(self: Any, y: Tensor) -> Tensor:
        """y (B, T, C) with the host's strides: a dropout draws in their order. Its fast path, in
        evaluation without gradients, has others."""
        slow = (self.training or y.requires_grad) and self.batch_first
        return y.transpose(0, 1).contiguous().transpose(0, 1) if slow else y


class TransformerEncoderLayer(Fused):
    """nn.TransformerEncoderLayer, pre-norm or post-norm, without masks."""

    fused_level = "block"
    fused_children = names(
        "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation"
    )
    fused_pieces = ("self_attn", "norm1", "norm2")
    fused_fc1, fused_act, fused_fc2 = "linear1", "activation", "linear2"
    fused_between, fused_after = ("dropout", ""), "dropout2"
    fused_get = Mlp.fused_get

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
            if not bypassed(getattr(self, name)):
                return f"{name} keeps its own forward"
        return None if activation_name(self.activation) else "no kernel for its activation"

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, "linear1", "linear2")
        yield from left_dropouts(self, "dropout", "dropout1", "dropout2")

    def fused_attend(self: Any, y: Tensor, x: Tensor) -> Tensor:
        """x + dropout1(self_attn(y))"""
        if inert(self.dropout1):
            return self.self_attn.fused_branch(y, {"residual": x})
        return x + self.dropout1(self.self_attn.fused_as_host(self.self_attn.fused_branch(y)))

    def fused_feed_forward(self: Any, y: Tensor, x: Tensor) -> Tensor:
        """x + dropout2(linear2(dropout(act(linear1(y)))))"""
        return Mlp.fused_parts(self).branch(y, {"residual": x})

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        if not self.norm_first:
            x = self.norm1(self.fused_attend(x, x))
            return self.norm2(self.fused_feed_forward(x, x))
        low = autocast_dtype(x)
        y, x = self.norm1.fused_and_input(x, low)
        x = self.fused_attend(y, x)
        y, x = self.norm2.fused_and_input(x, low if is_plain(self.linear1) else None)
        return self.fused_feed_forward(y, x)


TABLE: dict[str, type[Fused]] = {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm,
    "torch.nn.modules.conv.Conv2d": PatchConv,
    "torch.nn.modules.conv.Conv3d": PatchConv3d,
    "torch.nn.modules.container.Sequential": SequentialMlp,
    "torch.nn.modules.activation.MultiheadAttention": MultiheadAttention,
    "torch.nn.modules.transformer.TransformerEncoderLayer": TransformerEncoderLayer,
}

OF_TOKENS: dict[str, type[Fused]] = {
    "torch.nn.modules.conv.Conv2d": PatchConvOfTokens,
    "torch.nn.modules.conv.Conv3d": PatchConv3dOfTokens,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
