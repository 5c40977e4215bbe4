"""Choose launch configs by measuring them on this GPU, at the shapes of one step of a model.

Every config that ships and fits is run; one whose output or gradients break the 2x rule, or differ
between two runs, cannot win. The choices go into a file in the user's cache folder, which later
runs read at their first step; what is in it is not measured again. Without a GPU there is nothing
to measure. More: docs/tune.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ..runtime import tuned_table
from ..runtime.backend import Gpu, gpu
from ..runtime.configs import TABLES
from ..runtime.dtypes import DTYPES
from ..runtime.tuned_table import Entry, TableError
from ..swap.apply import swap_in
from ..swap.choices import Choices
from ..tools import tuning
from . import options
from .console import CommandError, term_interrupts
from .models import build_model, fused_model, input_shape, run_step


def model_step(
    model: str, batch: int, dtype: str, *, train: bool, device: torch.device, **overrides: Any
) -> Callable[[], None]:
    """One step of `fused_model(model)` on random images, fp32 parameters under autocast."""
    vit = fused_model(model, **overrides).to(device).train(train)
    images = torch.randn(batch, *input_shape(vit), device=device)

    def step() -> None:
        run_step(vit, images, dtype, train=train)
        vit.zero_grad(set_to_none=True)

    return step


def _config(config: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in tuned_table.fields(config).items())


def describe(found: tuning.Decision) -> str:
    """One decision in a line or more."""
    won = f"the default stays, {found.default_us:.1f} us a step"
    if found.winner != found.default:
        gain = 100.0 * (1.0 - found.winner_us / found.default_us)
        won = f"{found.default_us:.1f} -> {found.winner_us:.1f} us a step ({gain:.1f} % less): "
        won += _config(found.winner)
    tried = f"{found.tried} others tried, {len(found.refused)} refused"
    lines = [f"{found.choice.table} {found.choice.key}: {won}; {tried}"]
    lines += [f"  refused {_config(config)}: {why}" for config, why in found.refused]
    if found.unchecked:
        lines.append(f"  nothing could be checked, so that nothing was tried: {found.unchecked}")
    if not found.complete:
        lines.append("  the time was over before every config was tried")
    return "\n".join(lines)


def run_tuning(
    step: Callable[[], object],
    device: torch.device,
    *,
    timer: tuning.Timer = tuning.gpu_microseconds,
    seconds: float = float("inf"),
) -> int:
    """Tune a step, print each decision and write the table after each; the exit status.

    It is 1 where a shipped default is wrong on this GPU.
    """
    here = gpu(device)
    try:
        entries = {(e.table, e.key): e for e in tuned_table.read(here)[0]}
    except TableError as error:
        print(f"{tuned_table.table_path(here)} is written anew: {error}")
        entries = {}
    done = {name for name, entry in entries.items() if entry.complete}
    wrong, decided, start = 0, 0, time.monotonic()
    for found in tuning.tune(step, device, timer=timer, seconds=seconds, done=done):
        print(describe(found))
        spent = time.monotonic() - start
        left = min(spent * found.left / (1 - found.left), max(seconds - spent, 0.0))
        print(f"  {100 * (1 - found.left):.0f} % done, about {left:.0f} s left", flush=True)
        wrong += any(config == found.default for config, _ in found.refused)
        if not found.tried:
            continue
        decided += 1
        name, us = (found.choice.table, found.choice.key), (found.default_us, found.winner_us)
        config = tuned_table.fields(found.winner)
        entries[name] = Entry(*name, config, *us, tuned_table.now(), found.complete)
        tuned_table.save(here, entries.values())  # what is measured outlives an interrupt
    if decided:
        print(f"{decided} decisions, {len(entries)} in {tuned_table.table_path(here)}")
    else:
        print("there was nothing to choose; nothing was written")
    if done:
        print(f"{len(done)} of a former run were left as they are; --clear removes them")
    if wrong:
        print(f"{wrong} shipped defaults are wrong on this GPU: please report them")
    return 1 if wrong else 0


def write_choices(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure the kinds of modules of a host's model; write their choices and the launch configs
    of this GPU into `--out`, for `swap_in(choices=)`. What the file has is not measured again.
    """
    path, dtype = arguments.out, arguments.dtype
    model = build_model(arguments.model, img_size=arguments.img_size).to(device)
    model.train(arguments.train)
    images = torch.randn(arguments.batch, *input_shape(model, arguments.img_size), device=device)
    precision = torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")
    with torch.set_grad_enabled(arguments.train), precision:
        report = swap_in(model, measure=images, choices=path if path.exists() else None)
    found = report.choices or Choices()
    print(*found.rows, sep="\n")
    entries = [asdict(e) | {"key": [*e.key]} for e in tuned_table.read(gpu(device))[0]]
    by_date = sorted(entries + found.configs, key=lambda entry: entry["date"])
    found.configs = list({(e["table"], *e["key"]): e for e in by_date}.values())
    found.save(path)
    print(f"{len(found.rows)} kinds of modules and {len(found.configs)} launch configs in {path}")


