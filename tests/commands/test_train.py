"""`fastvit-kernels train`: what docs/train.md promises of a run."""

import json
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels import create_vit
from fastvit_kernels.commands import cli, train as command
from fastvit_kernels.measure.model_errors import model_errors
from fastvit_kernels.runtime import backend as runtime_backend, files
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.weights.files import read_pickle

datasets = pytest.importorskip("sklearn.datasets")
Image = pytest.importorskip("PIL.Image")

QUICK = ["--batch", 256, "--no-check", "--epochs", 1]


def run(*words):
    return cli.main(["train", *(str(word) for word in words)])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _small(request, monkeypatch):
    """Two layers, 200 images and empty pictures, but for the test that asks for the whole."""
    if "whole" in request.fixturenames:
        return
    digits = datasets.load_digits()
    few = SimpleNamespace(images=digits.images[:200], target=digits.target[:200])
    monkeypatch.setattr(datasets, "load_digits", lambda: few)
    monkeypatch.setitem(command.DIGITS_VIT, "depth", 2)
    monkeypatch.setattr(command.figures, "_save", lambda figure, path: path.touch())


@pytest.fixture
def whole():
    """Asks for the default model, all digits and pictures."""


def checkpoint(folder):
    return read_pickle(folder / command.CHECKPOINT)


def assert_same_run(first, second):
    a, b = checkpoint(first), checkpoint(second)
    for rows in (a["history"], b["history"]):
        for row in rows:
            del row["images_per_s"]
    assert a["history"] == b["history"] and a["model"].keys() == b["model"].keys()
    assert all(torch.equal(x, b["model"][name]) for name, x in a["model"].items())
    moments = [[*of["optimizer"]["state"].values()] for of in (a, b)]
    for one, other in zip(*moments, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_train_writes_everything_and_learns(tmp_path, capsys, whole):
    assert run("--epochs", 4, "--batch", 128, "--out", "run") == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for said in ("  logits: ", "  worst gradient, ", "gradients are within", "Held-out accuracy"):
        assert said in out
    assert "labels smoothed by 0.1" in out and "epoch   1/4: training loss " in out
    if not torch.cuda.is_available():
        assert "the check runs in Triton's interpreter" in out
        assert out.endswith("Trained in PyTorch; the kernels were checked on 2 images.\n")
    folder = tmp_path / "run"
    pictures = ["attention.png", "confusion.png", "curves.png"]
    written = [command.CHECKPOINT, command.METRICS, command.WEIGHTS]
    assert sorted(p.name for p in folder.iterdir()) == sorted(pictures + written)
    for name in pictures:
        with Image.open(folder / name) as image:
            assert image.width > 600 and image.height > 400
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    rows = (folder / command.METRICS).read_text().splitlines()
    assert len(rows) == 5 and rows[0].startswith("epoch,train_loss,images_per_s")
    assert checkpoint(folder)["history"][-1]["held_out_accuracy"] > 0.6
    Image.linear_gradient("L").save("image.png")
    weights = str(folder / command.WEIGHTS)
    assert cli.main(["attention-maps", "image.png", "--weights", weights, "--out", "maps"]) == 0
    assert len(list((tmp_path / "maps").iterdir())) == 4


def stop_at(step, monkeypatch):
    """Ctrl-C at a step of the run."""
    rate = command.learning_rate

    def stopping(now, total):
        if now == step:
            raise KeyboardInterrupt
        return rate(now, total)

    monkeypatch.setattr(command, "learning_rate", stopping)


def test_interrupt_and_resume_is_bit_for_bit(tmp_path, monkeypatch, capsys):
    """Within the first epoch, within the second; and the check changes no training."""
    words = ["--batch", 32, "--epochs", 3, "--no-check"]  # five steps an epoch
    assert run(*words, "--out", "whole") == 0
    first, later = [*words, "--out", "parts"], ["--resume", "--no-check", "--out", "parts"]
    for step, done, given in ((2, 0, first), (7, 1, later)):
        with monkeypatch.context() as patch:
            stop_at(step, patch)
            assert run(*given) == 130
        assert "train --resume --out parts" in capsys.readouterr().out
        assert len(checkpoint(tmp_path / "parts")["history"]) == done
        torch.manual_seed(12345)
    assert run("--resume", "--out", "parts") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_process(tmp_path):
    words = ["train", "--epochs", "500", "--batch", "512", "--no-check", "--out", "run"]
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
    assert "Go on with: fastvit-kernels train --resume --out run" in out
    assert checkpoint(tmp_path / "run")["history"]


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


def test_runs_never_overwrite_each_other(tmp_path):
    for seed in (0, 1):
        assert run(*QUICK, "--seed", seed) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["digits", "digits-2"]
    first, second = (checkpoint(tmp_path / "runs" / name) for name in ("digits", "digits-2"))
    assert not torch.equal(first["model"]["head.weight"], second["model"]["head.weight"])


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "learning_rate", lambda step, total: math.inf)
    assert run(*QUICK, "--out", "infinite") == 2
    err = capsys.readouterr().err
    assert "is not finite" in err and "try a smaller --lr" in err
    model = checkpoint(tmp_path / "infinite")["model"]
    assert all(weight.isfinite().all() for weight in model.values())


