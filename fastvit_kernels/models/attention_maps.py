"""Attention probabilities of every layer, to look at; the kernels never store them.

    map[b, h, t, s] = softmax_s(q[b, t, h] . k[b, s, h] * D**-0.5)

The model runs on PyTorch's own math path, one step of which is the softmax; a dispatch mode keeps
what it gives.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..runtime.arguments import check_tensor
from ..runtime.backend import backend
from ..runtime.compat import SOFTMAXES, TorchDispatchMode


class _Softmaxes(TorchDispatchMode):
    """Keeps each softmax of (B, H, T, T) scores while a model runs."""

    def __init__(self):
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in SOFTMAXES and out.ndim == 4 and out.shape[-1] == out.shape[-2]:
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
    """Compute the softmax attention of each layer and head.

    Runs the model once in eval mode without gradients, so without dropout or DropPath: the maps
    depend on the images alone. Leaves modes, hooks and random state unchanged.

    Args:
        model: a VisionTransformer or any module with our Attention; or a model of timm,
            torchvision, transformers or torch.nn, swapped or not.
        images: what the model takes, (B, in_chans, height, width).
    Returns:
        One (B, H, T, T) fp32 tensor per layer, in execution order; row t is where token t looks.
        Memory: 4 B H T T bytes per layer.
    Precision: q and k as the model computes them, scores and softmax fp32.
    Raises: ValueError if the model computes no attention, as on an empty batch; TypeError for other
        models or images.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attention_maps: model must be an nn.Module, got {type(model).__name__}")
    check_tensor("attention_maps", "images", images)
    outside = torch.inference_mode(False)  # in it torch's attention is one call
    with outside, torch.no_grad(), _evaluating(model), _math_attention(), _Softmaxes() as seen:
        model(images)
    if not any(probabilities.numel() for probabilities in seen.maps):
        raise ValueError(f"attention_maps: {type(model).__name__} computes no attention")
    return seen.maps