def show(here: Gpu) -> int:
    """Print the table of this GPU; the exit status, 1 where it cannot be used."""
    path = tuned_table.table_path(here)
    try:
        entries, _ = tuned_table.read(here)
    except TableError as error:
        print(f"{path} is ignored: {error}")
        return 1
    print(f"{path}: {len(entries)} of {len(TABLES)} tables' decisions" if entries else "no table")
    for e in entries:
        values = " ".join(f"{k}={v}" for k, v in e.config.items())
        print(f"{e.table} {e.key}: {values}, {e.default_us:.1f} -> {e.config_us:.1f} us, {e.date}")
    return 0


def clear(here: Gpu) -> int:
    """Remove the table of this GPU."""
    path = tuned_table.table_path(here)
    existed = path.exists()
    path.unlink(missing_ok=True)
    tuned_table.Journal(here).path.unlink(missing_ok=True)
    print(f"removed {path}" if existed else f"there is no table {path}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add(parser, "--model", default=options.MODEL)
    options.add(parser, "--batch", default=256)
    options.add(parser, "--dtype", default="bf16")
    options.add(parser, "--img-size", "--device")
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")
    both = "measure modules beside their hosts too, and write both for swap_in(choices=FILE)"
    options.add(parser, "--out", metavar="FILE", help=both)
    end = "try no further config after these; the costly kernels come first"
    options.add(parser, "--time-budget", help=end)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print this GPU's table")
    what.add_argument("--clear", action="store_true", help="remove this GPU's table")


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where a shipped default is wrong here or --show finds a bad table."""
    if not torch.cuda.is_available():
        raise CommandError(
            "torch sees no GPU. Configs are chosen by measuring them, so that there is nothing to "
            "do and nothing was written; `fastvit-kernels compile` needs no GPU"
        )
    device = options.chosen_device(arguments)
    if device.type != "cuda":
        raise CommandError(f"--device {device}: configs are chosen by measuring them on a GPU")
    torch.cuda.set_device(device)
    if arguments.show or arguments.clear:
        return (show if arguments.show else clear)(gpu(device))
    options.require_kernels(device)
    step = model_step(
        arguments.model,
        arguments.batch,
        arguments.dtype,
        train=arguments.train,
        device=device,
        img_size=arguments.img_size,
    )
    try:
        with term_interrupts():  # a terminated process would blame the config that it tried
            status = run_tuning(step, device, seconds=arguments.time_budget or float("inf"))
            if arguments.out is not None:
                del step
                write_choices(arguments, device)
            return status
    except tuning.Unusable as error:
        print(f"the GPU cannot be used any more after {error}")
        print("what was decided before is written; run the command again, it leaves this one out")
        return 1
    except torch.OutOfMemoryError as error:
        raise CommandError(f"a batch of {arguments.batch} does not fit: {error}") from error
