"""python -m tests.machine.device.exact sm_80|sm_90|cuda: calls whose every rounding is exact.

Small whole numbers have one right answer, in any order of sums: so the PTX machine and a GPU must
give the same bits, those of float64. Where both do, the machine is proved on what it ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import fastvit_kernels as fk

from .driver import ptx_machine

# By name: the call, and the shapes of what it takes.
CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (
        lambda x, weight, bias, residual, gamma, rates: fk.linear(
            x, weight, bias, residual=residual, layer_scale=gamma, row_scale=rates.detach()
        ),
        [(2, 37, 72), (104, 72), (104,), (2, 37, 104), (104,), (2,)],
    ),
    "patch_embed": (
        lambda images, weight, bias, prefix, positions: fk.patch_embed(
            images, weight, bias, prefix_tokens=prefix, pos_embed=positions
        ),
        [(2, 3, 24, 40), (72, 3, 8, 8), (72,), (1, 1, 72), (1, 16, 72)],
    ),
    "rope": (
        lambda q, k, cos, sin: torch.cat(
            fk.rope(q, k, cos.detach(), sin.detach(), prefix_tokens=1)
        ),
        [(2, 19, 3, 32), (2, 19, 3, 32), (18, 32), (18, 32)],
    ),
}


def step(call: Callable[..., Tensor], given: list[Tensor], device: str) -> list[Tensor]:
    """What a call gives, and the gradient of each of its arguments that has one."""
    given = [x.to(device).requires_grad_() for x in given]
    out = call(*given)
    dout = torch.randint(-1, 2, out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, given, dout, allow_unused=True)
    return [x.cpu() for x in (out.detach(), *grads) if x is not None]


def main(where: str) -> None:
    on_a_gpu = where == "cuda"
    for name, (call, shapes) in CALLS.items():
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randint(-1, 2, shape, generator=generator) for shape in shapes]
        with fk.backend("torch"):
            wanted = step(call, [x.double() for x in numbers], "cpu")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with fk.backend("triton") if on_a_gpu else ptx_machine(where):
                found = step(call, [x.to(dtype) for x in numbers], "cuda" if on_a_gpu else "cpu")
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b.to(a.dtype)), f"{name}, {dtype}: {tuple(a.shape)}"
    print("the bits of float64")


if __name__ == "__main__":
    main(sys.argv[1])
