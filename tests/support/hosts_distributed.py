"""Two gloo processes on the CPU train a swapped model; run by tests/swap/test_swap_distributed.py.

python hosts_distributed.py OUT: the losses of STEPS steps for each of KINDS, by one process and by
two, which share a batch of the same size. All are forks of this process, which saves the imports.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

KINDS = ("ddp", "fsdp2", "fsdp2_checkpoint", "fsdp2_mixed_checkpoint", "fsdp2_policy_checkpoint")
STEPS, BATCH = 4, 4


def build() -> Any:
    import timm

    from fastvit_kernels import swap_in
    from tests.model_coverage.compare import randomize

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_base_patch14_dinov2", img_size=28, embed_dim=32, depth=2, num_heads=2, num_classes=7
    )
    randomize(model)
    assert swap_in(model).level == "block"
    return model


def wrap(model: Any, kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if "checkpoint" in kind:
        from private import checkpoint_blocks, checkpoint_wrapper

        from fastvit_kernels import checkpoint_policy

        block, options = type(model.blocks[0]), {}
        if "policy" in kind:
            options = {"context_fn": checkpoint_policy("attention").context_fn}
        checkpoint_blocks(
            model, partial(checkpoint_wrapper, **options), lambda m: isinstance(m, block)
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if "mixed" in kind:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 28, 28, generator=generator)
    return images, torch.randint(0, 7, (BATCH,), generator=generator)


def train(model: nn.Module, rank: int, world: int) -> list[float]:
    images, labels = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    share = BATCH // world
    mine = slice(rank * share, (rank + 1) * share)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(images[mine]).float(), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def mixed_losses(model: nn.Module) -> list[float]:
    """What FSDP2's mixed precision does, in one process: bf16 forward, fp32 gradients and step."""
    images, labels = batch()
    low = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        with torch.no_grad():
            for p, q in zip(low.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        halves, total = [], 0.0
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            low.zero_grad()
            logits = low(images[half].bfloat16()).float()
            loss = nn.functional.cross_entropy(logits, labels[half])
            loss.backward()
            total += loss.item() / 2
            halves.append([p.grad.float() for p in low.parameters()])
        for p, first, second in zip(model.parameters(), *halves, strict=True):
            p.grad = (first + second) / 2
        optimizer.step()
        losses.append(total)
    return losses


def run(kind: str, rank: int, world: int) -> list[float]:
    from fastvit_kernels import set_backend

    # The interpreter is slow: the wrappers see the same modules whichever backend runs.
    set_backend("auto" if kind == "ddp" or "policy" in kind else "torch")
    model = build()
    if world > 1:
        return train(wrap(model, kind), rank, world)
    return mixed_losses(model) if "mixed" in kind else train(model, 0, 1)


def rank_of(rank: int, world: int, out: str) -> None:
    if world > 1:
        meeting = f"file://{out}.meeting"  # a file, because a free port may be taken meanwhile
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    losses = {kind: run(kind, rank, world) for kind in KINDS}
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(losses, f"{out}/{world}.pt")


def main() -> int:
    """0 where every process has ended well."""
    from fast_interpreter import make_fast
    from interpreter import mend_interpreter

    from fastvit_kernels.runtime.compat import define_torchvision_operators

    mend_interpreter()
    make_fast()
    define_torchvision_operators()
    torch.set_num_threads(1)
    torch.compiler.reset()  # imports what the first step of an optimizer asks for
    build()  # what it imports, before the forks
    pids = []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rank_of(rank, world, sys.argv[1])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
