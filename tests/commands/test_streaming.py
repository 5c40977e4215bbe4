"""Streamed images: what a step sees depends on the seed alone, broken files name themselves."""

from __future__ import annotations

import argparse
import copy
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_data import Image, write_images

from fastvit_kernels.commands import cli
from fastvit_kernels.commands.console import CommandError, make_console
from fastvit_kernels.commands.training import checkpoint, records, run as training, streaming
from fastvit_kernels.commands.training.processes import Processes
from fastvit_kernels.commands.training.settings import make_settings
from fastvit_kernels.commands.training.streaming import Streamed, training_transforms
from fastvit_kernels.models import modules
from fastvit_kernels.runtime.backend import backend

pytest.importorskip("rich")
pytest.importorskip("torchvision")
FOLDER = ["--data", "folder", "--data-dir", "images"]
SMALL = ["--model", "vit_mnist", "--img-size", "12", "--no-check", "--threads", "1"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*words):
    return cli.main(["train", *(str(word) for word in words)])


def streamed(folder, workers=0, skip=False, say=lambda _: None, **given):
    given = {"data": "folder", "data_dir": str(folder), "img_size": 8, "batch_size": 5, **given}
    settings = make_settings({"model": "vit_mnist", **given}, torch.device("cpu"))
    found = records.find(replace(settings, seed=0))  # one split, whatever the seed
    return Streamed(found, settings, torch.device("cpu"), workers, skip, say)


def seen(images, epoch, world=1):
    """Pixels and labels of an epoch's batches, of all processes one after the other."""
    parts = [list(images.batches(epoch, Processes(rank, world))) for rank in range(world)]
    steps = list(zip(*parts, strict=True))
    kept = [[(x, y) for x, y, weight in step if weight] for step in steps]
    return [(torch.cat([x for x, _ in s]), torch.cat([y for _, y in s])) for s in kept]


def test_batches_depend_on_the_seed_alone(tmp_path):
    """Not on the number of workers, nor on the number of processes that share a batch."""
    write_images(tmp_path / "images", count=8, size=(20, 16))
    words = dict(randaugment=9, crop_scale=0.3)
    first = seen(streamed(tmp_path / "images", **words), 1)
    for other in (
        seen(streamed(tmp_path / "images", workers=2, **words), 1),
        seen(streamed(tmp_path / "images", **words), 1, world=3),
    ):
        for (x, y), (other_x, other_y) in zip(first, other, strict=True):
            assert torch.equal(x, other_x) and torch.equal(y, other_y)
    assert [len(y) for _, y in first] == [5, 5, 2]
    second = seen(streamed(tmp_path / "images", **words), 2)
    assert not torch.equal(first[0][0], second[0][0])
    another = seen(streamed(tmp_path / "images", seed=1, **words), 1)
    assert not torch.equal(first[0][0], another[0][0])
    assert torch.cat([y for _, y in first]).bincount().tolist() == [6, 6]


