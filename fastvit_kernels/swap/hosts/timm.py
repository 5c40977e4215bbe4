"""timm: the blocks and parts of its Vision Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.layer_norm import layer_norm
from ...ops.linear import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_hooked, is_plain
from .. import hosts
from .attend import attend, attend_packed, attend_weights, unpack
from .fused import (
    DropPath,
    Fused,
    LayerNorm,
    LayerScale,
    Left,
    add_body,
    fold,
    inert,
    is_dense,
    jumpable,
    left_dropouts,
    left_linears,
    names,
    normed,
    pre_norm_branch,
    project,
    project_out,
)
from .parts import GluMlp, Mlp, SwiGLU


class LayerNormFp32(LayerNorm):
    """LayerNorm that reads fp32 and writes x.dtype, autocast or not."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not is_dense(x):
            return self.host_forward(x)
        return layer_norm(x, self.weight, self.bias, self.eps, out_dtype=x.dtype)

    def and_input(self: Any, x: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        return super().and_input(x, out_dtype or x.dtype)


class Attention(Fused):
    """qkv -> q_norm, k_norm -> attention -> norm -> gate -> proj -> proj_drop."""

    level = "attention"
    children_known = names("qkv q_norm k_norm attn_drop norm gate proj proj_drop")

    def blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, "qkv", "q_proj", "k_proj", "v_proj", "gate", "proj")
        yield from left_dropouts(self, "proj_drop")

    def reads_low(self: Any) -> bool:
        return self.qkv is not None and is_plain(self.qkv) and self._gate() is None

    def draws(self: Any) -> bool:
        return not inert(self.proj_drop)

    def _gate(self: Any) -> nn.Module | None:
        return getattr(self, "gate", None)  # absent before timm 1.0.22

    def _dropout_p(self: Any) -> float:
        return self.attn_drop.p if self.training else 0.0

    def _heads(self: Any, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        if inert(self.q_norm) and inert(self.k_norm):
            if is_plain(self.qkv):
                return attend_weights(
                    x, self.qkv.weight, self.qkv.bias, self.num_heads, dropout_p=self._dropout_p()
                )
            return attend_packed(self.qkv(x), self.num_heads, dropout_p=self._dropout_p())
        q, k, v = unpack(project(self.qkv, x), self.num_heads)
        return attend(self.q_norm(q), self.k_norm(k), v, dropout_p=self._dropout_p())

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None, **context: Any,
    ) -> Tensor:  # fmt: skip
        gate = self._gate()
        gate = None if gate is None else project(gate, x).sigmoid()
        out = self._heads(x, **context).flatten(2)
        norm = getattr(self, "norm", None)
        out = out if norm is None or inert(norm) else norm(out)
        out = out if gate is None else out * gate
        return project_out(self.proj, self.proj_drop, out, residual, layer_scale, row_scale)

    def forward(self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal or not is_dense(x) or self.blocked():
            return self.host_forward(x, attn_mask=attn_mask, is_causal=is_causal)
        return self.branch(x)


def _biased_qkv(self: Any, x: Tensor) -> Tensor:
    """qkv of a module that holds q_bias and v_bias apart, beside a k_bias of zeros."""
    if self.q_bias is None:
        return project(self.qkv, x)
    bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
    if is_plain(self.qkv):
        return linear(x, self.qkv.weight, bias)
    return self.qkv(x) + bias


def _lost_qkv(module: Any) -> str | None:
    """The host reads its qkv's weight beside biases of its own, without calling it."""
    if getattr(module, "q_bias", None) is None or is_plain(module.qkv):
        return None
    return "its qkv is replaced, and the host reads only the weight"


class RopeAttention(Attention):
    """EvaAttention and AttentionRope: q and k are rotated by PyTorch between qkv and attention."""

    children_known = Attention.children_known | names("q_proj k_proj v_proj q_bias v_bias")

    def blocked(self: Any) -> str | None:
        return _lost_qkv(self) or super().blocked()

    def reads_low(self: Any) -> bool:
        separate = (self.q_proj, self.k_proj, self.v_proj)
        projections = separate if self.qkv is None else (self.qkv,)
        return all(is_plain(m) for m in projections) and self._gate() is None

    def _heads(self: Any, x: Tensor, rope: Tensor | None = None) -> Tensor:
        if self.qkv is None:
            q, k, v = (
                project(m, x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for m in (self.q_proj, self.k_proj, self.v_proj)
            )
        else:
            has_bias = getattr(self, "q_bias", None) is not None
            qkv = _biased_qkv(self, x) if has_bias else project(self.qkv, x)
            q, k, v = unpack(qkv, self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (self._rotate(t, rope).type_as(v) for t in (q, k))
        groups = getattr(self, "num_kv_groups", 1)
        if groups > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return attend(q, k, v, dropout_p=self._dropout_p())

    def _rotate(self: Any, x: Tensor, rope: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        first = self.num_prefix_tokens
        half = getattr(self, "rotate_half", False)
        rotated = apply_rot_embed_cat(x[:, :, first:], rope, half=half)
        return torch.cat([x[:, :, :first], rotated], dim=2)

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Any = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or is_causal or not is_dense(x) or self.blocked():
            return self.host_forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        return self.branch(x, rope=rope)


class BeitAttention(Attention):
    """BEiT's: the relative position bias is an additive mask."""

    children_known = names(
        "qkv q_bias v_bias relative_position_bias_table attn_drop proj proj_drop"
    )

    def blocked(self: Any) -> str | None:
        return _lost_qkv(self) or super().blocked()

    def _heads(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        mask = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            mask = self._get_rel_pos_bias()
            mask = mask if shared_rel_pos_bias is None else mask + shared_rel_pos_bias
        q, k, v = unpack(_biased_qkv(self, x), self.num_heads)
        return attend(q, k, v, mask=mask, dropout_p=self._dropout_p())

    def forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        if not is_dense(x) or self.blocked():
            return self.host_forward(x, shared_rel_pos_bias)
        return self.branch(x, shared_rel_pos_bias=shared_rel_pos_bias)


class RelPosAttention(Attention):
    """The relative position bias comes from a child or is shared by the layers."""

    children_known = names("qkv q_norm k_norm rel_pos attn_drop proj proj_drop")

    def _heads(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        mask = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        q, k, v = unpack(project(self.qkv, x), self.num_heads)
        return attend(self.q_norm(q), self.k_norm(k), v, mask=mask, dropout_p=self._dropout_p())

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        if not is_dense(x) or self.blocked():
            return self.host_forward(x, shared_rel_pos)
        return self.branch(x, shared_rel_pos=shared_rel_pos)


class Block(Fused):
    """x = x + drop_path1(ls1(attn(norm1(x))));  x = x + drop_path2(ls2(mlp(norm2(x))))"""

    level = "block"
    children_known = names("norm1 attn ls1 drop_path1 norm2 mlp ls2 drop_path2")
    pieces = ("norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")
    bodies = ("attn", "mlp")

    def forward(self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        if not is_dense(x):
            return self.host_forward(x, attn_mask=attn_mask, is_causal=is_causal)
        jump = attn_mask is None and not is_causal

        def call(y: Tensor) -> Tensor:
            return self.attn(y, attn_mask=attn_mask, is_causal=is_causal)

        x = pre_norm_branch(
            x, self.norm1, self.attn, self.ls1, self.drop_path1, call=call, jump=jump
        )
        return pre_norm_branch(x, self.norm2, self.mlp, self.ls2, self.drop_path2)


class EvaBlock(Fused):
    """Block with RoPE and with LayerScale as parameters of its own."""

    level = "block"
    children_known = names("norm1 attn gamma_1 drop_path1 norm2 mlp gamma_2 drop_path2")
    pieces = ("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2")
    bodies = ("attn", "mlp")

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Any = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        if not is_dense(x):
            return self.host_forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        jump = attn_mask is None and not is_causal

        def call(y: Tensor) -> Tensor:
            return self.attn(y, rope=rope, attn_mask=attn_mask, is_causal=is_causal)

        x = pre_norm_branch(
            x, self.norm1, self.attn, self.gamma_1, self.drop_path1,
            call=call, jump=jump, rope=rope,
        )  # fmt: skip
        return pre_norm_branch(x, self.norm2, self.mlp, self.gamma_2, self.drop_path2)


class BeitBlock(Fused):
    """BEiT's block: LayerScale as parameters, a bias shared by the layers."""

    level = "block"
    children_known = EvaBlock.children_known
    pieces, bodies = EvaBlock.pieces, EvaBlock.bodies

    def forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        if not is_dense(x):
            return self.host_forward(x, shared_rel_pos_bias)

        def call(y: Tensor) -> Tensor:
            return self.attn(y, shared_rel_pos_bias=shared_rel_pos_bias)

        x = pre_norm_branch(
            x, self.norm1, self.attn, self.gamma_1, self.drop_path1,
            call=call, shared_rel_pos_bias=shared_rel_pos_bias,
        )  # fmt: skip
        return pre_norm_branch(x, self.norm2, self.mlp, self.gamma_2, self.drop_path2)


class RelPosBlock(Fused):
    """Block whose attention takes a relative position bias."""

    level = "block"
    children_known = Block.children_known
    pieces, bodies = Block.pieces, Block.bodies

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        if not is_dense(x):
            return self.host_forward(x, shared_rel_pos)

        def call(y: Tensor) -> Tensor:
            return self.attn(y, shared_rel_pos=shared_rel_pos)

        x = pre_norm_branch(
            x, self.norm1, self.attn, self.ls1, self.drop_path1,
            call=call, shared_rel_pos=shared_rel_pos,
        )  # fmt: skip
        return pre_norm_branch(x, self.norm2, self.mlp, self.ls2, self.drop_path2)


class ResPostBlock(Fused):
    """x = x + drop_path1(norm1(attn(x))), then the MLP: a norm stands between every branch and its
    residual, so that nothing fuses across children and the host's forward on fused children is
    the widest there is."""

    level = "block"
    children_known = names("norm1 attn drop_path1 norm2 mlp drop_path2")
    pieces = ("attn", "norm1", "mlp", "norm2")
    bodies = ("attn", "mlp")


class ParallelScalingBlock(Fused):
    """x + drop_path(ls(attn_out_proj(attention) + mlp_out_proj(act(mlp)))) after one in_proj."""

    level = "block"
    children_known = names(
        "in_norm in_proj mlp_bias q_norm k_norm attn_drop mlp_drop mlp_act out_proj attn_out_proj "
        "mlp_out_proj ls drop_path"
    )
    pieces = ("in_norm", "ls", "drop_path")

    def blocked(self: Any) -> str | None:
        return None if self.fused_attn else "fused_attn is False: it forms the scores"

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, "in_proj", "out_proj", "attn_out_proj", "mlp_out_proj")
        yield from left_dropouts(self, "mlp_drop")

    def _in(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if jumpable(self.in_norm):
            low = autocast_dtype(x) if is_plain(self.in_proj) else None
            return self.in_norm.and_input(x, low)
        return self.in_norm(x), x

    def _heads(self: Any, qkv: Tensor) -> Tensor:
        """(B, T, 3C) -> (B, T, C)"""
        dropout_p = self.attn_drop.p if self.training else 0.0
        if inert(self.q_norm) and inert(self.k_norm):
            return attend_packed(qkv, self.num_heads, dropout_p=dropout_p).flatten(2)
        q, k, v = unpack(qkv, self.num_heads)
        return attend(self.q_norm(q), self.k_norm(k), v, dropout_p=dropout_p).flatten(2)

    def forward(self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        masked = attn_mask is not None or is_causal
        if masked or not is_dense(x) or self.blocked():
            return self.host_forward(x, attn_mask=attn_mask, is_causal=is_causal)
        y, x = self._in(x)
        hidden, qkv = project(self.in_proj, y).split(
            (self.in_split[0], sum(self.in_split[1:])), dim=-1
        )
        hidden = hidden if self.mlp_bias is None else hidden + self.mlp_bias
        out = self._heads(qkv)
        hidden = self.mlp_drop(self.mlp_act(hidden))
        epilogue = fold((self.ls, self.drop_path), x)
        if self.out_proj is not None:
            pairs = [(self.out_proj, torch.cat((out, hidden), dim=-1))]
        else:
            pairs = [(self.attn_out_proj, out), (self.mlp_out_proj, hidden)]
        if epilogue is None:
            return x + self.drop_path(self.ls(sum(project(m, h) for m, h in pairs)))
        gamma, rows = epilogue
        if gamma is not None:
            x = x.to(torch.promote_types(x.dtype, gamma.dtype))
        for module, h in pairs:  # x + s (a + b) = (x + s a) + s b
            x = project_out(module, None, h, x, gamma, rows)
        return x


class ParallelThingsBlock(Fused):
    """Branches side by side: x + sum_i attn_i(x), then x + sum_i mlp_i(x)."""

    level = "block"
    children_known = names("attns ffns")

    def forward(self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        hooked = any(is_hooked(m) for m in (*self.attns, *self.ffns))
        if attn_mask is not None or is_causal or hooked or not is_dense(x):
            return self.host_forward(x, attn_mask=attn_mask, is_causal=is_causal)
        for branches, name in ((self.attns, "attn"), (self.ffns, "mlp")):
            start = x
            for branch in branches:
                body = getattr(branch, name)
                jump = jumpable(body)
                y = normed(branch.norm, start, body if jump else None)
                x = add_body(x, y, body, (branch.ls, branch.drop_path), body, jump, {})
        return x


TABLE: dict[str, type[Fused]] = {
    "timm.layers.attention.Attention": Attention,
    "timm.layers.attention.AttentionRope": RopeAttention,
    "timm.layers.drop.DropPath": DropPath,
    "timm.layers.layer_scale.LayerScale": LayerScale,
    "timm.layers.mlp.GluMlp": GluMlp,
    "timm.layers.mlp.Mlp": Mlp,
    "timm.layers.mlp.SwiGLU": SwiGLU,
    "timm.layers.norm.LayerNorm": LayerNorm,
    "timm.layers.norm.LayerNormFp32": LayerNormFp32,
    "timm.models.beit.Attention": BeitAttention,
    "timm.models.beit.Block": BeitBlock,
    "timm.models.eva.EvaAttention": RopeAttention,
    "timm.models.eva.EvaBlock": EvaBlock,
    "timm.models.vision_transformer.Block": Block,
    "timm.models.vision_transformer.ParallelScalingBlock": ParallelScalingBlock,
    "timm.models.vision_transformer.ParallelThingsBlock": ParallelThingsBlock,
    "timm.models.vision_transformer.ResPostBlock": ResPostBlock,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelPosAttention,
    "timm.models.vision_transformer_relpos.RelPosBlock": RelPosBlock,
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": ResPostBlock,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
