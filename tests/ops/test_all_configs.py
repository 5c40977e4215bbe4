"""Every launch config that ships, forced, by the 2x rule and bit for bit.

Without a GPU each config runs in one case, twice; which one goes round from config to config. On a
GPU each runs in every case that it fits, at real sizes.
"""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.runtime import configs as launch_configs
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import TABLES, ConfigTable
from fastvit_kernels.runtime.dtypes import DTYPES
from tests.check import __main__ as command, all_configs, selection, worker
from tests.check.__main__ import main
from tests.check.config_cases import config_cases

SHIPPED = [
    (table.name, config)
    for table in TABLES.values()
    for config in table.configs
    if getattr(config, "route", "") != "gluon"  # it has no interpreter: machine/device
]


def _id(value):
    if isinstance(value, str):
        return value
    short = {"num_warps": "w", "num_stages": "s"}
    parts = []
    for name, number in value._asdict().items():
        if number is True:
            parts.append(name)
        elif number is not False and number != 0:
            parts.append(f"{short.get(name, name + '=')}{number}")
    return "-".join(parts) or "none"


@functools.cache
def _reached(dtype, large):
    """How the cases of a dtype reach each table; made once, with their references."""
    return all_configs.reach(config_cases(large, DEVICE, DTYPES[dtype]))[0]


def _runs(table, config, dtype, large):
    return [r for r in _reached(dtype, large) if r.table == table and r.fits(config)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs it at real sizes")
@pytest.mark.parametrize(("table", "config"), SHIPPED, ids=_id)
def test_config_in_the_interpreter(table, config):
    index = SHIPPED.index((table, config))
    dtypes = ("fp32", "fp16") if index % 2 else ("fp16", "fp32")
    runs = next(filter(None, (_runs(table, config, dtype, False) for dtype in dtypes)), [])
    assert runs, "no case forces this config: give its op one in tests/check/config_cases.py"
    run = all_configs.run_config(runs[index % min(len(runs), 4)], config)
    assert run.fault is None, run.case
    assert 0 < run.share <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("index", range(len(config_cases(True, DEVICE, torch.float32))))
def test_configs_on_gpu(index, dtype):
    """By case, so that few processes compute its float64 reference."""
    case = config_cases(True, DEVICE, DTYPES[dtype])[index]
    reached, faults = all_configs.reach([case])
    pairs = [(r, c) for r in reached for c in r.configs()]
    runs = [all_configs.run_config(r, c, repeats=3) for r, c in pairs]
    wrong = [f"{run.table} {run.config}: {run.fault}" for run in runs if run.fault is not None]
    assert not faults
    assert not wrong, case.name + "\n" + "\n".join(wrong)


class Config(NamedTuple):
    kind: str


RIGHT, WRONG, HIDDEN, UNFIT = Config("right"), Config("wrong"), Config("hidden"), Config("unfit")


@pytest.fixture
def planted(monkeypatch):
    """An op with two tables: the second is asked only where the first says "hidden"."""
    monkeypatch.setattr(launch_configs, "TABLES", tables := {})
    monkeypatch.setattr(all_configs, "TABLES", tables)
    monkeypatch.setattr(command, "TABLES", tables)
    monkeypatch.setattr(selection, "TABLES", tables)
    monkeypatch.setattr(worker, "TABLES", tables)
    monkeypatch.setattr(launch_configs, "_on_change", [])
    here = gpu(torch.device("cpu"))
    route = ConfigTable(
        "route", [RIGHT, HIDDEN, UNFIT], lambda *_: RIGHT, lambda gpu, c, size: c is not UNFIT
    )
    tile = ConfigTable("tile", [RIGHT, WRONG], lambda *_: RIGHT)

    def double(x):
        factor = 2.0
        if route.choose(here, len(x)) is HIDDEN and tile.choose(here, len(x)) is WRONG:
            factor = 2.01
        return x * factor

    def make():
        return {"x": torch.arange(1.0, 9.0, requires_grad=True)}

    return Case("double", double, lambda x: x * 2.0, make)


def _run_all(cases):
    found, faults = all_configs.reach(cases)
    return [*faults, *(all_configs.run_config(r, c) for r in found for c in r.configs())]


def test_wrong_config_found(planted):
    runs = _run_all([planted])
    found = {(run.table, run.config): run.fault for run in runs}
    # UNFIT is not run; the tables are both reached
    assert set(found) == {("route", RIGHT), ("route", HIDDEN), ("tile", RIGHT), ("tile", WRONG)}
    assert "out: max" in found["tile", WRONG]
    assert [fault for fault in found.values() if fault] == [found["tile", WRONG]]
    assert not all_configs.passed(runs)
    assert all_configs.passed([r for r in runs if r.fault is None])


def test_unreached_table_fails(planted):
    ConfigTable("asleep", [RIGHT], lambda *_: RIGHT)
    runs = [run for run in _run_all([planted]) if run.fault is None]
    assert not all_configs.passed(runs)
    assert ("asleep", "1", "0", "0", "0.00", "not reached") in command.config_rows(runs)


def test_check_all_configs_prints_counts_and_json(planted, monkeypatch, capsys):
    monkeypatch.setattr(selection, "cases_of", lambda device, dtype, all_configs: [planted])
    words = ["--all-configs", "--dtype", "fp32", "--device", "cpu"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "4 of 5 configs of 2 tables fit here and ran" in out
    assert "FAILED tile [kind=wrong], double, fp32: out: max" in out
    assert main([*words, "--json"]) == 1
    *runs, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["passed"] is False and len(runs) == 4
    assert {run["table"] for run in runs} == {"route", "tile"}
