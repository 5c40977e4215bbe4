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
from ..tools.aot import TARGETS, CompileError, Kernel, Share, compile_step
from . import options
from .console import CommandError, aligned
from .models import fused_model, input_shape, run_step


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
        "--jobs", type=options.positive(int, options.MOST_PROCESSES), metavar="N", default=1,
        help="processes that compile (default 1)",
    )  # fmt: skip


def model_step(model: nn.Module, batch: int, dtype: str, *, train: bool) -> Callable[[], None]:
    """A step of a model on the meta device: forward, and where `train` loss and backward."""

    def step() -> None:
        model.train(train)
        state = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in model.named_buffers()}
        for name, p in model.named_parameters():
            empty = torch.empty(p.shape, dtype=p.dtype)
            state[name] = nn.Parameter(empty, requires_grad=p.requires_grad)
        images = torch.empty(batch, *input_shape(model))
        forward = functools.partial(torch.func.functional_call, model, state)
        run_step(forward, images, dtype, train=train)

    return step


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
    compile_step(_step(args), TARGETS[arch], share)


def _compile(args: argparse.Namespace) -> dict[str, list[Kernel]]:
    """The kernels of each target; with several processes each first compiles its share."""
    archs = args.arch or [_arch_here()]
    step = _step(args)  # a mistake is found before processes start
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            shares = [(arch, Share(i, args.jobs)) for arch in archs for i in range(args.jobs)]
            for done in [pool.submit(_fill_cache, args, *share) for share in shares]:
                done.result()
    return {arch: compile_step(step, TARGETS[arch]) for arch in archs}


def _cells(k: Kernel) -> tuple[str, ...]:
    return k.kernel, k.config, k.dtypes, str(k.shared), f"{k.seconds:.2f}"


def run(args: argparse.Namespace) -> int:
    """Compile and print; the exit status."""
    try:
        compiled = _compile(args)
    except CompileError as error:
        print(f"fastvit-kernels compile: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:  # no triton, the interpreter, an unknown model
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps([asdict(k) for kernels in compiled.values() for k in kernels], indent=1))
        return 0
    header = ("kernel", "config", "pointers", "shared bytes", "compile s")
    for arch, kernels in compiled.items():
        what = "training" if args.train else "inference"
        print(f"{arch}: {args.model}, batch {args.batch}, {args.dtype}, {what}\n")
        print(aligned([header, *map(_cells, kernels)]), end="\n\n")
    problems = [text for kernels in compiled.values() for k in kernels for text in k.problems()]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 0
