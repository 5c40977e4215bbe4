"""python -m tests.machine COMMAND: compile, gate, device, for GPUs not here.

README.md has the rules, the columns and the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fastvit_kernels.commands import options
from fastvit_kernels.runtime.triton import VERSION

from . import compile
from .aot import TARGETS
from .device.kernels import KINDS, PRECISIONS, run_device
from .gate import TABLE, run_gate
from .resources import GATED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.machine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compiling = commands.add_parser("compile", help="compile the kernels of a step of a model")
    compile.add_arguments(compiling)
    gate = commands.add_parser("gate", help="compile every kernel and apply the rules")
    count = options.positive(int, options.MOST_PROCESSES)
    device = commands.add_parser("device", help="run the compiled kernels, by the 2x rule")
    for command, archs in ((compiling, TARGETS), (gate, TARGETS), (device, GATED)):
        command.add_argument("--arch", nargs="+", choices=archs, metavar="ARCH")
        command.add_argument("--jobs", type=count, metavar="N", help="processes")
    gate.add_argument("--changed", action="store_true", help="leave out what passed before")
    gate.add_argument("--update", action="store_true", help="write the table")
    device.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    device.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    device.add_argument("--only", nargs="+", default=(), metavar="NAME", help="cases with it")
    device.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("NUMBER", "OF"))
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(words)
    if args.command == "compile":
        return compile.run_compile(args)
    if args.command == "device":
        archs, jobs = args.arch or ["sm_80"], args.jobs or 1
        return run_device(archs, args.precision, args.kind, jobs, args.only, args.share)
    if args.update and args.arch:
        parser.error("--update writes every row: leave out --arch")
    here = [name for name, target in TARGETS.items() if target.least_triton <= VERSION]
    return run_gate(args.arch or here, TABLE, args.update, args.changed, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
