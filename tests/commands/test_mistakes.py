"""Every command says a user's mistake in one line, before any work, and ends with status 2."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

import pytest
import torch

import fastvit_kernels as fk
from bench import __main__ as bench
from fastvit_kernels.commands import cli

for _package in ("safetensors", "sklearn", "matplotlib"):
    pytest.importorskip(_package)
Image = pytest.importorskip("PIL.Image")

MINE = """
import torch
class Attention(torch.nn.Linear): pass
def none(): return None
def raises(): raise RuntimeError("out of patience")
def flat(num_classes=10, in_chans=1): return Attention(5, num_classes)
def few(num_classes=10, in_chans=1):
    return torch.nn.Sequential(torch.nn.Flatten(), Attention(224 ** 2, 3))
"""
RUN = dict(data="digits", model="digits", img_size=8, in_chans=1, epochs=1, batch=256, lr=1e-3)
RUN |= dict(dtype="fp32", seed=0, compile=False, workers=0)

# command line -> what the line must say: what came, and what is wanted
MISTAKES = {
    # words
    "": "arguments are required: COMMAND",
    "polish": "invalid choice: 'polish' (choose from",
    "check --nope": "unrecognized arguments: --nope (--help",
    "attention-maps photo.png": "arguments are required: --weights",
    "tune --train --infer": "not allowed with",
    # values of flags
    "train --lr -1": "--lr: must be a number above 0 and at most 1000.0, got '-1'",
    "train --dtype fp16": "invalid choice: 'fp16' (choose from",
    "train --device cuda:3": "--device cuda:3: torch sees no GPU",
    "train --img-size 1": "img_size (1, 1) must be at least patch_size (2, 2)",
    "tune --device tpu": "--device: must be cpu, cuda or cuda:N, got tpu",
    "check --jobs -1": "--jobs: must be a whole number from 0 to 1024, got '-1'",
    "check --only convolution": "--only convolution: no case has it in its name; there are",
    "compare --ways fast": "invalid choice: 'fast' (choose from",
    "attention-maps photo.png --weights mnist.pth --option depth": "must be NAME=VALUE, got depth",
    "bench attention --mode train": "invalid choice: 'train' (choose from",
    "bench vit --batch 3": "--batch and --img-size need --model",
    "bench": "arguments are required: COMMAND",
    "bench vit --mode fwd": "invalid choice: 'fwd' (choose from",
    "bench vit --dtype fp32": "invalid choice: 'fp32' (choose from",
    # this machine
    "tune": "by measuring them on a GPU: none on cpu",
    "bench quick": "torch sees no GPU, so nothing was run",
    "bench linear --device cpu": "torch sees no GPU, so nothing was run",
    # models
    "train --model vit_smal_patch16_224": "module:callable; near names: vit_small_patch16_224",
    "compare resnet50": "near names: timm:resnet50",
    "compare jax:vit": "'jax:vit': no module named jax, here or installed; wanted a name of",
    "train --model timm:vit_tiny_patch16_225": "near names: timm:vit_tiny_patch16_224",
    "train --model torchvision:vit_b_16": "torchvision:vit_b_16 takes images of 3 channels",
    "train --model hf:dinov": "near names: hf:dinov2",
    "train --model hf:text.json": "text.json is no config of an image classifier of transformers",
    "train --model timm:resnet18": "--model timm:resnet18 is no ViT: no module in it is an",
    "train --model timm:vit_tiny_patch16_224 --img-size 8": "images [1, 1, 8, 8]: ",
    "train --model mine:none": "none() got an unexpected keyword argument",
    "train --model mine:flat": "--model mine:flat, images [1, 1, 224, 224]: mat1 and mat2",
    "train --model mine:few": "gives [1, 3], wanted logits [1, 10]",
    "compare mine:none": "mine:none gave NoneType, wanted torch.nn.Module",
    "compare mine:raises": "compare: model mine:raises: out of patience",
    "compare broken:build": "compare: model broken:build: No module named 'absent_package'",
    "attention-maps photo.png --weights mnist.pth --model vit_mnist --option dept=3": "'dept'",
    # folders and files that are read
    "train --data absent": "--data absent is not a folder",
    "train --data empty": "empty must hold a folder of images for each class",
    "train --data one": "one needs two classes or more, of two images each",
    "compare vit_mnist --data empty --batch 2": "--data empty holds 0 images; --batch wants 2",
    "compare vit_mnist --data torn": "torn/a.png cannot be read as an image",
    "attention-maps absent.png --weights mnist.pth": "there is no file absent.png",
    "attention-maps text.json --weights mnist.pth --model vit_mnist": "text.json cannot be read as",
    "attention-maps deep.tiff --weights mnist.pth --model vit_mnist": "8 bits a channel are wanted",
    "attention-maps photo.png --weights mnist.pth": "is not of `train`; other weights need --model",
    "attention-maps photo.png --weights foreign.safetensors": "need --model NAME: it lacks",
    "attention-maps photo.png --weights foreign.pth --model vit_mnist": "does not fit vit_mnist: ",
    "attention-maps photo.png --weights mnist.pth --model timm:resnet18": "does not fit timm:",
    "bench plot absent": "absent",
    # runs
    "train --resume": "--resume needs --out, the folder of the run",
    "train --resume --out empty": "there is no checkpoint empty/checkpoint.pt",
    "train --resume --out run-code": "cannot be read as a checkpoint: it holds more than tensors",
    "train --resume --out run-weights": "cannot be read as a checkpoint: it lacks 'config'",
    "train --resume --out run-images": "the images are not those that the run was trained on",
    "train --resume --out run-model": "run-model/checkpoint.pt does not fit its model: ",
    "train --resume --out run-model --epochs 9": "--epochs 9 differs from the 1 of run-model",
    "train --out run-model": "run-model holds a run: add --resume, or name another folder",
    # output that cannot be written
    "train --out mnist.pth": "--out: mnist.pth cannot be written: ",
    "attention-maps photo.png --weights mnist.pth --out mnist.pth": "mnist.pth is a file",
    "bench linear --out mnist.pth": "mnist.pth is a file",
}


class _Code:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the command lines name."""
    from safetensors.torch import save_file
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "one/a", "torn"):
        (folder / name).mkdir(parents=True)
    image = Image.linear_gradient("L")
    for name in ("photo.png", "one/a/1.png", "one/a/2.png"):
        image.save(folder / name)
    Image.new("I", (4, 4)).save(folder / "deep.tiff")
    for name in ("text.json", "torn/a.png"):
        (folder / name).write_text("hello")
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("import absent_package")
    torch.save(fk.create_vit("vit_mnist").state_dict(), folder / "mnist.pth")
    torch.save({"x": torch.ones(1)}, folder / "foreign.pth")
    save_file({"x": torch.ones(1)}, folder / "foreign.safetensors")
    digest = hashlib.sha256(load_digits().images.tobytes()).hexdigest()
    run = dict(config=RUN, images=digest, model={}, optimizer={}, history=[])
    runs = dict(code=_Code(), weights={"x": 1}, model=run, images={**run, "images": "others"})
    for name, content in runs.items():
        (folder / f"run-{name}").mkdir()
        torch.save(content, folder / f"run-{name}/checkpoint.pt")
    return folder


def _files(folder):
    """But for Python's own cache of mine.py: each, and when it was written."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path: path.stat().st_mtime_ns for path in found}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_before_any_work(line, folder, monkeypatch, capsys):
    for host in ("timm", "torchvision", "transformers"):
        if f"{host}:" in line or (host == "transformers" and "hf:" in line):
            pytest.importorskip(host)
    if "--data" in line and "train" in line:
        pytest.importorskip("torchvision")
    monkeypatch.chdir(folder)
    before, words = _files(folder), shlex.split(line)
    is_bench = words[:1] == ["bench"]
    try:
        status = bench.main(words[1:]) if is_bench else cli.main(words)
    except SystemExit as stop:  # argparse's
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2, out + err
    (said,) = err.splitlines()
    assert MISTAKES[line] in said and len(said) < 600
    assert said.startswith(("bench", "python -m bench") if is_bench else "fastvit-kernels")
    assert out == "" and _files(folder) == before
