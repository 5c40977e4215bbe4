"""Images that do not fit in memory: torch's DataLoader reads them, torchvision's v2 transforms crop
and augment them, in worker processes while the model trains.

What an image becomes depends on (seed, epoch, image) alone: not on the number of workers, nor on
the number of processes that share a batch. That is why the loader is not timm's, whose workers draw
from generators of their own, and whose dataset takes the next image in place of one that is broken.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...runtime.compat import define_torchvision_operators
from ..console import CommandError, require
from .data import Batches, InMemory, Normalization, read_image
from .processes import Processes
from .records import Found, Records, find
from .settings import Settings

SAMPLE = 256  # training images that give mean and standard deviation

Item = tuple[Tensor | None, int, int, str]  # pixels, label, number, what is wrong with it
Place = tuple[int, int | None]  # number, seed


def transforms() -> Any:
    """torchvision's transforms.v2."""
    define_torchvision_operators()
    return require("torchvision.transforms.v2", "torchvision", "fastvit-kernels[train-folder]")


def training_transforms(settings: Settings) -> Callable[[Tensor], Tensor]:
    """Of a uint8 image: random crop, mirror, RandAugment."""
    v2 = transforms()
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
        crop = None if seed is None else self.transforms
        size = self.settings.img_size if crop is None else None
        try:
            pixels = read_image(self.records, index, size, self.settings.in_chans)
        except CommandError as error:
            return None, label, index, str(error)
        if crop is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed or 0)
                pixels = crop(pixels)
        return pixels, label, index, ""


def _collate(items: list[Item]) -> tuple[Tensor | None, Tensor, Tensor, dict[int, str]]:
    """uint8 (B, channels, size, size), labels, numbers, and what is wrong with the others."""
    good = [item for item in items if item[0] is not None]
    pixels = torch.stack([item[0] for item in good if item[0] is not None]) if good else None
    labels, numbers = (torch.tensor([item[i] for item in good], dtype=torch.int64) for i in (1, 2))
    return pixels, labels, numbers, {item[2]: item[3] for item in items if item[3]}


class Streamed(Batches):
    """Images that workers read while others are trained on."""

    held_out_batch = 256

    def __init__(
        self,
        found: Found,
        settings: Settings,
        device: torch.device,
        workers: int,
        skip: bool,
        say: Callable[[str], None],
    ):
        super().__init__(found, settings, device)
        self.workers, self.skip, self.say = workers, skip, say
        self.as_bytes = False  # whether the model normalizes what it reads
        self.train, self.held_out = (Images(records, settings) for records in found[:2])
        order = torch.randperm(
            self.train_count, generator=torch.Generator().manual_seed(settings.seed)
        )
        places: list[list[Place]] = [[(i, None)] for i in order[:SAMPLE].tolist()]
        pixels = [found for found, *_ in self._read(self.train, places) if found is not None]
        if not pixels:
            raise CommandError(f"none of {len(places)} training images can be read")
        self.normalization = Normalization.of(torch.cat(pixels))
        self.sample = torch.cat(pixels[:2]).to(device)

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
            for number, message in wrong.items():
                if not self.skip:
                    raise CommandError(f"{message}; --on-error skip goes on without it")
                if (name := images.records.name(number)) not in self.broken:
                    self.say(f"left out: {message}")
                    self.broken.add(name)
            yield pixels, labels, numbers

    def _shown(
        self, batches: Sequence[Tensor], processes: Processes, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        shares = [batch[processes.share(len(batch))].tolist() for batch in batches]
        images, first = self.held_out, None
        if generator is not None:  # image 0's crop has the seed `first`
            images, first = self.train, generator.initial_seed() * self.train_count % 2**62
        places: list[list[Place]] = [
            [(i, None if first is None else first + i) for i in share] for share in shares
        ]
        read = self._read(images, [place for place in places if place])
        for share in shares:
            pixels, labels, numbers = next(read) if share else (None, *torch.empty(2, 0).long())
            if pixels is None:
                pixels = torch.zeros_like(self.sample[:1])
            pixels = pixels.to(self.device, non_blocking=True)
            pixels = pixels if self.as_bytes else self.normalization(pixels)
            yield pixels, labels.to(self.device, non_blocking=True), numbers.to(self.device)

    def held_out_sample(self) -> tuple[int, Tensor]:
        """The first held-out image that can be read: its number, (1, channels, size, size)."""
        for index in range(self.held_out_count):
            pixels, *_ = self.held_out[index, None]
            if pixels is not None:
                return index, pixels[None].to(self.device)
        raise CommandError("none of the held-out images can be read")

    def digest(self) -> str:
        train, held_out = self.train.records.digest(), self.held_out.records.digest()
        return f"{train} {held_out} {self.classes}"


Source = InMemory | Streamed


def open_images(
    settings: Settings, arguments: argparse.Namespace, device: torch.device, console: Any
) -> Source:
    """The images, in memory or to be streamed."""
    with console.status("reading images"):
        found = find(settings)
        if settings.in_memory:
            return InMemory(found, settings, device)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = min(8, (cores or 1) - 1) if arguments.workers is None else arguments.workers
        skip, say = arguments.on_error == "skip", partial(console.print, markup=False)
        return Streamed(found, settings, device, workers, skip, say)
