"""`fastvit-kernels compile`: the kernels of a step, compiled for named GPUs, in a table.

They stay in Triton's cache, so a GPU of that kind finds them there. `--gate` and `--rank` are for
those who change a kernel: docs/compile.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from ..runtime.backend import gpu
from ..tools.aot import CompileError, Share, compile_step, trace_step
from ..tools.resources import TARGETS, Kernel
from . import options, rank
from .console import CommandError, aligned
from .gate import broken_rules, run_gate
from .models import fused_model
from .resources import HEADER, cells
from .steps import model_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fastvit-kernels compile`."""
    parser.add_argument(
        "--arch", nargs="+", choices=list(TARGETS), metavar="ARCH",
        help=f"targets, of {', '.join(TARGETS)} (default this machine's GPU, else sm_90)",
    )  # fmt: skip
    options.add_model(parser)
    options.add_img_size(parser)
    options.add_batch(parser, 256)
    options.add_step(parser)
    options.add_dtype(parser, default="bf16")
    options.add_json(parser)
    parser.add_argument(
        "--jobs", type=options.positive(int, options.MOST_PROCESSES), metavar="N",
        help="processes that compile (default 1; one for each processor with --gate)",
    )  # fmt: skip
    # For CI and for those who change a kernel: docs/compile.md explains them.
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--table", type=Path, default=Path("docs/resources.md"), help=argparse.SUPPRESS
    )
    parser.add_argument("--update", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--changed", action="store_true", help=argparse.SUPPRESS)
    rank.add_arguments(parser)


def _step(args: argparse.Namespace) -> Callable[[], None]:
    with torch.device("meta"):
        model = fused_model(args.model, img_size=args.img_size)
    return model_step(model, args.batch, args.dtype, train=args.train)


def _arch_here() -> str:
    """The target that this machine's GPU is, so that its launches find what is compiled."""
    if torch.cuda.is_available():
        arch = gpu(torch.device("cuda", torch.cuda.current_device())).arch
        if arch in TARGETS:
            return arch
    return "sm_90"


def _fill_cache(args: argparse.Namespace, arch: str, share: Share) -> None:
    trace_step(_step(args), TARGETS[arch], share)


def _compile(args: argparse.Namespace) -> dict[str, list[Kernel]]:
    """The kernels of each target; with several processes each first compiles its share."""
    archs = args.arch or [_arch_here()]
    step = _step(args)  # a mistake is found before processes start
    if (jobs := args.jobs or 1) > 1:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            shares = [(arch, Share(i, jobs)) for arch in archs for i in range(jobs)]
            for done in [pool.submit(_fill_cache, args, *share) for share in shares]:
                done.result()
    return {arch: compile_step(step, TARGETS[arch]) for arch in archs}


def run(args: argparse.Namespace) -> int:
    """Compile and print; the exit status."""
    try:
        if args.rank is not None:
            return rank.run_rank(args)
        if args.gate:
            if args.update and (args.arch or args.changed):
                raise CommandError("--update writes every row: leave out --arch and --changed")
            archs = args.arch or list(TARGETS)
            return run_gate(archs, args.table, args.update, args.changed, args.jobs)
        compiled = _compile(args)
    except CompileError as error:
        print(f"fastvit-kernels compile: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:  # no triton, the interpreter, an unknown model
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps([k.as_dict() for kernels in compiled.values() for k in kernels], indent=1))
        return 0
    for arch, kernels in compiled.items():
        rows = [(*cells(k), f"{k.seconds:.2f}") for k in kernels]
        what = "training" if args.train else "inference"
        print(f"{arch}: {args.model}, batch {args.batch}, {args.dtype}, {what}; a block may have")
        print(f"{TARGETS[arch].shared_limit} bytes of shared memory\n")
        print(aligned([(*HEADER, "compile s"), *rows]), end="\n\n")
    problems = broken_rules(k for kernels in compiled.values() for k in kernels)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 0
