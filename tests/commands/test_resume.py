"""What a run leaves: whole files where the disk is full; and what no file of it can do."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data import Image, write_images
from test_train import _a_smaller_run, _in_a_folder_of_its_own, _small_run, run

from fastvit_kernels.commands import cli
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.training import (
    checkpoint,
    checkpoint as names,
    figures,
    run as training,
)
from fastvit_kernels.commands.training.processes import Processes
from fastvit_kernels.runtime import files
from fastvit_kernels.runtime.backend import backend

resource = pytest.importorskip("resource")
pytest.importorskip("rich")
__all__ = ["_a_smaller_run", "_in_a_folder_of_its_own"]  # fixtures
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


class Runs:
    """A pickle of it makes the file "executed" when it is read by a trusting unpickler."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.fixture
def one_line(capsys):
    """Run a command that must end with one line of its own and status 2, and give that line."""

    def command(*words):
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return command


@pytest.fixture
def small_files():
    """After a call of it no file may grow beyond so many bytes: the disk is as good as full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(path):
    """Let the disk be full for what is written to `path`."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.with_name(f".{path.name}.tmp").symlink_to(FULL)


def test_a_disk_that_fills_in_a_checkpoint(tmp_path, monkeypatch, one_line, small_files):
    train_epoch = training.Run.train_epoch

    def fill_in_the_second(self, learner, epoch, advance):
        if epoch == 2:
            small_files(100_000)
        return train_epoch(self, learner, epoch, advance)

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "train_epoch", fill_in_the_second)
        words = ["train", "--epochs", 3, "--batch", 64, "--no-check", "--out", "run"]
        line = one_line(*words)
    assert line == (
        "fastvit-kernels train: run/checkpoint.pt cannot be written: File too large. "
        "run/checkpoint.pt holds the run after epoch 1 of 3; go on with: "
        "fastvit-kernels train --resume --out run"
    )
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint.pt", "metrics.csv"]
    small_files(resource.RLIM_INFINITY)
    assert run("--resume", "--no-check", "--out", "run") == 0
    assert len(checkpoint.load(tmp_path / "run" / "checkpoint.pt")["history"]) == 3


@needs_full
@pytest.mark.parametrize("name", [names.CHECKPOINT, names.METRICS, names.WEIGHTS, names.SUMMARY])
def test_a_disk_that_is_full(tmp_path, one_line, name):
    """Of each file; what the run has written before stays whole, and it goes on with --resume."""
    fill(tmp_path / "run" / name)
    line = one_line("train", "--epochs", 1, "--batch", 128, "--no-check", "--out", "run")
    assert f"run/{name} cannot be written: No space left on device" in line
    assert not (tmp_path / "run" / name).exists()
    if name == names.CHECKPOINT:
        assert line.startswith("fastvit-kernels train: nothing was trained: ")
    else:
        assert line.endswith("epoch 1 of 1; go on with: fastvit-kernels train --resume --out run")
        assert run("--resume", "--no-check", "--out", "run") == 0


@needs_full
def test_a_disk_that_is_full_elsewhere(tmp_path, monkeypatch):
    """A picture: the old content stays."""
    monkeypatch.undo()  # pictures are drawn
    path = tmp_path / "figure.png"
    path.write_text("old")
    fill(path)
    with pytest.raises(OSError, match=r"figure\.png cannot be written: No space left"):
        figures._save(figures._figure(1, 1), path)
    assert path.read_text() == "old"


def test_a_full_disk_is_not_torchs_own_error(tmp_path, small_files):
    """torch.save raises a RuntimeError, where nothing is left for the file's end to write."""
    small_files(10_000)
    write = functools.partial(torch.save, {"a": torch.zeros(100_000)})
    with pytest.raises(OSError, match=r"^\S*file cannot be written: File too large$"):
        files.write_atomically(tmp_path / "file", write)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_system_is_one_line(monkeypatch, one_line):
    def refuse(arguments):
        raise OSError(28, "No space left on device", "results.json")

    monkeypatch.setattr("fastvit_kernels.commands.check.run", refuse)
    assert one_line("check").endswith("[Errno 28] No space left on device: 'results.json'")


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), fsync(*a)))
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    files.write_text(tmp_path / "file", "text")
    assert calls == ["fsync", "replace"] and (tmp_path / "file").read_text() == "text"


