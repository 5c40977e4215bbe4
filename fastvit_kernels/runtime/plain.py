"""When a fused op may read a submodule's weights instead of calling it, and what happens if not."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.modules.module as _torch_module
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody watches calls of `module`: a hook, its own or a global one, or a forward
    set on the instance. Such a module must be called, not jumped over."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    )


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `linear` is an nn.Linear as torch made it: no subclass, hook or parametrization,
    and a dense weight.

    A LoRA or quantised layer has a `weight` too, but means something else by it; a hook wants to
    be called. Such a layer runs its own forward. (A parametrization changes the class.)
    """
    return (
        type(linear) is nn.Linear
        and not is_hooked(linear)
        and not is_traceable_wrapper_subclass(linear.weight)  # torchao, DTensor
    )


def add_tokens(patches: Tensor, prefix_tokens: Tensor | None, pos_embed: Tensor | None) -> Tensor:
    """Patches with prefix tokens before them and positions added, for a projection that was called.

    Shapes: patches (B, P, C), prefix_tokens (1, n, C), pos_embed (1, P or n + P, C).
    """
    if pos_embed is not None and pos_embed.shape[1] == patches.shape[1]:
        patches, pos_embed = patches + pos_embed, None
    if prefix_tokens is not None:
        patches = torch.cat([prefix_tokens.expand(len(patches), -1, -1), patches], dim=1)
    return patches if pos_embed is None else patches + pos_embed


def add_branch(
    y: Tensor, residual: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None
) -> Tensor:
    """residual + row_scale * layer_scale * y, for a branch that did not end in a fused epilogue.

    Shapes: y and residual (B, ..., C), layer_scale (C,), row_scale (B,).
    """
    if layer_scale is not None:
        y = y * layer_scale
    if row_scale is not None:
        y = y * row_scale.view(-1, *[1] * (y.ndim - 1))
    return y if residual is None else residual + y