def test_a_broken_kernel_stops_the_training(tmp_path, monkeypatch, capsys):
    def broken(model, images, autocast):
        errors = model_errors(model, images, autocast=autocast)
        wrong = {**vars(errors[0]), "max": 1.0}
        return [type(errors[0])(**wrong), *errors[1:]]

    monkeypatch.setattr(command, "model_errors", broken)
    assert run("--epochs", 1, "--out", "run") == 1
    out = capsys.readouterr().out
    assert "breaks the 2x rule" in out and "  logits: largest error 1.00e+00 (" in out
    assert "Nothing was trained" in out
    assert not (tmp_path / "run" / command.CHECKPOINT).exists()


def write_images(folder, classes=("cat", "dog"), count=6):
    """Each class is of one grey."""
    for index, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (40, 30), (40 + 150 * index,) * 3)
            image.putpixel((number, 0), (255, 0, 0))
            image.save(folder / name / f"{number}.png")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_of_images(tmp_path, monkeypatch, capsys, workers):
    """A class each folder; read, split, trained, resumed."""
    pytest.importorskip("torchvision")
    write_images(tmp_path / "pets")
    words = ["--data", "pets", "--model", "vit_mnist", "--img-size", 8, "--batch", 4]
    words += ["--epochs", 2, "--workers", workers, "--lr", "1e-4", "--no-check"]
    assert run(*words, "--out", "whole") == 0, capsys.readouterr().err
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        assert run(*words, "--out", "parts") == 130
    assert run("--resume", "--no-check", "--out", "parts") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    out = capsys.readouterr().out
    assert "10 training and 2 held-out images, 2 classes" in out
    (tmp_path / "pets/cat/0.png").write_text("torn")
    assert run(*words, "--out", "torn") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pets/cat/0.png cannot be read as an image" in line and "Traceback" not in line


def test_a_model_of_another_library(tmp_path, capsys):
    """Checked beside its own code, trained swapped, drawn."""
    pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = dict(model_type="vit", image_size=8, patch_size=4, num_channels=1, **sizes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", "hf:config.json", "--batch", 256, "--epochs", 1, "--out", "run"]
    assert run(*words) == 0, capsys.readouterr().err
    assert "gradients are within" in capsys.readouterr().out
    Image.linear_gradient("L").save("image.png")
    weights = f"run/{command.WEIGHTS}"
    assert cli.main(["attention-maps", "image.png", "--weights", weights]) == 0


def test_the_learning_rate_warms_up_and_falls_to_zero():
    shares = [command.learning_rate(step, 100) for step in range(101)]
    assert shares[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert shares[10] == 1 and shares[55] == pytest.approx(0.5) and shares[100] == 0


def test_weight_decay_is_on_matrices_alone():
    model = create_vit("vit_mnist", depth=1)
    decayed, others = command.make_optimizer(model, 1e-3).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (command.WEIGHT_DECAY, 0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        n for n, p in model.named_parameters() if n.endswith("weight") and p.ndim > 1
    }
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_a_compiled_model_in_bf16(monkeypatch, capsys):
    """Where the interpreter computes bf16 wrongly, `check` refuses it; `train` blames no kernel."""
    monkeypatch.setattr(runtime_backend, "INTERPRETED", True)
    monkeypatch.setattr(runtime_backend, "_interprets_bf16", lambda: False)
    assert cli.main(["check", "--dtype", "bf16", "--device", "cpu"]) == 2
    assert "computes bf16 wrongly" in capsys.readouterr().err
    compiled, seen, linear = [], [], torch.nn.functional.linear
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda *given: seen.append(torch.is_autocast_enabled("cpu")) or linear(*given),
    )
    words = ["--epochs", 1, "--batch", 256, "--dtype", "bf16", "--device", "cpu", "--out", "run"]
    assert run(*words, "--compile") == 0
    assert compiled and any(seen)
    out = capsys.readouterr().out
    assert "The kernels are not checked" in out and "computes bf16 wrongly" in out


def test_training_through_the_kernels_follows_pytorch(tmp_path, monkeypatch):
    """An epoch of each backend from the same weights."""
    for name, value in dict(embed_dim=16, depth=1, num_heads=2, patch_size=4).items():
        monkeypatch.setitem(command.DIGITS_VIT, name, value)
    for name in ("triton", "torch"):
        with backend(name):
            words = ["--epochs", 1, "--batch", 100, "--no-check", "--dtype", "fp32"]
            assert run(*words, "--out", name) == 0
    losses = [checkpoint(tmp_path / n)["history"][0]["train_loss"] for n in ("triton", "torch")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
