"""Where streamed images are: class folders, tar shards, a dataset of Hugging Face's library.

Records know every image's label and name before any image is read.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..console import CommandError, refusing, require
from .data import IMAGE_SUFFIXES, folder_images, split_folders, stratified_split


class Records:
    """Images by number: `open` gives a PIL image or raises what pillow raises."""

    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        raise NotImplementedError

    def open(self, index: int) -> Any:
        raise NotImplementedError

    def content(self) -> Any:
        """What the digest is of."""
        raise NotImplementedError

    def digest(self) -> str:
        return hashlib.sha256(repr(self.content()).encode()).hexdigest()


@dataclass
class Files(Records):
    """Images that are files."""

    paths: list[Path]
    labels: list[int]

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def open(self, index: int) -> Any:
        return require("PIL.Image", "pillow").open(self.paths[index])

    def content(self) -> Any:
        """Names, sizes and labels: reading every pixel would take longer than an epoch."""
        rows = zip(self.paths, self.labels, strict=True)
        return [(str(path), path.stat().st_size, label) for path, label in rows]


@dataclass
class Shards(Records):
    """Samples KEY.cls and KEY.jpg in tar files, as WebDataset lays them out; local, uncompressed.

    An index of offsets, read once: the images of a step then come from any place of any shard.
    """

    places: list[tuple[Path, str, int, int]]  # shard, name, offset, bytes
    labels: list[int]

    def name(self, index: int) -> str:
        shard, name, *_ = self.places[index]
        return f"{shard}: {name}"

    def open(self, index: int) -> Any:
        shard, _, offset, count = self.places[index]
        with shard.open("rb") as file:
            file.seek(offset)
            return require("PIL.Image", "pillow").open(io.BytesIO(file.read(count)))

    def content(self) -> Any:
        return self.places, self.labels

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Shards:
        """The index of these shards.

        Raises: CommandError naming a shard that cannot be read, or a sample without a class.
        """
        places, labels = [], []
        for path in paths:
            images: dict[str, tuple[Path, str, int, int]] = {}
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
        if min(labels) < 0:
            raise CommandError(f"classes must be 0 or more, got {min(labels)}")
        return cls(places, labels)


@dataclass
class Rows(Records):
    """A split of Hugging Face's `datasets` with an image column and a label column."""

    split: Any
    image: str
    labels: list[int]

    def name(self, index: int) -> str:
        return f"row {index}"

    def open(self, index: int) -> Any:
        return self.split[index][self.image]

    def content(self) -> Any:
        return getattr(self.split, "_fingerprint", ""), self.labels


@dataclass
class Part(Records):
    """Some of the records, where there is no split but ours."""

    whole: Records
    indices: list[int]
    labels: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.labels = [self.whole.labels[i] for i in self.indices]

    def name(self, index: int) -> str:
        return self.whole.name(self.indices[index])

    def open(self, index: int) -> Any:
        return self.whole.open(self.indices[index])

    def content(self) -> Any:
        return self.whole.digest(), self.indices


Found = tuple[Records, Records, list[str]]  # training, held out, names of the classes


def _split(records: Records, classes: list[str], held_out: float, seed: int, where: Path) -> Found:
    train, rest = stratified_split(torch.tensor(records.labels), held_out, seed)
    if not len(rest):
        raise CommandError(f"{where}: no class has two images, so none can be held out")
    return Part(records, train.tolist()), Part(records, rest.tolist()), classes


def from_folder(folder: Path, held_out: float, seed: int) -> Found:
    """folder/train/CLASS with folder/val or folder/test, or folder/CLASS with a split by seed."""
    root, held_folder, classes = split_folders(folder)
    everything = Files(*folder_images(root, classes))
    if held_folder is None:
        return _split(everything, classes, held_out, seed, folder)
    return everything, Files(*folder_images(held_folder, classes)), classes


def from_shards(folder: Path, held_out: float, seed: int) -> Found:
    """folder/train/*.tar with folder/val or folder/test, or folder/*.tar with a split by seed."""
    found = {n: sorted((folder / n).glob("*.tar")) for n in ("", "train", "val", "test")}
    held = found["val"] or found["test"]
    train = Shards.read(found["train"] or found[""]) if found["train"] or found[""] else None
    if train is None or bool(found["train"]) != bool(held):
        raise CommandError(
            f"{folder} needs *.tar, or train/*.tar beside val/*.tar or test/*.tar; "
            + ", ".join(f"{n or '.'}: {len(paths)} shards" for n, paths in found.items())
        )
    classes = [str(c) for c in range(max(train.labels) + 1)]
    if not held:
        return _split(train, classes, held_out, seed, folder)
    rest = Shards.read(held)
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
    parts = {n: Rows(s, images[0], list(s[names[0]])) for n, s in splits.items()}
    held = next((parts[n] for n in ("validation", "val", "test") if n in parts), None)
    if held is None:
        return _split(parts["train"], classes, held_out, seed, folder)
    return parts["train"], held, classes


SOURCES = {"folder": from_folder, "webdataset": from_shards, "hf": from_datasets}
