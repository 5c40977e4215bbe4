"""Images as numbers: read, normalized, augmented; the batches of a run, from memory or streamed.

Pixels stay uint8 until a batch is on the device. In memory every image is read, cropped and resized
before training starts, so that a damaged file stops the command at once, with its name, and not in
the third epoch.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.patch_embed.functions import normalised_pixels
from ..console import CommandError, refusing, require
from .processes import Processes
from .records import Found, Records
from .settings import Settings


@dataclass(frozen=True)
class Normalization:
    """(pixel / 255 - mean) / std, one mean and std a channel, of the training images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, images: Tensor) -> Normalization:
        count = images.numel() // images.shape[1]
        mean, std = [], []
        for channel in range(images.shape[1]):
            # Exact integer histograms: no fp32 copy of all images, equal on every device.
            histogram = torch.bincount(images[:, channel].flatten().long(), minlength=256).double()
            levels = torch.arange(256, device=images.device).double() / 255
            mean.append((histogram @ levels).item() / count)
            std.append(math.sqrt((histogram @ (levels - mean[-1]).square()).item() / count) or 1.0)
        return cls(tuple(mean), tuple(std))

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, channels, height, width) -> fp32 of the same shape."""
        return normalised_pixels(images, self.mean, self.std, torch.float32)


@dataclass(frozen=True)
class Augmentation:
    """Random affine maps: the largest rotation, relative zoom, shift in pixels, and mirroring."""

    degrees: float = 0.0
    zoom: float = 0.0
    shift: float = 0.0
    mirror: bool = False

    @staticmethod
    def draw(B: int, generator: torch.Generator) -> Tensor:
        """(5, B), from -1 to 1, on the CPU, so that a run draws the same maps on every device."""
        return 2 * torch.rand(5, B, generator=generator) - 1

    def apply(self, images: Tensor, draw: Tensor) -> Tensor:
        """fp32 (B, channels, height, width) by the numbers of `draw`, a column an image; the border
        is repeated outwards."""
        height, width = images.shape[-2:]
        angle = draw[0] * math.radians(self.degrees)
        zoom = 1 + draw[1] * self.zoom
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        flip = torch.where((draw[4] < 0) & self.mirror, -1.0, 1.0)
        # affine_grid's units: the image reaches from -1 to 1 along each axis.
        shift_x, shift_y = draw[2] * 2 * self.shift / width, draw[3] * 2 * self.shift / height
        rows = [
            torch.stack([cos * flip, -sin * height / width, shift_x], dim=-1),
            torch.stack([sin * flip * width / height, cos, shift_y], dim=-1),
        ]
        affine = torch.stack(rows, dim=1).to(images.device)
        grid = F.affine_grid(affine, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


AUGMENTATIONS = {
    "digits": Augmentation(degrees=5, zoom=0.1, shift=0.5),
    "mnist": Augmentation(degrees=10, zoom=0.1, shift=2),
    "folder": Augmentation(degrees=5, zoom=0.2, shift=16, mirror=True),
}


def upright(opened: Any, in_chans: int) -> Any:
    """A pillow image as its EXIF turns it, grey or RGB.

    Raises: ValueError for more than 8 bits a channel; what pillow raises for a damaged file.
    """
    image = require("PIL.ImageOps", "pillow").exif_transpose(opened)
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"mode {image.mode}; 8 bits a channel are wanted")
    return image.convert("L" if in_chans == 1 else "RGB")


def fit(image: Any, img_size: int | None) -> Tensor:
    """A pillow image as uint8 (channels, height, width): as it is, or cropped to a square about its
    centre and resized bicubically."""
    numpy = require("numpy", "numpy")
    if img_size is not None and image.size != (img_size, img_size):
        bicubic = require("PIL.Image", "pillow").Resampling.BICUBIC
        image = require("PIL.ImageOps", "pillow").fit(image, (img_size, img_size), bicubic)
    pixels = torch.from_numpy(numpy.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def read_image(records: Records, index: int, img_size: int | None, in_chans: int) -> Tensor:
    """One image as uint8 (in_chans, img_size, img_size), or of its own size for None."""
    bomb = require("PIL.Image", "pillow").DecompressionBombError
    broken = (OSError, ValueError, SyntaxError, KeyError, bomb)
    reading = refusing(f"{records.name(index)} cannot be read as an image", *broken)
    with reading, records.open(index) as image:
        return fit(upright(image, in_chans), img_size)


def _check_memory(count: int, bytes_each: int) -> None:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return
    # Once as separate images, once in one tensor.
    if 2 * count * bytes_each > memory:
        raise CommandError(
            f"{count} images of {bytes_each} bytes are held in memory, twice while they are read, "
            f"and this machine has {memory / 1e9:.1f} GB; use a smaller --img-size or fewer images"
        )


class Split(NamedTuple):
    images: Tensor  # (N, channels, height, width) uint8
    labels: Tensor  # (N,) int64


class Batches:
    """The images of a run, batch by batch. Every process takes every step: where it has no row of a
    batch, or none that can be read, it gets black pixels, and no number."""

    normalization: Normalization
    sample: Tensor  # (2, channels, height, width) uint8, of the training images
    held_out_batch = 1024

    def __init__(self, found: Found, settings: Settings, device: torch.device):
        train, held_out, self.classes = found
        self.settings, self.device = settings, device
        self.train_count, self.held_out_count = len(train), len(held_out)
        self.held_out_labels = torch.tensor(held_out.labels, device=device)
        self.broken: set[str] = set()

    def batches(self, epoch: int, processes: Processes) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This process's rows of shuffled, augmented batches, and the weight of their mean loss in
        that of the batch: the rows' share times the number of processes, over which DDP and FSDP2
        average. The batches are a function of (seed, epoch) alone; a batch is the poorer by what
        could not be read."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(self.train_count, generator=generator)
        batches = order.split(self.settings.batch_size)
        shown = self._shown(batches, processes, generator)
        for batch, (images, labels, _) in zip(batches, shown, strict=True):
            weight = len(labels) * processes.world / len(batch)
            yield images, labels if weight else labels.new_zeros(1), weight

    def held_out_batches(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers and images of this process's held-out images."""
        batches = torch.arange(self.held_out_count).split(self.held_out_batch)
        for images, _, numbers in self._shown(batches, processes, None):
            yield numbers, images

    def _shown(
        self, batches: Sequence[Tensor], processes: Processes, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This process's images, labels and numbers of batches of numbers: of training images,
        augmented by a generator, or without one of held-out images."""
        raise NotImplementedError


class InMemory(Batches):
    """All images on the device as bytes."""

    def __init__(self, found: Found, settings: Settings, device: torch.device):
        super().__init__(found, settings, device)
        train, held_out, _ = found
        size, in_chans = settings.img_size, settings.in_chans
        places = [(records, i) for records in (train, held_out) for i in range(len(records))]
        _check_memory(len(places), in_chans * size**2)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # pillow decodes outside the GIL
            read = list(pool.map(lambda p: read_image(p[0], p[1], size, in_chans), places))
        images, rest = torch.stack(read).split([len(train), len(held_out)])
        self.normalization, self.sample = Normalization.of(images), images[:2].to(device)
        self.train = Split(images.to(device), torch.tensor(train.labels, device=device))
        self.held_out = Split(rest.to(device), self.held_out_labels)

    def _shown(
        self, batches: Sequence[Tensor], processes: Processes, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        split = self.held_out if generator is None else self.train
        augmentation = AUGMENTATIONS[self.settings.data]
        for batch in batches:
            mine, draw = processes.share(len(batch)), None
            if generator is not None and self.settings.augment:
                draw = augmentation.draw(len(batch), generator)
            numbers = batch[mine].to(self.device)
            pixels = split.images[numbers] if len(numbers) else torch.zeros_like(self.sample[:1])
            images = self.normalization(pixels)
            if draw is not None and len(numbers):
                images = augmentation.apply(images, draw[:, mine])
            yield images, split.labels[numbers], numbers

    def held_out_sample(self) -> tuple[int, Tensor]:
        return 0, self.held_out.images[:1]

    def digest(self) -> str:
        digest = hashlib.sha256(repr(self.classes).encode())
        for tensor in (*self.train, *self.held_out):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()
