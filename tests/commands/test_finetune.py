"""Pretrained weights, frozen parameters, LoRA and probes, on models of other libraries."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict

import pytest
import torch
from test_data import write_images
from test_resume import Runs

from fastvit_kernels.commands import cli, models
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.models import build_model
from fastvit_kernels.commands.training import checkpoint
from fastvit_kernels.commands.training.checkpoint import CHECKPOINT, open_run
from fastvit_kernels.commands.training.model import load_into, merged, model_of, tensors_in
from fastvit_kernels.commands.training.settings import given_options, make_settings

pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
CONFIG = dict(
    model_type="vit",
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=8,
    patch_size=4,
    num_channels=1,
    num_labels=3,
)
DIGITS = ["--batch", 256, "--epochs", 1, "--no-check", "--threads", 1]


def train(*words):
    return cli.main(["train", *(str(word) for word in words)])


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """A folder that transformers wrote: three classes, where the digits have ten."""
    import transformers

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(**CONFIG)
    model = transformers.AutoModelForImageClassification.from_config(config)
    model.save_pretrained(tmp_path / "pretrained")
    return model


def test_lora_on_a_swapped_model_of_the_disk(tmp_path, capsys, pretrained):
    """LoRA and the new head are trained; weights.pth has them merged under the host's names."""
    pytest.importorskip("peft")
    words = ["--weights", "hf:pretrained", "--lora", 2, *DIGITS, "--out", "run"]
    assert train(*words) == 0, capsys.readouterr().err
    out = " ".join(capsys.readouterr().out.split())
    assert "tensors of hf:pretrained" in out and "of them trained" in out
    model = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["model"]
    before = pretrained.state_dict()
    query = next(n for n in before if n.endswith(("q_proj.weight", "query.weight")))
    kept = query.replace(".weight", ".base_layer.weight")
    assert torch.equal(model[kept], before[query])
    learnt = model[query.replace(".weight", ".lora_B.default.weight")]
    assert learnt.abs().max() > 0 and learnt.shape[1] == 2
    written = torch.load(tmp_path / "run" / "weights.pth", weights_only=True)
    assert set(written) == set(before)
    assert not torch.equal(written[query], before[query])
    assert written["classifier.weight"].shape[0] == 10
    down = model[query.replace(".weight", ".lora_A.default.weight")]
    torch.testing.assert_close(written[query], before[query] + 2 * learnt @ down)
    assert train("--resume", "--no-check", "--out", "run") == 0, capsys.readouterr().err


def test_what_lora_trains(tmp_path, pretrained):
    """The low-rank weights of queries, keys and values, and the head unless it is frozen; to merge
    leaves the model under training as it is."""
    pytest.importorskip("peft")
    for freeze in ([], ["classifier.*"]):
        given = {"weights": "hf:pretrained", "lora": 2, "freeze": freeze}
        settings = make_settings(given, torch.device("cpu"))
        model = model_of(settings, 10)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        low = {n for n in trained if "lora_" in n}
        assert len(low) == 2 * 2 * 3  # two layers, two weights each of q, k, v
        head = set() if freeze else {"classifier.weight", "classifier.bias"}
        assert trained - low == head
        before = {n: v.clone() for n, v in model.state_dict().items()}
        assert set(merged(model, settings).state_dict()) == set(pretrained.state_dict())
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        assert before.keys() == model.state_dict().keys()


def test_nothing_in_a_folder_of_transformers_is_executed(tmp_path, capsys, pretrained):
    (tmp_path / "pretrained" / "model.safetensors").unlink()
    state = {**pretrained.state_dict(), "x": Runs()}
    torch.save(state, tmp_path / "pretrained" / "pytorch_model.bin")
    assert train("--weights", "hf:pretrained", *DIGITS, "--out", "run") == 2
    error = capsys.readouterr().err  # transformers may warn before
    assert "--weights hf:pretrained cannot be read" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "executed").exists()


def test_a_frozen_backbone(tmp_path, capsys, pretrained):
    words = ["--weights", "hf:pretrained", "--freeze", "backbone", *DIGITS, "--out", "run"]
    assert train(*words) == 0, capsys.readouterr().err
    model = checkpoint.load(tmp_path / "run" / "checkpoint.pt")["model"]
    for name, value in pretrained.state_dict().items():
        assert name.startswith("classifier") or torch.equal(model[name], value), name
    assert train(*words[:-2], "--freeze", "nothing.*", "--out", "no") == 2
    assert "--freeze nothing.* names no parameter" in capsys.readouterr().err
    assert train(*words[:-2], "--freeze", "*", "--out", "no") == 2
    assert "--freeze * leaves no parameter to train" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    model = build_model("timm:vit_tiny_patch16_224", img_size=32, num_classes=4, depth=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    for change, message in (
        (lambda s: s.pop("blocks.0.norm1.weight"), "it lacks blocks.0.norm1.weight"),
        (lambda s: s.update({"norm.bias": torch.zeros(5)}), r"norm.bias is \(5,\) there and"),
        (lambda s: s.clear(), "holds no tensors by name"),
    ):
        wrong = dict(state)
        change(wrong)
        torch.save(wrong, tmp_path / "wrong.pth")
        with pytest.raises(CommandError, match=message):
            load_into(model, str(tmp_path / "wrong.pth"))
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    with pytest.raises(CommandError, match=r"there is no file .*absent.pth"):
        load_into(model, str(tmp_path / "absent.pth"))


def test_another_head_and_another_grid(tmp_path):
    """timm resizes its positions; a classifier of other classes stays as it was."""
    source = build_model("timm:vit_tiny_patch16_224", img_size=64, num_classes=9, depth=1)
    torch.save(
        {"state_dict": {f"module.{n}": v for n, v in source.state_dict().items()}},
        tmp_path / "file.pth",
    )
    for name in ("timm:vit_tiny_patch16_224", "vit_tiny_patch16_224"):
        model = build_model(name, img_size=32, num_classes=4, depth=1)
        head = model.get_parameter("head.weight").clone()
        line = load_into(model, str(tmp_path / "file.pth"))
        assert "new: head" in line
        weight = "blocks.0.attn.qkv.weight"
        assert torch.equal(model.get_parameter(weight), source.get_parameter(weight))
        assert torch.equal(model.get_parameter("head.weight"), head)
        assert model.get_parameter("pos_embed").shape == (1, 5, 192)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s},
        lambda s: {"teacher": s, "student": {}},
        lambda s: {"state_dict": {f"_orig_mod.{n}": v for n, v in s.items()}, "epoch": 3},
        lambda s: {"model_ema": {f"module._orig_mod.{n}": v for n, v in s.items()}},
    ],
    ids=["model", "teacher", "compiled", "ddp"],
)
def test_the_tensors_in_a_file_of_another_trainer(wrap):
    state = {"head.weight": torch.ones(2), "norm.bias": torch.zeros(1)}
    assert tensors_in(wrap({**state, "step": 3}), "file") == state


