"""Which images and which runs a folder holds."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_data import Image

from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.training import checkpoint, checkpoint as names, records
from fastvit_kernels.commands.training.records import Records
from fastvit_kernels.commands.training.settings import make_settings


def shard(path, *members):
    """A tar file; a number is a class, None an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, content in members:
            data = io.BytesIO()
            if content is None:
                Image.new("RGB", (4, 4)).save(data, "PNG")
            else:
                data.write(str(content).encode())
            member = tarfile.TarInfo(name)
            member.size = len(data.getvalue())
            file.addfile(member, io.BytesIO(data.getvalue()))


def sample(key, label):
    return (f"{key}.png", None), (f"{key}.cls", label)


def find(folder, data, **given):
    given = {"data": data, "data_dir": str(folder), "img_size": 8, **given}
    return records.find(make_settings(given, torch.device("cpu")))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*sample("a", 0), ("b.png", None)], "b needs an image and a .cls file"),
        ([*sample("a", 0), ("b.cls", 1)], "b needs an image and a .cls file"),
        ([*sample("a", 0), *sample("b", -1)], "class -1 is not among the 1 classes"),
        ([*sample("a", "cat")], "cannot be read as a shard: invalid literal"),
        ([("notes.txt", 0)], "holds no sample"),
    ],
)
def test_a_shard_that_is_refused(tmp_path, members, message):
    shard(tmp_path / "0.tar", *members)
    with pytest.raises(CommandError, match=message):
        find(tmp_path, "webdataset")


def test_classes_of_shards_are_those_of_training(tmp_path):
    members = ("b.cls", 1), *sample("a", 0), ("b.png", None)  # each kind in an order of its own
    shard(tmp_path / "train" / "0.tar", *members)
    shard(tmp_path / "val" / "0.tar", *sample("c", 1))
    train, held_out, classes = find(tmp_path, "webdataset")
    assert (train.labels, held_out.labels, classes) == ([0, 1], [1], ["0", "1"])
    assert [train.name(1), held_out.name(0)] == [
        f"{tmp_path}/train/0.tar: b.png",
        f"{tmp_path}/val/0.tar: c.png",
    ]
    shard(tmp_path / "val" / "0.tar", *sample("c", 2))
    with pytest.raises(CommandError, match="class 2 is not among the 2 classes"):
        find(tmp_path, "webdataset")


def test_a_dataset_of_hugging_face(tmp_path, monkeypatch):
    """Its own library may be absent: classes by the dataset's names, validation before test."""

    class ImageColumn:
        pass

    class ClassLabel:
        names = ("zebra", "ant")

    class Split(SimpleNamespace):
        def __getitem__(self, column):
            return {"image": f"{self.name} {column}"} if column in (0, 1) else self.label

    columns = {"image": ImageColumn(), "label": ClassLabel()}
    parts = {
        name: Split(features=columns, label=[0, 1] * count, name=name, _fingerprint=name)
        for count, name in enumerate(("train", "test", "validation"), 2)
    }
    library = SimpleNamespace(
        Image=ImageColumn,
        ClassLabel=ClassLabel,
        load_dataset=lambda _: parts,
        load_from_disk=lambda _: parts["train"],
    )
    monkeypatch.setattr(records, "require", lambda *_: library)
    train, held_out, classes = find(tmp_path, "hf")
    assert classes == ["zebra", "ant"]
    assert (len(train), len(held_out)) == (4, 8)
    assert (train.open(1), held_out.open(0)) == ("train 1", "validation 0")
    assert (train.name(1), train.origin, held_out.origin) == ("row 1", "train", "validation")
    (tmp_path / "dataset_info.json").touch()
    train, held_out, _ = find(tmp_path, "hf", held_out=0.5)
    assert (len(train), len(held_out)) == (2, 2)
    del parts["train"]
    (tmp_path / "dataset_info.json").unlink()
    with pytest.raises(CommandError, match="needs a split train, got test, validation"):
        find(tmp_path, "hf")


def test_the_digest_of_each_kind_of_records(tmp_path):
    place, other = (tmp_path / "a.png", "", 0, 7), (tmp_path / "b.png", "", 0, 7)
    whole, first, second = Records([place, other], [0, 1]), torch.tensor([0]), torch.tensor([1])
    rows = Records(range(2), [0, 1], str, "a")
    kinds = [
        whole,
        Records([other, place], [0, 1]),
        Records([place, other], [0, 0]),
        Records([(*place[:3], 8), other], [0, 1]),
        Records([place, (*other[:2], 9, 7)], [0, 1]),
        Records([place, (other[0], "c.png", 0, 7)], [0, 1]),
        whole.part(first),
        whole.part(second),
        rows,
        Records(range(2), [0, 1], str, "b"),
        Records(range(2), [1, 1], str, "a"),
        rows.part(first),
        rows.part(second),
        Records([1], [0], str, "a"),
    ]
    digests = [kind.digest() for kind in kinds]
    assert len(set(digests)) == len(kinds) and digests == [kind.digest() for kind in kinds]


def _checkpoint(path, epochs):
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = dict.fromkeys(checkpoint.PARTS, "")
    checkpoint.save(path, {**parts, "history": [{}] * epochs})


def test_which_folder_a_run_takes(tmp_path, monkeypatch):
    """The first that is free, none that holds a run already; where it goes on, the one named."""
    monkeypatch.chdir(tmp_path)
    cpu = torch.device("cpu")
    assert names.open_run({}, None, False, cpu)[0] == Path("runs/digits")
    for number in ("", "-2", "-9", "-10", "-other"):
        _checkpoint(Path(f"runs/digits{number}/checkpoint.pt"), 1)
    Path("runs/digits-11").mkdir()  # holds no run
    assert names.open_run({}, None, False, cpu)[0] == Path("runs/digits-3")
    with pytest.raises(CommandError, match="--resume needs --out"):
        names.open_run({}, None, True, cpu)
    with pytest.raises(CommandError, match=r"digits-9 holds a run already .checkpoint.pt"):
        names.open_run({}, Path("runs/digits-9"), False, cpu)
