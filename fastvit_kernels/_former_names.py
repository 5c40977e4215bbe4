"""Where former versions had their classes and functions: pickles name the module of each."""

from __future__ import annotations

import sys

from .models import modules, vit
from .ops.mlp import narrow
from .ops.norm import functions as norms
from .swap.hosts import fused, parts, timm, torch_nn, torchvision, transformers

FORMER_NAMES = {
    "ops.layer_norm": norms,
    "ops.narrow_mlp": narrow,
    "ops.rms_norm": norms,
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
