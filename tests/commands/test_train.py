import copy
import json
import math
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_data import Image, write_images, write_mnist

from fastvit_kernels import create_vit
from fastvit_kernels.commands import cli
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.training import (
    checkpoint,
    checkpoint as names,
    data,
    figures,
    processes,
    records,
    report,
    run as training,
    streaming,
)
from fastvit_kernels.commands.training.data import AUGMENTATIONS, Augmentation
from fastvit_kernels.commands.training.processes import Processes
from fastvit_kernels.commands.training.settings import DIGITS_VIT, make_settings
from fastvit_kernels.runtime import files
from fastvit_kernels.runtime.backend import backend, get_backend
from fastvit_kernels.verify import plain_vit

pytest.importorskip("rich")

TIMES = ("seconds", "images_per_s", "reference_images_per_s")
QUICK = ["--batch", "64", "--no-check", "--epochs", "2"]


def run(*words):
    return cli.main(["train", *(str(word) for word in words)])


def without_times(history):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in history]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fewer(*counts):
    """`find`, of the digits so many of each part."""

    def found(settings):
        *parts, classes = records.find(settings)
        if settings.data != "digits":
            return *parts, classes
        shares = zip(parts, counts, strict=True)
        return *(part.part(torch.arange(count)) for part, count in shares), classes

    return found


@pytest.fixture(autouse=True)
def _a_smaller_run(request, monkeypatch):
    """A few images, two layers and empty pictures, except for tests that ask for more."""
    if "all_digits" in request.fixturenames:
        return
    if "pictures" not in request.fixturenames:  # they take longer than the training
        monkeypatch.setattr(figures, "_save", lambda figure, path, dpi=0: path.touch())
    monkeypatch.setattr(streaming, "find", fewer(200, 40))
    monkeypatch.setitem(DIGITS_VIT, "depth", 2)


@pytest.fixture
def all_digits():
    """Asks for scikit-learn's 1797 images and the default model."""


@pytest.fixture
def pictures():
    """Asks for pictures that are drawn."""