def test_a_crop_is_random_and_reading_leaves_the_generator_alone(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir()
        for i in range(3):
            gradient = Image.linear_gradient("L").convert("RGB")
            gradient.save(tmp_path / "images" / name / f"{i}.png")
    state = torch.get_rng_state()
    images = streamed(tmp_path / "images")
    epochs = [torch.cat([x for x, _ in seen(images, epoch)]) for epoch in (1, 2)]
    assert epochs[0].flatten(1).std(0).max() > 0.1
    crops = [{tuple(x.flatten().tolist()) for x in epoch} for epoch in epochs]
    assert len(crops[0]) == len(crops[1]) > 1 and not crops[0] & crops[1], "of equal files"
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_of_shares_sum_to_the_batch(tmp_path):
    write_images(tmp_path / "images", count=8)
    images = streamed(tmp_path / "images")
    parts = [list(images.batches(1, Processes(rank, 3))) for rank in range(3)]
    for step in zip(*parts, strict=True):
        assert sum(weight for *_, weight in step) == pytest.approx(3)
        assert all(len(x) == len(y) > 0 for x, y, _ in step)


def test_a_broken_image_names_itself(tmp_path, capsys):
    """At most SAMPLE images are read before the run begins: this one is found in the first epoch
    or before; the run stops or goes on as it is told."""
    write_images(tmp_path / "images", count=6)
    (tmp_path / "images" / "dog" / "1.png").write_bytes(b"not an image")
    words = ["--data", "folder", "--data-dir", "images", *SMALL, "--epochs", 2, "--batch", 4]
    assert train(*words, "--out", "stopped", "--workers", 0) == 2
    err = capsys.readouterr().err
    assert "dog/1.png cannot be read as an image" in err and "--on-error skip" in err
    assert train(*words, "--out", "run", "--on-error", "skip", "--workers", 1) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("left out:") == 1 and "dog/1.png" in out
    assert "Left out: 1 images" in out and "waiting for data" in out
    history = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["history"]
    assert all(0 <= row["data_wait"] <= 1 for row in history)


def test_a_broken_image_counts_nowhere(tmp_path):
    """Nor in the loss, the accuracy and the number of either split."""
    write_images(tmp_path / "images", count=6)
    whole = streamed(tmp_path / "images")
    dog = next(
        i for i in range(2) if "dog" in whole.held_out.records.name(i)
    )  # and one of that number
    for name in (*map(whole.train.records.name, (dog, 9)), whole.held_out.records.name(dog)):
        Path(name).write_bytes(b"not an image")
    given = dict(augment=False, lr=1e-12, label_smoothing=0.0, warmup_epochs=0)
    images = streamed(tmp_path / "images", skip=True, **given)
    run = training.Run(images, tmp_path)
    with backend("torch"), torch.no_grad():
        run.model.eval().get_parameter("head.bias")[0] += (
            10  # all are cats, so the one that is read
        )
        batches = list(images.batches(1, Processes()))
        train = [(run.model(x), y) for x, y, _ in batches]
        held = [
            (run.model(x), images.held_out_labels[i], i)
            for i, x in images.held_out_batches(Processes())
        ]
    with backend("torch"):
        row = run.epoch(1, lambda: None)
    _, predicted = run.evaluate(run.learners[0])
    assert sum(len(y) for _, y in train) + sum(len(y) for _, y, _ in held) == 9
    wanted = [min(5, images.train_count - start) for start in range(0, images.train_count, 5)]
    assert [w for *_, w in batches] == [len(y) / n for (_, y), n in zip(train, wanted, strict=True)]
    for split, parts in (("train", train), ("held_out", held)):
        logits, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        assert row[f"{split}_loss"] == pytest.approx(loss, rel=1e-4)
        right = (logits.argmax(1) == labels).float().mean().item()
        assert row[f"{split}_accuracy"] == pytest.approx(right) and right > 0
    read = torch.cat([part[2] for part in held])
    assert (predicted >= 0).nonzero()[:, 0].tolist() == read.tolist()
    assert len(images.broken) == 3


def test_what_is_drawn_is_the_first_that_can_be_read(tmp_path):
    write_images(tmp_path / "images", count=6)
    images = streamed(tmp_path / "images", skip=True)
    for number in range(2):
        found, pixels = images.held_out_sample()
        assert found == number and torch.equal(pixels[0], images.held_out[number, None][0])
        Path(images.held_out.records.name(number)).write_bytes(b"not an image")
    with pytest.raises(CommandError, match="none of the held-out images can be read"):
        images.held_out_sample()


def test_the_options_reach_the_crops(tmp_path):
    words = {"data": "folder", "data_dir": str(tmp_path), "img_size": 8, "model": "vit_mnist"}
    settings = make_settings({**words, "crop_scale": 0.5, "randaugment": 7}, torch.device("cpu"))
    crop, mirror, randaugment = training_transforms(settings).transforms
    assert tuple(crop.scale) == (0.5, 1.0) and tuple(crop.size) == (8, 8) and crop.antialias
    assert mirror.p == 0.5 and randaugment.magnitude == 7
    assert len(training_transforms(make_settings(words, torch.device("cpu"))).transforms) == 2


def test_streamed_images_are_normalized_by_those_of_training(tmp_path):
    write_images(tmp_path / "images" / "train", count=5)
    write_images(tmp_path / "images" / "val", count=40)
    images = streamed(tmp_path / "images", augment=False)
    pixels = torch.tensor([*range(5), *range(100, 105)]).double() / 255
    assert images.normalization.mean == pytest.approx([pixels.mean().item()] * 3)
    assert images.normalization.std == pytest.approx([pixels.std(correction=0).item()] * 3)
    held = torch.cat([x for _, x in images.held_out_batches(Processes())])
    assert held.shape == (80, 3, 8, 8)
    first = (0 - pixels.mean()) / pixels.std(correction=0)
    assert held[0].mean().item() == pytest.approx(first.item(), rel=1e-4)


def test_the_images_that_normalize_are_drawn(tmp_path, monkeypatch):
    """Not the first ones, which are all cats."""
    write_images(tmp_path / "images", count=25)
    monkeypatch.setattr(streaming, "SAMPLE", 12)
    images = streamed(tmp_path / "images")
    assert images.normalization.std[0] * 255 > 20
    assert images.normalization != streamed(tmp_path / "images", seed=1).normalization


def test_held_out_images_are_cropped_about_their_centre(tmp_path):
    write_images(tmp_path / "images" / "train", count=4)
    for name in ("cat", "dog"):
        wide = Image.new("RGB", (24, 8))
        wide.paste((255, 255, 255), (8, 0, 16, 8))
        (tmp_path / "images" / "val" / name).mkdir(parents=True)
        wide.save(tmp_path / "images" / "val" / name / "0.png")
    images = streamed(tmp_path / "images")
    (_, pixels), *_ = images.held_out_batches(Processes())
    white = images.normalization(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8))
    torch.testing.assert_close(pixels, white.expand_as(pixels))


