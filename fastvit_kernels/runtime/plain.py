"""When a fused op may read a submodule's weights instead of calling it."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from .compat import has_global_hook, is_wrapper


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of `module` are watched: by a hook, its own or a global one, or by a forward
    set on the instance. Such a module must be called, not bypassed."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or has_global_hook()
    )


# What a dense parameter has; another one means that a subclass wants to see what is done with it.
OWN_FUNCTIONS = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
_LINEAR = nn.Linear.forward


def is_raw(tensor: Tensor) -> bool:
    """Whether an op may read the tensor's memory: dense, and of no subclass with rules of its own
    (a DTensor, a quantised weight, a weight with its own `__torch_function__`)."""
    kind = type(tensor)
    is_own = kind is Tensor or kind is nn.Parameter
    if not is_own and (kind.__torch_function__ not in OWN_FUNCTIONS or is_wrapper(tensor)):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `linear` is an nn.Linear as torch made it: no subclass, hook or parametrization,
    torch's own forward, and a dense weight.

    A LoRA or quantised layer has a `weight` too, but means something else by it; a hook wants to
    be called. Such a layer runs its own forward. (A parametrization changes the class.)
    """
    return (
        type(linear) is nn.Linear
        and nn.Linear.forward is _LINEAR
        and not is_hooked(linear)
        and is_raw(linear.weight)
        and (linear.bias is None or is_raw(linear.bias))
    )
