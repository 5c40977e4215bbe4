"""Swin: attention inside windows of a grid that may be shifted, with a learnt bias of positions.

    q k^T / sqrt(D) + bias(H, N, N) [+ mask of the shift (windows, N, N)]

The two are one mask of the fused attention, by window, and it has the gradient of the bias. A block
joins the windows before the output projection: that ends in the residual, in the image's order, and
computes nothing that was padded. Swin V2's scores are cosines, times a scale of each head: q and k
are made such rows of length one before they enter the same attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....runtime.compat import rel_pos_bias
from ....runtime.plain import is_hooked, is_plain
from ...prove import ROOTS
from .. import fused
from ..attend import Turn
from ..attention import Attention, AttentionRoles
from ..block import Block, pre_norm
from ..fused import ROUNDED, DropPath, PathRoles, Unfused, example, is_noop, names, row, width_of
from ..grids import Windows, bias_of
from ..layers import DROP_PATH, MLP, Attention as HfAttention, layer
from ..masks import SHIFTED
from .bias import HALVES


def _area(copy: Any) -> dict[str, int]:
    """What follows from the sides of a window: it may equal a width, which a copy narrows."""
    return {"window_area": copy.window_size[0] * copy.window_size[1]}


ROLES = AttentionRoles(
    ("qkv",),
    "num_heads",
    "proj",
    dropout="attn_drop",
    after="proj_drop",
    mask="mask",
    masks=SHIFTED,
    scale="scale",
    through=("attn_drop", "softmax"),
)
# timm's, on windows (B windows, N, C). It forms the scores by default: `fused_attn` says nothing.
WINDOW_ATTENTION = row(
    Attention,
    roles=ROLES._replace(tokens="window_area"),
    bias=rel_pos_bias,
    children=names("relative_position_bias_table"),
    derived=staticmethod(_area),
)


class Cosine(Attention):
    """Swin V2's. The biases of q, k and v are parameters beside the projection; that of positions
    is computed of their distances."""

    fused_roles = ROLES._replace(
        scale=1.0, raw=True, biases=(("q_bias", "k_bias", "v_bias"),), tokens="window_size"
    )
    fused_children = names("cpb_mlp logit_scale")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        apart = getattr(module, "qkv_bias_separate", False)
        return "it adds the bias of its projection apart" if apart else None

    def fused_norms(self) -> None:
        """No kernel has them."""

    def fused_positions(self: Any) -> tuple[Any, Any]:
        """Who has the tables and the scale, and what makes a bias of the distances."""
        return self, self.cpb_mlp

    def fused_normed(self: Any, q: Tensor, k: Tensor, low: bool) -> tuple[Tensor, Tensor]:
        scale = self.fused_positions()[0].logit_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)

    def fused_bias(self: Any) -> Tensor | None:
        has, mlp = self.fused_positions()
        table = mlp(has.relative_coords_table).view(-1, len(has.logit_scale))
        return 16 * bias_of(table, has.relative_position_index).sigmoid()

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        yield "q and k normalised", 2 * 5 * self.fused_width()  # norm: 1, quotient: 2, scale: 2


def _four_windows(copy: Any) -> dict[str, Any]:
    """A grid of no more of them, and the masks of these."""
    mask = copy._buffers.get("attn_mask")
    if mask is None:
        return _area(copy)
    copy._buffers["attn_mask"] = mask[:4]
    return {**_area(copy), "input_resolution": tuple(2 * n for n in copy.window_size)}


class SwinBlock(Block):
    """timm's: x is (B, height, width, C)."""

    fused_axes = (4,)
    fused_first_rebuilds, fused_alike = False, True
    fused_derived = staticmethod(_four_windows)

    def fused_calls(self: Any, generator: torch.Generator) -> list[tuple[Tensor, dict[str, Any]]]:
        rows, columns = self.window_size
        grid = (rows + 1, 2 * columns) if self.attn_mask is None else self.input_resolution
        return [(example(generator, 1, *grid, width_of(self.norm1)), {})]

    def fused_own(self: Any, x: Tensor, extras: Any) -> dict[str, Any]:
        windows = Windows((x.shape[1], x.shape[2]), self.window_size, self.shift_size, False)
        mask = self.attn_mask
        if getattr(self, "dynamic_mask", False):
            mask = self.get_attn_mask(x.new_empty(1, *windows.padded(), 1))
        return {"windows": windows, "mask": mask}