def assert_same_run(first, second):
    a, b = (checkpoint.load(folder / "checkpoint.pt") for folder in (first, second))
    assert without_times(a["history"]) == without_times(b["history"])
    parts = [n for n in a if n.endswith(("model", "optimizer", "average"))]
    assert a.keys() == b.keys() and {"model", "optimizer"} <= set(parts)
    for part in parts:
        assert a[part].keys() == b[part].keys() and a[part]
        for name, tensor in a[part].items():
            assert torch.equal(tensor, b[part][name]), f"{part} {name}"
    assert torch.equal(a["rng"]["torch"], b["rng"]["torch"])
    assert a["rng"]["python"] == b["rng"]["python"]
    assert torch.equal(a["rng"]["numpy"][1], b["rng"]["numpy"][1])
    if (first / names.WEIGHTS).exists():
        ours, theirs = (torch.load(f / names.WEIGHTS, weights_only=True) for f in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_train_writes_everything_and_learns(tmp_path, capsys, all_digits):
    assert run("--epochs", 3, "--batch", 128, "--compare", "--out", "run") == 0
    out = capsys.readouterr().out
    assert "Agreement with PyTorch" in out and "gradients agree" in out
    assert "images/s" in out and "Held-out accuracy" in out
    if not torch.cuda.is_available():
        assert "No GPU: the kernels run in Triton's interpreter for the check batch" in out
    folder = tmp_path / "run"
    assert sorted(p.name for p in folder.iterdir()) == sorted(names.WRITTEN)
    for name in (names.CURVES, names.CONFUSION, names.ATTENTION):
        with Image.open(folder / name) as image:
            assert image.width > 600 and image.height > 400
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50

    summary = json.loads((folder / names.SUMMARY).read_text())
    assert summary["held_out_accuracy"] > 0.5
    assert sum(map(sum, summary["confusion"])) == 359
    right = sum(summary["confusion"][i][i] for i in range(10))
    assert summary["held_out_accuracy"] == right / 359
    assert all(e["passed"] for e in summary["agreement"])
    rows = (folder / names.METRICS).read_text().splitlines()
    assert len(rows) == 4 and rows[0].startswith("epoch,lr,train_loss")

    # The reference was trained from the same weights on the same batches.
    last = summary["last_epoch"]
    assert math.isclose(last["train_loss"], last["reference_train_loss"], rel_tol=1e-3)

    weights = torch.load(folder / names.WEIGHTS, weights_only=True)
    held = checkpoint.load(folder / names.CHECKPOINT)["model"]
    assert all(torch.equal(weights[name], held[name]) for name in held)


def test_attention_maps_of_the_weights_of_a_run(tmp_path, capsys, pictures):
    """weights.pth needs no --model where checkpoint.pt lies beside it, and is what is drawn."""
    assert run(*QUICK, "--out", "run") == 0
    Image.linear_gradient("L").save("image.png")
    words = ["attention-maps", "image.png", "--weights", "run/weights.pth", "--out"]
    assert cli.main([*words, "a"]) == 0, capsys.readouterr().err
    assert cli.main([*words[:3], "run/checkpoint.pt", "--out", "b"]) == 0
    pairs = zip(*(sorted((tmp_path / d).iterdir()) for d in "ab"), strict=True)
    assert [a.read_bytes() == b.read_bytes() for a, b in pairs] == [True, True]
    weights = torch.load("run/weights.pth", weights_only=True)
    torch.save({k: v for k, v in weights.items() if k != "pos_embed"}, "run/weights.pth")
    assert cli.main([*words, "c"]) == 2
    assert "pos_embed" in capsys.readouterr().err
    os.remove("run/checkpoint.pt")
    assert cli.main([*words, "c"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_model_of_another_library(tmp_path, capsys):
    """Trained swapped, beside the host's own code, resumed, drawn."""
    pytest.importorskip("transformers")
    settings = dict(
        model_type="vit",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_channels=1,
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    words = ["--model", "hf:config.json", "--batch", 64, "--epochs", 1, "--threads", 1]
    assert run(*words, "--compare", "--out", "run") == 0, capsys.readouterr()
    assert "gradients agree" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    last = summary["last_epoch"]
    assert math.isclose(last["train_loss"], last["reference_train_loss"], rel_tol=1e-3)
    assert len(summary["agreement"]) > 20 and all(e["passed"] for e in summary["agreement"])
    assert run("--resume", "--no-check", "--out", "run") == 0
    Image.linear_gradient("L").save("image.png")
    assert cli.main(["attention-maps", "image.png", "--weights", "run/weights.pth"]) == 0
    assert len(list((tmp_path / "attention-maps").iterdir())) == 2


class _StopAt:
    """Raises KeyboardInterrupt in the middle of an epoch."""

    def __init__(self, epoch):
        self.epoch, self.train_epoch = epoch, training.Run.train_epoch

    def __call__(self, run, learner, epoch, advance):
        def interrupt():
            if epoch == self.epoch:
                raise KeyboardInterrupt
            advance()

        return self.train_epoch(run, learner, epoch, interrupt)


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--compare", "--drop-path", "0.3"],
        ["--ema", "0.9", "--freeze", "blocks.0.*", "--drop-path", "0.3"],
    ],
    ids=["plain", "compare", "ema"],
)
def test_interrupt_and_resume_is_bit_for_bit(tmp_path, monkeypatch, capsys, extra):
    words = ["--batch", 64, "--epochs", 3, "--no-check", *extra]
    assert run(*words, "--out", "whole") == 0
    with monkeypatch.context() as patch:
        stop = _StopAt(2)
        patch.setattr(training.Run, "train_epoch", lambda *args: stop(*args))
        assert run(*words, "--out", "parts") == 130
    out = capsys.readouterr().out
    assert "after epoch 1 of 3" in out
    assert "fastvit-kernels train --resume --out parts" in out
    torch.manual_seed(12345)  # the states come from the checkpoint, not from this process
    assert run("--resume", "--out", "parts", "--no-check") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_interrupt_in_the_first_epoch_can_be_resumed(tmp_path, monkeypatch, capsys):
    assert run(*QUICK, "--out", "whole") == 0
    with monkeypatch.context() as patch:
        stop = _StopAt(1)
        patch.setattr(training.Run, "train_epoch", lambda *args: stop(*args))
        assert run(*QUICK, "--out", "parts") == 130
    assert "after epoch 0 of 2" in capsys.readouterr().out
    assert run("--resume", "--out", "parts", "--no-check") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_check_batch_changes_no_training(tmp_path):
    words = ["--epochs", 1, "--batch", 64, "--drop-path", "0.2"]
    assert run(*words, "--out", "checked") == 0
    assert run(*words, "--out", "unchecked", "--no-check") == 0
    assert_same_run(tmp_path / "checked", tmp_path / "unchecked")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_process(tmp_path):
    words = ["train", "--epochs", "500", "--batch", "256", "--no-check", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fastvit_kernels", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A background job of a shell, such as CI's, hands on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("epoch   1/500") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, out
    done = len(checkpoint.load(tmp_path / "run" / "checkpoint.pt")["history"])
    assert done >= 1 and f"after epoch {done} of 500" in out


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old")

    def fail(file):
        file.write(b"new, half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_runs_never_overwrite_each_other(tmp_path, capsys):
    words = [*QUICK[:-1], "1"]
    assert run(*words) == 0
    assert run(*words, "--seed", 1) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["digits", "digits-2"]
    before = (tmp_path / "runs" / "digits" / "checkpoint.pt").read_bytes()
    assert run(*words, "--out", "runs/digits") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (tmp_path / "runs" / "digits" / "checkpoint.pt").read_bytes() == before

    assert run("--resume", "--no-check", "--out", "runs/digits-2") == 0
    assert "Resumed after epoch 1 of 1" in capsys.readouterr().out
    assert run("--resume", "--epochs", "9", "--out", "runs/digits-2") == 2
    assert "--epochs 9 differs from the 1" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path, capsys):
    assert run(*QUICK, "--lr", "1e30", "--no-augment", "--out", "run") == 2
    err = capsys.readouterr().err
    assert "is not finite" in err and "smaller --lr" in err
    model = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["model"]
    assert all(weight.isfinite().all() for weight in model.values())


def test_a_broken_kernel_stops_the_training(tmp_path, monkeypatch, capsys):
    def broken(model, images, autocast):
        errors = plain_vit.agreement(model, images, autocast)
        wrong = {**vars(errors[0]), "max": 1.0}
        return [type(errors[0])(**wrong), *errors[1:]]

    monkeypatch.setattr(report, "agreement", broken)
    assert run("--epochs", 1, "--out", "run") == 1
    out = capsys.readouterr().out
    assert "break the 2x rule" in out and "logits" in out and "Nothing was trained" in out
    assert not (tmp_path / "run").exists()


def _mnist(folder):
    write_mnist(folder)


def _folder(folder):
    write_images(folder, count=5)


@pytest.mark.parametrize(
    ("kind", "prepare", "words"),
    [
        ("mnist", _mnist, ["--drop-path", "0.1"]),
        ("folder", _folder, ["--model", "vit_mnist", "--img-size", 12]),
    ],
)
def test_other_data(tmp_path, kind, prepare, words):
    prepare(tmp_path / "images")
    words = ["--data", kind, "--data-dir", "images", "--epochs", 1, "--no-check", *words]
    assert run(*words) == 0
    assert (tmp_path / "runs" / kind / "summary.json").is_file()


def _damaged(folder):
    write_images(folder)
    (folder / "cat" / "1.png").write_bytes(b"not an image")


@pytest.mark.parametrize(
    ("prepare", "words", "message"),
    [
        (None, ["--data", "folder"], "--data folder needs --data-dir"),
        (None, ["--data", "folder", "--data-dir", "absent"], "absent is not a folder"),
        (None, ["--data", "mnist", "--data-dir", "images"], "has no file train-images-idx3-ubyte"),
        (None, ["--data-dir", "images"], "takes no --data-dir"),
        (None, ["--in-chans", "3"], "has one channel"),
        (None, ["--data", "mnist", "--data-dir", "images", "--in-chans", "3"], "has one channel"),
        (None, ["--lora", "2", "--compare"], "--lora and --compare"),
        (None, ["--model", "resnet50"], "unknown model 'resnet50'"),
        (None, ["--img-size", "1"], "patch_size"),
        (None, ["--resume"], "--resume needs --out, the folder of the run"),
        (None, ["--resume", "--out", "images"], "there is no checkpoint images/checkpoint.pt"),
        (_damaged, ["--data", "folder", "--data-dir", "images"], "cat/1.png cannot be read"),
    ],
)
def test_mistakes(tmp_path, capsys, prepare, words, message):
    (tmp_path / "images").mkdir()
    if prepare is not None:
        prepare(tmp_path / "images")
    assert run(*words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_resume_needs_the_same_data(tmp_path, capsys):
    write_images(tmp_path / "images", count=5)
    words = ["--data", "folder", "--data-dir", "images", "--model", "vit_mnist", "--img-size", 8]
    assert run(*words, "--epochs", 1, "--no-check") == 0
    held = checkpoint.load(tmp_path / "runs" / "folder" / "checkpoint.pt")["settings"]
    assert held["data_dir"] == str(tmp_path / "images"), "from any folder"
    again = ["--resume", "--no-check", "--out", tmp_path / "runs" / "folder"]
    assert run("--data-dir", "images", *again) == 0, "the same folder, however it is spelled"
    assert run("--data-dir", "runs", *again) == 2
    assert "--data-dir" in capsys.readouterr().err
    Image.new("RGB", (9, 9), (7, 7, 7)).save(tmp_path / "images" / "cat" / "0.png")
    assert run("--data", "folder", *again) == 2
    assert "--resume needs the same data" in capsys.readouterr().err


def test_resume_of_a_damaged_checkpoint(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"half")
    assert run("--resume", "--out", "run") == 2
    assert "cannot be read as a checkpoint" in capsys.readouterr().err


def test_resume_of_a_checkpoint_of_another_model(tmp_path, capsys, monkeypatch):
    """As where the file that describes a host's model has changed since."""
    assert run("--epochs", 1, "--batch", 64, "--no-check", "--out", "run") == 0
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    monkeypatch.setitem(DIGITS_VIT, "mlp_ratio", 3.0)
    assert run("--resume", "--no-check", "--out", "run") == 2
    err = capsys.readouterr().err
    assert "run/checkpoint.pt is a checkpoint of another model" in err
    assert "size mismatch for blocks.0.mlp.fc1.weight" in err
    assert "torch.Size([128, 64]) from checkpoint" in err
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def _small_run(folder, **given):
    settings = make_settings({"epochs": 4, "warmup_epochs": 1, **given}, torch.device("cpu"))
    with_seed_0 = streaming.find(make_settings({}, torch.device("cpu")))
    return training.Run(data.InMemory(with_seed_0, settings, torch.device("cpu")), folder)


def test_patch_attention_reads_the_class_token_or_the_mean():
    maps = torch.rand(2, 7, 7).softmax(-1)  # a class token, then 2 x 3 patches
    cls = figures.patch_attention(maps, 1, True, (2, 3))
    assert cls.shape == (2, 2, 3) and cls[1, 1, 2] == maps[1, 0, 6]
    cls = figures.patch_attention(maps, 3, True, (2, 2))  # and two registers
    assert cls[1, 1, 1] == maps[1, 0, 6]
    mean = figures.patch_attention(maps, 1, False, (2, 3))
    torch.testing.assert_close(mean[0, 0, 1], maps[0, 1:, 2].mean())


def test_pixels_that_fill_no_patch_are_not_drawn():
    model = create_vit("vit_mnist", img_size=(9, 7))
    image = torch.zeros(1, 9, 7, dtype=torch.uint8)
    normalization = data.Normalization((0.5,), (0.5,))
    pixels, layers, _ = figures.sample_attention(model, image, normalization)
    assert pixels.shape == (1, 8, 6) and layers[0].shape == (2, 4, 3)


def test_learning_rate_warms_up_and_falls_to_zero():
    settings = make_settings({"epochs": 5, "warmup_epochs": 2, "lr": 1.0}, torch.device("cpu"))
    rates = [training.learning_rate(step, 10, settings) for step in range(50)]
    assert rates[0] == pytest.approx(0.05) and rates[19] == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(rates[:20]))
    assert all(a >= b for a, b in pairwise(rates[20:]))
    assert 0 <= rates[-1] < 0.01


@pytest.mark.parametrize("decay", [0.05, 0.0])
def test_weight_decay_is_on_matrices_alone(tmp_path, decay):
    run = _small_run(tmp_path, weight_decay=decay)
    groups = run.learners[0].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [decay, 0.0]
    names = {id(p): n for n, p in run.model.named_parameters()}
    decayed = {names[id(p)] for p in groups[0]["params"]}
    assert "blocks.0.mlp.fc1.weight" in decayed and "patch_embed.proj.weight" in decayed
    assert not decayed & {"cls_token", "pos_embed", "blocks.0.norm1.weight", "head.bias"}
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_batches_cover_every_image_once_and_depend_on_the_epoch_alone(tmp_path):
    run = _small_run(tmp_path, augment=False)
    first, again, next_ = (
        torch.cat([y for _, y, _ in run.source.batches(e, run.processes)]) for e in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, next_)
    assert torch.equal(first.bincount(), run.source.train.labels.bincount())


def _plain_training(run, epochs):
    """What docs/train.md promises of a run, written out: the weights, their average if asked for,
    and the losses and accuracies of the training images (smoothed) and of the held-out ones (the
    average's, not smoothed), epoch by epoch. For a run that has not begun."""
    s, model = run.settings, copy.deepcopy(run.model)
    split, held = run.source.train, run.source.held_out
    pixels = split.images.double() / 255
    mean, std = pixels.mean().float(), pixels.std(correction=0).float()
    decayed = [
        p for n, p in model.named_parameters() if p.ndim > 1 and n not in ("cls_token", "pos_embed")
    ]
    others = [p for p in model.parameters() if not any(p is d for d in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": s.weight_decay}, {"params": others, "weight_decay": 0}]
    )
    average = copy.deepcopy(model) if s.ema else model
    steps = math.ceil(len(split.labels) / s.batch_size)
    warmup, total, step, rows = s.warmup_epochs * steps, s.epochs * steps, 0, []
    for epoch in range(1, epochs + 1):
        model.train()
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + epoch)
        order = torch.randperm(len(split.labels), generator=generator)
        loss_sum, right = 0.0, 0
        for index in order.split(s.batch_size):
            x = (split.images[index].float() / 255 - mean) / std
            if s.augment:
                x = AUGMENTATIONS["digits"].apply(x, Augmentation.draw(len(index), generator))
            y = split.labels[index]
            rate = s.lr * (step + 1) / warmup
            if step >= warmup:
                rate = s.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            logits = model(x).log_softmax(1)
            target = F.one_hot(y, 10) * (1 - s.label_smoothing) + s.label_smoothing / 10
            loss = -(target * logits).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= min(1.0, 1.0 / (norm + 1e-6))
            optimizer.step()
            if s.ema:
                for p, a in zip(model.parameters(), average.parameters(), strict=True):
                    a.data = s.ema * a.data + (1 - s.ema) * p.data
            loss_sum, right = loss_sum + loss.item() * len(y), right + (logits.argmax(1) == y).sum()
            step += 1
        average.eval()
        with torch.no_grad():
            logits = average((held.images.float() / 255 - mean) / std).log_softmax(1)
        rows.append(
            {
                "lr": rate,
                "train_loss": loss_sum / len(split.labels),
                "train_accuracy": float(right) / len(split.labels),
                "held_out_loss": -logits[torch.arange(len(held.labels)), held.labels].mean().item(),
                "held_out_accuracy": (logits.argmax(1) == held.labels).float().mean().item(),
            }
        )
    return model, average, rows


@pytest.mark.parametrize(("augment", "ema"), [(True, 0.8), (False, 0.0)])
def test_a_run_is_what_the_manual_says(tmp_path, augment, ema):
    """Against a training loop of its own: data, schedule, decay, clipping, smoothing, average."""
    given = dict(
        epochs=3,
        warmup_epochs=1,
        lr=0.02,
        weight_decay=0.3,
        label_smoothing=0.2,
        drop_path=0.3,
        ema=ema,
        seed=3,
        augment=augment,
        batch_size=48,
    )
    with backend("torch"):
        run = _small_run(tmp_path, **given)
        state = torch.get_rng_state()
        model, average, rows = _plain_training(run, 2)
        torch.set_rng_state(state)
        for epoch in (1, 2):
            run.epoch(epoch, lambda: None)
    for ours, wanted in ((run.model, model), (run.learners[0].evaluated()[0], average)):
        for name, weight in ours.named_parameters():
            other = wanted.get_parameter(name)
            if name.endswith("qkv.bias"):  # Adam makes steps of the keys' part of rounding alone
                weight, other = (w.detach().view(3, -1)[[0, 2]] for w in (weight, other))
            torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4, msg=name)
    for row, wanted in zip(run.history, rows, strict=True):
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("model", [None, "hf"])
def test_plain_pytorch_beside_a_run_is_trained_alike(tmp_path, model):
    """The same weights, batches, dropped paths, clipping and frozen parameters; and it changes
    nothing of the run, nor of what the next epoch draws."""
    given = dict(drop_path=0.5, lr=0.02, warmup_epochs=0, freeze=["cls_token"], batch_size=100)
    if model is not None:
        pytest.importorskip("transformers")
        settings = dict(
            model_type="vit",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.3,
        )
        (tmp_path / "config.json").write_text(json.dumps(settings))
        given |= dict(model=f"hf:{tmp_path}", drop_path=0.0, freeze=["*cls_token"])
    alone, beside = (_small_run(tmp_path, compare=c, **given) for c in (False, True))
    ours, plain = (dict(learner.model.named_parameters()) for learner in beside.learners)
    frozen = {n: p.detach().clone() for n, p in ours.items() if n.endswith("cls_token")}
    assert len(frozen) == 1
    with torch.no_grad():  # a host's own are so small that dropout hardly moves a loss
        for learner in (*alone.learners, *beside.learners):
            for name, p in learner.model.named_parameters():
                p.mul_(8 if model and p.ndim > 1 and name not in frozen else 1)
    with backend("torch"):
        state = torch.get_rng_state()
        alone.epoch(1, lambda: None)
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        row = beside.epoch(1, lambda: None)
    assert torch.equal(torch.get_rng_state(), drawn) and not torch.equal(state, drawn)
    for name, p in alone.model.named_parameters():
        assert torch.equal(p, ours[name]), name
        assert name not in frozen or torch.equal(plain[name], frozen[name])
    for key in ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy"):
        assert row[f"reference_{key}"] == pytest.approx(row[key], rel=1e-3), key


@pytest.mark.parametrize("error", [CommandError("no"), OSError("the disk is full")])
def test_no_process_waits_for_one_that_failed(error, monkeypatch):
    def action():
        raise error

    said = []
    monkeypatch.setattr(processes.dist, "broadcast_object_list", lambda box: said.append([*box]))
    with pytest.raises(type(error)):
        Processes(0, 2, True).agree(action)
    monkeypatch.setattr(processes.dist, "broadcast_object_list", lambda box: box.__init__(said[0]))
    with pytest.raises(SystemExit) as ended:
        Processes(1, 2, True).agree(action)
    assert said == [[False, None]] and ended.value.code == 2


def test_each_process_and_epoch_drops_other_paths(tmp_path, monkeypatch):
    """By (seed, epoch, process), whatever was drawn before."""

    class Alone(Processes):
        def sum(self, value):
            return value

        def agree(self, action):
            return action()

    def train_epoch(run, *_):
        drawn.append(torch.rand(1).item())
        return {"train_loss": 1.0}

    drawn = []
    monkeypatch.setattr(training.Run, "train_epoch", train_epoch)
    for _ in range(2):
        for rank in (0, 1):
            run = _small_run(tmp_path)
            run.processes = Alone(rank, 2, True)
            run.evaluate = lambda learner, run=run: (1.0, run.source.held_out_labels)
            for epoch in (1, 2):
                run.epoch(epoch, lambda: None)
    assert drawn[:4] == drawn[4:] and len(set(drawn)) == 4


def test_a_gradient_weighs_as_its_share(tmp_path, monkeypatch):
    """What a process has of a batch counts by its rows, not as a whole batch."""
    found = []

    def clip(parameters, norm):
        found.append([p.grad.clone() for p in parameters])
        raise KeyboardInterrupt

    monkeypatch.setattr(training.nn.utils, "clip_grad_norm_", clip)
    for weight in (1.0, 0.5):
        run = _small_run(tmp_path)
        x, y, _ = next(run.source.batches(1, run.processes))
        run.source.batches = lambda *_, x=x, y=y, weight=weight: iter([(x, y, weight)])
        with backend("torch"), pytest.raises(KeyboardInterrupt):
            run.epoch(1, lambda: None)
    for whole, half in zip(*found, strict=True):
        torch.testing.assert_close(half, whole / 2)


def test_speed_is_of_all_images_and_of_training_alone(tmp_path, monkeypatch):
    """By a clock that stands still but while a batch comes (3 s) and in the forward (1 s)."""
    clock = [0.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])

    def after(seconds, value=None):
        clock[0] += seconds
        return value

    run = _small_run(tmp_path, batch_size=100, augment=False)
    batches, n = run.source.batches, run.steps_per_epoch
    run.source.batches = lambda *words: (after(3.0, batch) for batch in batches(*words))
    hook = run.model.register_forward_hook(lambda m, x, y: after(1.0))
    with backend("torch"):
        row = run.epoch(1, lambda: None)
    hook.remove()
    assert row["images_per_s"] == pytest.approx(run.source.train_count / (4 * n))
    assert run.pace == pytest.approx((run.source.train_count / (4 * n), 3 / 4))
    assert row["seconds"] == 4 * n + 1, "and the held-out images"
    run.write_metrics()
    names_, values = (line.split(",") for line in (tmp_path / "metrics.csv").read_text().split())
    assert dict(zip(names_, map(float, values), strict=True)) == pytest.approx(row, rel=1e-6)


@pytest.mark.parametrize("key", ["train_loss", "held_out_loss", "reference_train_loss"])
def test_no_figure_of_an_epoch_may_be_infinite(tmp_path, key):
    run = _small_run(tmp_path)
    run.save()
    row = {"epoch": 2, "train_loss": 1.0, "held_out_loss": 1.0}
    run._refuse_infinite(row)
    for value in (math.nan, math.inf):
        with pytest.raises(CommandError, match="the loss of epoch 2 is not finite"):
            run._refuse_infinite({**row, key: value})


def test_narrow_models_start_from_larger_weights(tmp_path):
    """docs/train.md: below C = 192 Xavier for Linear and 0.3 for positions; from there timm's."""
    narrow = _small_run(tmp_path).model
    weight = narrow.blocks[0].mlp.fc1.weight
    bound = math.sqrt(6 / sum(weight.shape))
    assert 0.9 * bound < weight.abs().max() <= bound
    assert narrow.pos_embed.std().item() == pytest.approx(0.3, rel=0.15)
    wide = _small_run(tmp_path, model="vit_tiny_patch16_224", img_size=32, in_chans=1).model
    assert wide.embed_dim == 192
    for weight in (wide.blocks[0].mlp.fc1.weight, wide.pos_embed):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)