def _poisoned(folder):
    folder.mkdir()
    torch.save({"format": 2, "settings": Runs()}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def test_nothing_in_a_checkpoint_is_executed(tmp_path, one_line):
    path = _poisoned(tmp_path / "run")
    line = one_line("train", "--resume", "--no-check", "--out", "run")
    why = "it holds more than tensors (getattr)"
    assert f"run/checkpoint.pt cannot be read as a checkpoint: {why}" in line
    assert not Path("executed").exists()
    torch.load(path, weights_only=False)
    assert Path("executed").exists(), "where it is trusted; else this would prove nothing"


@pytest.mark.parametrize(
    "words",
    [
        ["attention-maps", "image.png", "--weights", "run/checkpoint.pt"],
        ["attention-maps", "image.png", "--weights", "run/weights.pth"],
        ["attention-maps", "image.png", "--model", "vit_mnist", "--weights", "run/weights.pth"],
        ["train", "--no-check", "--weights", "run/weights.pth"],
        ["probe", "--model", "vit_mnist", "--weights", "run/weights.pth"],
    ],
)
def test_nothing_in_weights_is_executed(tmp_path, one_line, words):
    pytest.importorskip("sklearn")
    (tmp_path / "run").mkdir()
    Image.linear_gradient("L").save("image.png")
    for name in ("checkpoint.pt", "weights.pth"):
        torch.save({"model": {"norm.weight": torch.ones(1), "x": Runs()}}, f"run/{name}")
    line = one_line(*words)
    assert "run/weights.pth" in line or "run/checkpoint.pt" in line
    assert "it holds more than tensors (getattr)" in line
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.pop("history"), "it lacks history"),
        (lambda c: c["settings"].update(new=1), "unexpected keyword argument 'new'"),
        (lambda c: c.pop("model"), "it lacks 'model'"),
        (lambda c: c.pop("rng"), "it lacks 'rng'"),
        (lambda c: c.pop("optimizer"), "it lacks 'optimizer'"),
    ],
    ids=["history", "settings", "model", "rng", "optimizer"],
)
def test_a_checkpoint_that_lacks_something(tmp_path, one_line, change, why):
    run = _small_run(tmp_path)
    run.save()
    content = checkpoint.load(tmp_path / "checkpoint.pt")
    change(content)
    torch.save(content, tmp_path / "checkpoint.pt")
    line = one_line("train", "--resume", "--no-check", "--out", tmp_path)
    assert f"{tmp_path}/checkpoint.pt cannot be read as a checkpoint: " in line and why in line


def test_the_random_states_are_all_restored():
    def draw():
        return random.random(), np.random.normal(), np.random.random(), torch.rand(3).tolist()

    np.random.normal()  # numpy draws two normal numbers at a time, and keeps one
    state = checkpoint.rng_state()
    first = draw()
    checkpoint.set_rng_state(state)
    assert draw() == first


@pytest.mark.parametrize(
    "content", [[1], {"format": 3}, {"model": {}}], ids=["list", "newer", "other"]
)
def test_what_is_no_checkpoint_of_this_version(tmp_path, one_line, content):
    run = _small_run(tmp_path)
    run.save()
    if isinstance(content, dict):
        whole = checkpoint.load(tmp_path / "checkpoint.pt")
        content = {**(whole if "format" in content else {}), **content}
    torch.save(content, tmp_path / "checkpoint.pt")
    line = one_line("train", "--resume", "--no-check", "--out", tmp_path)
    assert "checkpoint.pt is not a checkpoint of fastvit-kernels train" in line


