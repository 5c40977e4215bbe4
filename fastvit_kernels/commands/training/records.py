"""Where images are: class folders, tar shards, a dataset of Hugging Face's library.

Records know every image's label and name before any image is read.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import CommandError, refusing, require

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
class _Numbered:
    """Images by number; a number has a name, a label and a place."""

    places: Any
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Sequence[int]) -> Any:
        places, labels = ([of[i] for i in indices] for of in (self.places, self.labels))
        return replace(self, places=places, labels=labels)


@dataclass
class Files(_Numbered):
    """Images in files or in tar shards.

    Places of shards are read once: the images of a step then come from anywhere in any shard.
    """

    places: list[Place]

    def name(self, index: int) -> str:
        path, member, *_ = self.places[index]
        return f"{path}: {member}" if member else str(path)

    def open(self, index: int) -> Any:
        """A PIL image; raises what pillow raises."""
        path, member, offset, count = self.places[index]
        pillow = require("PIL.Image", "pillow")
        if not member:
            return pillow.open(path)
        with path.open("rb") as file:
            file.seek(offset)
            return pillow.open(io.BytesIO(file.read(count)))

    def digest(self) -> str:
        """Of names, sizes and labels: reading every pixel would take longer than an epoch."""
        return hashlib.sha256(repr((self.places, self.labels)).encode()).hexdigest()


@dataclass
class Rows(_Numbered):
    """Rows of a split of Hugging Face's `datasets`, by the methods of Files."""

    places: Sequence[int]
    split: Any
    column: str

    def name(self, index: int) -> str:
        return f"row {self.places[index]}"

    def open(self, index: int) -> Any:
        return self.split[self.places[index]][self.column]

    def digest(self) -> str:
        content = getattr(self.split, "_fingerprint", ""), self.places, self.labels
        return hashlib.sha256(repr(content).encode()).hexdigest()


Records = Files | Rows
Found = tuple[Records, Records, list[str]]  # training, held out, names of the classes


def _split(records: Records, classes: list[str], held_out: float, seed: int, where: Path) -> Found:
    train, rest = stratified_split(torch.tensor(records.labels), held_out, seed)
    if not len(rest):
        raise CommandError(f"{where}: no class has two images, so none can be held out")
    return records.part(train.tolist()), records.part(rest.tolist()), classes


def _class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folder: Path, classes: list[str]) -> Files:
    """The images in these class folders, in order."""
    files = Files([], [])
    for label, name in enumerate(classes):
        found = sorted(
            p for p in (folder / name).rglob("*")
            if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith(".") and p.is_file()
        )  # fmt: skip
        files.places += [(path, "", 0, path.stat().st_size) for path in found]
        files.labels += [label] * len(found)
    return files


def from_folder(folder: Path, held_out: float, seed: int) -> Found:
    """folder/train/CLASS with folder/val or folder/test, or folder/CLASS with a split by seed."""
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
        return _split(images, classes, held_out, seed, folder)
    if unknown := sorted(set(_class_folders(held)) - set(classes)):
        raise CommandError(f"{held / unknown[0]} has no counterpart in {root}")
    rest = _files(held, classes)
    if not len(rest):
        raise CommandError(f"{held} holds no image")
    return images, rest, classes


def _shards(paths: Sequence[Path]) -> Files:
    """The samples KEY.cls and KEY.jpg in tar files, as WebDataset lays them out; not compressed."""
    files = Files([], [])
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
        files.places += images.values()
        files.labels += [classes[key] for key in images]
    if min(files.labels) < 0:
        raise CommandError(f"classes must be 0 or more, got {min(files.labels)}")
    return files


def from_shards(folder: Path, held_out: float, seed: int) -> Found:
    """folder/train/*.tar with folder/val or folder/test, or folder/*.tar with a split by seed."""
    found = {n: sorted((folder / n).glob("*.tar")) for n in ("", "train", "val", "test")}
    of_train, held = found["train"] or found[""], found["val"] or found["test"]
    if not of_train or bool(found["train"]) != bool(held):
        raise CommandError(
            f"{folder} needs *.tar, or train/*.tar beside val/*.tar or test/*.tar; "
            + ", ".join(f"{n or '.'}: {len(paths)} shards" for n, paths in found.items())
        )
    train = _shards(of_train)
    classes = [str(c) for c in range(max(train.labels) + 1)]
    if not held:
        return _split(train, classes, held_out, seed, folder)
    rest = _shards(held)
    if max(rest.labels) >= len(classes):
        raise CommandError(
            f"{held[0].parent}: class {max(rest.labels)} is not among the {len(classes)} classes "
            "of the training shards"
        )
    return train, rest, classes


def from_datasets(folder: Path, held_out: float, seed: int) -> Found:
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
    classes = list(columns[names[0]].names)

    def rows(split: Any) -> Rows:
        labels = list(split[names[0]])
        return Rows(range(len(labels)), labels, split, images[0])

    train = rows(splits["train"])
    held = next((splits[n] for n in ("validation", "val", "test") if n in splits), None)
    if held is None:
        return _split(train, classes, held_out, seed, folder)
    return train, rows(held), classes


SOURCES = {"folder": from_folder, "webdataset": from_shards, "hf": from_datasets}