def test_an_average_begins_with_the_first_weights(tmp_path):
    """Not with those of the first step; frozen parameters stay in it as they are."""
    run = _small_run(tmp_path, ema=0.5, freeze=["cls_token", "blocks.0.*"])
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(1 if p.requires_grad else 0)
    average = run.learners[0].average
    average.update_parameters(run.model)
    for name, value in average.module.named_parameters():
        frozen = name == "cls_token" or name.startswith("blocks.0.")
        torch.testing.assert_close(value, before[name] + (0 if frozen else 0.5), msg=name)


def test_the_average_of_a_swapped_model_reads_its_own_weights(tmp_path):
    pytest.importorskip("transformers")
    settings = dict(
        model_type="vit",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    run = _small_run(tmp_path, ema=0.5, model=f"hf:{tmp_path}")
    (learner,) = run.learners
    with backend("torch"):
        run.model.eval()(torch.zeros(1, 1, 8, 8))  # what a swapped block notes of its weights
        with torch.no_grad():
            for p in learner.average.module.parameters():
                p.zero_()
        loss, _ = run.evaluate(learner)
        assert loss == pytest.approx(math.log(10))
        assert any(p.abs().max() > 0 for p in run.model.parameters())
        learner.average = None
        assert run.evaluate(learner)[0] != pytest.approx(math.log(10), rel=1e-4)


def test_the_seed_draws_weights_split_and_order(tmp_path, all_digits):
    def drawn(seed):
        settings = make_settings({"seed": seed}, torch.device("cpu"))
        images = data.InMemory(records.find(settings), settings, torch.device("cpu"))
        run = training.Run(images, tmp_path)
        source = _small_run(tmp_path, seed=seed).source  # of one split, whatever the seed
        _, labels, _ = next(source.batches(1, run.processes))
        weight = run.model.get_parameter("blocks.0.mlp.fc1.weight")
        return weight.sum().item(), images.held_out.labels.tolist(), labels.tolist()

    assert drawn(1) == drawn(1)
    assert all(a != b for a, b in zip(drawn(1), drawn(2), strict=True))


def test_settings_reach_the_model_and_the_threads(tmp_path, monkeypatch, capsys):
    run = _small_run(tmp_path, drop_path=0.25, img_size=6, model="vit_mnist")
    assert run.model.blocks[-1].drop_path2.drop_prob == 0.25
    assert run.model.patch_embed.grid_size == (3, 3) or run.model.patch_embed.img_size == (6, 6)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert cli.main(["train", *QUICK[:-1], "1", "--out", "a"]) == 0
    assert cli.main(["train", *QUICK[:-1], "1", "--out", "b", "--threads", "2"]) == 0
    assert threads == [1, 2]


def test_bf16_is_of_autocast(tmp_path):
    """The weights stay fp32, the products are bf16, in training and in evaluation."""
    seen = set()
    run = _small_run(tmp_path, precision="bf16")
    hook = run.model.head.register_forward_hook(lambda m, x, y: seen.add((m.training, y.dtype)))
    with backend("torch"):
        run.epoch(1, lambda: None)
    hook.remove()
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_a_warm_up_longer_than_the_run():
    settings = make_settings({"epochs": 2, "warmup_epochs": 9, "lr": 1.0}, torch.device("cpu"))
    rates = [training.learning_rate(step, 2, settings) for step in range(4)]
    assert rates == [0.25, 0.5, 0.75, 1.0]


def test_weights_of_shares_sum_to_the_batch(tmp_path):
    """Each image is one process's, and the weighted mean of the shares' losses is the batch's."""
    run = _small_run(tmp_path, batch_size=7)
    alone = list(run.source.batches(1, Processes()))
    parts = [list(run.source.batches(1, Processes(rank, 3))) for rank in range(3)]
    for (x, y, weight), *shares in zip(alone, *parts, strict=True):
        assert weight == 1 and sum(share[2] for share in shares) == pytest.approx(3)
        kept = [share for share in shares if share[2]]
        assert torch.equal(torch.cat([share[0] for share in kept]), x)
        assert torch.equal(torch.cat([share[1] for share in kept]), y)
        assert [share[2] for share in kept] == pytest.approx([len(s[1]) * 3 / len(y) for s in kept])
    held = [list(run.source.held_out_batches(Processes(rank, 3))) for rank in range(3)]
    numbers = torch.cat([index for part in held for index, _ in part])
    assert numbers.sort().values.tolist() == list(range(run.source.held_out_count))


def test_augmentations_are_those_of_the_manual():
    """Degrees, zoom, shift in pixels, mirroring: docs/train.md's row --no-augment."""
    manual = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    row = next(line for line in manual.splitlines() if line.startswith("| `--no-augment`"))
    assert "rotation 5 / 10 / 5 degrees, zoom 10 / 10 / 20 %, shift 0.5 / 2 / 16 pixels" in row
    found = [AUGMENTATIONS[kind] for kind in ("digits", "mnist", "folder")]
    assert [a.degrees for a in found] == [5, 10, 5] and [a.zoom for a in found] == [0.1, 0.1, 0.2]
    assert [a.shift for a in found] == [0.5, 2, 16]
    assert [a.mirror for a in found] == [False, False, True]


def test_defaults_are_those_of_the_manual():
    kinds = [
        make_settings(given, torch.device("cpu"))
        for given in ({}, {"data": "mnist", "data_dir": "."}, {"data": "folder", "data_dir": "."})
    ]
    assert [(s.epochs, s.warmup_epochs) for s in kinds] == [(40, 4), (20, 2), (100, 5)]
    assert [(s.batch_size, s.lr) for s in kinds] == [(64, 2e-3), (256, 2e-3), (256, 1e-3)]
    assert [s.model for s in kinds] == [None, "vit_mnist", "vit_tiny_patch16_224"]
    assert [(s.img_size, s.in_chans) for s in kinds] == [(8, 1), (28, 1), (224, 3)]
    for s in kinds:
        assert (s.weight_decay, s.label_smoothing, s.drop_path) == (0.05, 0.1, 0)
        assert (s.held_out, s.seed, s.crop_scale, s.mixup, s.ema) == (0.2, 0, 0.08, 0, 0)
        assert (s.randaugment, s.precision, s.augment, s.compare) == (0, "fp32", True, False)
    assert make_settings({}, torch.device("cuda")).precision == "bf16"


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(
            class_token=False, global_pool="avg", reg_tokens=2, no_embed_class=True, pre_norm=True
        ),
        dict(init_values=0.3, reg_tokens=1, act_layer="quick_gelu", qkv_bias=False, num_classes=3),
        dict(global_pool="avg", fc_norm=False, pool_include_prefix=True, norm_eps=1e-5),
    ],
    ids=["mnist", "avg", "layer_scale", "mean_of_all"],
)
def test_plain_vit_is_the_model(options):
    """The reference against the model's own PyTorch path, in float64."""
    model = create_vit("vit_mnist", **options).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    with backend("torch"):
        ours = model(images)
    plain = plain_vit.plain_vit(model, dict(model.named_parameters()), images)
    torch.testing.assert_close(plain, ours)


def test_training_through_the_kernels_follows_pytorch(tmp_path, monkeypatch):
    """Two steps of each backend from the same weights; --backend auto is PyTorch on a CPU."""
    seen, train_epoch = [], training.Run.train_epoch

    def record(*arguments):
        seen.append(get_backend())
        return train_epoch(*arguments)

    monkeypatch.setattr(streaming, "find", fewer(4, 1))
    for name, value in dict(embed_dim=16, depth=1, num_heads=2, patch_size=4).items():
        monkeypatch.setitem(DIGITS_VIT, name, value)
    monkeypatch.setattr(training.Run, "train_epoch", record)
    losses = []
    for name in ("auto", "triton", "torch"):
        words = ["--epochs", 1, "--batch", 2, "--no-check", "--dtype", "fp32"]
        assert run(*words, "--backend", name, "--out", name) == 0
        losses.append(
            checkpoint.load(tmp_path / name / "checkpoint.pt")["history"][0]["train_loss"]
        )
    assert seen == ["auto" if torch.cuda.is_available() else "torch", "triton", "torch"]
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)
    assert get_backend() == "auto"
