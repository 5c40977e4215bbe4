import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fastvit_kernels as fk
from fastvit_kernels.commands import attention_maps, cli, console
from fastvit_kernels.commands.models import build_model, read_image
from fastvit_kernels.runtime.backend import backend

Image = pytest.importorskip("PIL.Image")


def command(*words, cwd, **variables):
    """`python -m fastvit_kernels` in a process of its own, without the tests' variable."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= variables
    return subprocess.run(
        [sys.executable, "-m", "fastvit_kernels", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_a_plain_command_turns_the_interpreter_on_by_itself(tmp_path):
    done = command("check", "--only", "layer_norm_and", "--dtype", "fp32", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["interpreted"] is True
    assert "TRITON_INTERPRET" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_a_value_that_the_user_has_set_is_left_alone(tmp_path):
    done = command("check", cwd=tmp_path, TRITON_INTERPRET="0")
    assert done.returncode == 2
    assert "the kernels cannot run here: the tensor is on the CPU" in done.stderr


def test_what_cannot_be_written_at_the_end_is_an_error(monkeypatch, capsys):
    """A few lines wait in a buffer until the command is done."""

    def full():
        raise OSError(28, "No space left on device")

    module = SimpleNamespace(run=lambda arguments: 0)
    monkeypatch.setattr(cli, "_module", lambda name: module)
    monkeypatch.setattr(
        cli,
        "build_parser",
        lambda words: SimpleNamespace(parse_args=lambda words: SimpleNamespace(command="check")),
    )
    monkeypatch.setattr(sys.stdout, "flush", full)
    assert cli.main(["check"]) == 2
    monkeypatch.undo()
    assert "fastvit-kernels check: " in capsys.readouterr().err


def test_which_commands_run_kernels(monkeypatch):
    """They start again in the interpreter where there is no GPU, or where --device leaves it."""
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
    monkeypatch.setattr(cli, "HAS_TRITON", False)
    assert found(False, None) == set()


def test_importing_the_package_sets_no_variable(tmp_path):
    program = "import os, fastvit_kernels.commands.cli; print(os.environ.get('TRITON_INTERPRET'))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "None", done.stderr


def test_calls_from_python_never_replace_the_process(monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("execve")

    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr(cli, "needs_interpreter", lambda _: True)
    words = ["check", "--only", "layer_norm_and", "--dtype", "fp32"]
    assert cli.main(words) == 0
    assert re.search(r"(\d+) of \1 cases passed", capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["fastvit-kernels", *words])
    with pytest.raises(AssertionError, match="execve"):
        cli.main()


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"fastvit-kernels {name}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)
    assert len(out.splitlines()) <= 24, "one screen"


def test_a_missing_package_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["train", "--out", str(tmp_path / "run")]) == 2
    assert 'pip install -e ".[train]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_require_passes_on_an_import_error_of_another_package(monkeypatch, tmp_path):
    (tmp_path / "needs_another.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        console.require("needs_another", "needs_another")


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.radial_gradient("L").convert("RGB").save(path)
    return path


@pytest.mark.parametrize(
    ("name", "global_pool"),
    [
        ("vit_tiny_patch32_224", "token"),
        ("vit_tiny_patch32_224", "avg"),
        ("timm:vit_small_patch32_224", "token"),
    ],
    ids=["token", "avg", "timm"],
)
def test_attention_maps_writes_one_png_a_layer(tmp_path, photo, name, global_pool, capsys):
    if ":" in name:
        pytest.importorskip("timm")
    options = dict(depth=2, embed_dim=48, num_heads=3, global_pool=global_pool)
    if global_pool == "avg":
        options["class_token"] = False
    model = build_model(name, **options)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    words = ["attention-maps", str(photo), "--weights", str(tmp_path / "weights.pth")]
    words += ["--model", name, "--out", str(tmp_path / "out")]
    for name, value in options.items():
        words += ["--option", f"{name}={value}"]
    assert cli.main(words) == 0, capsys.readouterr().err
    files = sorted((tmp_path / "out").iterdir())
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
def test_the_pixels_that_a_named_model_sees(tmp_path, photo, monkeypatch, name, mean, std):
    """docs/train.md: from -1 to 1, or what timm notes for its model."""
    if ":" in name:
        pytest.importorskip("timm")
    model, seen = build_model(name, depth=1), []
    fake = attention_maps.figures.Attention([torch.ones(3, 14, 14)], True, (224, 224))
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    monkeypatch.setattr(attention_maps.figures, "draw_attention", lambda *words: None)
    monkeypatch.setattr(
        attention_maps.figures,
        "head_attention",
        lambda model, image: seen.append(image) or fake,
    )
    words = ["--model", name, "--option", "depth=1", "--out", str(tmp_path / "o")]
    words = ["attention-maps", str(photo), "--weights", str(tmp_path / "weights.pth"), *words]
    assert cli.main(words) == 0
    pixels = read_image(photo, (3, 224, 224))
    mean, std = (torch.tensor(x).expand(3).view(3, 1, 1) for x in (mean, std))
    torch.testing.assert_close(seen[0], ((pixels - mean) / std)[None])


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


def test_one_thread_of_blas_unless_the_user_says_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execve", lambda *words: seen.append(words[-1]))
    monkeypatch.setattr(cli, "needs_interpreter", lambda _: True)
    monkeypatch.setattr(
        cli.importlib,
        "import_module",
        lambda _: SimpleNamespace(run=lambda _: 0, add_arguments=lambda _: None, __doc__=""),
    )
    monkeypatch.setattr(sys, "argv", ["fastvit-kernels", "check"])
    for given in (None, "4"):
        monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
        cli.main()
    assert [e["OPENBLAS_NUM_THREADS"] for e in seen] == ["1", "4"]
    assert {e["TRITON_INTERPRET"] for e in seen} == {"1"}


def test_an_interrupt_is_130(monkeypatch, capsys):
    from fastvit_kernels.commands import check

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupt)
    assert cli.main(["check"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_each_layer_of_an_image_is_drawn(tmp_path, photo, monkeypatch):
    model = build_model("vit_tiny_patch32_224", depth=3)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    drawn = []
    monkeypatch.setattr(
        attention_maps.figures, "draw_attention", lambda *words: drawn.append(words)
    )
    words = ["--model", "vit_tiny_patch32_224", "--option", "depth=3", "--out", str(tmp_path / "o")]
    words = ["attention-maps", str(photo), "--weights", str(tmp_path / "weights.pth"), *words]
    assert cli.main(words) == 0
    pixels = read_image(photo, (3, 224, 224))
    with backend("torch"):
        maps = fk.attention_maps(model.eval(), (pixels[None] - 0.5) / 0.5)
    assert len(drawn) == 3
    for index, (image, ((layer,), from_cls, _), path, title) in enumerate(drawn):
        assert from_cls and path.name == f"photo-layer0{index}.png" and f"layer {index}" in title
        assert torch.equal(image, pixels)
        torch.testing.assert_close(layer, maps[index][0, :, 0, 1:].unflatten(-1, (7, 7)))
