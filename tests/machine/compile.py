"""`python -m tests.machine compile`: the kernels of a step, compiled for named GPUs, in a table.

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

from fastvit_kernels.commands import options
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import fused_model, input_shape, run_step
from fastvit_kernels.runtime.backend import gpu

from .aot import TARGETS, WHOLE, CompileError, Kernel, Share, compile_step
from .table import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but --arch and --jobs, which the other commands have too."""
    options.add(parser, "--model", default=options.MODEL)
    options.add(parser, "--batch", default=256)
    options.add(parser, "--dtype", default="bf16")
    options.add(parser, "--img-size", "--json")
    options.add(parser.add_mutually_exclusive_group(), "--train", "--infer")


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
    step, jobs = model_step(model, args.batch, args.dtype, train=args.train), args.jobs or 1
    if share is WHOLE and jobs > 1:  # a mistake has been found before processes start
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            shares = [Share(i, jobs) for i in range(jobs)]
            list(pool.map(functools.partial(_compile, args), shares))
    return {arch: compile_step(step, TARGETS[arch], share) for arch in args.arch or [_arch_here()]}


def run_compile(args: argparse.Namespace) -> int:
    """Compile and print; 1 for a kernel that does not compile, 2 for a user's mistake."""
    try:
        compiled = _compile(args)
        if not all(compiled.values()):
            raise CommandError(f"--model {args.model} launches no kernel, so none was compiled")
    except CompileError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 1
    except (CommandError, RuntimeError, ValueError) as error:  # no triton, an unknown model
        print(f"compile: {error}", file=sys.stderr)
        return 2
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
