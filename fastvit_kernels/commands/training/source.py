"""The images of a run in memory, batch by batch. `streaming.Streamed` has the same methods."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .data import Augmentation, Dataset, Normalization
from .processes import Processes
from .settings import Settings

AUGMENTATIONS = {
    "digits": Augmentation(degrees=5, zoom=0.1, shift=0.5),
    "mnist": Augmentation(degrees=10, zoom=0.1, shift=2),
    "folder": Augmentation(degrees=5, zoom=0.2, shift=16, mirror=True),
}


class InMemory:
    """All images on the device as bytes."""

    def __init__(self, dataset: Dataset, settings: Settings):
        self.classes, self.settings = dataset.classes, settings
        self.normalization = Normalization.of(dataset.train.images)
        self.train, self.held_out = dataset.train, dataset.held_out
        self.train_count, self.held_out_count = len(self.train), len(self.held_out)
        self.broken: set[str] = set()

    def to(self, device: torch.device) -> None:
        self.train, self.held_out = self.train.to(device), self.held_out.to(device)

    @property
    def held_out_labels(self) -> Tensor:
        return self.held_out.labels

    def batches(self, epoch: int, processes: Processes) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This process's rows of shuffled, augmented batches, and the weight of their mean loss in
        that of the batch: the rows' share times the number of processes, over which DDP and FSDP2
        average. The batches are a function of (seed, epoch) alone."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(self.train_count, generator=generator).to(self.train.labels.device)
        augmentation = AUGMENTATIONS[self.settings.data]
        for index in order.split(self.settings.batch_size):
            mine = processes.share(len(index))
            weight = (mine.stop - mine.start) * processes.world / len(index)
            if not weight:  # every process takes every step
                mine = slice(0, 1)
            draw = augmentation.draw(len(index), generator) if self.settings.augment else None
            index = index[mine]
            images = self.normalization(self.train.images[index])
            if draw is not None:
                images = augmentation.apply(images, draw[:, mine])
            yield images, self.train.labels[index], weight

    def held_out_batches(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers and pixels of this process's held-out images; where it has none of a batch, no
        number and one image, because every process takes every step."""
        for index in torch.arange(self.held_out_count, device=self.held_out.labels.device).split(
            1024
        ):
            mine = index[processes.share(len(index))]
            shown = mine if len(mine) else index[:1]
            yield mine, self.normalization(self.held_out.images[shown])

    def training_sample(self, count: int) -> Tensor:
        return self.train.images[:count]

    def held_out_sample(self) -> tuple[int, Tensor]:
        return 0, self.held_out.images[:1]

    def digest(self) -> str:
        digest = hashlib.sha256(repr(self.classes).encode())
        for split in (self.train, self.held_out):
            digest.update(split.images.cpu().contiguous().numpy().tobytes())
            digest.update(split.labels.cpu().numpy().tobytes())
        return digest.hexdigest()
