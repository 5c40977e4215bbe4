"""What a run reports: the check batch, the figures in words, the summary, the drawings."""

from __future__ import annotations

import io
import json

import pytest
import torch
from test_train import _in_a_folder_of_its_own, _small_run
from torch import nn

from fastvit_kernels.commands.models import build_model, fused_model
from fastvit_kernels.commands.training import figures, report
from fastvit_kernels.commands.training.model import host_of
from fastvit_kernels.runtime.backend import backend, get_backend
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.verify.accuracy import Error

rich = pytest.importorskip("rich.console")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
__all__ = ["_in_a_folder_of_its_own"]  # a fixture
RIGHT, WRONG = (Error(n, x, 1.0, 1.0, 1.0, 2.0, 2.0) for n, x in (("logits", 1.0), ("dx", 9.0)))


def console():
    return rich.Console(file=io.StringIO(), width=200, highlight=False)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, by the name of their file."""
    found = {}
    monkeypatch.setattr(figures, "_save", lambda f, path, dpi=0: found.update({path.name: f}))
    return found


@pytest.mark.parametrize("host", [False, True], ids=["ours", "host"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_batch_is_of_the_kernels(tmp_path, monkeypatch, host, precision):
    """Not of PyTorch beside itself; in the run's precision; two normalized images."""
    seen = []

    def compare(model, images, autocast):
        seen.append((get_backend(), model.training, autocast))
        assert images.dtype is torch.float32 and len(images) == 2
        return [RIGHT, WRONG]

    run = _small_run(tmp_path, precision=precision)
    if host:
        run.model = nn.Linear(2, 2)
        monkeypatch.setattr(report, "host_of", lambda model: model)
    monkeypatch.setattr(report, "model_errors" if host else "agreement", compare)
    written = console()
    errors = report.check_batch(run, written)
    assert seen == [("triton", False, torch.bfloat16 if precision == "bf16" else None)]
    assert errors == [RIGHT, WRONG] and get_backend() == "auto"
    assert "1 of 2 tensors break the 2x rule" in written.file.getvalue()


def test_the_hosts_own_code_is_what_a_swapped_model_is_compared_with():
    pytest.importorskip("timm")
    with torch.device("meta"):
        model = fused_model("timm:vit_tiny_patch16_224", img_size=32, depth=1)
        host = host_of(model)
        classes = [type(m) for m in build_model("timm:vit_tiny_patch16_224", depth=1).modules()]
    assert any(isinstance(m, Fused) for m in model.modules())
    assert [type(m) for m in host.modules()] == classes


@pytest.fixture
def run(tmp_path, drawn):
    """A run of four epochs that were not run: two of its 359 held-out images cannot be read, and
    it takes all others for threes."""
    run = _small_run(tmp_path, compare=True)
    with torch.no_grad():
        run.model.get_parameter("head.bias")[3] = 100
    evaluate = run.evaluate

    def broken(learner):
        loss, predicted = evaluate(learner)
        predicted[-2:] = -1
        return loss, predicted

    run.evaluate = broken
    run.source.broken = {"one", "two"}
    row = {"epoch": 1, "lr": 0.1, "train_loss": 2.0, "train_accuracy": 0.1, "held_out_loss": 2.5}
    row |= {"held_out_accuracy": 0.25}
    row |= {f"reference_{n}": v + 0.125 for n, v in row.items() if n[0] in "th"}
    speeds = ((10, 1), (20, 2), (60, 3), (1000, 700))  # the median is of two in the middle
    run.history = [
        {**row, "epoch": i + 1, "images_per_s": a, "reference_images_per_s": b, "seconds": 2.0**i}
        for i, (a, b) in enumerate(speeds)
    ]
    return run


def test_the_report_is_of_the_history_and_of_what_could_be_read(run, tmp_path):
    written = console()
    with backend("torch"):
        report.write_report(run, [RIGHT, WRONG], written)
    labels = run.source.held_out_labels[:-2]
    right = int((labels == 3).sum())
    said = " ".join(written.file.getvalue().split())
    assert f"Held-out accuracy: {100 * right / 357:.2f} % ({357 - right} of 357 wrong)" in said
    assert "Training: 40 images/s (median of 4 epochs), 15 s." in said
    assert "Plain PyTorch beside it: 37.50 %, loss 2.625, 2 images/s." in said
    assert "Left out: 2 images that cannot be read." in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_accuracy"] == right / 357
    assert (summary["images_per_s"], summary["training_seconds"]) == (40, 15)
    assert [row[3] for row in summary["confusion"]] == labels.bincount(minlength=10).tolist()
    assert [(e["name"], e["passed"]) for e in summary["agreement"]] == [
        ("logits", True),
        ("dx", False),
    ]
    assert summary["last_epoch"] == run.history[-1]


def test_what_is_drawn_of_a_run(run, drawn):
    with backend("torch"):
        report.write_report(run, [], console())
    loss, accuracy = drawn["curves.png"].axes[:2]
    names = [
        f"{who}, {what}" for who in ("our model", "plain PyTorch") for what in ("train", "held-out")
    ]
    for axes, wanted in ((loss, (2.0, 2.5, 2.125, 2.625)), (accuracy, (10, 25, 22.5, 37.5))):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines) == names
        for line, y in zip(lines.values(), wanted, strict=True):
            assert list(line.get_xdata()) == [1, 2, 3, 4]
            assert list(line.get_ydata()) == pytest.approx([y] * 4)
    axes, *_ = drawn["confusion.png"].axes
    labels = run.source.held_out_labels[:-2]
    assert {text.get_text() for text in axes.texts} == set(map(str, labels.bincount().tolist()))
    share = axes.get_images()[0].get_array()
    assert share[:, 3].tolist() == [100.0] * 10 and share.sum() == 1000, "of the true class"
    true = int(labels[0])
    title = drawn["attention.png"].get_suptitle()
    assert true != 3 and f"held-out image 0, class {true}, predicted 3" in title


def test_each_panel_is_of_its_layer_and_head(tmp_path, drawn):
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    layers = [torch.rand(3, 2, 2), torch.rand(3, 2, 2)]
    figures.draw_attention(image, layers, True, tmp_path / "all.png", "title")
    figures.draw_attention(image, layers[1:], False, tmp_path / "one.png", "title")
    peak = max(layer.max().item() for layer in layers)
    panels = [axes for axes in drawn["all.png"].axes if axes.get_images()]
    assert [axes.get_title() for axes in panels[:4]] == ["image", "head 0", "head 1", "head 2"]
    assert [a.get_ylabel() for a in panels if a.get_ylabel()] == ["layer 0", "layer 1"]
    singles = [axes for axes in drawn["one.png"].axes if axes.get_images()]
    assert "of the class token" in drawn["all.png"].get_suptitle()
    assert "mean over all patches" in drawn["one.png"].get_suptitle()
    heads = [head for layer in layers for head in layer]
    for shown, wanted, top in (
        (panels, heads, peak),
        (singles, list(layers[1]), layers[1].max().item()),
    ):
        assert torch.equal(torch.tensor(shown[0].get_images()[0].get_array()), image[0])
        for axes, head in zip(shown[1:], wanted, strict=False):
            over = axes.get_images()[1]
            assert over.get_clim() == (0, pytest.approx(top))
            values = torch.tensor(over.get_array())
            assert torch.equal(values[::4, ::4], head) and torch.equal(values[3::4, 3::4], head)
