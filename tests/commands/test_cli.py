"""The program itself: help, how it ends, when it starts again; `attention-maps`."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fastvit_kernels as fk
from fastvit_kernels.commands import attention_maps, check, cli
from fastvit_kernels.commands.models import build_model, read_image
from fastvit_kernels.runtime.backend import backend

Image = pytest.importorskip("PIL.Image")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_a_plain_command_turns_the_interpreter_on_by_itself(tmp_path):
    words = ["check", "--only", "layer_norm_and", "--dtype", "fp32", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fastvit_kernels", *words],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["interpreted"] is True
    assert "TRITON_INTERPRET" not in done.stderr


def test_which_commands_start_again_in_the_interpreter(monkeypatch):
    """Those that run kernels, where there is no GPU or --device leaves it; not against the user."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(cli, "HAS_TRITON", True)

    def found(gpu, device):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        return {
            name
            for name in cli.COMMANDS
            if cli.needs_interpreter(SimpleNamespace(command=name, device=device))
        }

    wanted = {"train", "check"}
    assert found(False, None) == found(True, "cpu") == wanted and found(True, None) == set()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert found(False, None) == set()
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(cli, "HAS_TRITON", False)
    assert found(False, None) == set()


def test_only_the_process_of_a_command_starts_again(monkeypatch):
    """With one thread of BLAS unless the user says otherwise; a call from Python never does."""
    seen = []
    monkeypatch.setattr(os, "execve", lambda *words: seen.append(words[-1]))
    monkeypatch.setattr(cli, "needs_interpreter", lambda _: True)
    monkeypatch.setattr(check, "run", lambda _: 0)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert cli.main(["check"]) == 0 and not seen
    monkeypatch.setattr(sys, "argv", ["fastvit-kernels", "check"])
    cli.main()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    cli.main()
    assert [e["OPENBLAS_NUM_THREADS"] for e in seen] == ["1", "4"]
    assert {e["TRITON_INTERPRET"] for e in seen} == {"1"}


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "fastvit-kernels check: [Errno 28] No space"),
    ],
    ids=["interrupt", "full disk"],
)
def test_how_a_command_ends(error, status, said, monkeypatch, capsys):
    """Also where the last lines, which wait in a buffer, cannot be written."""

    def stop():
        raise error

    monkeypatch.setattr(check, "run", lambda _: 0)
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "flush", stop)
        assert cli.main(["check"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS)], ids=" ".join)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and f"fastvit-kernels {' '.join(words)}" in out
    if not words:
        assert all(name in out for name in cli.COMMANDS)
        assert len(out.splitlines()) <= 24, "one screen"


def test_a_missing_package_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["train", "--out", str(tmp_path / "run")]) == 2
    assert 'pip install -e ".[train]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.radial_gradient("L").convert("RGB").save(path)
    return path


def draw_maps(photo, model, name, **options):
    """The command, on these weights; its folder."""
    folder = photo.parent
    torch.save(model.state_dict(), folder / "weights.pth")
    words = [str(photo), "--weights", str(folder / "weights.pth"), "--out", str(folder / "out")]
    words += [word for item in options.items() for word in ("--option", "{}={}".format(*item))]
    assert cli.main(["attention-maps", *words, "--model", name]) == 0
    return folder / "out"


def test_attention_maps_writes_one_png_a_layer(photo):
    """Of the mean over all patches where there is no class token."""
    name, options = "vit_tiny_patch32_224", dict(depth=2, global_pool="avg", class_token=False)
    files = sorted(draw_maps(photo, build_model(name, **options), name, **options).iterdir())
    assert [f.name for f in files] == ["photo-layer00.png", "photo-layer01.png"]
    for file in files:
        with Image.open(file) as image:
            assert image.width > 700 and image.height > 250
            assert len(image.convert("RGB").getcolors(1 << 24)) > 100


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("vit_tiny_patch16_224", 0.5, 0.5),
        ("timm:deit_tiny_patch16_224", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
)
def test_the_maps_of_the_pixels_that_a_named_model_sees(photo, monkeypatch, name, mean, std):
    """docs/train.md: from -1 to 1, or what timm notes for its model."""
    if ":" in name:
        pytest.importorskip("timm")
    model, drawn = build_model(name, depth=2), []
    monkeypatch.setattr(attention_maps.figures, "draw_attention", lambda *of: drawn.append(of))
    draw_maps(photo, model, name, depth=2)
    pixels = read_image(photo, (3, 224, 224))
    mean, std = (torch.tensor(x).expand(3).view(3, 1, 1) for x in (mean, std))
    with backend("torch"):
        maps = fk.attention_maps(model.eval(), ((pixels - mean) / std)[None])
    assert len(drawn) == 2
    for index, (image, ((layer,), from_cls, _), path, title) in enumerate(drawn):
        assert from_cls and path.name == f"photo-layer0{index}.png" and f"layer {index}" in title
        assert torch.equal(image, pixels)
        torch.testing.assert_close(layer, maps[index][0, :, 0, 1:].unflatten(-1, (14, 14)))


def test_images_are_cropped_about_their_centre_and_turned_upright(tmp_path):
    image = Image.new("L", (6, 4))
    image.putpixel((0, 0), 255)
    image.putpixel((1, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise: (0, 0) becomes the upper right corner
    image.save(tmp_path / "a.png", exif=exif)
    pixels = read_image(tmp_path / "a.png", (1, 4, 4))
    assert pixels.shape == (1, 4, 4) and pixels[0, 0, 3] == 1 and pixels.sum() == 1
    assert read_image(tmp_path / "a.png", (3, 2, 2)).shape == (3, 2, 2)
