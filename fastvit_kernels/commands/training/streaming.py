"""Images that do not fit in memory: read, cropped and augmented by worker processes of torch's
DataLoader while the model trains.

What an image becomes depends on (seed, epoch, image) alone: not on the number of workers, nor on
the number of processes that share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..console import CommandError, require
from ..zoo import define_torchvision_operators
from .data import Normalization, fit, upright
from .processes import Processes
from .records import Records
from .settings import Settings

SAMPLE = 256  # training images that give mean and standard deviation
HELD_OUT_BATCH = 256
_BROKEN = (OSError, ValueError, SyntaxError, KeyError)  # of pillow, on files that are no images

Item = tuple[Tensor | None, int, int, str]  # pixels, label, number, what is wrong with it
Place = tuple[int, int | None]  # number, seed


def training_transforms(settings: Settings) -> Callable[[Tensor], Tensor]:
    """torchvision's v2 transforms of a uint8 image: random crop, mirror, RandAugment."""
    define_torchvision_operators()
    v2: Any = require("torchvision.transforms.v2", "torchvision", "torchvision")
    steps = [
        v2.RandomResizedCrop(settings.img_size, (settings.crop_scale, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if settings.randaugment:
        steps.append(v2.RandAugment(magnitude=settings.randaugment))
    return v2.Compose(steps)


class Images(Dataset[Item]):
    """Images of (number, seed); seed None is the centred square of the held-out images."""

    def __init__(self, records: Records, settings: Settings):
        self.records, self.settings = records, settings
        self.transforms = training_transforms(settings) if settings.augment else None

    def __getitem__(self, place: Place) -> Item:
        index, seed = place
        label = self.records.labels[index]
        size, channels = self.settings.img_size, self.settings.in_chans
        try:
            with self.records.open(index) as opened:
                image = upright(opened, channels)
                if seed is None or self.transforms is None:
                    return fit(image, size), label, index, ""
                pixels = fit(image, None)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.transforms(pixels), label, index, ""
        except _BROKEN as error:
            name = self.records.name(index)
            return None, label, index, f"{name} cannot be read as an image: {error}"


def _collate(items: list[Item]) -> tuple[Tensor | None, Tensor, Tensor, list[str]]:
    """uint8 (B, channels, size, size), labels, numbers, and what is wrong with the others."""
    good = [item for item in items if item[0] is not None]
    pixels = torch.stack([item[0] for item in good if item[0] is not None]) if good else None
    labels, numbers = (torch.tensor([item[i] for item in good], dtype=torch.int64) for i in (1, 2))
    return pixels, labels, numbers, [item[3] for item in items if item[3]]


class Streamed:
    """The images of a run, as `source.InMemory` gives them."""

    def __init__(
        self, train: Records, held_out: Records, classes: list[str], settings: Settings,
        workers: int, skip: bool, say: Callable[[str], None],
    ):  # fmt: skip
        self.classes, self.settings = classes, settings
        self.workers, self.skip, self.say = workers, skip, say
        self.train, self.held_out = train, held_out
        self.broken: set[str] = set()
        self.as_bytes = False  # whether the model normalizes what it reads
        self.device = torch.device("cpu")
        self.train_count, self.held_out_count = len(train), len(held_out)
        self._train_images = Images(train, settings)
        self._held_out_images = Images(held_out, settings)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(settings.seed))
        places: list[list[Place]] = [[(i, None)] for i in order[:SAMPLE].tolist()]
        sample = [pixels for pixels, *_ in self._read(self._train_images, places)]
        pixels = [p for p in sample if p is not None]
        if not pixels:
            raise CommandError(f"none of {len(places)} training images can be read")
        self.normalization = Normalization.of(torch.cat(pixels))
        self._sample = torch.cat(pixels[:2])

    def to(self, device: torch.device) -> None:
        self.device = device
        self.held_out_labels = torch.tensor(self.held_out.labels, device=device)

    def _read(
        self, images: Images, places: list[list[Place]]
    ) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
        loader = DataLoader(
            images,
            batch_sampler=places,
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own: dropped paths are drawn from the global one
        )
        for pixels, labels, numbers, wrong in loader:
            for message in wrong:
                if not self.skip:
                    raise CommandError(f"{message}; --on-error skip goes on without it")
                if message not in self.broken:
                    self.say(f"left out: {message}")
                    self.broken.add(message)
            yield pixels, labels, numbers

    def _on_device(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.device, non_blocking=True)
        return pixels if self.as_bytes else self.normalization(pixels)

    def _nothing(self) -> Tensor:
        """An image for a step of which this process has no row; its loss weighs nothing."""
        return self._on_device(torch.zeros_like(self._sample[:1]))

    def batches(self, epoch: int, processes: Processes) -> Iterator[tuple[Tensor, Tensor, float]]:
        """As `InMemory.batches`. A batch is the poorer by what could not be read."""
        base = self.settings.seed * 1_000_003 + epoch
        order = torch.randperm(self.train_count, generator=torch.Generator().manual_seed(base))
        batches = order.split(self.settings.batch_size)
        first = base * self.train_count % 2**62
        mine = [b[processes.share(len(b))].tolist() or b[:1].tolist() for b in batches]
        spare = [not len(b[processes.share(len(b))]) for b in batches]
        places: list[list[Place]] = [[(i, first + i) for i in b] for b in mine]
        read = self._read(self._train_images, places)
        for (pixels, labels, _), batch, empty in zip(read, batches, spare, strict=True):
            if pixels is None or empty:
                yield self._nothing(), labels.new_zeros(1).to(self.device), 0.0
                continue
            weight = len(labels) * processes.world / len(batch)
            yield self._on_device(pixels), labels.to(self.device, non_blocking=True), weight

    def held_out_batches(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """As `InMemory.held_out_batches`."""
        chunks = torch.arange(self.held_out_count).split(HELD_OUT_BATCH)
        mine = [c[processes.share(len(c))].tolist() or c[:1].tolist() for c in chunks]
        spare = [not len(c[processes.share(len(c))]) for c in chunks]
        places: list[list[Place]] = [[(i, None) for i in c] for c in mine]
        read = self._read(self._held_out_images, places)
        for (pixels, _, numbers), empty in zip(read, spare, strict=True):
            if pixels is None or empty:
                yield torch.zeros(0, dtype=torch.int64, device=self.device), self._nothing()
            else:
                yield numbers.to(self.device), self._on_device(pixels)

    def training_sample(self, count: int) -> Tensor:
        return self._sample[:count].to(self.device)

    def held_out_sample(self) -> tuple[int, Tensor]:
        """The first held-out image that can be read: its number, (1, channels, size, size)."""
        for index in range(self.held_out_count):
            pixels, *_ = self._held_out_images[index, None]
            if pixels is not None:
                return index, pixels[None].to(self.device)
        raise CommandError("none of the held-out images can be read")

    def digest(self) -> str:
        return f"{self.train.digest()} {self.held_out.digest()} {self.classes}"
