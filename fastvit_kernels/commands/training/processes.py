"""The processes of a run: one, or those that torchrun started. DDP and FSDP2 are torch's own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.vit import VisionTransformer
from ..console import CommandError
from ..options import chosen_device

T = TypeVar("T")
LAUNCH = "torchrun --nproc-per-node N -m fastvit_kernels train"
# What torch's backends say when a peer is gone; they raise plain RuntimeErrors.
_LOST = ("gloo", "nccl", "connection", "socket", "peer", "timed out")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run. The default is a run of one process alone."""

    rank: int = 0
    world: int = 1
    launched: bool = False  # by torchrun, if only one

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """The rows of a global batch of `count` that are this process's; they may be none."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def agree(self, action: Callable[[], T]) -> T:
        """What `action` returns in the first process, in all of them. Where it raises CommandError
        or OSError, the others end in silence with status 2."""
        if self.world == 1:
            return action()
        box: list[Any] = [False, None]
        error = None
        if self.first:
            try:
                box = [True, action()]
            except (CommandError, OSError) as refused:
                error = refused
        dist.broadcast_object_list(box)
        if error is not None:
            raise error
        if not box[0]:
            raise SystemExit(2)
        return box[1]


def join(arguments: argparse.Namespace) -> tuple[Processes, torch.device]:
    """This process among those of torchrun, or alone, and its device, of the kind that is given."""
    given = arguments.device
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if arguments.fsdp:
            raise CommandError(f"--fsdp shards over processes; start them with {LAUNCH} --fsdp")
        return Processes(), chosen_device(arguments)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = given or ("cuda" if seen else "cpu")
    if kind not in ("cpu", "cuda"):
        raise CommandError(f"--device {given}: torchrun gives each process a GPU; say cpu or cuda")
    if kind == "cuda" and local >= seen:
        raise CommandError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', local + 1)} processes on this machine, and torch "
            f"sees {seen} GPUs; --nproc-per-node {max(seen, 1)} or fewer, or --device cpu"
        )
    device, transport = torch.device("cpu"), "gloo"
    if kind == "cuda":
        device, transport = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    # Others wait while the first one reads images and runs the check batch.
    dist.init_process_group(transport, timeout=timedelta(hours=1))
    return Processes(dist.get_rank(), dist.get_world_size(), True), device


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the list of same-class siblings with most parameters."""
    lists: list[list[nn.Module]] = [[]]
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            kind, count = Counter(map(type, module)).most_common(1)[0]
            if count > 1:
                lists.append([child for child in module if type(child) is kind])
    return max(lists, key=lambda found: sum(p.numel() for m in found for p in m.parameters()))


def distribute(
    model: nn.Module, device: torch.device, fsdp: bool, dtype: torch.dtype | None
) -> nn.Module:
    """The model under DDP, or sharded in place by FSDP2, block by block: it gathers weights and
    computes in autocast's dtype, and reduces in fp32."""
    if not fsdp:
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            # Hosts carry parameters that no output reads, such as a mask token.
            find_unused_parameters=not isinstance(model, VisionTransformer),
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(dtype, reduce_dtype=None if dtype is None else torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def lost(error: BaseException) -> bool:
    """Whether an error means that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST)


@contextmanager
def ended_together(processes: Processes, say: Callable[[str], None]) -> Iterator[None]:
    """Say how far the run has come when another process ends it.

    torchrun sends SIGTERM to the others. The main thread may be inside a collective, where no
    Python handler runs, so a thread reads the signal from a pipe.
    """
    if not processes.launched or threading.current_thread() is not threading.main_thread():
        yield
        return
    once = threading.Lock()

    def end(reason: str) -> None:
        if once.acquire(blocking=False) and processes.first:
            say(reason)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                end("it was told to end (SIGTERM), as torchrun does when another process has ended")
                sys.stdout.flush()
                os._exit(128 + signal.SIGTERM)

    handler = signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of its own fills the pipe
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if not lost(error):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0]
        end(f"another process of the run has ended ({reason})")
        raise SystemExit(1) from error
    finally:
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGTERM, handler)
        os.close(writer)
        thread.join(1)
        os.close(reader)
