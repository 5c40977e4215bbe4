"""Lets torchvision, and timm and transformers through it, be imported beside a CPU-only torch.

torchvision's import registers fake versions of two operators of its own binary, and fails where
that binary was built for another torch. Its ViT is plain PyTorch: the names alone are enough.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # a definition lasts as long as its Library


def define_torchvision_operators() -> None:
    """Define torchvision::nms and torchvision::qnms unless torchvision's binary brings them."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _libraries:
        return
    for binary in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            continue
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms" + _SIGNATURE)
    library.define("qnms" + _SIGNATURE)
    _libraries.append(library)
