"""torch.nn: what hand-written ViTs are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...ops.linear import linear
from ...ops.mlp import mlp
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_plain
from .. import hosts
from .attend import attend_weights
from .fused import (
    Fused,
    LayerNorm,
    Left,
    inert,
    is_dense,
    jumpable,
    left_dropouts,
    left_linears,
    names,
    project,
    project_out,
)
from .parts import PatchConv, SequentialMlp, activation_name


class MultiheadAttention(Fused):
    """nn.MultiheadAttention as self-attention: query is key is value, no mask, no weights asked.

    torch reads out_proj's weight without calling it, and so do we.
    """

    level = "attention"
    caveat = "fused where it is called with query = key = value and need_weights=False"

    @classmethod
    def reject(cls, module: Any) -> str | None:
        if not module._qkv_same_embed_dim:
            return "its keys or values have another width"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds a key and a value of its own"
        if not module.batch_first:
            return "batch_first is False"
        return None

    def blocked(self: Any) -> str | None:
        out = self.out_proj
        if type(out) is not NonDynamicallyQuantizableLinear:
            return f"its out_proj is a {type(out).__name__}"
        return None

    def reads_low(self) -> bool:
        return True

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        dropout_p = self.dropout if self.training else 0.0
        out = attend_weights(
            x, self.in_proj_weight, self.in_proj_bias, self.num_heads, dropout_p=dropout_p
        )
        return linear(
            out.flatten(2), self.out_proj.weight, self.out_proj.bias,
            residual=residual, layer_scale=layer_scale, row_scale=row_scale,
        )  # fmt: skip

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None,
        need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:  # fmt: skip
        plain = key is query and value is query and is_dense(query) and query.ndim == 3
        masked = key_padding_mask is not None or attn_mask is not None or is_causal
        if need_weights or masked or not plain or self.blocked():
            return self.host_forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        return self.branch(query), None


class TransformerEncoderLayer(Fused):
    """nn.TransformerEncoderLayer, pre-norm or post-norm, without masks."""

    level = "block"
    children_known = names(
        "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation"
    )

    @classmethod
    def reject(cls, module: Any) -> str | None:
        if not module.self_attn.batch_first:
            return "batch_first is False"
        if activation_name(module.activation) is None:
            name = getattr(module.activation, "__name__", type(module.activation).__name__)
            return f"no kernel for {name}"
        return None

    def blocked(self: Any) -> str | None:
        for name in ("self_attn", "norm1", "norm2"):
            if not jumpable(getattr(self, name)):
                return f"{name} keeps its own forward"
        return None if activation_name(self.activation) else "no kernel for its activation"

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, "linear1", "linear2")
        yield from left_dropouts(self, "dropout", "dropout1", "dropout2")

    def _attend(self: Any, y: Tensor, x: Tensor) -> Tensor:
        """x + dropout1(self_attn(y))"""
        if inert(self.dropout1):
            return self.self_attn.branch(y, x)
        return x + self.dropout1(self.self_attn.branch(y))

    def _feed_forward(self: Any, y: Tensor, x: Tensor) -> Tensor:
        """x + dropout2(linear2(dropout(act(linear1(y)))))"""
        fc1, fc2, name = self.linear1, self.linear2, activation_name(self.activation)
        at_rest = inert(self.dropout) and inert(self.dropout2)
        if name is not None and is_plain(fc1) and is_plain(fc2) and at_rest:
            return mlp(y, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=name, residual=x)
        if is_plain(fc1):
            hidden = linear(y, fc1.weight, fc1.bias, activation=name)
        else:
            hidden = self.activation(project(fc1, y))
        return project_out(fc2, self.dropout2, self.dropout(hidden), x, None, None)

    def forward(
        self: Any, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        masked = src_mask is not None or src_key_padding_mask is not None or is_causal
        if masked or not is_dense(src) or src.ndim != 3 or self.blocked():
            return self.host_forward(src, src_mask, src_key_padding_mask, is_causal)
        x = src
        if not self.norm_first:
            x = self.norm1(self._attend(x, x))
            return self.norm2(self._feed_forward(x, x))
        low = autocast_dtype(x)
        y, x = self.norm1.and_input(x, low)
        x = self._attend(y, x)
        y, x = self.norm2.and_input(x, low if is_plain(self.linear1) else None)
        return self._feed_forward(y, x)


TABLE: dict[str, type[Fused]] = {
    "torch.nn.modules.normalization.LayerNorm": LayerNorm,
    "torch.nn.modules.conv.Conv2d": PatchConv,
    "torch.nn.modules.container.Sequential": SequentialMlp,
    "torch.nn.modules.activation.MultiheadAttention": MultiheadAttention,
    "torch.nn.modules.transformer.TransformerEncoderLayer": TransformerEncoderLayer,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
