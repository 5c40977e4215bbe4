"""Where images are: digits, idx files, class folders, tar shards, a dataset of Hugging Face.

Records know every image's label and name before any image is read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import CommandError, refusing, require
from .settings import Settings

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
Place = tuple[Path, str, int, int]  # a file, the name inside a shard, offset, bytes


def stratified_split(labels: Tensor, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (train, held-out), each in order; every class gives the same share, by seed."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        # At least one of each side where a class has two images or more.
        count = min(max(round(held_out * len(members)), 1), len(members) - 1)
        mask[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~mask).nonzero()[:, 0], mask.nonzero()[:, 0]


@dataclass
class Records:
    """Images by number: in files, in tar shards, or rows of what `read` reads.

    Places of shards are read once: the images of a step then come from anywhere in any shard.
    """

    places: Sequence[Any]  # a Place each, or the number of a row
    labels: list[int]
    read: Callable[[int], Any] | None = None  # a row's PIL image
    origin: str = ""  # what tells the rows from those of other data

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Tensor) -> Records:
        places, labels = ([of[i] for i in indices.tolist()] for of in (self.places, self.labels))
        return replace(self, places=places, labels=labels)

    def name(self, index: int) -> str:
        if self.read is not None:
            return f"row {self.places[index]}"
        path, member, *_ = self.places[index]
        return f"{path}: {member}" if member else str(path)

    def open(self, index: int) -> Any:
        """A PIL image; raises what pillow raises."""
        if self.read is not None:
            return self.read(self.places[index])
        path, member, offset, count = self.places[index]
        pillow = require("PIL.Image", "pillow")
        if not member:
            return pillow.open(path)
        with path.open("rb") as file:
            file.seek(offset)
            return pillow.open(io.BytesIO(file.read(count)))

    def digest(self) -> str:
        """Of names, sizes and labels: reading every pixel would take longer than an epoch."""
        content = self.origin, self.places, self.labels
        return hashlib.sha256(repr(content).encode()).hexdigest()


Found = tuple[Records, Records, list[str]]  # training, held out, names of the classes
# As it lies there: no held-out images where they are to be split, no names where those are numbers.
Source = tuple[Records, Records | None, list[str] | None]


def _arrays(images: Tensor, labels: Tensor) -> Records:
    """(N, height, width) uint8."""
    pillow, pixels = require("PIL.Image", "pillow"), images.numpy()
    return Records(range(len(images)), labels.tolist(), lambda row: pillow.fromarray(pixels[row]))


def from_digits(_: Path) -> Source:
    """scikit-learn's 1797 scans of handwritten digits, 8 x 8 x 1; they come with the package."""
    digits: Any = require("sklearn.datasets", "scikit-learn").load_digits()
    # The scans have 17 levels, 0 to 16.
    images = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)
    return _arrays(images, digits.target), None, None


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


def _idx_split(folder: Path, prefix: str) -> Records:
    image_path = _idx_file(folder, f"{prefix}-images-idx3-ubyte")
    label_path = _idx_file(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or images.numel() == 0:
        raise CommandError(f"{image_path}: wanted (N, height, width), got {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        raise CommandError(
            f"{label_path}: wanted ({len(images)},) labels, got {tuple(labels.shape)}"
        )
    return _arrays(images, labels)


def from_idx(folder: Path) -> Source:
    """MNIST's four idx files; the t10k files are the held-out split."""
    return _idx_split(folder, "train"), _idx_split(folder, "t10k"), None


def _class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folder: Path, classes: list[str]) -> Records:
    """The images in these class folders, in order."""
    places: list[Place] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            p
            for p in (folder / name).rglob("*")
            if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith(".") and p.is_file()
        )
        places += [(path, "", 0, path.stat().st_size) for path in found]
        labels += [label] * len(found)
    return Records(places, labels)


def from_folder(folder: Path) -> Source:
    """folder/train/CLASS with folder/val or folder/test, or folder/CLASS."""
    held = next((folder / n for n in ("val", "test") if (folder / n).is_dir()), None)
    if (folder / "train").is_dir() != (held is not None):
        raise CommandError(f"{folder} needs train/ beside val/ or test/, or class folders alone")
    root = folder if held is None else folder / "train"
    classes = _class_folders(root)
    if len(classes) < 2:
        raise CommandError(f"{root} needs two class folders or more, got {len(classes)}")
    images = _files(root, classes)
    if empty := sorted(set(range(len(classes))) - set(images.labels)):
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise CommandError(f"{root / classes[empty[0]]} holds no image ({suffixes})")
    if held is None:
        return images, None, classes
    if unknown := sorted(set(_class_folders(held)) - set(classes)):
        raise CommandError(f"{held / unknown[0]} has no counterpart in {root}")
    return images, _files(held, classes), classes


