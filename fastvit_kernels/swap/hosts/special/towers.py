"""transformers' vision towers with RMSNorm, qk-norm, RoPE or gated MLPs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....ops.linear.functions import linear
from ....runtime.arguments import autocast_dtype
from ....runtime.plain import is_plain
from .. import fused
from ..attend import HeadNorms, Turn, attend, by_keys, turn_of, turned
from ..fused import Given, Unfused, can_inline, example, names, project
from ..layers import SWIGLU, Attention, layer
from ..masks import BROADCAST
from ..mlp import Mlp
from ..roles import Body


class VJepaAttention(Attention):
    """V-JEPA 2: three thirds of a head turn by frame, row and column of their token."""

    fused_children = names("dropout")
    fused_roles = Attention.fused_roles._replace(
        projections=("query", "key", "value"),
        out="proj",
        dropout="dropout_prob",
        head_dim="attention_head_size",
    )
    fused_extra_kwargs = ("position_mask",)

    @staticmethod
    def fused_derived(copy: Any) -> dict[str, int]:
        return dict.fromkeys(("d_dim", "h_dim", "w_dim"), 2 * (copy.attention_head_size // 3 // 2))

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        derived = cls.fused_derived(module)
        same = all(getattr(module, name) == width for name, width in derived.items())
        return None if same else "its thirds of a head have other widths"

    def fused_others(self: Any, x: Tensor, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        yield {}
        most = self.grid_depth * self.grid_size**2
        yield {"position_mask": torch.randint(most, x.shape[:2], generator=generator)}

    def fused_heads(self: Any, x: Tensor, **extras: Any) -> Tensor:
        if (position_mask := extras.get("position_mask")) is None:
            position_mask = torch.arange(x.shape[1], device=x.device)
        frame, place = position_mask // self.grid_size**2, position_mask % self.grid_size**2
        axes = torch.stack((frame, place // self.grid_size, place % self.grid_size), -1)
        # In the dtype of q, as the host's: bf16 under autocast.
        dtype = autocast_dtype(x) or x.dtype
        omega = torch.arange(self.d_dim // 2, dtype=dtype, device=x.device) / (self.d_dim / 2.0)
        angles = axes.unsqueeze(-1) * (1.0 / 10000**omega)  # (..., T, 3, d_dim / 2)
        angles = torch.cat((angles, angles), dim=-1).flatten(-2)
        return self.fused_attend(x, turn=Turn(angles.cos(), angles.sin(), interleaved=True))


class Clippable(Unfused):
    """Gemma 4's Linear inside a module, where that does not clip."""

    fused_level = "epilogue"
    fused_children = names("linear")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return "it clips its values" if module.use_clipped_linears else None


class Clipped(Body):
    """Its Linears lie inside modules of their own, which are called where they do more."""

    def fused_child(self, name: str) -> Any:
        child: Any = super().fused_child(name)
        holds = isinstance(child, Clippable) and can_inline(child)
        return child.linear if holds and not child.use_clipped_linears else child  # type: ignore[attr-defined]


def _by_pairs(x: Tensor, axis: int, D: int) -> Tensor:
    """Columns of heads of D, four quarters (a, b) of x and (a, b) of y, in the order in which
    halves are pairs: the a's, then the b's. q and k may change places alike."""
    x = x.unflatten(axis, (-1, 2, 2, D // 4)).movedim(axis + 1, axis + 2)
    return x.flatten(axis, axis + 3)


class GemmaAttention(Clipped, Attention):
    """Gemma 4's: RMSNorm of q, k and v by head; a half of each head turns by x, the other by y."""

    fused_roles = Attention.fused_roles._replace(
        q_norm="q_norm", k_norm="k_norm", mask="attention_mask", masks=BROADCAST
    )
    fused_children = names("v_norm")
    fused_extra_kwargs = ("position_embeddings", "attention_mask", "position_ids")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return "k and v have fewer heads" if module.num_key_value_groups > 1 else None

    def fused_width(self: Any) -> int:
        """H D"""
        return getattr(self.q_proj, "linear", self.q_proj).out_features

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        if self.fused_norms() is None or not self.fused_accepts_autocast_input():
            yield "RoPE", 2 * 9 * self.fused_width()
        yield from fused.norm_in_pytorch("v_norm", self.v_norm, self.fused_width())

    def fused_others(self: Any, x: Tensor, generator: torch.Generator) -> Iterator[dict[str, Any]]:
        tables = [example(generator, *x.shape[:2], self.head_dim).detach() for _ in "cs"]
        places = torch.zeros(*x.shape[:2], 2, dtype=torch.long)
        yield {"position_embeddings": tuple(tables), "position_ids": places}

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        places, D, (B, T, _) = extras.get("position_ids"), self.head_dim, x.shape
        if not isinstance(places, Tensor) or places.shape[-1] != 2 or D % 4:
            return None
        turn = turn_of(extras.get("position_embeddings"), (B, 1, T, D))
        return (x, extras) if turn is not None and turn.cos.shape == (B, T, D) else None

    def fused_heads(self: Any, x: Tensor, **extras: Any) -> Tensor:
        tables, places = extras["position_embeddings"], extras["position_ids"]
        D, norms, mask = self.head_dim, self.fused_norms(), by_keys(extras.get("attention_mask"))
        q, k, v = self.fused_projections()
        if norms is not None and is_plain(q) and is_plain(k):
            cos, sin = (_by_pairs(t, 2, D) for t in tables)
            weights = [None if w is None else _by_pairs(w, 0, D) for w in norms[1:5]]
            both = linear(x, torch.cat([_by_pairs(m.weight, 0, D) for m in (q, k)]))
            q, k = both.unflatten(-1, (2, -1, D)).transpose(1, 3).unbind(2)
            norms = HeadNorms(norms.norm, *weights, eps=norms.eps)
            q, k = turned(q, k, Turn(cos, sin), norms)
        else:
            rotate = sys.modules[self.fused_host.__module__].apply_multidimensional_rope
            both = (q, self.q_norm), (k, self.k_norm)
            heads = [norm(project(m, x).unflatten(-1, (-1, D))) for m, norm in both]
            q, k = (rotate(t, *tables, places).transpose(1, 2) for t in heads)
        v, _ = fused.normed(self.v_norm, project(v, x).unflatten(-1, (-1, D)), True)
        return attend(
            q, k, v.transpose(1, 2), mask=mask, dropout_p=self.fused_dropout_p(), scale=self.scaling
        )


class GemmaMlp(Clipped, Mlp):
    fused_roles = SWIGLU.fused_roles


VJEPA = layer(
    "norm1",
    "attention",
    "drop_path",
    "norm2",
    "mlp",
    "drop_path",
    given=("position_mask",),
    result=(2, 0),
)
# Norms before and behind each branch; the latter add the residual.
GEMMA = layer(
    "input_layernorm",
    "self_attn",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp",
    "post_feedforward_layernorm",
    given=GemmaAttention.fused_extra_kwargs,
)
