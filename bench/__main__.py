"""`python -m bench`: measure ops and whole models side by side, draw.

    python -m bench quick --out DIR                     one GPU, ten minutes: right, fast, tuned
    python -m bench all --time-budget 540 --out DIR     everything, most telling rows first
    python -m bench attention --dtype bf16 --out DIR    over T next to every SDPA backend
    python -m bench attention --shape T197 --mode bwd
    python -m bench vit --mode train --provider swapped
    python -m bench vit --model timm:vit_small_patch14_dinov2 --batch 64
    python -m bench host                                what each op costs the host, without a GPU
    python -m bench plot DIR                            redraw from DIR/results.csv
    python -m bench docs                                docs/benchmarks.md from bench/results

The exit status is 1 where a provider breaks the 2x rule, or one of ours fails; 2 for a mistake in
the command, 3 where the time was over first, 130 for an interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import STARTED, host, quick, report
from bench.models import VIT
from bench.ops import MODES, OPS
from bench.plan import DTYPES, STEPS, Wanted
from bench.rows import read_results
from bench.run import Machine, run, this_machine
from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError, Parser

MEASURED = {
    "all": "time everything, the most telling rows first",
    **{op: f"time the op {op}" for op in OPS},
    VIT: "time steps of whole models",
}


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("python -m bench", description=__doc__, formatter_class=raw)
    add = parser.add_subparsers(dest="command", metavar="COMMAND", required=True).add_parser
    says = "check, time and tune in ten minutes"
    quick.add_arguments(add("quick", help=says, description=quick.__doc__, formatter_class=raw))
    for name, says in MEASURED.items():
        _add_measuring(add(name, help=says), name)
    options.add(add("host", help="microseconds of the host a call of each op"), "--device")
    add("plot", help="redraw everything from a CSV").add_argument("folder", type=Path)
    add("docs", help="generate docs/benchmarks.md from bench/results")
    return parser


def _add_measuring(parser: argparse.ArgumentParser, name: str) -> None:
    modes = {"all": (*MODES, *STEPS), VIT: STEPS}.get(name, MODES)
    dtypes = {"all": ("amp", *DTYPES), VIT: ("amp", "bf16")}.get(name, DTYPES)
    parser.add_argument("--mode", action="append", default=[], choices=modes)
    amp = "of all tensors; amp: fp32 parameters under bf16 autocast"
    options.add(parser, "--dtype", choices=dtypes, action="append", default=[], help=amp)
    for flag, says in (("--provider", "may be given several times"), ("--shape", "part of an id")):
        parser.add_argument(flag, action="append", default=[], help=says)
    if name == VIT:
        options.add(parser, "--model", help=f"{options.NAMES} (in place of the plan's models)")
        options.add(parser, "--batch", "--img-size")
    options.add(parser, "--device")
    options.add(parser, "--time-budget", help="end after these")
    options.add(parser, "--out", help="folder of the results (default bench-out)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")


def main(
    argv: Sequence[str] | None = None, machine: Machine | None = None, started: float | None = None
) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        status = _run(arguments, machine, started)
        sys.stdout.flush()
        return status
    except (CommandError, OSError) as error:  # a disk that is full
        print(f"bench {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace, machine: Machine | None, started: float | None) -> int:
    command = arguments.command
    if command == "plot":
        return report.run_plot(read_results(arguments.folder), arguments.folder)
    if command == "docs":
        return report.write_docs()
    if command == "host":
        return host.run(options.chosen_device(arguments))
    machine = machine or this_machine(arguments)
    if command == "quick":
        return quick.run(arguments, machine is not None)
    given = {n: x for n in ("model", "batch", "img_size") if (x := getattr(arguments, n, None))}
    if given and "model" not in given:
        raise CommandError("--batch and --img-size need --model: the plan's models have their own")
    asked = arguments.provider, arguments.shape, arguments.dtype, arguments.mode
    wanted = Wanted((VIT, *OPS) if command == "all" else (command,), *asked, **given)
    if machine is None:
        raise CommandError("torch sees no GPU, so nothing was run and nothing was written")
    arguments.out = arguments.out or Path("bench-out")
    return run(arguments, wanted, machine, started)


if __name__ == "__main__":
    sys.exit(main(started=STARTED))
