"""`fastvit-kernels tune` with a stand-in timer: what may win, what is written, what is read."""

from __future__ import annotations

import importlib
import json
import warnings
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.commands import cli, tune as command
from fastvit_kernels.runtime import configs as launch_configs, tuned_table
from fastvit_kernels.runtime.backend import Gpu, gpu
from fastvit_kernels.runtime.configs import TABLES, ConfigTable
from fastvit_kernels.runtime.operator import LAUNCHERS, operator

backend_module = importlib.import_module("fastvit_kernels.runtime.backend")
HERE = Gpu("cpu", 2, 2**20, "Stand-in GPU 1")


class Config(NamedTuple):
    kind: str
    num_warps: int = 4


DEFAULT, RIGHT, EVEN, FASTER = map(Config, ("default", "right", "even", "faster"))
WRONG, NAN = Config("wrong"), Config("nan")
MICROSECONDS = {DEFAULT: 10.0, RIGHT: 8.0, EVEN: 9.9, FASTER: 6.0, WRONG: 1.0, NAN: 1.0}


@operator(fake=lambda x: torch.empty_like(x))
def planted_fwd(x: torch.Tensor) -> torch.Tensor:
    config = TABLES["planted"].choose(gpu(x.device), x.shape[-1])
    return x * {WRONG: 2.0001, NAN: float("nan")}.get(config, 2.0)


PLANTED = LAUNCHERS.pop("planted_fwd")  # of no other test


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    """A named GPU on the CPU, an empty cache folder, nothing tuned."""
    monkeypatch.setattr(backend_module, "_gpu", lambda device: HERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch_configs, "_tuned", {})
    monkeypatch.setattr(launch_configs, "_on_change", list(launch_configs._on_change))
    backend_module.GPUS.clear()
    launch_configs._forget()
    yield
    launch_configs._forget()
    backend_module.GPUS.clear()


@contextmanager
def planted(monkeypatch, *configs):
    """The operator above with a table of these configs."""
    monkeypatch.setitem(LAUNCHERS, "planted_fwd", PLANTED)
    try:
        yield ConfigTable("planted", [DEFAULT, *configs], lambda gpu, size: DEFAULT)
    finally:
        del TABLES["planted"]


def step():
    planted_fwd[1](torch.randn(4, 6))


def timer(call):
    """Microseconds of the config in force."""
    call()
    return MICROSECONDS[launch_configs._forced["planted"]]


def tuned(monkeypatch, *configs, **given):
    with planted(monkeypatch, *configs):
        return list(command.tune(step, HERE, timer, **given))


@pytest.mark.parametrize(
    ("configs", "winner"),
    [
        ((RIGHT, FASTER), FASTER),
        ((FASTER, RIGHT), FASTER),
        ((RIGHT, WRONG, NAN), RIGHT),  # however fast a wrong one is
        ((EVEN,), DEFAULT),  # within the noise
    ],
    ids=["faster last", "faster first", "wrong", "even"],
)
def test_the_fastest_right_config_wins(monkeypatch, capsys, configs, winner):
    (entry,) = tuned(monkeypatch, *configs)
    assert (entry.table, entry.key) == ("planted", (6,))
    assert entry.config == winner._asdict()
    assert (entry.default_us, entry.config_us) == (10.0, MICROSECONDS[winner])
    assert capsys.readouterr().out.count("is wrong here") == 2 * (WRONG in configs)


def test_a_time_budget_ends_the_search(monkeypatch):
    assert tuned(monkeypatch, RIGHT, seconds=-1.0) == []


def test_a_table_that_is_there_does_not_sway_and_is_in_force_again(monkeypatch):
    with planted(monkeypatch, RIGHT, FASTER) as table:
        entry = tuned_table.Entry("planted", (6,), RIGHT._asdict(), 10.0, 8.0)
        tuned_table.save(HERE, [entry])
        launch_configs.install(HERE, None)
        assert table.choose(HERE, 6) == RIGHT
        (found,) = command.tune(step, HERE, timer)
        assert found.config == FASTER._asdict() and found.default_us == 10.0
        assert table.choose(HERE, 6) == RIGHT
        tuned_table.save(HERE, [found])
        launch_configs.install(HERE, None)
        assert table.choose(HERE, 6) == FASTER


def test_the_decisions_of_a_training_step(capsys):
    """Of the kernels themselves, those of the backward too, by a timer that calls them."""
    calls = []
    x, weight = torch.randn(4, 24, requires_grad=True), torch.ones(24)

    def counting(call):
        call()
        calls.append(call)
        return 1.0

    found = list(command.tune(lambda: fk.layer_norm(x, weight).sum().backward(), HERE, counting))
    assert "is wrong" not in capsys.readouterr().out
    assert {entry.table for entry in found} >= {"layer_norm_fwd", "layer_norm_bwd"} and calls
    for entry in found:
        assert tuned_table.entry(HERE, {**vars(entry), "key": list(entry.key)})[0] == entry


def test_the_decisions_of_a_model_that_is_swapped_in():
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
    fk.swap_in(layer)
    x = torch.randn(2, 5, 16)
    found = {entry.table for entry in command.tune(lambda: layer(x), HERE, lambda call: 1.0)}
    assert found >= {"layer_norm_fwd", "attention_fwd"}


@pytest.fixture
def written(monkeypatch):
    """A table with one entry, and its path."""
    with planted(monkeypatch, RIGHT):
        entry = tuned_table.Entry("planted", (6,), RIGHT._asdict(), 10.0, 8.0)
        tuned_table.save(HERE, [entry])
        yield tuned_table.table_path(HERE)


def _changed(name, value):
    def change(text):
        content = json.loads(text)
        (content if name in content else content["entries"][0])[name] = value
        return json.dumps(content)

    return change


DAMAGES = {
    "cut off": lambda text: text[:-9],
    "empty": lambda text: "",
    "no object": lambda text: "[]",
    "another triton": _changed("triton", "1.0"),
    "another GPU": _changed("gpu", "Other"),
    "another format": _changed("format", 1),
    "no such table": _changed("table", "absent"),
    "a config that does not ship": _changed("config", {"kind": "own", "num_warps": 4}),
    "a number that is a boolean": _changed("config", {"kind": "right", "num_warps": True}),
    "no key": _changed("key", None),
    "no entries": lambda text: json.dumps(json.loads(text) | {"entries": None}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_table_is_ignored_with_one_warning(written, name):
    written.write_text(DAMAGES[name](written.read_text()))
    table = TABLES["planted"]
    with pytest.warns(UserWarning, match="the tuned configs in .* are ignored: "):
        assert table.choose(HERE, 6) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.choose(HERE, 7) == DEFAULT


@pytest.mark.gpu
def test_tune_on_a_gpu(tmp_path, capsys):
    words = ["--model", "vit_mnist", "--batch", "64", "--time-budget", "20"]
    assert cli.main(["tune", *words]) == 0
    assert "decisions in" in capsys.readouterr().out
