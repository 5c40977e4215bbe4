"""The command line: `fastvit-kernels COMMAND` and `python -m fastvit_kernels COMMAND`.

Each command is a module with two functions: `add_arguments(parser)` and `run(arguments)`, which
returns the exit status. 0 is success, 1 a check that failed, 2 a user's mistake, 130 an interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import __version__
from ..runtime.triton import HAS_TRITON
from .console import CommandError

INTERPRET = "TRITON_INTERPRET"
DESCRIPTION = "Fused Triton kernels for Vision Transformers: train, check, compile, tune."


@dataclass(frozen=True)
class Command:
    module: str
    help: str
    runs_kernels: bool  # so that a machine without a GPU needs Triton's interpreter


COMMANDS = {
    "train": Command("train", "train a ViT on real images with the kernels", True),
    "check": Command("check", "compare every kernel with float64 on this machine", True),
    "compare": Command(
        "compare", "a model eager, compiled and swapped: time, memory, numbers", False
    ),
    "compile": Command("compile", "compile the kernels for GPUs that are not here", False),
    "tune": Command("tune", "choose launch configs by measuring them on this GPU", False),
    "probe": Command("probe", "k-NN and a linear probe on a model's frozen features", False),
    "attention-maps": Command("attention_maps", "draw where each head of a ViT looks", False),
}


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that `words` name is imported and gets its arguments."""
    parser = argparse.ArgumentParser(prog="fastvit-kernels", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        if name == next((word for word in words if not word.startswith("-")), None):
            module = importlib.import_module(f"{__package__}.{command.module}")
            sub.description = module.__doc__
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(sub)
    return parser


def needs_interpreter(arguments: argparse.Namespace) -> bool:
    """Whether this command must start again with TRITON_INTERPRET=1.

    Triton reads the variable when it decorates the kernels, and they are decorated already: the
    package is imported before `main` can run. A value that the user has set is left alone.
    """
    on_gpu = torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu"
    wanted = COMMANDS[arguments.command].runs_kernels and HAS_TRITON and not on_gpu
    return wanted and INTERPRET not in os.environ


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name. None means that this process is the command: it
            reads sys.argv, and may start itself again in place to turn Triton's interpreter on.
    Returns: the exit status.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser(words).parse_args(words)
    if argv is None and needs_interpreter(arguments):
        sys.stdout.flush()
        sys.stderr.flush()
        # The same process, program and words. The interpreter's tiles are too small for several
        # BLAS threads to pay off.
        variables = {"OPENBLAS_NUM_THREADS": "1", **os.environ, INTERPRET: "1"}
        os.execve(sys.executable, sys.orig_argv, variables)
    module = importlib.import_module(f"{__package__}.{COMMANDS[arguments.command].module}")
    try:
        status = module.run(arguments)
        sys.stdout.flush()
        return status
    except (CommandError, OSError) as error:  # a disk that is full, a file that is not there
        print(f"fastvit-kernels {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