def test_who_reads_bytes(tmp_path):
    """docs/train.md: our models, without --mixup and --compare, normalize as they read."""
    write_images(tmp_path / "images", count=6)
    for given, wanted in (({}, True), ({"mixup": 0.4}, False), ({"compare": True}, False)):
        images = streamed(tmp_path / "images", img_size=12, **given)
        run = training.Run(images, tmp_path)
        assert images.as_bytes == wanted
        embed, found = run.model.patch_embed, images.normalization
        assert (embed.mean, embed.std) == (found.mean, found.std)
        pixels, *_ = next(images.batches(1, Processes()))
        assert (pixels.dtype is torch.uint8) == wanted


def test_the_share_of_time_spent_waiting_for_data(tmp_path, monkeypatch):
    """By a clock that stands still but while a batch comes (3 s) and in the forward (1 s)."""
    write_images(tmp_path / "images", count=6)
    images, clock = streamed(tmp_path / "images", img_size=12), [0.0]
    run = training.Run(images, tmp_path)
    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])

    def after(seconds, value=None):
        clock[0] += seconds
        return value

    batches = images.batches
    images.batches = lambda *words: (after(3.0, batch) for batch in batches(*words))
    run.model.register_forward_hook(lambda *_: after(1.0))
    with backend("torch"):
        row = run.epoch(1, lambda: None)
    assert row["data_wait"] == 3 / 4 and row["images_per_s"] == images.train_count / (4 * 2)


def test_mixup_is_by_beta_of_alpha(tmp_path):
    """A large ALPHA mixes halves."""
    write_images(tmp_path / "images", count=6)
    images = streamed(tmp_path / "images", img_size=12, mixup=1000.0)
    mix = training.Run(images, tmp_path)._mixup()
    assert mix is not None
    for _ in range(10):
        x, y = mix(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.tensor([0, 1]))
        assert y.shape == (2, 2) and (y - 0.5).abs().max() < 0.1
        torch.testing.assert_close(x.flatten(), y[:, 1])


