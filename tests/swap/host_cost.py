"""What the facts cost at a call: CPU time of a swapped timm block and of the checks before it.

    python tests/swap/host_cost.py

PyTorch path, one thread, tiny tensors, so that host time is nearly all there is; the least of ten
runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from fastvit_kernels import set_backend, swap_in
from fastvit_kernels.commands.zoo import define_torchvision_operators


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
    from timm.models.vision_transformer import Block

    host = Block(64, 2, init_values=1e-5)
    block: Any = copy.deepcopy(host)
    swap_in(block)
    x = torch.randn(1, 5, 64)
    calls: dict[str, Callable[[], Any]] = {
        "host, forward": lambda: host(x),
        "swapped, forward": lambda: block(x),
        "swapped, forward and backward": lambda: block(x).sum().backward(),
        "of these: are the facts still true": block.fused_verdict,
        "of these: the arguments": lambda: block.fused_given((x,), {}),
    }
    times = {name: [cpu_time(call) for _ in range(10)] for name, call in calls.items()}
    for name, found in times.items():
        print(f"{name:<36} {min(found):8.1f} us")


if __name__ == "__main__":
    main()
