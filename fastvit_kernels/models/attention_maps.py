"""Attention probabilities of every layer, to look at; the kernels never store them.

    map[b, h, t, s] = softmax_s(q[b, t, h] . k[b, s, h] * D**-0.5)

A forward hook reads the output of each qkv projection while the model runs as usual.

Of another library's model the softmax of each attention is read, on PyTorch's own math path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.arguments import check_tensor
from ..runtime.backend import backend
from .modules import Attention

_SOFTMAXES = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)


def attention_probabilities(qkv: Tensor) -> Tensor:
    """(B, T, 3, H, D) -> (B, H, T, T) fp32, each row summing to 1; autocast is off inside."""
    with torch.autocast(qkv.device.type, enabled=False):
        q, k, _ = qkv.float().permute(2, 0, 3, 1, 4)
        scores = (q * qkv.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1)


def _qkv_of(module: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """The projection of an attention module, and the view of its output as (B, T, 3, H, D)."""
    if isinstance(module, Attention):
        return module.qkv, lambda y: y.unflatten(-1, (3, module.num_heads, module.head_dim))
    return None


class _Softmaxes(TorchDispatchMode):
    """Keeps each softmax of (B, H, T, T) scores while a model runs."""

    def __init__(self):
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _SOFTMAXES and out.ndim == 4 and out.shape[-1] == out.shape[-2]:
            self.maps.append(out.float())
        return out


@contextmanager
def _math_attention():
    """Attention of torch in single steps, one of which is the softmax."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with backend("torch"), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _evaluating(model: nn.Module):
    """Eval mode inside; restores every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Softmax attention of each layer and head.

    Runs the model once in eval mode without gradients, so without dropout or DropPath: the maps
    depend on the images alone. Leaves modes, hooks and random state unchanged.

    Args:
        model: a VisionTransformer or any module that contains our Attention; else a model of timm,
            torchvision, transformers or torch.nn, swapped or not.
        images: what the model takes, (B, in_chans, height, width).
    Returns:
        One (B, H, T, T) fp32 tensor per layer, in running order; row t is where token t looks.
        Memory: 4 B H T T bytes per layer.
    Precision: q and k as the model computes them, scores and softmax fp32.
    Raises: ValueError if the model computes no attention; TypeError for other models or images.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attention_maps: model must be an nn.Module, got {type(model).__name__}")
    check_tensor("attention_maps", "images", images)
    projections = [found for m in model.modules() if (found := _qkv_of(m)) is not None]
    maps: list[Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluating(model))
        if not projections:
            stack.enter_context(_math_attention())
            maps = stack.enter_context(_Softmaxes()).maps
        for qkv, packed in projections:

            def read(_module, _inputs, y: Tensor, packed=packed) -> None:
                maps.append(attention_probabilities(packed(y)))

            stack.callback(qkv.register_forward_hook(read).remove)
        model(images)
    if not maps:
        raise ValueError(f"attention_maps: {type(model).__name__} computes no attention")
    return maps