class OwnWindows(Attention):
    """An attention that cuts its windows itself."""

    fused_cut: Any  # (x) -> the windows and their mask, as a block gives them; {}: it sees all of x

    def fused_planned(self: Any, place: fused.Place) -> fused.Planned:
        planned, found = super().fused_planned(place), self.fused_found(place)

        def run(modules: list[Any], x: Tensor, epilogue: fused.Epilogue, more: Any) -> Tensor:
            return planned(modules, x, epilogue, {**more, **found(modules).fused_cut(x)})

        return run


class ShiftedWindowAttention(OwnWindows):
    """torchvision's: x is (B, height, width, C); it reads its Linears' weights, and calls none."""

    fused_roles = ROLES._replace(after="", dropout="attention_dropout", scale=None, through=())
    fused_children = names("relative_position_bias_table")
    fused_axes = (4,)

    def fused_blocked(self: Any) -> str | None:
        if not (is_plain(self.qkv) and is_plain(self.proj)):
            return "it reads the weight of a Linear that is replaced"
        if self.training and self.dropout > 0:
            return "its dropout draws by window"
        return None

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        (rows, columns), C = self.window_size, width_of(self.qkv)
        return [(2, rows + 1, 2 * columns, C), (2, 2 * rows, columns, C)]

    def fused_windows(self: Any) -> Iterator[tuple[nn.Module, int]]:
        yield self, self.window_size[0] * self.window_size[1]

    def fused_cut(self: Any, x: Tensor) -> dict[str, Any]:
        grid = x.shape[1], x.shape[2]
        every = zip(grid, self.window_size, self.shift_size, strict=True)
        shift = tuple(step if n > size else 0 for n, size, step in every)
        windows = Windows(grid, tuple(self.window_size), shift)
        return {"windows": windows, "mask": windows.mask(self.qkv.weight)}

    def fused_bias(self: Any) -> Tensor | None:
        return self.get_relative_position_bias()


class ShiftedCosine(ShiftedWindowAttention, Cosine):
    """torchvision's Swin V2: whatever the bias of k is, it counts as zero."""

    fused_roles = ShiftedWindowAttention.fused_roles._replace(scale=1.0)
    fused_children = Cosine.fused_children | {"relative_position_index", "relative_coords_table"}

    def fused_weights(self: Any) -> list[tuple[Tensor, Tensor | None] | None]:
        weight, bias = self.qkv.weight, self.qkv.bias
        if bias is not None:
            q, k, v = bias.chunk(3)
            bias = torch.cat((q, torch.zeros_like(k), v))
        return [(weight, bias)]


HF_ATTENTION = row(  # transformers', from 5.x on
    HfAttention,
    bias=lambda self: self.relative_position_bias(),
    children=names("relative_position_bias"),
    roles=HfAttention.fused_roles._replace(
        mask="attention_mask", masks=SHIFTED, tokens="relative_position_bias.window_area"
    ),
)


class HfSwinLayer(Block):
    """transformers': x is (B, height width, C) of the grid that comes with it."""

    fused_first_rebuilds = fused_first_skips = False

    def fused_blocked(self: Any) -> str | None:
        drop = getattr(self, "dropout", None)  # V2 has none of its own
        return super().fused_blocked() if is_noop(drop) else "its dropout draws by window"

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        if "input_dimensions" not in extras or is_hooked(self.attention):
            return None
        return x, extras

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        size, width = self.window_size, width_of(self.layernorm_before)
        for grid in ((2 * size, size + 1), (size + 1, 2 * size)):
            x = example(generator, 1, grid[0] * grid[1], width)
            yield (x,), {"input_dimensions": grid}

    def fused_own(self: Any, x: Tensor, extras: Any) -> dict[str, Any]:
        grid = extras["input_dimensions"]
        adapts = hasattr(self, "set_shift_and_window_size")  # V2 is made for its grid
        if adapts and not extras.get("always_partition", False):
            self.set_shift_and_window_size(grid)
        windows = Windows(tuple(grid), (self.window_size,) * 2, (self.shift_size,) * 2)
        return {"windows": windows, "attention_mask": windows.mask(x)}


TORCHVISION: dict[str, Any] = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ShiftedWindowAttention,
    "torchvision.models.swin_transformer.SwinTransformerBlock": pre_norm(
        "norm1", "attn", "stochastic_depth", "norm2", "mlp", "stochastic_depth", axes=(4,)
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": ShiftedCosine,
    "torchvision.models.swin_transformer.SwinTransformerBlockV2": pre_norm(
        "", "attn", "norm1 stochastic_depth", "", "mlp", "norm2 stochastic_depth", axes=(4,)
    ),
    "torchvision.ops.stochastic_depth.StochasticDepth": row(
        DropPath,
        roles=PathRoles("p"),
        reject=staticmethod(lambda m: None if m.mode == "row" else "it drops whole batches"),
    ),
}
_LAYER = layer(
    "layernorm_before",
    "attention",
    "dropout drop_path",
    "layernorm_after",
    "mlp",
    "dropout",
    mixin=HfSwinLayer,
    result=(2, 0),
    extra_kwargs=("input_dimensions", "always_partition"),
)
SWIN = (("Layer", _LAYER), ("Attention", HF_ATTENTION), ("MLP", MLP))


