"""Choose launch configs by measuring them on this GPU, at the shapes of one step of a model.

A config that gives the default's numbers and is faster by more than the noise is written to a file
in the user's cache folder, which later runs read at their first step. More: docs/tune.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..measure.timer import microseconds, spread
from ..measure.turns import alternate, beats
from ..runtime import tuned_table
from ..runtime.backend import Gpu, backend, gpu
from ..runtime.compat import TorchDispatchMode
from ..runtime.configs import TABLES, Choice, forced, install, recording
from ..runtime.operator import LAUNCHERS
from ..runtime.tuned_table import Entry, TableError
from . import options
from .console import CommandError, refusing
from .models import fused_model, input_shape, run_step

ROUNDS = 7  # of a config and the default in turn
Timer = Callable[[Callable[[], Any]], float]  # -> microseconds of one call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add(parser, "--model", default=options.MODEL)
    options.add(parser, "--batch", default=256)
    options.add(parser, "--dtype", default="bf16")
    options.add(parser, "--img-size", "--device")
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")
    options.add(parser, "--time-budget", help="start no further config after this")


class _FirstCalls(TorchDispatchMode):
    """Where a dispatch mode looks on, calls go through the registered operators: the first one that
    takes a decision is kept with its arguments."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # else swapped modules run their host's forward
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Choice, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastvit_kernels":
            return func(*args, **(kwargs or {}))
        with recording() as choices:
            result = func(*args, **(kwargs or {}))
        launcher = LAUNCHERS[func.overloadpacket.__name__]
        for choice in choices:
            self.calls.setdefault(choice, partial(launcher, *args, **(kwargs or {})))
        return result


def is_right(found: Any, wanted: Any) -> bool:
    """Whether two configs' results differ by rounding alone: in RMS by the eps of the coarsest
    dtype among them; fp32 sums of many rows by 1e-5."""
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True)
    pairs = [(x.float(), y.float(), y.dtype) for x, y in pairs if y is not None and y.numel()]
    eps = max(1e-5, *(torch.finfo(dtype).eps for *_, dtype in pairs if dtype.is_floating_point))
    apart = [(torch.where(x == y, 0.0, x - y), y) for x, y, _ in pairs]
    return all(d.square().mean().sqrt() <= eps * y.square().mean().sqrt() for d, y in apart)


@torch.no_grad()
def decide(choice: Choice, call: Callable[[], Any], timer: Timer, deadline: float) -> Entry | None:
    """The fastest right config of one decision, None where there is no other to try."""
    default, *others = TABLES[choice.table].candidates(choice.gpu, *choice.key)
    best, best_us, default_us = default, float("inf"), 0.0

    def timed(config: Any) -> float:
        with forced(choice.table, config):
            return timer(call)

    with forced(choice.table, default):
        wanted = call()
    for config in others:
        if time.monotonic() > deadline:
            break
        with forced(choice.table, config):
            right = is_right(call(), wanted)
        if not right:
            print(f"  {choice.table} {config} is wrong here: please report it")
            continue
        ours, theirs = alternate(ROUNDS, partial(timed, config), partial(timed, default))
        us, default_us = spread(ours).median, spread(theirs).median
        if beats(ours, theirs) and us < best_us:
            best, best_us = config, us
    if not default_us:
        return None
    us = default_us, min(best_us, default_us)
    return Entry(choice.table, choice.key, best._asdict(), *us)


def tune(
    step: Callable[[], Any], here: Gpu, timer: Timer = microseconds, seconds: float = float("inf")
) -> Iterator[Entry]:
    """The entries of the decisions that a step takes."""
    install(here, {})  # the shipped defaults are what a tuned config must beat
    try:
        with backend("triton"):
            with _FirstCalls() as mode:
                step()
            deadline = time.monotonic() + seconds
            for choice, call in mode.calls.items():
                if (entry := decide(choice, call, timer, deadline)) is not None:
                    yield entry
    finally:
        install(here, None)


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    device = options.chosen_device(arguments)
    if device.type != "cuda":
        raise CommandError(f"configs are chosen by measuring them on a GPU: none on {device}")
    torch.cuda.set_device(device)
    here = gpu(device)
    options.require_kernels(device)
    with refusing(f"{tuned_table.table_path(here)} cannot be written", OSError):
        tuned_table.table_path(here).parent.mkdir(parents=True, exist_ok=True)
    model = fused_model(arguments.model, img_size=arguments.img_size).to(device)
    images = torch.randn(arguments.batch, *input_shape(model, arguments.img_size), device=device)
    model.train(arguments.train)
    step = partial(run_step, model, images, arguments.dtype, train=arguments.train)
    try:
        entries = {(e.table, e.key): e for e in tuned_table.read(here)[0]}
    except TableError as error:
        print(f"the table is written anew: {error}")
        entries = {}
    for entry in tune(step, here, seconds=arguments.time_budget or float("inf")):
        entries[entry.table, entry.key] = entry
        tuned_table.save(here, entries.values())  # what is measured outlives an interrupt
        print(entry, flush=True)
    print(f"{len(entries)} decisions in {tuned_table.table_path(here)}")
    return 0
