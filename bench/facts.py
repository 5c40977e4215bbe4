"""`python -m bench facts`: what a figure depends on besides the code, in some lines."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

from bench.providers import SDPA_BACKENDS
from bench.rows import environment

PACKAGES = (
    "torch", "triton", "numpy", "timm", "transformers", "torchvision", "flash_attn",
    "flash_attn_interface", "xformers", "liger_kernel", "quack-kernels",
)  # fmt: skip


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def facts() -> list[str]:
    """Lines for a reader."""
    found = environment()
    lines = [f"{name}: {value}" for name, value in found.items() if value]
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info()
        lines.append(
            f"compute capability {p.major}.{p.minor}, {p.multi_processor_count} SMs, "
            f"{total / 2**30:.0f} GiB of which {free / 2**30:.0f} are free, L2 "
            f"{getattr(p, 'L2_cache_size', 0) / 2**20:.0f} MiB, CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()}"
        )
    lines.append(
        f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}"
    )
    lines.append(", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    lines.append("forced backends of SDPA: " + ", ".join(SDPA_BACKENDS))
    return lines


def run() -> int:
    """Print them; 1 where there is no GPU."""
    print(*facts(), sep="\n")
    return 0 if torch.cuda.is_available() else 1
