"""The options that say how images are read, and the images by them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..options import MOST_PROCESSES, within
from . import data
from .records import SOURCES
from .settings import Settings
from .streaming import Streamed


def add_reading(parser: Any) -> None:
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="the folder of any --data but digits")
    add(
        "--in-memory", action=argparse.BooleanOptionalAction,
        help="hold the images of --data folder in memory, not streamed",
    )  # fmt: skip
    add(
        "--workers", type=within(int, 0, MOST_PROCESSES), metavar="N",
        help="processes that read streamed images, 0 for none (default: cores less one, 8 at most)",
    )  # fmt: skip
    add(
        "--on-error", choices=("stop", "skip"), default="stop",
        help="at a streamed image that cannot be read (default stop); both name it",
    )  # fmt: skip


def open_images(
    settings: Settings, arguments: argparse.Namespace, console: Any
) -> data.Dataset | Streamed:
    """The images, in memory or to be streamed."""
    with console.status("reading images") as status:
        if settings.in_memory:
            return data.load(
                settings, lambda done, total: status.update(f"reading images: {done} of {total}")
            )
        find = SOURCES[settings.data]
        found = find(data.data_folder(settings), settings.held_out, settings.seed)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = min(8, (cores or 1) - 1) if arguments.workers is None else arguments.workers
        skip = arguments.on_error == "skip"
        return Streamed(
            *found, settings, workers, skip, lambda line: console.print(line, markup=False)
        )
