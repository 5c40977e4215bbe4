"""`python -m bench warm`: the first launches at the targets' shapes, side by side, to compile.

Each case runs once forward and backward in a process of its own, so that Triton's and the
compiler's caches are full when the timing begins; a case that hangs or dies is named here, where it
costs no time of the others. max-autotune is not warmed: its choices are timings, which need the
machine to themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bench.stages import CUT_SHORT
from bench.target_tasks import Target, targets
from fastvit_kernels.commands import options
from fastvit_kernels.verify.isolated import Job, python, run_isolated

TIMEOUT = 150.0  # seconds of silence: a model is built and compiled in them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m bench warm`."""
    parser.add_argument(
        "--jobs", type=options.within(int, 1, options.MOST_PROCESSES), default=4, metavar="N",
        help="processes at once",
    )  # fmt: skip
    options.add_budget(parser, "what still runs after these is stopped")
    parser.set_defaults(device=None)


def job_of(number: int, target: Target) -> Job:
    return Job(target.name, python(__name__, str(number)))


def run(
    jobs: Sequence[Job], workers: int, budget: float, say: Callable[[str], object] = print
) -> int:
    """Run them: 0, 3 where the time was too short for all, else 1 where one has failed."""
    started, left, bad = time.monotonic(), {job.name for job in jobs}, 0
    for outcome in run_isolated(jobs, workers, TIMEOUT, budget=budget):
        left.discard(outcome.job.name)
        bad += outcome.failure is not None
        what = outcome.failure or f"{outcome.lines[-1]['seconds']:.0f} s"
        say(f"{'FAILED ' if outcome.failure else ''}{outcome.job.name}: {what}")
    say(
        f"{len(jobs) - len(left)} of {len(jobs)} cases ran once, {bad} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    return CUT_SHORT if left else 1 if bad else 0


def main(argument: str) -> int:
    """What a process does: one target, once, and a line that says how long it took."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    targets()[int(argument)].touch(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"seconds": time.monotonic() - started}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
