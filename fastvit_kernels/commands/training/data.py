"""Images for `train` in memory: scikit-learn's digits, idx files, class folders.

Every image is read, decoded and resized before training starts, so that a damaged file stops the
command at once, with its name, and not in the third epoch. Pixels stay uint8 until a batch is made.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.patch_embed.functions import normalised_pixels
from ..console import CommandError, refusing, require
from .processes import Processes
from .records import Records, from_folder, stratified_split
from .settings import Settings


@dataclass
class Split:
    images: Tensor  # (N, channels, height, width) uint8
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> Split:
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


@dataclass
class Dataset:
    train: Split
    held_out: Split
    classes: list[str]


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


def resize(images: Tensor, img_size: int) -> Tensor:
    """uint8 (N, h, w) -> (N, 1, img_size, img_size), by `fit`."""
    if images.shape[-2:] == (img_size, img_size):
        return images[:, None]
    _check_memory(len(images), img_size**2)
    opened = map(require("PIL.Image", "pillow").fromarray, images.numpy())
    return torch.stack([fit(image, img_size) for image in opened])


def load_digits(img_size: int, held_out: float, seed: int) -> Dataset:
    """scikit-learn's 1797 scans of handwritten digits, 8 x 8 x 1; they come with the package."""
    digits: Any = require("sklearn.datasets", "scikit-learn").load_digits()
    # The scans have 17 levels, 0 to 16.
    images = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)
    everything = Split(resize(images, img_size), torch.from_numpy(digits.target).long())
    train, rest = stratified_split(everything.labels, held_out, seed)
    return Dataset(everything[train], everything[rest], [str(c) for c in range(10)])


def read_idx(path: Path) -> Tensor:
    """A file of the idx format (MNIST's), plain or .gz, as a uint8 tensor.

    Layout: two zero bytes, the element type, the number of axes, each axis as a big-endian uint32,
    then the elements, last axis fastest.
    """
    numpy = require("numpy", "numpy")
    broken = (OSError, EOFError, IndexError, ValueError, zlib.error)
    with refusing(f"{path} cannot be read as an idx file of bytes", *broken):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it begins with {content[:3].hex(' ')}, wanted 00 00 08")
        axes = content[3]
        shape = numpy.frombuffer(content, ">u4", axes, 4).tolist()
        elements = numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * axes)
        return torch.from_numpy(elements.reshape(shape).copy())


def _idx_file(folder: Path, name: str) -> Path:
    """`name` in folder or in its MNIST/raw (torchvision's layout), either spelling, maybe .gz."""
    spellings = (name, name.replace("-idx", ".idx"))
    for place, spelling, suffix in product(("", "MNIST/raw", "raw"), spellings, ("", ".gz")):
        path = folder / place / (spelling + suffix)
        if path.is_file():
            return path
    raise CommandError(f"{folder} has no file {name} or {name}.gz")


def _idx_split(folder: Path, prefix: str, img_size: int) -> Split:
    image_path = _idx_file(folder, f"{prefix}-images-idx3-ubyte")
    label_path = _idx_file(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_path), read_idx(label_path).long()
    if images.ndim != 3 or images.numel() == 0:
        raise CommandError(f"{image_path}: wanted (N, height, width), got {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        raise CommandError(
            f"{label_path}: wanted ({len(images)},) labels, got {tuple(labels.shape)}"
        )
    return Split(resize(images, img_size), labels)


def load_idx(folder: Path, img_size: int) -> Dataset:
    """MNIST's four idx files; the t10k files are the held-out split."""
    train, held_out = (_idx_split(folder, prefix, img_size) for prefix in ("train", "t10k"))
    num_classes = int(train.labels.max()) + 1
    if int(held_out.labels.max()) >= num_classes:
        raise CommandError(
            f"{folder}: the t10k labels reach {int(held_out.labels.max())}, "
            f"the training labels only {num_classes - 1}"
        )
    return Dataset(train, held_out, [str(c) for c in range(num_classes)])


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
    if img_size is not None:
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


def load_folder(folder: Path, img_size: int, in_chans: int, held_out: float, seed: int) -> Dataset:
    """The class folders of `records.from_folder`."""
    train, rest, classes = from_folder(folder, held_out, seed)
    places = [(records, i) for records in (train, rest) for i in range(len(records))]
    _check_memory(len(places), in_chans * img_size**2)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # pillow decodes outside the GIL
        images = list(pool.map(lambda p: read_image(p[0], p[1], img_size, in_chans), places))
    everything = Split(torch.stack(images), torch.tensor(train.labels + rest.labels))
    return Dataset(everything[: len(train)], everything[len(train) :], classes)


def load(settings: Settings) -> Dataset:
    """The images of a run in memory."""
    if settings.data == "digits":
        return load_digits(settings.img_size, settings.held_out, settings.seed)
    folder = data_folder(settings)
    if settings.data == "mnist":
        return load_idx(folder, settings.img_size)
    return load_folder(
        folder, settings.img_size, settings.in_chans, settings.held_out, settings.seed
    )


def data_folder(settings: Settings) -> Path:
    folder = Path(settings.data_dir or "")
    if not folder.is_dir():
        raise CommandError(f"--data-dir {folder} is not a folder")
    return folder


class InMemory:
    """The images of a run, batch by batch: all of them on the device as bytes."""

    def __init__(self, dataset: Dataset, settings: Settings):
        self.classes, self.settings = dataset.classes, settings
        self.normalization = Normalization.of(dataset.train.images)
        self.train, self.held_out = dataset.train, dataset.held_out
        self.train_count, self.held_out_count = len(self.train), len(self.held_out)
        self.broken: set[str] = set()

    def to(self, device: torch.device) -> None:
        self.train, self.held_out = self.train.to(device), self.held_out.to(device)
        self.held_out_labels = self.held_out.labels

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
        numbers = torch.arange(self.held_out_count, device=self.held_out.labels.device)
        for index in numbers.split(1024):
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
