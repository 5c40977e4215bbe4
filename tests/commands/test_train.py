import json
import math
import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from test_data import Image, write_images, write_mnist

from fastvit_kernels import create_vit
from fastvit_kernels.commands import cli
from fastvit_kernels.commands.training import checkpoint, data, figures, report
from fastvit_kernels.commands.training import folder as names
from fastvit_kernels.commands.training import run as training
from fastvit_kernels.commands.training.settings import DIGITS_VIT, make_settings
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


@pytest.fixture(autouse=True)
def _a_smaller_run(request, monkeypatch):
    """A few images, two layers and empty pictures, except for tests that ask for more."""
    if "all_digits" in request.fixturenames:
        return
    if "pictures" not in request.fixturenames:  # they take longer than the training
        monkeypatch.setattr(figures, "_save", lambda figure, path, dpi=0: path.touch())
    load_digits = data.load_digits

    def few(*arguments):
        full = load_digits(*arguments)
        train, held_out = (
            data.Split(split.images[:count], split.labels[:count])
            for split, count in ((full.train, 200), (full.held_out, 40))
        )
        return data.Dataset(train, held_out, full.classes)

    monkeypatch.setattr(data, "load_digits", few)
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
    for part in ("model", "reference", "average"):
        assert (part in a) == (part in b)
        for name, weight in a.get(part, {}).items():
            assert torch.equal(weight, b[part][name]), name
    for part in ("optimizer", "reference_optimizer"):
        for index, state in a.get(part, {"state": {}})["state"].items():
            for name, value in state.items():
                assert torch.equal(value, b[part]["state"][index][name]), (index, name)
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
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
        model_type="vit", hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, image_size=8, patch_size=4,
        num_channels=1,
    )  # fmt: skip
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
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A background job of a shell, such as CI's, hands on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
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
    checkpoint.write_text(path, "old")

    def fail(file):
        file.write(b"new, half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(path, fail)
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

    assert run("--resume", "--no-check") == 0
    assert "Resumed after epoch 1 of 1" in capsys.readouterr().out
    assert run("--resume", "--epochs", "9") == 2
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
        (None, ["--model", "resnet50"], "unknown model 'resnet50'"),
        (None, ["--img-size", "1"], "patch_size"),
        (None, ["--resume"], "there is no run of --data digits"),
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
    Image.new("RGB", (9, 9), (7, 7, 7)).save(tmp_path / "images" / "cat" / "0.png")
    assert run("--data", "folder", "--resume") == 2
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
    assert "model.blocks.0.mlp.fc1.weight is (128, 64) there and (192, 64) here" in err
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def _small_run(folder, **given):
    settings = make_settings({"epochs": 4, "warmup_epochs": 1, **given}, torch.device("cpu"))
    return training.Run(settings, data.load_digits(8, 0.2, 0), torch.device("cpu"), folder)


def test_patch_attention_reads_the_class_token_or_the_mean():
    maps = torch.rand(2, 7, 7).softmax(-1)  # a class token, then 2 x 3 patches
    cls = figures.patch_attention(maps, 1, True, (2, 3))
    assert cls.shape == (2, 2, 3) and cls[1, 1, 2] == maps[1, 0, 6]
    mean = figures.patch_attention(maps, 1, False, (2, 3))
    torch.testing.assert_close(mean[0, 0, 1], maps[0, 1:, 2].mean())


def test_pixels_that_fill_no_patch_are_not_drawn():
    model = create_vit("vit_mnist", img_size=(9, 7))
    assert figures.seen_pixels(model, torch.zeros(1, 9, 7)).shape == (1, 8, 6)


def test_learning_rate_warms_up_and_falls_to_zero():
    settings = make_settings({"epochs": 5, "warmup_epochs": 2, "lr": 1.0}, torch.device("cpu"))
    rates = [training.learning_rate(step, 10, settings) for step in range(50)]
    assert rates[0] == pytest.approx(0.05) and rates[19] == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(rates[:20]))
    assert all(a >= b for a, b in pairwise(rates[20:]))
    assert 0 <= rates[-1] < 0.01


def test_weight_decay_is_on_matrices_alone(tmp_path):
    run = _small_run(tmp_path)
    groups = run.learners[0].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
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
    few = data.load_digits

    def fewer(*arguments):
        full = few(*arguments)
        train, held_out = (
            data.Split(split.images[:count], split.labels[:count])
            for split, count in ((full.train, 4), (full.held_out, 1))
        )
        return data.Dataset(train, held_out, full.classes)

    seen, train_epoch = [], training.Run.train_epoch

    def record(*arguments):
        seen.append(get_backend())
        return train_epoch(*arguments)

    monkeypatch.setattr(data, "load_digits", fewer)
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
