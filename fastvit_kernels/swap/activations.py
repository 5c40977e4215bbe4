"""Which activations of the host libraries have a kernel, by the name that our ops give them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from ..runtime.plain import is_hooked

# class path of an activation module -> our name for it
_ACTIVATIONS = {
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}


def is_activation(cls: type) -> bool:
    """Whether modules of this class are an activation that a kernel may compute instead."""
    return f"{cls.__module__}.{cls.__qualname__}" in _ACTIVATIONS


def activation_name(act: Any) -> str | None:
    """Our name of an activation module or function, None where it is another one."""
    if not isinstance(act, nn.Module):
        return "gelu" if act is F.gelu else None
    if is_hooked(act):
        return None
    cls = type(act)
    if cls is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}")
