"""DDP and FSDP2 around a swapped model, and FSDP2 before it: the host's gradients, no break."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from torch import distributed as dist, multiprocessing

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

DEPTH = 2


def ddp(model, swap):
    swap(model)
    return torch.nn.parallel.DistributedDataParallel(model)


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def swap_then_shard(model, swap):
    swap(model, regional=True)
    return shard(model)


def shard_then_swap(model, swap):
    shard(model)
    with pytest.raises(ValueError, match=r"already sharded.*give regional=True"):
        swap(model)
    swap(model, regional=True)
    return model


def shard_checkpointed(model, swap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    swap(model, regional=True)
    blocks = list(model.blocks)
    apply_activation_checkpointing(model, check_fn=lambda m: any(m is b for b in blocks))
    return shard(model)


WAYS = [ddp, swap_then_shard, shard_then_swap, shard_checkpointed]


def grads_of(model):
    found = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")] = grad
    return found


def work(rank, store, results):
    from fastvit_kernels.runtime.compat import define_torchvision_operators

    define_torchvision_operators()
    from swapped import images, vit

    from fastvit_kernels import status, swap_in

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    host, batches = vit(DEPTH), [images(seed=0), images(seed=1)]
    sum(host(x).square().sum() / 2 for x in batches).backward()
    wanted = grads_of(host)
    for way in WAYS:
        dynamo.reset()
        dynamo.utils.counters.clear()
        model = way(vit(DEPTH), swap_in)
        for _ in range(2):
            model.zero_grad()
            model(batches[rank]).square().sum().backward()
        grads = grads_of(model)
        errors = [float((grads[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items()]
        breaks = sum(dynamo.utils.counters["graph_break"].values())
        if rank == 0:
            results[way.__name__] = (max(errors), len(status(model).graphs), breaks)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.minutes
def test_ddp_and_fsdp2_give_the_hosts_gradients(tmp_path):
    """Processes meet at a file: a port that is free now may be another's when they are there."""
    results = multiprocessing.Manager().dict()
    multiprocessing.spawn(work, (tmp_path / "store", results), 2)
    for way in WAYS:
        error, graphs, breaks = results[way.__name__]
        assert error < 1e-4, way.__name__
        assert breaks == 0, way.__name__
        assert graphs == (1 if way is ddp else DEPTH), way.__name__
