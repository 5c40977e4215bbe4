"""The mixins of transformers' towers whose images lie one after the other: Qwen-VL's and their kin.

They get cu_seqlens on the device. Without flash-attn the host reads the lengths of the sequences in
every block and calls attention for each; here it is one `rope_attention`, and where the caller does
not say the longest, one read for all blocks that share a cu_seqlens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.plain import is_raw
from ...plans import Run
from ..attend import Turn, packable, turn_of
from ..fused import NOTHING, Given, Place, example, names, normed, width_of
from ..layers import SWIGLU, Attention, layer
from ..mlp import Mlp, plain_mlp
from ..read_once import is_readable, read_once


def _lengths(cu_seqlens: Tensor) -> tuple[int, int, int, int]:
    """The first start, the last end, the shortest and the longest sequence."""
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    return starts[0], starts[-1], min(lengths), max(lengths)


def longest(cu_seqlens: Tensor, total: int) -> int | None:
    """The longest sequence of `total` tokens, or what it may be at most where nobody may look; None
    where cu_seqlens does not describe them."""
    if not is_readable(cu_seqlens):
        return total
    first, end, least, most = read_once(cu_seqlens, _lengths)
    return max(most, 1) if first == 0 and end == total and least >= 0 else None


class Sequences(NamedTuple):
    """Of a packing, what attention reads."""

    cu_seqlens: Tensor
    longest: int


class PackedAttention(Attention):
    """qkv -> q and k turn -> attention within each sequence -> proj; x is (total, C)."""

    fused_roles = Attention.fused_roles._replace(
        projections=("qkv",), heads="num_heads", head_dim="", out="proj", result=None
    )
    fused_extra_kwargs = ("cu_seqlens", "position_embeddings", "max_seqlen")
    fused_axes = (2,)
    fused_tolerance = 1e-5  # the host turns in fp32

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        D = self.proj.in_features // self.num_heads
        for lengths in ((4, 1, 3), (2, 0, 4)):
            total = sum(lengths)
            starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            tables = tuple(example(generator, total, D).detach() for _ in "cs")
            given = {"cu_seqlens": starts, "position_embeddings": tables}
            yield (example(generator, total, width_of(self)),), given
        yield (example(generator, total, width_of(self)),), given | {"max_seqlen": 5}

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        """The call with its longest sequence; None where the ops do not take its cu_seqlens and
        tables: then the host does, or says why not."""
        starts, D = extras.get("cu_seqlens"), self.proj.in_features // self.num_heads
        if not isinstance(starts, Tensor) or starts.dtype is not torch.int32 or starts.ndim != 1:
            return None
        if len(starts) < 2 or starts.device != x.device or not is_raw(starts):
            return None
        turn = turn_of(extras.get("position_embeddings"), (1, 1, len(x), D))
        if turn is None or turn.cos.shape != (len(x), D) or turn.cos.device != x.device:
            return None
        if turn.cos.requires_grad or turn.sin.requires_grad:
            return None  # towers compute theirs; what no call is tried with has no proof
        most: Any = extras.get("max_seqlen")
        if most is None:
            most = longest(starts, len(x))
        known = type(most) is int or isinstance(most, torch.SymInt)
        fits = known and most > 0 and packable(D, self.fused_dropout_p())
        return (x, {**extras, "max_seqlen": most}) if fits else None

    def fused_heads(self: Any, x: Tensor, **extras: Any) -> Tensor:
        """(total, C) -> (total, H, D)"""
        turn = Turn(*extras["position_embeddings"])
        packing = Sequences(extras["cu_seqlens"], extras["max_seqlen"])
        return self.fused_attend(x.unsqueeze(0), turn=turn, packing=packing).squeeze(0)


PACKED_LAYER = layer(
    "norm1",
    "attn",
    "",
    "norm2",
    "mlp",
    "",
    given=PackedAttention.fused_extra_kwargs,
    item=None,
    axes=(2,),
    tolerance=1e-5,
)
QWEN3_MLP = plain_mlp("linear_fc1", "act_fn", "linear_fc2")


class Qwen3Merger(Mlp):
    """The tokens of a square side by side, normed before that or after it, through an MLP."""

    fused_roles = QWEN3_MLP.fused_roles
    fused_children = names("norm")
    fused_axes = (2,)

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        width = self.hidden_size // 4 if self.use_postshuffle_norm else width_of(self.norm)
        return [(rows * self.hidden_size // width, width) for rows in (3, 2)]

    def fused_resolved(self: Any, place: Place) -> Run:
        planned, found = self.fused_planned(place), self.fused_found(place)
        low = self.fused_accepts_autocast_input()

        def run(modules: list[Any], x: Tensor, extras: dict[str, Any]) -> Tensor:
            me = found(modules)
            x = x.view(-1, me.hidden_size) if me.use_postshuffle_norm else x
            y, _ = normed(me.norm, x, low)
            return planned(modules, y.view(-1, me.hidden_size), NOTHING, extras)

        return run


_QWEN3 = (
    ("Block", PACKED_LAYER),
    ("Attention", PackedAttention),
    ("MLP", QWEN3_MLP),
    ("PatchMerger", Qwen3Merger),
)
_GLM = ("VisionBlock", PACKED_LAYER), ("VisionAttention", PackedAttention)
# model -> what the names of its classes begin with, and its rows of the table
PACKED: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "qwen2_vl": (
        "",
        (
            ("Qwen2VLVisionBlock", PACKED_LAYER),
            ("VisionAttention", PackedAttention),
            ("VisionMlp", plain_mlp("fc1", "act", "fc2")),
        ),
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", (*_GLM, ("MLP", SWIGLU))),
    "qwen3_vl": ("Qwen3VLVision", _QWEN3),
    "qwen3_vl_moe": ("Qwen3VLMoeVision", _QWEN3),
    "qwen3_5": ("Qwen3_5Vision", _QWEN3),
    "qwen3_5_moe": ("Qwen3_5MoeVision", _QWEN3),
    "qwen3_omni_moe": ("Qwen3OmniMoeVision", _QWEN3[:3]),
    "qwen4_exp": ("Qwen4ExpVision", _QWEN3),
    "cohere_compass": ("CohereCompassVision", _QWEN3[:3]),
    "glm4v": ("Glm4v", _GLM),
    "glm4v_moe": ("Glm4vMoe", _GLM),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoe", _GLM),
}