def _shards(paths: Sequence[Path]) -> Records:
    """The samples KEY.cls and KEY.jpg in tar files, as WebDataset lays them out; not compressed."""
    places: list[Place] = []
    labels: list[int] = []
    for path in paths:
        images: dict[str, Place] = {}
        classes: dict[str, int] = {}
        reading = refusing(
            f"{path} cannot be read as a shard", OSError, tarfile.TarError, ValueError
        )
        with reading, tarfile.open(path, "r:") as shard:
            for member in filter(tarfile.TarInfo.isreg, shard):
                key, _, suffix = member.name.rpartition(".")
                if suffix == "cls":
                    content: Any = shard.extractfile(member)
                    classes[key] = int(content.read())
                elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    images[key] = (path, member.name, member.offset_data, member.size)
        if alone := sorted(images.keys() ^ classes.keys()):
            raise CommandError(f"{path}: {alone[0]} needs an image and a .cls file")
        if not images:
            raise CommandError(f"{path} holds no sample of an image and a .cls file")
        places += images.values()
        labels += [classes[key] for key in images]
    return Records(places, labels)


def from_shards(folder: Path) -> Source:
    """folder/train/*.tar with folder/val or folder/test, or folder/*.tar."""
    found = {n: sorted((folder / n).glob("*.tar")) for n in ("", "train", "val", "test")}
    train, held = found["train"] or found[""], found["val"] or found["test"]
    if not train or bool(found["train"]) != bool(held):
        raise CommandError(
            f"{folder} needs *.tar, or train/*.tar beside val/*.tar or test/*.tar; "
            + ", ".join(f"{n or '.'}: {len(paths)} shards" for n, paths in found.items())
        )
    return _shards(train), _shards(held) if held else None, None


def _cell(split: Any, column: str, row: int) -> Any:
    return split[row][column]


def from_datasets(folder: Path) -> Source:
    """What `datasets` reads in a folder: one that save_to_disk wrote, or files of its own kinds."""
    library: Any = require("datasets", "datasets", "datasets")
    # Exception: of its own classes, and those of what it reads with
    with refusing(f"{folder} cannot be read by datasets", Exception):
        saved = (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()
        read = library.load_from_disk if saved else library.load_dataset
        loaded = read(str(folder))
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise CommandError(f"{folder} needs a split train, got {', '.join(splits)}")
    columns = splits["train"].features
    images = [n for n, kind in columns.items() if isinstance(kind, library.Image)]
    names = [n for n, kind in columns.items() if isinstance(kind, library.ClassLabel)]
    if not images or not names:
        raise CommandError(
            f"{folder} needs a column of Image and one of ClassLabel, got "
            + ", ".join(f"{n}: {type(kind).__name__}" for n, kind in columns.items())
        )

    def rows(split: Any) -> Records:
        labels, origin = list(split[names[0]]), getattr(split, "_fingerprint", "")
        return Records(range(len(labels)), labels, partial(_cell, split, images[0]), origin)

    held = next((splits[n] for n in ("validation", "val", "test") if n in splits), None)
    rest = None if held is None else rows(held)
    return rows(splits["train"]), rest, list(columns[names[0]].names)


SOURCES = {
    "digits": from_digits,
    "mnist": from_idx,
    "folder": from_folder,
    "webdataset": from_shards,
    "hf": from_datasets,
}


def find(settings: Settings) -> Found:
    """Training and held-out images of --data, and the names of their classes. Where the data has no
    held-out images of its own, every class gives a share of its images, by seed."""
    folder = Path(settings.data_dir or "")
    if not folder.is_dir():
        raise CommandError(f"--data-dir {folder} is not a folder")
    train, rest, names = SOURCES[settings.data](folder)
    classes = names or [str(c) for c in range(max(train.labels) + 1)]
    found = {*train.labels, *(rest.labels if rest else ())}
    if strange := found - {*range(len(classes))}:
        raise CommandError(
            f"{folder}: class {min(strange)} is not among the {len(classes)} classes of the "
            "training images, from 0 on"
        )
    if rest is None:
        labels = torch.tensor(train.labels)
        train, rest = map(train.part, stratified_split(labels, settings.held_out, settings.seed))
    if not len(rest):
        raise CommandError(f"{folder}: none can be held out; wanted two images of a class, or more")
    return train, rest, classes