def _run_of(folder, processes, monkeypatch):
    """A run with an average, dropped paths, and a parameter that no output reads."""
    make = training.model_of

    def with_unused(*words):
        model = make(*words)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    with monkeypatch.context() as patch:
        patch.setattr(training, "model_of", with_unused)
        run = _small_run(folder, ema=0.5, drop_path=0.2, batch_size=100)
    run.processes = processes
    return run


@pytest.mark.parametrize("to", [Processes(), Processes(launched=True)], ids=["alone", "torchrun"])
@pytest.mark.parametrize("of", [Processes(), Processes(launched=True)], ids=["alone", "torchrun"])
def test_every_tensor_is_restored(tmp_path, monkeypatch, of, to):
    """Weights, their average, all that AdamW keeps, and nothing of it for a parameter that no
    gradient has reached; with and without torchrun."""
    run, again = _run_of(tmp_path, of, monkeypatch), _run_of(tmp_path, to, monkeypatch)
    with backend("torch"):
        run.epoch(1, lambda: None)
    run.save()
    again.restore()
    first, second = (r.learners[0].state() for r in (run, again))
    assert not [name for name in first["optimizer"] if name.startswith("unused")]
    assert first.keys() == second.keys() == {"model", "average", "optimizer"}
    for part, tensors in first.items():
        assert tensors and tensors.keys() == second[part].keys()
        for name, value in tensors.items():
            assert torch.equal(value, second[part][name]), name
    assert again.history == run.history


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda s: s.update({"head.bias": torch.zeros(3)}), "size mismatch for head.bias"),
        (lambda s: s.update(new=torch.zeros(3)), 'Unexpected key(s) in state_dict: "new"'),
        (lambda s: s.pop("head.bias"), "head.bias is only here"),
    ],
    ids=["shape", "there", "here"],
)
def test_a_checkpoint_of_another_model(tmp_path, one_line, change, difference):
    _small_run(tmp_path).save()
    content = checkpoint.load(tmp_path / "checkpoint.pt")
    change(content["model"])
    torch.save(content, tmp_path / "checkpoint.pt")
    line = one_line("train", "--resume", "--no-check", "--out", tmp_path)
    assert "is a checkpoint of another model" in line and difference in line


@pytest.mark.parametrize("part", ["pixels", "labels", "classes"])
def test_resume_compares_all_of_the_data(tmp_path, part):
    before, after = _small_run(tmp_path), _small_run(tmp_path)
    before.save()
    if part == "pixels":
        after.source.held_out.images[0, 0, 0, 0] += 1
    elif part == "labels":
        after.source.train.labels[0] += 1
    else:
        after.source.classes[0] = "other"
    with pytest.raises(CommandError, match="--resume needs the same data"):
        after.restore()


def test_resume_of_streamed_images_is_bit_for_bit(tmp_path, monkeypatch):
    """Crops, MixUp and averaged weights: one process reads, then two of them."""
    pytest.importorskip("torchvision")
    write_images(tmp_path / "images", count=6)
    words = ["--data", "folder", "--data-dir", "images", "--model", "vit_mnist", "--img-size", 12]
    words += ["--no-check", "--threads", 1, "--batch", 4, "--epochs", 2, "--mixup", 0.4]
    words += ["--ema", 0.5, "--workers", 0]
    assert run(*words, "--out", "whole") == 0
    train_epoch = training.Run.train_epoch

    def stop(self, learner, epoch, advance):
        def interrupt():
            if epoch == 2:
                raise KeyboardInterrupt

        return train_epoch(self, learner, epoch, interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "train_epoch", stop)
        assert run(*words, "--out", "parts") == 130
    assert run("--resume", "--no-check", "--out", "parts", "--workers", 0) == 0
    first, second = (checkpoint.load(tmp_path / d / "checkpoint.pt") for d in ("whole", "parts"))
    for part in ("model", "average"):
        assert all(torch.equal(v, second[part][n]) for n, v in first[part].items())
