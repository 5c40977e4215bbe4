"""`train` in several processes, as torchrun would start them: run by test_train_distributed.py.

python tests/support/distributed_training.py FOLDER SCENARIO... runs each scenario into
FOLDER/SCENARIO and prints its name and the exit status of every rank. The ranks are forks of this
process, which saves the imports, and meet at a file. A process that kills itself does so at a named
point: in a step, or with half of a checkpoint written; no clock is read.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure
import rich.box
import rich.progress
import rich.table
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from small_training import shrink

from fastvit_kernels.commands import cli
from fastvit_kernels.commands.training import run as training

__all__ = ["matplotlib", "rich"]  # imported for the forks
START = ["--epochs", "2", "--batch", "64", "--no-check", "--device", "cpu", "--backend", "torch"]
RESUME = ["--resume", "--no-check", "--device", "cpu"]
# Name: for each start of the run, the number of processes, its words, the rank that dies and where.
SCENARIOS: dict[str, list[tuple[int, list[str], int | None, str]]] = {
    "one": [(0, START, None, "")],
    "ddp": [(2, START, None, "")],
    "fsdp": [(2, [*START, "--fsdp"], None, "")],
    "average": [(0, [*START, "--ema", "0.5"], None, "")],
    "averages": [(2, [*START, "--ema", "0.5", "--fsdp"], None, ""), (1, RESUME, None, "")],
    "step": [(2, START, 1, "step"), (1, RESUME, None, "")],
    "half": [(2, [*START, "--fsdp"], 1, "half"), (0, RESUME, None, "")],
    "term": [(2, START, 0, "term")],
    "grown": [(0, START, 0, "step"), (2, [*RESUME, "--fsdp"], None, "")],
    "bf16": [(2, [*START, "--fsdp", "--dtype", "bf16"], None, "")],
    "rows": [(3, [*START, "--batch", "67", "--epochs", "1"], None, "")],  # the last batch has two
    "few": [(2, [*START, "--batch", "1"], None, "")],
    "beside": [(2, [*START, "--compare"], None, "")],
}


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_me() -> None:
    """What torchrun does to the others when a process has ended."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def die_in_step(count: int, die: Callable[[], None] = kill_me) -> None:
    """End this process in its count-th step, between backward and optimizer."""
    clip, steps = torch.nn.utils.clip_grad_norm_, 0

    def counted(*arguments):
        nonlocal steps
        if steps == count:
            die()
        steps += 1
        return clip(*arguments)

    training.nn.utils.clip_grad_norm_ = counted


def die_half_way() -> None:
    """Kill this process in the checkpoint of the second epoch, before it gives its shards."""
    save, calls = training.Run.save, 0

    def counted(run: training.Run) -> None:
        nonlocal calls
        calls += 1
        return kill_me() if calls == 3 else save(run)

    training.Run.save = counted


def rank_of(rank: int, world: int, words: list[str], out: Path, dies: str, meeting: Path) -> int:
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if world:  # 0 stands for a process without torchrun
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group = functools.partial(
            dist.init_process_group, init_method=f"file://{meeting}", rank=rank, world_size=world
        )
    if dies == "step":
        die_in_step(5)  # of four steps an epoch: the second epoch's second
    elif dies == "term":
        die_in_step(5, end_me)
    elif dies == "half":
        die_half_way()
    return cli.main(["train", *words, "--out", str(out)])


def run(out: Path, world: int, words: list[str], dying: int | None, where: str) -> list[int]:
    """The exit status of each rank: negative where a signal ended it."""
    meeting = out.with_suffix(f".meeting{world}")
    pids = []
    for rank in range(max(world, 1)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = rank_of(rank, world, words, out, where if rank == dying else "", meeting)
            except SystemExit as left:
                status = int(left.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(status)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.compiler.reset()  # imports what the first step of an optimizer asks for
    shrink(203, 41)
    for name in names:
        statuses = [run(folder / name, *start) for start in SCENARIOS[name]]
        print(name, statuses, flush=True)


if __name__ == "__main__":
    main()
