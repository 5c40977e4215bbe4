"""Stateless layers for the `kernels` library, which puts a layer's forward in a model's own module.

A layer has no constructor and no members; `self` is the host's module, whose parameters it reads.
Each has the forward signature of what it stands for in transformers. Where the module is not what
the fused forward computes (a hook on a child, LoRA, a mask), these layers raise an error: use
swap_in there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .ops.mlp.functions import mlp
from .ops.norm.functions import layer_norm, rms_norm
from .runtime.plain import is_plain
from .swap.activations import activation_name


class LayerNorm(nn.Module):
    """For nn.LayerNorm over the last axis."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    bias: Tensor
    eps: float
    normalized_shape: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1:
            raise ValueError(f"LayerNorm: one axis is wanted, got {self.normalized_shape}")
        return layer_norm(input, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """For transformers' LlamaRMSNorm and its copies: Qwen2RMSNorm, Qwen3RMSNorm."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class ViTMLP(nn.Module):
    """For transformers' ViT, DeiT, DINOv2, CLIP and SigLIP MLPs: fc1, activation_fn, fc2."""

    has_backward = True
    can_torch_compile = True

    fc1: nn.Linear
    fc2: nn.Linear
    activation_fn: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        name = activation_name(self.activation_fn)
        if name is None or not (is_plain(self.fc1) and is_plain(self.fc2)):
            raise ValueError("ViTMLP: plain Linears and a known activation are wanted; see swap_in")
        return mlp(
            hidden_states,
            self.fc1.weight,
            self.fc1.bias,
            self.fc2.weight,
            self.fc2.bias,
            activation=name,
        )
