"""Where 0.1.0 had its classes: a pickle of a model names the module of each, and still loads."""

from __future__ import annotations

import sys

from .models import modules, vit
from .swap.hosts import fused, parts, timm, torch_nn, torchvision, transformers

FORMER_NAMES = {
    "modules": modules,
    "vit": vit,
    "hosts.fused": fused,
    "hosts.parts": parts,
    "hosts.timm": timm,
    "hosts.torch_nn": torch_nn,
    "hosts.torchvision": torchvision,
    "hosts.transformers": transformers,
}
for _name, _module in FORMER_NAMES.items():
    sys.modules[f"{__package__}.{_name}"] = _module