@pytest.mark.parametrize(
    ("cores", "given", "workers"), [(1, None, 0), (4, None, 3), (20, None, 8), (4, 0, 0), (4, 5, 5)]
)
def test_the_number_of_workers(tmp_path, monkeypatch, cores, given, workers):
    write_images(tmp_path / "images", count=3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(streaming, "Streamed", lambda *words: words[3:5])
    settings = make_settings(
        {"data": "folder", "data_dir": str(tmp_path / "images")}, torch.device("cpu")
    )
    for on_error in ("skip", "stop"):
        words = argparse.Namespace(workers=given, on_error=on_error)
        found = streaming.open_images(
            settings, words, torch.device("cpu"), make_console(quiet=True)
        )
        assert found == (workers, on_error == "skip")


@pytest.mark.parametrize("change", ["size", "name", "label", "held out", "class"])
def test_the_digest_of_streamed_images(tmp_path, change):
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split, count=5)
    before = streamed(tmp_path / "images").digest()
    assert streamed(tmp_path / "images").digest() == before
    image = tmp_path / "images" / ("val" if change == "held out" else "train") / "cat" / "3.png"
    if change in ("size", "held out"):
        image.write_bytes(image.read_bytes() + b"0")
    elif change != "class":
        image.rename(
            image.with_name("9.png") if change == "name" else image.parents[1] / "dog" / "3a.png"
        )
    after = streamed(tmp_path / "images")
    if change == "class":
        after.classes[0] = "other"
    assert after.digest() != before


def test_mixup_and_average(tmp_path, capsys, monkeypatch):
    """The averaged weights are what is reported and written; a resumed run goes on with them."""
    write_images(tmp_path / "images", count=6)
    words = ["--data", "folder", "--data-dir", "images", *SMALL, "--workers", 0, "--batch", 4]
    words += ["--mixup", 0.4, "--ema", 0.5]
    first: dict[str, torch.Tensor] = {}
    save = training.Run.save
    with monkeypatch.context() as patch:
        patch.setattr(
            training.Run,
            "save",
            lambda run: (first or first.update(copy.deepcopy(run.model.state_dict())), save(run)),
        )
        assert train(*words, "--epochs", 2, "--out", "run") == 0, capsys.readouterr().err
    content = checkpoint.load(tmp_path / "run" / "checkpoint.pt")
    written = torch.load(tmp_path / "run" / "weights.pth", weights_only=True)
    name = "blocks.0.mlp.fc1.weight"
    assert torch.equal(written[name], content["average"][name])
    assert not torch.equal(written[name], content["model"][name])
    step = (written[name] - first[name]).abs().max()
    assert 0 < step < (content["model"][name] - first[name]).abs().max(), "it follows"
    assert train("--resume", "--no-check", "--out", "run") == 0
    assert train(*words[:-4], "--epochs", 2, "--out", "plain") == 0
    plain = checkpoint.load(tmp_path / "plain" / "checkpoint.pt")
    assert plain["history"][0]["train_loss"] != content["history"][0]["train_loss"]
    assert "average" not in plain


def test_our_models_read_bytes(tmp_path, monkeypatch):
    """Normalized in the patch embedding: the losses are those of a run that reads numbers."""
    write_images(tmp_path / "images", count=6)
    words = ["--data", "folder", "--data-dir", "images", *SMALL, "--workers", 0, "--batch", 4]
    embed, read = modules.patch_embed, set()
    monkeypatch.setattr(
        modules, "patch_embed", lambda x, *a, **k: read.add(x.dtype) or embed(x, *a, **k)
    )
    assert train(*words, "--epochs", 2, "--out", "bytes") == 0
    assert torch.uint8 in read
    read.clear()
    monkeypatch.setattr(training.Run, "_leave_bytes", lambda run: None)
    assert train(*words, "--epochs", 2, "--out", "numbers") == 0
    assert read == {torch.float32}
    first, second = (
        [
            row[key]
            for row in checkpoint.load(tmp_path / out / "checkpoint.pt")["history"]
            for key in ("train_loss", "held_out_loss")
        ]
        for out in ("bytes", "numbers")
    )
    assert first == pytest.approx(second, rel=1e-4)


