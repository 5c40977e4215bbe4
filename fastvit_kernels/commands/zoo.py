"""torchvision, and what imports it, beside a torch that its binary is not for."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import library


@functools.cache
def define_torchvision_operators() -> None:
    """Let torchvision, and timm through it, be imported beside a torch that its binary is not for.

    Its import registers fake versions of two operators of that binary; its models are plain
    PyTorch, for which the operators' names are enough. Nothing happens where the binary loads.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for binary in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            continue
        return
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"torchvision::{name}", schema)
