"""python -m tests.machine COMMAND: compile, gate, rank, device, left-out, for GPUs not here.

README.md has the rules, the columns and the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fastvit_kernels.commands import options
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.triton import VERSION

from . import compile
from .aot import TARGETS
from .device.kernels import KINDS, PRECISIONS, run_device
from .device.left_out import run_left_out
from .gate import TABLE, run_gate
from .loop_model import ROOFS
from .rank import TOKENS, run_rank
from .ranking import SIZES
from .resources import GATED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.machine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compiling = commands.add_parser("compile", help="compile the kernels of a step of a model")
    compile.add_arguments(compiling)
    gate = commands.add_parser("gate", help="compile every kernel and apply the rules")
    rank = commands.add_parser("rank", help="order the configs that ship by modelled time")
    count = options.positive(int, options.MOST_PROCESSES)
    device = commands.add_parser("device", help="run the compiled kernels, by the 2x rule")
    left_out = commands.add_parser("left-out", help="write what the machine notices")
    both = ((compiling, TARGETS), (gate, TARGETS), (rank, ROOFS))
    for command, archs in (*both, (device, GATED), (left_out, GATED)):
        command.add_argument("--arch", nargs="+", choices=archs, metavar="ARCH")
        command.add_argument("--jobs", type=count, metavar="N", help="processes")
    gate.add_argument("--changed", action="store_true", help="leave out what passed before")
    gate.add_argument("--update", action="store_true", help="write the table")
    gate.add_argument("--every", type=int, default=1, metavar="N", help="each Nth case alone")
    gate.add_argument("--table", type=Path, default=TABLE, metavar="FILE")
    rank.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(sorted(TABLES))}")
    rank.add_argument("--sizes", nargs="+", choices=SIZES, default=["S", "B", "L"])
    rank.add_argument("--tokens", nargs="+", type=options.positive(int), default=list(TOKENS))
    device.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    device.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    device.add_argument("--only", nargs="+", default=(), metavar="NAME", help="cases with it")
    device.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("NUMBER", "OF"))
    device.add_argument("--record", action="store_true", help="write device/ran.csv")
    options.add(rank, "--batch", default=256)
    options.add(rank, "--json")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(words)
    if args.command == "compile":
        return compile.run_compile(args)
    if args.command == "rank":
        if unknown := [name for name in args.tables if name not in TABLES]:
            parser.error(f"no config table {unknown[0]!r}; there are {', '.join(sorted(TABLES))}")
        return run_rank(args)
    if args.command == "left-out":
        return run_left_out(args.arch or ["sm_80"], args.jobs or 1)
    if args.command == "device":
        if args.record and (args.only or args.share != (0, 1)):
            parser.error("--record writes rows of whole kinds: leave out --only and --share")
        return run_device(
            args.arch or ["sm_80"],
            args.precision,
            args.kind,
            args.jobs or 1,
            args.only,
            args.share,
            args.record,
        )
    if args.update and (args.arch or args.changed or args.every > 1):
        parser.error("--update writes every row: leave out --arch, --changed and --every")
    here = [name for name, target in TARGETS.items() if target.least_triton <= VERSION]
    return run_gate(args.arch or here, args.table, args.update, args.changed, args.jobs, args.every)


if __name__ == "__main__":
    sys.exit(main())
