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
from typing import Any

import torch

from .. import __version__
from ..runtime.triton import HAS_TRITON
from .console import CommandError, Parser

INTERPRET = "TRITON_INTERPRET"
DESCRIPTION = "Fused Triton kernels for Vision Transformers: train, check, compare, tune."

COMMANDS = {
    "train": "train a ViT on real images with the kernels",
    "check": "compare every kernel with float64 on this machine",
    "compare": "a model eager, compiled and swapped: time, memory, numbers",
    "tune": "choose launch configs by measuring them on this GPU",
    "attention-maps": "draw where each head of a ViT looks",
}
RUN_KERNELS = ("train", "check")  # so that a machine without a GPU needs Triton's interpreter


def _module(command: str) -> Any:
    return importlib.import_module(f"{__package__}.{command.replace('-', '_')}")


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that `words` name is imported and gets its arguments."""
    parser = Parser(prog="fastvit-kernels", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text)
        if name == next((word for word in words if not word.startswith("-")), None):
            module = _module(name)
            sub.description = module.__doc__
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(sub)
    return parser


def needs_interpreter(arguments: argparse.Namespace) -> bool:
    """Whether this command must start again with TRITON_INTERPRET=1.

    Triton reads the variable when it decorates the kernels, BLAS its own when torch is imported,
    which is before `main` can run. A value that the user has set is left alone.
    """
    on_gpu = torch.cuda.is_available() and getattr(arguments, "device", None) != "cpu"
    wanted = arguments.command in RUN_KERNELS and HAS_TRITON and not on_gpu
    return wanted and INTERPRET not in os.environ


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command by the words after the program's name; the exit status.

    None means that this process is the command: it reads sys.argv, and may start itself again in
    place to turn Triton's interpreter on.
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
    try:
        status = _module(arguments.command).run(arguments)
        sys.stdout.flush()
        return status
    except (CommandError, OSError) as error:  # a disk that is full, a file that is not there
        said = str(error).rpartition("CommandError: ")[2].strip()  # a reader's traceback is before
        print(f"fastvit-kernels {arguments.command}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
