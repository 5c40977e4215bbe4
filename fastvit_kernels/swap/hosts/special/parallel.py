"""timm: the blocks of its Vision Transformers whose branches are no chain."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....runtime.plain import is_plain
from .. import fused
from ..attend import attend, attend_qkv, unpack
from ..attention import AttentionRoles
from ..block import Block, BlockRoles
from ..branch import Step, fold, is_foldable
from ..fused import Fused, is_noop, names, norm_in_pytorch, project


class ParallelScalingBlock(Fused):
    """x + drop_path(ls(attn_out_proj(attention) + mlp_out_proj(act(mlp)))) after one in_proj."""

    fused_level = "block"
    fused_roles = AttentionRoles(
        ("in_proj", "out_proj", "mlp_out_proj"),
        out="attn_out_proj",
        dropout="attn_drop",
        after="mlp_drop",
    )
    fused_children = names("in_norm mlp_bias q_norm k_norm mlp_act ls drop_path")
    fused_pieces = ("in_norm", "ls", "drop_path")

    def fused_blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def fused_heads(self: Any, qkv: Tensor) -> Tensor:
        """(B, T, 3C) -> (B, T, C)"""
        dropout_p = self.attn_drop.p if self.training else 0.0
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        if is_noop(self.q_norm) and is_noop(self.k_norm):
            return attend_qkv(qkv, dropout_p=dropout_p).flatten(2)
        q, k, v = unpack(qkv)
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
        y, x = fused.normed(self.in_norm, x, is_plain(self.in_proj))
        hidden, qkv = project(self.in_proj, y).split(
            (self.in_split[0], sum(self.in_split[1:])), dim=-1
        )
        hidden = hidden if self.mlp_bias is None else hidden + self.mlp_bias
        out = self.fused_heads(qkv)
        hidden = self.mlp_drop(self.mlp_act(hidden))
        tail = self.ls, self.drop_path
        out_proj = getattr(self, "out_proj", None)  # absent before timm 1.0.16
        if out_proj is not None:
            pairs = [(out_proj, torch.cat((out, hidden), dim=-1))]
        else:
            pairs = [(self.attn_out_proj, out), (self.mlp_out_proj, hidden)]
        if not is_foldable(tail):
            return x + self.drop_path(self.ls(sum(project(m, h) for m, h in pairs)))
        gamma, rows = fold(tail, x)
        if gamma is not None:
            x = x.to(torch.promote_types(x.dtype, gamma.dtype))
        for module, h in pairs:  # x + s (a + b) = (x + s a) + s b
            epilogue = {"residual": x, "layer_scale": gamma, "row_scale": rows}
            x = fused.project_out(module, None, h, epilogue)
        return x


@cache
def _things(attns: int, ffns: int) -> BlockRoles:
    steps = []
    branches = [f"attns.{i}" for i in range(attns)] + [f"ffns.{i}" for i in range(ffns)]
    for i, name in enumerate(branches):
        source, body = (0, "attn") if i < attns else (attns, "mlp")
        tail = f"{name}.ls", f"{name}.drop_path"
        steps.append(Step(i + 1, source, i, f"{name}.norm", f"{name}.{body}", tail))
    return BlockRoles(tuple(steps), tuple(branches))


class ParallelThingsBlock(Block):
    """Branches side by side: x + sum_i attn_i(x), then x + sum_i mlp_i(x)."""

    @property
    def fused_roles(self: Any) -> BlockRoles:  # type: ignore[override]
        return _things(len(self.attns), len(self.ffns))

    fused_children = names("attns ffns")

    def fused_rebuilds(self, step: Step) -> bool:
        return False  # several norms read one sum
