"""timm's own train.py and validate.py, two epochs with one line added: the losses of the scripts as
they are.

Neither timm's wheel nor its sdist has the scripts, and CI reads package registries alone.
TIMM_SCRIPTS names a checkout of huggingface/pytorch-image-models, which has them: those of commit
aa4b5850 run with timm 1.0.31. test_ecosystem.py drives the same parts of timm without them.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import fastvit_kernels
from fastvit_kernels import backend
from fastvit_kernels.runtime.compat import define_torchvision_operators

define_torchvision_operators()
timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")
SCRIPTS = Path(os.environ.get("TIMM_SCRIPTS", ""))
pytestmark = pytest.mark.skipif(
    not (SCRIPTS / "train.py").is_file() or not (SCRIPTS / "validate.py").is_file(),
    reason="needs TIMM_SCRIPTS=DIR, a checkout of huggingface/pytorch-image-models",
)
ADDED = "    from fastvit_kernels import swap_in; swap_in(model)\n"
SIZES = ["img_size=8", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "mlp_ratio=2"]
MODEL = ["--model", "vit_base_patch14_dinov2", "--model-kwargs", *SIZES, "init_values=0.1"]
READING = [
    "--num-classes",
    "10",
    "--batch-size",
    "16",
    "--img-size",
    "8",
    "--workers",
    "0",
    "--device",
    "cpu",
]
TRAINING = [
    "--epochs",
    "2",
    "--warmup-epochs",
    "0",
    "--opt",
    "adamw",
    "--lr",
    "2e-3",
    "--seed",
    "3",
    "--clip-grad",
    "1.0",
    "--mixup",
    "0.2",
    "--aa",
    "rand-m5",
    "--drop-path",
    "0.1",
    "--model-ema",
    "--model-ema-decay",
    "0.9",
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """48 handwritten digits to train on and 48 to validate on, as image files."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder, found = tmp_path_factory.mktemp("digits"), load_digits()
    for i in range(96):
        place = folder / ("train" if i < 48 else "validation") / str(found.target[i])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (found.images[i] * 15).astype("uint8")
        Image.fromarray(pixels).convert("RGB").save(place / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def _own_logging():
    """The scripts give the root logger a handler of theirs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with backend("torch"):
        yield
    root.handlers[:] = handlers
    root.setLevel(level)


def scripts(folder, swapped):
    """A copy of both scripts, with the line added after the one that moves the model."""
    folder.mkdir()
    for name in ("train.py", "validate.py"):
        text = (SCRIPTS / name).read_text()
        if swapped:
            text, count = re.subn(
                r"^    (model = )?model\.to\(device=device, dtype.*\n",
                lambda found: found[0] + ADDED,
                text,
                flags=re.MULTILINE,
            )
            assert count == 1, name
        (folder / name).write_text(text)
    return folder


def run(monkeypatch, script, *words):
    monkeypatch.setattr(sys, "argv", [str(script), *(str(word) for word in words)])
    runpy.run_path(str(script), run_name="__main__")


def train_and_validate(monkeypatch, folder, digits):
    """The rows of train.py's summary.csv, and what validate.py prints of its last checkpoint."""
    run(
        monkeypatch,
        folder / "train.py",
        "--data-dir",
        digits,
        *MODEL,
        *READING,
        *TRAINING,
        "--output",
        folder,
        "--experiment",
        "run",
    )
    with (folder / "run" / "summary.csv").open() as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    run(
        monkeypatch,
        folder / "validate.py",
        digits,
        "--split",
        "validation",
        *MODEL,
        *READING,
        "--checkpoint",
        folder / "run" / "last.pth.tar",
        "--results-file",
        folder / "validated",
        "--results-format",
        "json",
        "--use-ema",
    )
    return rows, json.loads((folder / "validated").read_text())


def test_two_epochs_of_the_scripts(tmp_path, monkeypatch, digits):
    host = train_and_validate(monkeypatch, scripts(tmp_path / "host", False), digits)
    models, swap_in = [], fastvit_kernels.swap_in
    monkeypatch.setattr(
        fastvit_kernels, "swap_in", lambda model: models.append(model) or swap_in(model)
    )
    swapped = train_and_validate(monkeypatch, scripts(tmp_path / "swapped", True), digits)
    shares = [fastvit_kernels.status(model).share for model in models]
    assert len(shares) == 2 and min(shares) > 0.99, "a line each in train.py and validate.py"
    assert len(host[0]) == len(swapped[0]) == 2
    assert host[0][1]["train_loss"] < host[0][0]["train_loss"], "it trains"
    for row, other in zip(host[0], swapped[0], strict=True):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-4)
        assert other["eval_loss"] == pytest.approx(row["eval_loss"], rel=1e-4)
        assert other["eval_top1"] == pytest.approx(row["eval_top1"], abs=100 / 48), "an image of 48"
    assert swapped[1]["top1"] == pytest.approx(host[1]["top1"], abs=100 / 48)
    assert swapped[1]["top1"] == pytest.approx(swapped[0][-1]["eval_top1"], abs=100 / 48)