def write_shards(folder, count=6, shards=2):
    folder.mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as file:
            for i in range(count):
                image = io.BytesIO()
                Image.new("RGB", (12, 12), (20 * i, 0, 100 * (i % 2))).save(image, "PNG")
                for suffix, content in (("png", image.getvalue()), ("cls", str(i % 2).encode())):
                    member = tarfile.TarInfo(f"{shard}{i:04d}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))


def test_shards(tmp_path, capsys):
    write_shards(tmp_path / "all")
    images = streamed(tmp_path / "all", data="webdataset")
    assert images.classes == ["0", "1"] and images.train_count + images.held_out_count == 12
    red = torch.cat(
        [x for x, _ in seen(streamed(tmp_path / "all", data="webdataset", augment=False), 1)]
    )[:, 0, 0, 0]
    assert len(red.unique()) == 6, "each sample has its own red"
    words = ["--data", "webdataset", "--data-dir", "all", *SMALL, "--epochs", 1, "--workers", 0]
    assert train(*words) == 0, capsys.readouterr().err
    write_shards(tmp_path / "split" / "train", shards=1)
    with pytest.raises(CommandError, match=r"train: 1 shards, val: 0 shards"):
        records.from_shards(tmp_path / "split")
    (tmp_path / "all" / "001.tar").write_bytes(b"half")
    with pytest.raises(CommandError, match=r"001.tar cannot be read as a shard"):
        records.from_shards(tmp_path / "all")


def test_a_broken_image_of_a_shard_is_named_once(tmp_path):
    """Pillow's words about bytes in memory are others each time."""
    shard = tmp_path / "0.tar"
    write_shards(tmp_path / "all", shards=1)
    content = (tmp_path / "all" / "000.tar").read_bytes()
    shard.write_bytes(content.replace(b"\x89PNG", b"\x00PNG", 1))
    said = []
    images = streamed(tmp_path, data="webdataset", skip=True, say=said.append)
    for epoch in (1, 2):
        list(images.batches(epoch, Processes()))
        list(images.held_out_batches(Processes()))
    assert len(said) == len(images.broken) == 1 and f"left out: {shard}: 00000.png" in said[0]


def test_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    write_images(tmp_path / "images", count=5)
    split = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "images"), split="train")
    split.save_to_disk(str(tmp_path / "saved"))
    images = streamed(tmp_path / "saved", data="hf")
    assert images.classes == ["cat", "dog"] and images.train_count == 8
    assert torch.cat([y for _, y in seen(images, 1)]).bincount().tolist() == [4, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "hf", "--data-dir", "images"], "datasets"),
        (["--data", "webdataset", "--data-dir", "images"], "needs *.tar"),
        (["--data", "webdataset"], "--data webdataset needs --data-dir"),
        (["--data", "folder", "--data-dir", "absent"], "absent is not a folder"),
        (["--randaugment", "9"], "--randaugment is for streamed images"),
        (["--ema", "0.9", "--compare"], "--ema averages weights, which --compare does not"),
        (["--no-augment", "--crop-scale", "0.5", *FOLDER], "--no-augment leaves no place for"),
        (["--no-augment", "--randaugment", "9", *FOLDER], "--no-augment leaves no place for"),
        (["--crop-scale", "0.5", "--in-memory", *FOLDER], "--crop-scale is for streamed images"),
        (["--in-memory", "--data", "hf", "--data-dir", "images"], "--data hf is streamed alone"),
    ],
)
def test_mistakes(tmp_path, capsys, words, message):
    (tmp_path / "images").mkdir()
    assert train(*words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
