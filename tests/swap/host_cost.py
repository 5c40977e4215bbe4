"""What a swapped model costs the host: a timm block with the check of its state, and twelve layers
at one image, beside their hosts.

    python tests/swap/host_cost.py

PyTorch path, one thread, tiny tensors, so that host time is nearly all there is; CPU time, host and
swapped in turns, the least of ten runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastvit_kernels import set_backend, swap_in
from fastvit_kernels.commands.zoo import define_torchvision_operators
from fastvit_kernels.swap import plans


def cpu_time(call: Callable[[], Any], count: int = 100) -> float:
    """Microseconds of CPU time a call."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e6


def main() -> None:
    torch.set_num_threads(1)
    define_torchvision_operators()
    set_backend("torch")
    import timm

    def both(module: Any, x: torch.Tensor) -> None:
        module(x).sum().backward()

    def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
        host = make()
        swapped = copy.deepcopy(host)
        swap_in(swapped)
        return host, swapped

    host, block = pair(lambda: timm.models.vision_transformer.Block(64, 2, init_values=1e-5))
    x = torch.randn(1, 5, 64)
    calls: dict[str, Callable[[], Any]] = {
        "block 64, host, forward": lambda: host(x),
        "block 64, swapped, forward": lambda: block(x),
        "of these: its state and plan": lambda: plans.plan_of(block),
        "block 64, host, forward and backward": lambda: both(host, x),
        "block 64, swapped, forward and backward": lambda: both(block, x),
    }
    images = torch.randn(1, 3, 32, 32)
    for C, H in ((64, 2), (192, 3)):
        settings = {"embed_dim": C, "num_heads": H, "img_size": 32}
        layers = partial(timm.create_model, "vit_tiny_patch16_224", **settings)
        for name, model in zip(("host", "swapped"), pair(layers), strict=True):
            calls[f"12 layers, {C}, {name}, forward"] = partial(model, images)
            calls[f"12 layers, {C}, {name}, forward and backward"] = partial(both, model, images)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(10):
        for name, call in calls.items():
            times[name].append(cpu_time(call, 10 if "12" in name else 100))
    for name, found in times.items():
        beside = times.get(name.replace("swapped", "host"), found)
        ratio = f"  {min(found) / min(beside):.2f}x host" if beside is not found else ""
        print(f"{name:<42} {min(found):8.1f} us{ratio}")


if __name__ == "__main__":
    main()
