"""transformers' Data2Vec vision and BEiT: a learnt bias of relative positions, perhaps shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .branch import PreNormBlock
from .fused import (
    Child,
    Fused,
    Given,
    Inline,
    WithNone,
    example,
    hooked,
    left_dropouts,
    left_linears,
    names,
    part,
    width_of,
)
from .parts import Mlp, SelfAttention
from .transformers_layers import BeitAttention, HfDropPath, HfMlp, ViTLayer


class OwnBias(Fused):
    """A module with a bias of relative positions. Its caller may add another, by the first of
    `fused_extras`."""

    fused_extras: ClassVar[tuple[str, ...]]

    def fused_table(self: Any) -> tuple[Any, int]:
        """The module that gives the bias, None for none; the side of a patch."""
        return self.relative_position_bias, self.patch_size

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        (table, patch), width, given = self.fused_table(), width_of(self), {}
        heads, tokens = self.attention.num_attention_heads, (5, 4)
        if table is not None:
            rows, columns = table.window_size
            given = {"resolution": (rows * patch, columns * patch)}
            tokens = (rows * columns + 1,) * 2
        yield (example(generator, 2, tokens[0], width),), given
        T = tokens[1]
        shared = {self.fused_extras[0]: example(generator, 1, heads, T, T)}
        yield (example(generator, 1, T, width),), given | shared

    def fused_checked(self, x: Any, extras: dict[str, Any]) -> Given | None:
        """None where the bias needs a resolution that the call does not give."""
        if self.fused_table()[0] is not None and extras.get("resolution") is None:
            return None
        return super().fused_checked(x, extras)

    def fused_mask(self, x: Tensor, **extras: Any) -> Tensor | None:
        (table, patch), shared = self.fused_table(), extras.get(self.fused_extras[0])
        if table is None:
            return shared
        height, width = extras["resolution"]
        interpolates = extras.get("interpolate_pos_encoding", False)
        own = table((height // patch, width // patch), interpolates, dim_size=x.shape[1])
        return own if shared is None else own + shared


class Data2VecAttention(OwnBias, WithNone, SelfAttention):
    """A module of projections and attention, and one of the output projection."""

    fused_linears = ("query", "key", "value")
    fused_out, fused_after = "output.dense", "output.dropout"
    fused_children = names("attention output")
    fused_extras = ("relative_position_bias", "interpolate_pos_encoding", "resolution")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if "Sdpa" not in type(module.attention).__name__:
            return "it forms the scores"
        known = {"query", "key", "value", "dropout", "relative_position_bias"}
        unknown = sorted(set(module.attention._modules) - known)
        return f"it has a part that we do not know: {', '.join(unknown)}" if unknown else None

    def fused_blocked(self: Any) -> str | None:
        return hooked(self, "attention", "output")

    def fused_table(self: Any) -> tuple[Any, int]:
        inner = self.attention
        table = inner.relative_position_bias if inner.has_relative_position_bias else None
        return table, inner.config.patch_size

    def fused_width(self: Any) -> int:
        """H D"""
        return self.attention.all_head_size

    def fused_head_dim(self: Any) -> int:
        return self.attention.attention_head_size

    def fused_dropout_p(self: Any) -> float:
        return self.attention.config.attention_probs_dropout_prob if self.training else 0.0

    def fused_projections(self: Any) -> tuple[nn.Module, ...]:
        return tuple(getattr(self.attention, name) for name in self.fused_linears)

    def fused_products(self: Any) -> Iterator[nn.Module]:
        yield from (*self.fused_projections(), self.output.dense)

    def fused_left(self: Any) -> Iterator[Child]:
        inside = (f"attention.{name}" for name in self.fused_linears)
        yield from left_linears(self, *inside, self.fused_out)
        yield from left_dropouts(self, self.fused_after)

    def fused_heads(self: Any, x: Tensor, **extras: Any) -> Tensor:
        return self.fused_attend(x, self.fused_mask(x, **extras))


class _TwoHalves(Inline, Mlp):
    """The MLP of a layer that has a module for each of its halves."""

    fused_fc1, fused_act = "intermediate.dense", "intermediate.intermediate_act_fn"
    fused_fc2, fused_after = "output.dense", "output.dropout"
    fused_between = ("", "")

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer.output(self.layer.intermediate(x))

    def fused_get(self, name: str) -> Any:
        return part(self.layer, name)


class Data2VecLayer(WithNone, PreNormBlock):
    """LayerScale as parameters of its own; one DropPath module serves both branches."""

    fused_children = names("output")
    fused_names = (
        "layernorm_before", "attention", ("lambda_1", "drop_path"),
        "layernorm_after", "intermediate", ("lambda_2", "drop_path"),
    )  # fmt: skip
    fused_extras = Data2VecAttention.fused_extras

    def fused_blocked(self: Any) -> str | None:
        return hooked(self, "intermediate", "output")

    def fused_products(self: Any) -> Iterator[nn.Module]:
        yield from (self.intermediate.dense, self.output.dense)

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, "intermediate.dense", "output.dense")
        yield from left_dropouts(self, "output.dropout")

    def fused_child(self: Any, name: str) -> Any:
        return _TwoHalves(self) if name == "intermediate" else getattr(self, name)

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        return self.attention(y, **extras)[0]


class BeitLayer(OwnBias, ViTLayer):
    """BEiT's, from transformers 5.x on: the layer itself has the bias, its attention a mask."""

    fused_children = names("relative_position_bias")
    fused_names = (
        "layernorm_before", "attention", ("dropout", "lambda_1", "drop_path"),
        "layernorm_after", "mlp", ("dropout", "lambda_2", "drop_path"),
    )  # fmt: skip
    fused_extras = ("attention_mask", "interpolate_pos_encoding", "resolution")

    def fused_child(self: Any, name: str) -> Any:
        child = getattr(self, name)
        return None if isinstance(child, (int, float)) else child  # 1.0: no LayerScale

    def fused_context(self, x: Tensor, **extras: Any) -> dict[str, Any]:
        return {"attention_mask": self.fused_mask(x, **extras)}


_DATA2VEC = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"
DATA2VEC: dict[str, type[Fused]] = {
    _DATA2VEC + "Layer": Data2VecLayer,
    _DATA2VEC + "Attention": Data2VecAttention,
    _DATA2VEC + "DropPath": HfDropPath,
}
BEIT = (
    ("Layer", BeitLayer), ("Attention", BeitAttention), ("MLP", HfMlp), ("DropPath", HfDropPath)
)  # fmt: skip
