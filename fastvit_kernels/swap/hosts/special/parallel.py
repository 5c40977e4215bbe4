"""timm: the blocks of its Vision Transformers whose branches are no chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....runtime.plain import is_hooked, is_plain
from ..attend import attend, attend_packed, unpack
from ..branch import add_body, fold
from ..fused import (
    Child,
    Fused,
    Given,
    Unfused,
    bypassed,
    inert,
    left_dropouts,
    left_linears,
    names,
    norm_in_pytorch,
    normed,
    project,
    project_out,
)


class ResPostBlock(Unfused):
    """x = x + drop_path1(norm1(attn(x))), then the MLP: a norm stands between every branch and its
    residual, so that nothing fuses across children and the host's forward on fused children is
    the widest there is."""

    fused_level = "block"
    fused_children = names("norm1 attn drop_path1 norm2 mlp drop_path2")
    fused_pieces = ("attn", "norm1", "mlp", "norm2")
    fused_bodies = ("attn", "mlp")


class ParallelScalingBlock(Fused):
    """x + drop_path(ls(attn_out_proj(attention) + mlp_out_proj(act(mlp)))) after one in_proj."""

    fused_level = "block"
    fused_children = names(
        "in_norm in_proj mlp_bias q_norm k_norm attn_drop mlp_drop mlp_act out_proj attn_out_proj "
        "mlp_out_proj ls drop_path"
    )
    fused_attention_dropout = names("attn_drop")
    fused_pieces = ("in_norm", "ls", "drop_path")

    def fused_blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, "in_proj", "out_proj", "attn_out_proj", "mlp_out_proj")
        yield from left_dropouts(self, "mlp_drop")

    def fused_heads(self: Any, qkv: Tensor) -> Tensor:
        """(B, T, 3C) -> (B, T, C)"""
        dropout_p = self.attn_drop.p if self.training else 0.0
        if inert(self.q_norm) and inert(self.k_norm):
            return attend_packed(qkv, self.num_heads, dropout_p=dropout_p).flatten(2)
        q, k, v = unpack(qkv, self.num_heads)
        return attend(self.q_norm(q), self.k_norm(k), v, dropout_p=dropout_p).flatten(2)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        yield "activation of the MLP", 2 * self.in_split[0]
        if self.mlp_bias is not None:
            yield "bias of the MLP", 2 * self.in_split[0]
        out_proj = getattr(self, "out_proj", None)
        if out_proj is not None:
            yield "attention beside MLP", 2 * out_proj.in_features
        for name in ("q_norm", "k_norm"):
            yield from norm_in_pytorch(name, getattr(self, name))
        yield from norm_in_pytorch("in_norm", self.in_norm)

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        y, x = normed(self.in_norm, x, is_plain(self.in_proj))
        hidden, qkv = project(self.in_proj, y).split(
            (self.in_split[0], sum(self.in_split[1:])), dim=-1
        )
        hidden = hidden if self.mlp_bias is None else hidden + self.mlp_bias
        out = self.fused_heads(qkv)
        hidden = self.mlp_drop(self.mlp_act(hidden))
        folded = fold((self.ls, self.drop_path), x)
        out_proj = getattr(self, "out_proj", None)  # absent before timm 1.0.16
        if out_proj is not None:
            pairs = [(out_proj, torch.cat((out, hidden), dim=-1))]
        else:
            pairs = [(self.attn_out_proj, out), (self.mlp_out_proj, hidden)]
        if folded is None:
            return x + self.drop_path(self.ls(sum(project(m, h) for m, h in pairs)))
        gamma, rows = folded
        if gamma is not None:
            x = x.to(torch.promote_types(x.dtype, gamma.dtype))
        for module, h in pairs:  # x + s (a + b) = (x + s a) + s b
            epilogue = {"residual": x, "layer_scale": gamma, "row_scale": rows}
            x = project_out(module, None, h, epilogue)
        return x


class ParallelThingsBlock(Fused):
    """Branches side by side: x + sum_i attn_i(x), then x + sum_i mlp_i(x)."""

    fused_level = "block"
    fused_children = names("attns ffns")

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        return None if any(map(is_hooked, (*self.attns, *self.ffns))) else (x, extras)

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        for branches, name in ((self.attns, "attn"), (self.ffns, "mlp")):
            start = x
            for branch in branches:
                body = getattr(branch, name)
                bypass = bypassed(body)
                y, _ = normed(branch.norm, start, bypass and body.fused_reads_low())
                x = add_body(x, y, body, (branch.ls, branch.drop_path), body, bypass, {})
        return x
