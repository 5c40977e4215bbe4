"""Write the repository that the Hub's `kernels` library loads; uploading it is left to you."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..tools.hub import write_layout
from . import options
from .console import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastvit-kernels hub-layout`."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="an empty folder, or a new one")
    parser.add_argument(
        "--version", type=options.positive(int), default=1, metavar="N",
        help="of the interface: the Hub's branch is vN (default 1)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    try:
        variants = write_layout(arguments.dir, arguments.version)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    for path in variants:
        print(path)
    print(f"Load it with kernels.get_local_kernel(Path({str(arguments.dir)!r}))")
    return 0
