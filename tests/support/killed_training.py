"""`train`, killed with SIGKILL at chosen points and resumed until it is done.

python tests/support/killed_training.py FOLDER MOMENT... runs one training for each moment into
FOLDER/MOMENT and prints, for each process, how it ended. A moment is where the process kills
itself: "half" way through the bytes of a file that it writes (checkpoint.pt, metrics.csv),
"written" but not yet renamed, "renamed", each once for every file; in a "step" between backward and
the optimizer; or "never". No clock is read: the points are the same on every machine. Each process
is a fork of this one, which saves the imports and computes nothing itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib.figure
import rich.box
import rich.progress
import rich.table
import torch
from small_training import shrink

from fastvit_kernels.commands import cli
from fastvit_kernels.commands.training import checkpoint, run as training
from fastvit_kernels.runtime import files

__all__ = ["matplotlib", "rich"]  # imported for the forks
EPOCHS = 2
OPTIONS = ["--epochs", str(EPOCHS), "--batch", "64", "--no-check", "--device", "cpu"]
OPTIONS += ["--drop-path", "0.3", "--backend", "torch"]
# One for each process; a process begins at its last checkpoint: in the first epoch's first step of
# four, in its third, in the second epoch's second.
DEADLY_STEPS = (0, 2, 5)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _HalfFile:
    """A file of which half of what is written arrives, and then the process is gone."""

    def __init__(self, file: BinaryIO):
        self.file = file

    def write(self, content: Any) -> int:
        self.file.write(bytes(content)[: max(1, len(content) // 2)])
        self.file.flush()
        kill_me()
        return 0

    def flush(self) -> None:
        self.file.flush()


def die_in_step(count: int) -> None:
    """Kill this process in its count-th step (0 is the first)."""
    clip, steps = torch.nn.utils.clip_grad_norm_, 0

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        if steps == count:
            kill_me()
        steps += 1
        return clip(*arguments)

    training.nn.utils.clip_grad_norm_ = counted


def die_at(moment: str, count: int) -> None:
    """Kill this process at the given moment of its count-th file (0 is the first)."""
    write_atomically, replace = files.write_atomically, os.replace
    written = 0

    def counted(path: Path, write: Callable[[Any], object]) -> None:
        nonlocal written
        mine, written = written == count, written + 1

        def replace_or_die(source: Any, target: Any) -> None:
            if moment == "written":
                kill_me()
            replace(source, target)
            if moment == "renamed":
                kill_me()

        if not mine:
            return write_atomically(path, write)
        if moment == "half":
            return write_atomically(path, lambda file: write(_HalfFile(file)))
        files.os.replace = replace_or_die
        try:
            return write_atomically(path, write)
        finally:
            files.os.replace = replace

    files.write_atomically = counted


def run(folder: Path, moment: str, count: int) -> int:
    """The exit status of the count-th process of a run: negative where a signal ended it."""
    started = (folder / "checkpoint.pt").exists()
    words = ["train", *(["--resume", "--no-check", "--device", "cpu"] if started else OPTIONS)]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            output = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if moment == "step" and count < len(DEADLY_STEPS):
                die_in_step(DEADLY_STEPS[count])
            elif moment in ("half", "written", "renamed"):
                die_at(moment, count % 4)  # one file later than the last: all of them are met
            status = cli.main([*words, "--out", str(folder)])
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    folder, moments = Path(sys.argv[1]), sys.argv[2:]
    torch.compiler.reset()  # imports what the first step of an optimizer asks for
    shrink(200, 40)
    for moment in moments:
        statuses = []
        for count in range(20):
            statuses.append(run(folder / moment, moment, count))
            if (folder / moment / "checkpoint.pt").exists():
                content = checkpoint.load(folder / moment / "checkpoint.pt")  # whole at any moment
                if statuses[-1] == 0 and len(content["history"]) == EPOCHS:
                    break
        print(moment, *statuses, flush=True)


if __name__ == "__main__":
    main()
