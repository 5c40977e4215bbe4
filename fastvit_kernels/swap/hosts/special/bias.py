"""transformers' Data2Vec vision and BEiT: a learnt bias of relative positions, perhaps shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import Attention, AttentionRoles
from ..block import Block
from ..fused import Fused, Given, example, names, width_of
from ..layers import BEIT_ATTENTION, DROP_PATH, MLP, layer
from ..mlp import MlpRoles


class OwnBias(Fused):
    """A module with a bias of relative positions. Its caller may add another, by the first of
    `fused_extra_kwargs`."""

    fused_extra_kwargs: ClassVar[tuple[str, ...]]

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
        shared = {self.fused_extra_kwargs[0]: example(generator, 1, heads, T, T)}
        yield (example(generator, 1, T, width),), given | shared

    def fused_checked(self, x: Any, extras: dict[str, Any]) -> Given | None:
        """None where the bias needs a resolution that the call does not give."""
        if self.fused_table()[0] is not None and extras.get("resolution") is None:
            return None
        return super().fused_checked(x, extras)

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        (table, patch), shared = self.fused_table(), extras.get(self.fused_extra_kwargs[0])
        if table is None:
            return shared
        height, width = extras["resolution"]
        interpolates = extras.get("interpolate_pos_encoding", False)
        own = table((height // patch, width // patch), interpolates, dim_size=x.shape[1])
        return own if shared is None else own + shared


class Data2VecAttention(OwnBias, Attention):
    """A module of projections and attention, and one of the output projection."""

    fused_roles = AttentionRoles(
        ("attention.query", "attention.key", "attention.value"),
        out="output.dense",
        after="output.dropout",
        head_dim="attention.attention_head_size",
        result=(2, 0),
        through=("attention", "output"),
    )
    fused_extra_kwargs = ("relative_position_bias", "interpolate_pos_encoding", "resolution")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if "Sdpa" not in type(module.attention).__name__:
            return "it forms the scores"
        known = {"query", "key", "value", "dropout", "relative_position_bias"}
        unknown = sorted(set(module.attention._modules) - known)
        return f"it has a part that we do not know: {', '.join(unknown)}" if unknown else None

    def fused_table(self: Any) -> tuple[Any, int]:
        inner = self.attention
        table = inner.relative_position_bias if inner.has_relative_position_bias else None
        return table, inner.config.patch_size

    def fused_dropout_p(self: Any) -> float:
        return self.attention.config.attention_probs_dropout_prob if self.training else 0.0


# The MLP of a layer that has a module for each of its halves.
HALVES = MlpRoles(
    "intermediate.dense",
    "output.dense",
    after="output.dropout",
    act="intermediate.intermediate_act_fn",
)
DATA2VEC_LAYER = layer(
    "layernorm_before",
    "attention",
    "lambda_1 drop_path",
    "layernorm_after",
    HALVES,
    "lambda_2 drop_path",
    given=Data2VecAttention.fused_extra_kwargs,
    result=(2, 0),
    through=("intermediate", "output"),
    unread=frozenset(),
)


class BeitLayer(OwnBias, Block):
    """BEiT's, from transformers 5.x on: the layer itself has the bias, its attention a mask."""

    def fused_own(self: Any, x: Tensor, extras: Any) -> dict[str, Any]:
        return {"attention_mask": self.fused_mask(x, extras)}


BEIT_LAYER = layer(
    "layernorm_before",
    "attention",
    "dropout lambda_1 drop_path",
    "layernorm_after",
    "mlp",
    "dropout lambda_2 drop_path",
    mixin=BeitLayer,
    extra_kwargs=("attention_mask", "interpolate_pos_encoding", "resolution"),
    children=names("relative_position_bias"),
)
_DATA2VEC = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"
DATA2VEC: dict[str, Any] = {
    _DATA2VEC + "Layer": DATA2VEC_LAYER,
    _DATA2VEC + "Attention": Data2VecAttention,
    _DATA2VEC + "DropPath": DROP_PATH,
}
BEIT = (("Layer", BEIT_LAYER), ("Attention", BEIT_ATTENTION), ("MLP", MLP), ("DropPath", DROP_PATH))
