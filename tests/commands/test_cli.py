import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_data import Image

from fastvit_kernels.commands import attention_maps, cli, console
from fastvit_kernels.commands.models import build_model, input_shape
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.tools.aot import Kernel

pytest.importorskip("rich")


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


def test_unknown_command_is_a_users_mistake(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["polish"])
    assert stop.value.code == 2
    assert "polish" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["train", "--out", str(tmp_path / "run")]) == 2
    assert 'pip install "fastvit-kernels[train]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_require_passes_on_an_import_error_of_another_package(monkeypatch, tmp_path):
    (tmp_path / "needs_another.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        console.require("needs_another", "needs_another")


def test_a_table_has_columns_of_words_then_of_figures():
    table = console.make_table("case", figures=("us", "share"))
    assert [(c.header, c.justify) for c in table.columns] == [
        ("case", "left"),
        ("us", "right"),
        ("share", "right"),
    ]


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
    ("words", "message"),
    [
        (["photo.jpg", "--weights", "absent.pth"], "there is no checkpoint absent.pth"),
        (["photo.jpg", "--weights", "absent.pth", "--model", "vit_mnist"], "no file absent.pth"),
        (["photo.jpg", "--weights", "photo.jpg"], "other weights need --model"),
        (["photo.jpg", "--weights", "bad.pth", "--model", "vit_mnist"], "bad.pth"),
        (["photo.jpg", "--weights", "bad.pth", "--model", "resnet50"], "unknown model"),
        (["absent.png", "--weights", "good.pth", "--model", "vit_mnist"], "absent.png cannot be"),
    ],
)
def test_attention_maps_mistakes(tmp_path, photo, words, message, monkeypatch, capsys):
    from fastvit_kernels import create_vit

    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(1)}, "bad.pth")
    torch.save(create_vit("vit_mnist").state_dict(), "good.pth")
    assert cli.main(["attention-maps", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "attention-maps").exists()


def test_options_of_attention_maps_are_values(capsys):
    words = ["depth=2", "class_token=False", "rate=0.5", "global_pool=avg", "x=True", "y=[1, 2]"]
    assert dict(map(attention_maps._option, words)) == {
        "depth": 2,
        "class_token": False,
        "rate": 0.5,
        "global_pool": "avg",
        "x": True,
        "y": [1, 2],
    }
    with pytest.raises(SystemExit):
        cli.main(["attention-maps", "photo.jpg", "--weights", "good.pth", "--option", "depth"])
    assert "--option: must be NAME=VALUE, got depth" in capsys.readouterr().err


def test_the_pixels_that_a_named_model_sees(tmp_path):
    """docs/train.md: from -1 to 1, or what timm notes for its model; a classifier may be missing,
    nothing else."""
    pytest.importorskip("timm")
    for name, wanted in (
        ("vit_tiny_patch16_224", ((0.5,) * 3, (0.5,) * 3)),
        ("timm:vit_tiny_patch16_224", ((0.5,) * 3, (0.5,) * 3)),
        ("timm:deit_tiny_patch16_224", ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
    ):
        state = build_model(name, depth=1).state_dict()
        lacking = {n: v for n, v in state.items() if not n.startswith("head.")}
        torch.save(lacking, tmp_path / "weights.pth")
        model, found = attention_maps._named_model(name, tmp_path / "weights.pth", {"depth": 1})
        assert (found.mean, found.std) == wanted
        assert all(torch.equal(v, model.state_dict()[n]) for n, v in lacking.items())
        for lost in ("pos_embed", "blocks.0.norm1.weight", "blocks.0.mlp.fc1.bias"):
            torch.save({n: v for n, v in lacking.items() if n != lost}, tmp_path / "weights.pth")
            with pytest.raises(console.CommandError, match=f"does not fit .*it lacks {lost}"):
                attention_maps._named_model(name, tmp_path / "weights.pth", {"depth": 1})


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
    with Image.open(photo) as image:
        pixels = attention_maps.data.fit(image.convert("RGB"), 224)
    normal = attention_maps.data.Normalization((0.5,) * 3, (0.5,) * 3)
    with backend("torch"):
        maps = attention_maps.figures.attention_maps(model.eval(), normal(pixels[None]))
    assert len(drawn) == 3
    for index, (image, (layer,), from_cls, path, title) in enumerate(drawn):
        assert from_cls and path.name == f"photo-layer0{index}.png" and f"layer {index}" in title
        assert torch.equal(image, pixels)
        torch.testing.assert_close(layer, maps[index][0, :, 0, 1:].unflatten(-1, (7, 7)))


def test_what_compile_is_told_reaches_the_step(monkeypatch, capsys):
    """The model by its options, a table for each target, and the rules that a kernel breaks."""
    from fastvit_kernels.commands import compile as command

    asked = []

    def model_step(model, batch, dtype, *, train):
        asked.append((input_shape(model), batch, dtype, train))

    kernel = Kernel(
        "linear_fwd",
        "BLOCK_M=128 w8 s3",
        "bf16",
        "sm_90",
        shared=98304,
        shared_limit=232448,
        seconds=0.5,
        key="k",
    )
    monkeypatch.setattr(command, "model_step", model_step)
    large = replace(kernel, config="BLOCK_M=256 w8 s3", shared=232449)
    monkeypatch.setattr(command, "compile_step", lambda step, target, share: [kernel, large])
    words = ["compile", "--model", "vit_mnist", "--img-size", "8", "--batch", "3", "--infer"]
    assert cli.main([*words, "--arch", "sm_90", "--dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "sm_90: vit_mnist, batch 3, fp16, inference" in out and "linear_fwd" in out
    assert "BLOCK_M=128 w8 s3" in out and "98304" in out
    name = "sm_90 linear_fwd [BLOCK_M=256 w8 s3; bf16]"
    assert f"{name}: 232449 bytes of shared memory, a block has 232448" in out
    assert out.count("a block has") == 1
    assert cli.main([*words[:-1], "--arch", "sm_90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["shared"] == 98304
    assert asked == [((1, 8, 8), 3, "fp16", False), ((1, 8, 8), 3, "bf16", True)]


def test_compile_takes_the_gpu_that_is_there(monkeypatch):
    from fastvit_kernels.commands import compile as command
    from fastvit_kernels.runtime.backend import Gpu

    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    assert command._arch_here() == "sm_90"
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "current_device", lambda: 0)
    for arch, wanted in (("sm_80", "sm_80"), ("sm_75", "sm_90")):
        monkeypatch.setattr(command, "gpu", lambda device, arch=arch: Gpu(arch, 108, 1))
        assert command._arch_here() == wanted
