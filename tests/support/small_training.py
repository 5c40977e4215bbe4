"""A training that a test can afford to kill and run again: few images, a shallow model."""

from __future__ import annotations

import torch

from fastvit_kernels.commands import train
from fastvit_kernels.commands.training import records, streaming
from fastvit_kernels.commands.training.settings import DIGITS_VIT, make_settings


def shrink(images: int, held_out: int) -> None:
    """Let `train` in this process and its forks see so many of the digits, on one thread."""
    torch.set_num_threads(1)
    DIGITS_VIT["depth"] = 2
    first, rest, classes = records.find(make_settings({}, torch.device("cpu")))
    few = first.part(torch.arange(images)), rest.part(torch.arange(held_out)), classes
    streaming.find = lambda _: few
    train.write_report = lambda *_: None  # the pictures take longer than the training
