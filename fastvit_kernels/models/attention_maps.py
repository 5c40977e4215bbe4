"""Attention probabilities of every layer, for looking at; the kernels themselves never store them.

    map[b, h, t, s] = softmax_s(q[b, t, h] . k[b, s, h] * D**-0.5)

A forward hook reads what each qkv projection gives while the model runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..runtime.arguments import check_tensor
from .modules import Attention


def attention_probabilities(qkv: Tensor) -> Tensor:
    """(B, T, 3, H, D) -> (B, H, T, T) fp32, the rows of which sum to 1; never under autocast."""
    with torch.autocast(qkv.device.type, enabled=False):
        q, k, _ = qkv.float().permute(2, 0, 3, 1, 4)
        scores = (q * qkv.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1)


def _qkv_of(module: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """The projection of an attention module, and the view of its output as (B, T, 3, H, D)."""
    if isinstance(module, Attention):
        return module.qkv, lambda y: y.unflatten(-1, (3, module.num_heads, module.head_dim))
    return None


@contextmanager
def _evaluating(model: nn.Module):
    """Eval mode inside; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Softmax attention of each layer and head.

    The model runs once in eval mode without gradients: no dropout, no dropped paths, so that the
    maps are a function of the images alone. Modes, hooks and random state are left as they were.

    Args:
        model: a VisionTransformer, or any module that holds our Attention modules.
        images: what the model takes, (B, in_chans, height, width).
    Returns:
        One (B, H, T, T) fp32 tensor a layer, in the order in which the layers run; row t says where
        token t looks. Memory: 4 B H T T bytes a layer.
    Precision: q and k as the model computes them, scores and softmax fp32.
    Raises: ValueError where the model holds no Attention; TypeError for another model or image.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attention_maps: model must be an nn.Module, got {type(model).__name__}")
    check_tensor("attention_maps", "images", images)
    projections = [found for m in model.modules() if (found := _qkv_of(m)) is not None]
    if not projections:
        raise ValueError(
            f"attention_maps: {type(model).__name__} holds no fastvit_kernels.Attention"
        )
    maps: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluating(model))
        for qkv, packed in projections:

            def read(_module, _inputs, y: Tensor, packed=packed) -> None:
                maps.append(attention_probabilities(packed(y)))

            stack.callback(qkv.register_forward_hook(read).remove)
        model(images)
    return maps
