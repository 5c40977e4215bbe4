"""transformers' AttentionInterface: `attn_implementation="fastvit"`, and packed towers in one call.

Towers whose images lie one after the other (Qwen2-VL and its kin) call attention once for each
image, unless the name of the implementation says "flash": then once for all, with cu_seqlens. Under
that name, "fastvit_flash", it is one operator that Dynamo does not look into.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, library, nn

from ..ops.attention.launch import empty_dqkv
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.attention.varlen import (
    empty_fwd,
    varlen_attention,
    varlen_attention_bwd,
    varlen_attention_fwd,
    varlen_attention_ref,
)
from ..runtime.backend import reason_for_torch
from ..runtime.operator import NAMESPACE, operator

NAME, PACKED_NAME = "fastvit", "fastvit_flash"


def register_attention(model: nn.Module | None = None) -> None:
    """Register `attn_implementation="fastvit"` with transformers: attention and masks.

    Masks are made as for "sdpa". A second call changes nothing.

    Args:
        model: a transformers model; its vision towers of packed images (whose layers take
            cu_seqlens) use this attention from now on, in one call for all images. It is set in
            the towers' configs here, since transformers refuses a name with "flash" that it cannot
            import.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, function in ((NAME, fastvit_attention), (PACKED_NAME, packed_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    for module in () if model is None else model.modules():
        config: Any = getattr(module, "config", None)
        if (
            config is not None
            and "cu_seqlens" in inspect.signature(type(module).forward).parameters
        ):
            config._attn_implementation = PACKED_NAME


def fastvit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers' AttentionInterface wants them.

    Grouped heads, caches, biases and whatever else is asked for go to transformers' own sdpa.

    Args:
        query, key, value: (B, H, T, D) each.
    Returns: (B, T, H, D), and None for the probabilities.
    Raises: ValueError for attention sinks (s_aux).
    """
    grouped = getattr(module, "num_key_value_groups", 1) > 1
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"attn_implementation={NAME!r}: attention sinks (s_aux) have no kernel")
    extras = any(kwargs.get(name) is not None for name in ("cache", "position_bias", "softcap"))
    if grouped or extras or query.shape[2] != key.shape[2]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        asked: Any = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **asked)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal) and attention_mask is None,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `fastvit_attention`; where the tokens of a batch of one are several images', attention
    within each.

    Args:
        query, key, value: (1, H, total, D) each.
        cu_seq_lens_q: (images + 1,), from 0 to total: where each image begins.
        max_length_q: at least the tokens of the largest image; None: total.
    """
    if cu_seq_lens_q is None:
        asked: Any = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs)
        return fastvit_attention(module, query, key, value, attention_mask, **asked)
    if is_causal or attention_mask is not None:
        raise ValueError(f"attn_implementation={PACKED_NAME!r}: packed images take no mask")
    qkv = torch.stack((query[0], key[0], value[0])).permute(2, 0, 1, 3)
    longest = qkv.shape[0] if max_length_q is None else max_length_q
    cu_seqlens = cu_seq_lens_q.to(torch.int32)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropout > 0:
        out = varlen_attention(qkv, cu_seqlens, longest, scale=scale, dropout_p=dropout)
    else:
        out = packed_attention_op(qkv, cu_seqlens, longest, scale)[0]
    return out.unsqueeze(0), None


# The operator ---------------------------------------------------------------------------------


@operator(fake=empty_fwd)
def packed_attention_fwd(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(total, 3, H, D) -> out (total, H, D), lse; by PyTorch, lse is not written."""
    if reason_for_torch(qkv) is None:
        return varlen_attention_fwd.eager(qkv, cu_seqlens, None, max_seqlen, scale, 0.0)
    lse = empty_fwd(qkv, cu_seqlens, max_seqlen)[1]
    return varlen_attention_ref(qkv, cu_seqlens, max_seqlen, scale).contiguous(), lse


packed_attention_op = packed_attention_fwd.registered  # Dynamo of torch 2.10 calls no `Operator`


@operator(fake=empty_dqkv)
def packed_attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen: int,
    scale: float,
) -> Tensor:
    """dqkv (total, 3, H, D), contiguous; by PyTorch, the forward runs again."""
    if reason_for_torch(qkv) is None:
        saved = (dout, qkv, cu_seqlens, out, lse, None)
        return varlen_attention_bwd.eager(*saved, max_seqlen, scale, 0.0)
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        again = varlen_attention_ref(leaf, cu_seqlens, max_seqlen, scale)
    return torch.autograd.grad(again, leaf, dout)[0].contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(qkv, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, None, None, None]:
    return packed_attention_bwd(dout, *ctx.saved_tensors, *ctx.numbers), None, None, None


library.register_autograd(f"{NAMESPACE}::packed_attention_fwd", _backward, setup_context=_save)
