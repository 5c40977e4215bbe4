"""A training that a test can afford to kill and run again: few images, a shallow model."""

from __future__ import annotations

import torch

from fastvit_kernels.commands import train
from fastvit_kernels.commands.training import data
from fastvit_kernels.commands.training.settings import DIGITS_VIT


def shrink(images: int, held_out: int) -> None:
    """Let `train` in this process and its forks see so many of the digits, on one thread."""
    torch.set_num_threads(1)
    DIGITS_VIT["depth"] = 2
    full = data.load_digits(8, 0.2, 0)
    few = data.Dataset(
        data.Split(full.train.images[:images], full.train.labels[:images]),
        data.Split(full.held_out.images[:held_out], full.held_out.labels[:held_out]),
        full.classes,
    )
    data.load_digits = lambda *_: few
    train.write_report = lambda *_: None  # the pictures take longer than the training