def test_where_the_cache_is(tmp_path, monkeypatch):
    """HF_HUB_CACHE, else hub in HF_HOME, else in the user's cache."""
    home = tmp_path / "home"
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(models.Path, "home", lambda: home)
    for folder, name in (
        (home / ".cache" / "huggingface" / "hub", None),
        (tmp_path / "hf" / "hub", "HF_HOME"),
        (tmp_path / "cache", "HF_HUB_CACHE"),
    ):
        if name is not None:
            monkeypatch.setenv(name, str(tmp_path / "hf" if name == "HF_HOME" else folder))
        with pytest.raises(CommandError, match=f"a/b is not in {folder}, .*hf download a/b"):
            models.snapshot("a/b")
        found = folder / "models--a--b" / "snapshots" / "abc"
        found.mkdir(parents=True)
        (folder / "models--a--b" / "refs").mkdir()
        (folder / "models--a--b" / "refs" / "main").write_text("abc\n")
        assert models.snapshot("a/b") == found == models.source_folder("hf:a/b")


def test_weights_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, cpu = Namespace(weights="vit.pth", data="mnist", data_dir="images"), torch.device("cpu")
    given = given_options(words)
    settings = make_settings(given, cpu)
    assert settings.weights == str(tmp_path / "vit.pth")
    assert settings.data_dir == str(tmp_path / "images")
    content = {**dict.fromkeys(checkpoint.PARTS, ""), "settings": asdict(settings)}
    checkpoint.save(tmp_path / CHECKPOINT, content)
    assert open_run(given, tmp_path, True, cpu)[1] == settings  # the same words with --resume
    for name, value in (("augment", False), ("seed", 1), ("label_smoothing", 0.0)):
        with pytest.raises(CommandError, match="differs from"):
            open_run({**given, name: value}, tmp_path, True, cpu)
    monkeypatch.chdir("..")
    with pytest.raises(CommandError, match=r"--weights \S*/vit\.pth differs from the \S*/vit\.pth"):
        open_run(given_options(words), tmp_path, True, cpu)


def test_the_model_is_that_of_the_weights_but_where_one_is_named():
    given, cpu = {"weights": "timm:vit_tiny_patch16_224", "img_size": 32}, torch.device("cpu")
    assert make_settings(given, cpu).model == "timm:vit_tiny_patch16_224"
    assert make_settings({**given, "model": "timm:vit_small_x"}, cpu).model == "timm:vit_small_x"


def test_weights_of_the_cache(tmp_path, monkeypatch, capsys):
    """As `hf download` leaves them; what is not there is not fetched."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    words = ["--weights", "timm:vit_tiny_patch16_224", "--img-size", 32, "--in-chans", 1]
    assert train(*words, *DIGITS, "--out", "run") == 2
    err = capsys.readouterr().err
    assert "hf download timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k" in err
    folder = tmp_path / "cache" / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(CommandError, match=r"holds none of model\.safetensors"):
        load_into(build_model("timm:vit_tiny_patch16_224"), "timm:vit_tiny_patch16_224")
    source = build_model("timm:vit_tiny_patch16_224")
    safetensors.save_file(source.state_dict(), folder / "snapshots" / "abc" / "model.safetensors")
    model = build_model("timm:vit_tiny_patch16_224", img_size=32, num_classes=10)
    assert "new: head" in load_into(model, "timm:vit_tiny_patch16_224")
    name = "blocks.11.mlp.fc1.weight"
    assert torch.equal(model.get_parameter(name), source.get_parameter(name))
    with pytest.raises(CommandError, match="hf download facebook/absent"):
        load_into(model, "hf:facebook/absent")


def test_lora_is_for_models_of_other_libraries(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("--lora", 2) == 2
    assert "--lora is for models of other libraries" in capsys.readouterr().err


def test_probe(tmp_path, monkeypatch, capsys, pretrained):
    words = ["probe", "--weights", "hf:pretrained", "--batch", "512", "--json"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["train_images"] + result["held_out_images"] == 1797 and result["width"] == 16
    assert result["knn"] > 0.5 and result["linear"] > 0.3, "random features tell digits apart"
    write_images(tmp_path / "images", count=10)
    words = ["probe", "--model", "vit_mnist", "--img-size", "8", "--data", "folder"]
    assert cli.main([*words, "--data-dir", "images", "--workers", "0"]) == 0
    assert "k-NN (20): 100.00 %" in capsys.readouterr().out
    assert cli.main(["probe"]) == 2
    assert "probe needs --model NAME" in capsys.readouterr().err
