"""Initial weights of a VisionTransformer: timm's schemes, by timm's names."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from .gated_mlp import GluMlp, SwiGLU

WeightInit = Literal["", "skip", "reset", "jax", "jax_nlhb", "moco"]


def init_weights(model: nn.Module, mode: str, num_classes: int) -> None:
    """Draw what the modules of a model hold; "reset" keeps what their constructors drew.

    "" draws Linear weights from a truncated normal of 0.02, and zeroes their biases.
    """
    if mode == "reset":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _init_linear(module, name, mode)
            if name == "head" and mode == "jax_nlhb":  # every class as likely as another
                nn.init.constant_(module.bias, -math.log(num_classes))
        elif isinstance(module, nn.Conv2d) and mode.startswith("jax"):
            std = math.prod(module.weight.shape[1:]) ** -0.5 / 0.87962566103423978  # once truncated
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, (GluMlp, SwiGLU)):
            module.init_weights()


def _init_linear(linear: nn.Linear, name: str, mode: str) -> None:
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
        if mode.startswith("jax") and ".mlp." in name:
            nn.init.normal_(linear.bias, std=1e-6)
    if not mode:
        nn.init.trunc_normal_(linear.weight, std=0.02)
    elif mode == "moco" and name.endswith("qkv"):  # three matrices, not one
        bound = math.sqrt(6 / (linear.out_features // 3 + linear.in_features))
        nn.init.uniform_(linear.weight, -bound, bound)
    elif mode != "moco" and name == "head":
        nn.init.zeros_(linear.weight)
    else:
        nn.init.xavier_uniform_(linear.weight)


def fix_weights(blocks: nn.Module) -> None:
    """Divide what each branch adds by sqrt(2 l), l the number of its block."""
    for i, block in enumerate(blocks.children(), start=1):
        for name in ("attn.proj", "mlp.fc2"):
            block.get_parameter(f"{name}.weight").data.div_(math.sqrt(2 * i))