class HfCosine(Cosine):
    """transformers'. It adds the mask of the shift twice."""

    fused_roles = AttentionRoles(
        ("self.query", "self.key", "self.value"),
        out="output.dense",
        scale=1.0,
        head_dim="self.attention_head_size",
        dropout="self.dropout",
        after="output.dropout",
        mask="attention_mask",
        masks=SHIFTED,
        tokens="self.window_size",
        result=(1, 0),
        through=("self", "self.dropout", "output"),
    )

    def fused_positions(self: Any) -> tuple[Any, Any]:
        return self.self, self.self.continuous_position_bias_mlp

    def fused_mask(self: Any, x: Tensor, extras: dict[str, Any]) -> Tensor | None:
        mask = extras.get("attention_mask")
        return super().fused_mask(x, extras if mask is None else {"attention_mask": 2 * mask})


HOLDER = row(Unfused, level="epilogue")  # of what its owner computes with
SWINV2 = (
    (
        "Layer",
        layer(
            "",
            "attention",
            "layernorm_before drop_path",
            "",
            HALVES,
            "layernorm_after drop_path",
            mixin=HfSwinLayer,
            result=(1, 0),
            through=("intermediate", "output"),
            extra_kwargs=("input_dimensions",),
        ),
    ),
    ("Attention", HfCosine),
    *((end, HOLDER) for end in ("SelfAttention", "SelfOutput", "Intermediate", "Output")),
    ("DropPath", DROP_PATH),
)


# Its tables are for windows of one size; the host interpolates them for others.
SAM_ATTENTION = row(
    Attention,
    children=names("rope"),
    reject=staticmethod(lambda m: getattr(m, "rope", None) and "it turns queries and keys"),
    roles=ROLES._replace(
        mask="",
        masks=(),
        grid=True,
        along=("rel_pos_h", "rel_pos_w"),
        q_norm="q_norm",
        k_norm="k_norm",
        through=("attn_drop", "q_norm", "k_norm"),
    ),
)


def _drops_by_window(self: Any) -> str | None:
    at_rest = is_noop(self.drop_path1) and is_noop(self.attn.proj_drop)
    return None if at_rest or not self.window_size else "it drops by window"


def _pools(module: Any) -> str | None:
    """Of Hiera, block or attention, whose tokens get fewer and wider from stage to stage."""
    attn = getattr(module, "attn", module)
    strides = (getattr(attn, n, None) for n in ("q_stride", "query_stride", "q_pool"))
    return "it pools its queries" if any(s not in (None, 1) for s in strides) else None


class MaskUnitAttention(OwnWindows):
    """Of timm's Hiera and transformers': within each mask unit, or over all tokens. The row of them
    has the first tokens of all units, then the second ones."""

    fused_roles = AttentionRoles(("qkv",), "heads", "proj", scale="scale")
    fused_reject: Any = staticmethod(_pools)

    def fused_takes(self: Any, x: Tensor) -> bool:
        size = self.window_size if self.use_mask_unit_attn else 1
        return x.ndim == 3 and x.shape[1] % size == 0

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        size = self.window_size if self.use_mask_unit_attn else 2
        return [(2, 3 * size, width_of(self)), (3, 2 * size, width_of(self))]

    def fused_cut(self: Any, x: Tensor) -> dict[str, Any]:
        if not self.use_mask_unit_attn:
            return {}
        grid = self.window_size, x.shape[1] // self.window_size
        return {"windows": Windows(grid, (grid[0], 1), (0, 0))}


