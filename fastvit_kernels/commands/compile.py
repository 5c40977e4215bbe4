"""`fastvit-kernels compile`: the kernels of a step, compiled for named GPUs, in a table.

They stay in Triton's cache, where a GPU of that kind finds them: docs/compile.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import torch
from torch import nn

from ..runtime.backend import gpu
from ..tools.aot import TARGETS, WHOLE, CompileError, Kernel, Share, compile_step
from . import options
from .console import CommandError, aligned
from .models import fused_model, input_shape, run_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=list(TARGETS),
        metavar="ARCH",
        help=f"targets, of {', '.join(TARGETS)} (default this machine's GPU, else sm_90)",
    )
    options.add(parser, "--model", default=options.MODEL)
    options.add(parser, "--batch", default=256)
    options.add(parser, "--dtype", default="bf16")
    options.add(parser, "--img-size", "--json")
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")
    parser.add_argument(
        "--jobs",
        type=options.positive(int, options.MOST_PROCESSES),
        metavar="N",
        default=1,
        help="processes that compile (default 1)",
    )


def model_step(model: nn.Module, batch: int, dtype: str, *, train: bool) -> Callable[[], None]:
    """A step of a model on the meta device: forward, and where `train` loss and backward."""

    def step() -> None:
        model.train(train)
        state = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in model.named_buffers()}
        for name, p in model.named_parameters():
            state[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        forward = functools.partial(torch.func.functional_call, model, state)
        run_step(forward, torch.empty(batch, *input_shape(model)), dtype, train=train)

    return step


def _arch_here() -> str:
    """The target that this machine's GPU is, so that its launches find what is compiled."""
    here = torch.cuda.is_available() and gpu(torch.device("cuda", torch.cuda.current_device())).arch
    return here if here in TARGETS else "sm_90"


def _compile(args: argparse.Namespace, share: Share = WHOLE) -> dict[str, list[Kernel]]:
    """The kernels of this share for each target; with several processes each first does one."""
    with torch.device("meta"):
        model = fused_model(args.model, img_size=args.img_size)
    step = model_step(model, args.batch, args.dtype, train=args.train)
    if share is WHOLE and args.jobs > 1:  # a mistake has been found before processes start
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            shares = [Share(i, args.jobs) for i in range(args.jobs)]
            list(pool.map(functools.partial(_compile, args), shares))
    return {arch: compile_step(step, TARGETS[arch], share) for arch in args.arch or [_arch_here()]}


def run(args: argparse.Namespace) -> int:
    """Compile and print; the exit status."""
    try:
        compiled = _compile(args)
    except CompileError as error:
        print(f"fastvit-kernels compile: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:  # no triton, the interpreter, an unknown model
        raise CommandError(str(error)) from error
    if not all(compiled.values()):
        raise CommandError(f"--model {args.model} launches no kernel, so none was compiled")
    if args.json:
        print(json.dumps([asdict(k) for kernels in compiled.values() for k in kernels], indent=1))
        return 0
    header = ("kernel", "config", "pointers", "shared bytes", "compile s")
    for arch, kernels in compiled.items():
        what = "training" if args.train else "inference"
        print(f"{arch}: {args.model}, batch {args.batch}, {args.dtype}, {what}\n")
        rows = [(k.kernel, k.config, k.dtypes, str(k.shared), f"{k.seconds:.2f}") for k in kernels]
        print(aligned([header, *rows]), end="\n\n")
    problems = [text for kernels in compiled.values() for k in kernels for text in k.problems()]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 0