_SCALED = ("norm1", "attn", "ls1 drop_path1", "norm2", "mlp", "ls2 drop_path2")
TIMM: dict[str, Any] = {
    "timm.models.swin_transformer.SwinTransformerBlock": pre_norm(
        "norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2", mixin=SwinBlock
    ),
    "timm.models.swin_transformer.WindowAttention": WINDOW_ATTENTION,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": pre_norm(
        "", "attn", "norm1 drop_path1", "", "mlp", "norm2 drop_path2", mixin=SwinBlock
    ),
    "timm.models.swin_transformer_v2.WindowAttention": Cosine,
    "timm.models.vision_transformer_sam.Attention": SAM_ATTENTION,
    "timm.models.vision_transformer_sam.Block": pre_norm(
        *_SCALED, window="window_size", blocked=_drops_by_window, axes=(4,), first_skips=False
    ),
    "timm.models.hiera.MaskUnitAttention": MaskUnitAttention,
    "timm.models.hiera.HieraBlock": pre_norm(*_SCALED, reject=staticmethod(_pools)),
    "timm.models.hieradet_sam2.MultiScaleAttention": row(
        Attention,
        reject=staticmethod(_pools),
        children=names("q_pool"),
        roles=AttentionRoles(("qkv",), "num_heads", "proj", scale="scale", grid=True),
    ),
    "timm.models.hieradet_sam2.MultiScaleBlock": pre_norm(
        *_SCALED,
        window="window_size",
        reject=staticmethod(_pools),
        children=names("proj"),
        axes=(4,),
        first_skips=False,
    ),
}
HIERA = (
    (
        "Layer",
        layer(
            "layernorm_before",
            "attn",
            "drop_path",
            "layernorm_after",
            "mlp",
            "drop_path",
            result=(2, 0),
            reject=staticmethod(_pools),
        ),
    ),
    (
        "MaskUnitAttention",
        row(
            MaskUnitAttention,
            roles=AttentionRoles(("qkv",), "num_heads", "proj", scale="scale", result=(2, 0)),
        ),
    ),
    ("Mlp", MLP),
    ("DropPath", DROP_PATH),
)
# SAM 2's Hiera: on a grid, in windows of it.
SAM2 = (
    (
        "MultiScaleBlock",
        layer(
            "layer_norm1",
            "attn",
            "",
            "layer_norm2",
            "mlp",
            "",
            item=None,
            window="window_size",
            axes=(4,),
            first_skips=False,
            reject=staticmethod(_pools),
        ),
    ),
    (
        "MultiScaleAttention",
        row(
            HfAttention,
            reject=staticmethod(_pools),
            roles=AttentionRoles(("qkv",), "num_attention_heads", "proj", scale="scale", grid=True),
        ),
    ),
)


class Sam3Attention(HfAttention):
    """q and k turn, in fp32, by tables (1, T, D)."""

    fused_roles = HfAttention.fused_roles._replace(
        scale="scaling",
        grid=True,
        rope="position_embeddings",
        rotate="apply_rotary_pos_emb_2d",
        spread="*",
        kernel="interleaved, cos before sin, this prefix",
        needs_rope=True,
        rounded=True,
    )

    def fused_turn(self: Any, x: Tensor, angles: Any) -> Turn | None:
        return super().fused_turn(x, [t.squeeze(0) if t.ndim == 3 else t for t in angles])


def _few_positions(copy: Any) -> dict[str, Any]:
    """A window of 3 by 3, or a grid of 2 by 2: at its size its scores would fill a memory. And the
    frequencies of a head."""
    side, rotary = 3 if copy.window_size else 2, copy.rotary_emb
    copy._buffers["position_ids"] = copy.position_ids[: side * side]
    rotary._buffers["inv_freq"] = rotary.inv_freq[: copy.attention.head_dim // 4]
    return {"window_size": side} if copy.window_size else {}


class Sam3Layer(Block):
    """It makes the tables itself, of the places in a window or on the grid."""

    fused_children = names("rotary_emb position_ids")
    fused_derived = staticmethod(_few_positions)
    fused_first_rebuilds = fused_first_skips = False

    def fused_calls(self: Any, generator: torch.Generator) -> list[tuple[Tensor, dict[str, Any]]]:
        size, C = self.window_size, width_of(self)
        shapes = ((2, size + 1, 2 * size), (1, size, size)) if size else ((2, 2, 2), (3, 1, 4))
        return [(example(generator, *shape, C), {}) for shape in shapes]

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> fused.Given | None:
        watched = is_hooked(self.rotary_emb) and self not in ROOTS  # it wants what the norm gave
        return None if watched or is_hooked(self.attention) else (x, extras)

    def fused_own(self: Any, x: Tensor, extras: Any) -> dict[str, Any]:
        return {"position_embeddings": self.rotary_emb(x, self.position_ids)}


SAM3 = (
    (
        "Layer",
        layer(
            "layer_norm1",
            "attention",
            "",
            "layer_norm2",
            "mlp",
            "dropout",
            mixin=Sam3Layer,
            window="window_size",
            axes=(4,),
            tolerance=ROUNDED,
        ),
    ),
    ("RoPEAttention", Sam3Attention),
)
