"""`python -m tests.check`: its words, and processes that hang, crash or lose the device."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.runtime import configs as launch_configs
from fastvit_kernels.runtime.backend import INTERPRETED, gpu
from fastvit_kernels.runtime.configs import ConfigTable
from tests.check import __main__ as command, all_configs, results_cache, worker
from tests.check.__main__ import main
from tests.check.isolated import LOST, device_lost, run_isolated

CPU = torch.device("cpu")


class Config(NamedTuple):
    kind: str


RIGHT, WRONG, HIDDEN, UNFIT = Config("right"), Config("wrong"), Config("hidden"), Config("unfit")


@pytest.fixture
def planted(monkeypatch):
    """An op with two tables: the second is asked only where the first says "hidden"."""
    tables = {}
    for module in (launch_configs, all_configs, command, worker):
        monkeypatch.setattr(module, "TABLES", tables)
    monkeypatch.setattr(launch_configs, "_on_change", [])
    here, found = gpu(CPU), SimpleNamespace(factor=2.01)
    route = ConfigTable(
        "route", [RIGHT, HIDDEN, UNFIT], lambda *_: RIGHT, lambda gpu, c, size: c is not UNFIT
    )
    tile = ConfigTable("tile", [RIGHT, WRONG], lambda *_: RIGHT)

    def double(x):
        factor = 2.0
        if route.choose(here, len(x)) is HIDDEN and tile.choose(here, len(x)) is WRONG:
            factor = found.factor
        return x * factor

    def make():
        return {"x": torch.arange(1.0, 9.0, requires_grad=True)}

    case = Case("double", double, lambda x: x * 2.0, make)
    monkeypatch.setattr(worker, "cases_of", lambda *_: [case])
    return found


WORDS = ["--dtype", "fp32", "--device", "cpu", "--jobs", "0"]


def test_wrong_config_found(planted, capsys, tmp_path):
    words = [*WORDS, "--all-configs", "--keep", str(tmp_path / "kept")]
    for _ in range(2):  # the second time as the first has kept it
        assert main(words) == 1
        out = capsys.readouterr().out
        assert "4 of 5 configs of 2 tables fit here and ran" in out  # UNFIT does not
        assert out.count("FAILED tile [kind=wrong], double, fp32: out: max") == 1
    assert main([*words, "--json"]) == 1
    *runs, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["passed"] is False and len(runs) == 4
    assert {run["table"] for run in runs} == {"route", "tile"}


def test_unreached_table_fails(planted, capsys):
    planted.factor = 2.0
    assert main([*WORDS, "--all-configs"]) == 0
    ConfigTable("asleep", [RIGHT], lambda *_: RIGHT)
    assert main([*WORDS, "--all-configs"]) == 1
    assert "not reached" in capsys.readouterr().out
    assert main([*WORDS, "--all-configs", "--only", "double"]) == 0  # nor need it be


def test_kept_results_not_rerun(planted, capsys, tmp_path, monkeypatch):
    ran, run_case = [], worker.run_case
    monkeypatch.setattr(worker, "run_case", lambda *a: ran.append(a) or run_case(*a))
    words = [*WORDS, "--keep", str(tmp_path / "kept")]
    assert main(words) == 0 and len(ran) == 1
    with (tmp_path / "kept").open("a") as file:
        file.write('{"name": "torn')
    assert main(words) == 0 and len(ran) == 1
    assert "1 of 1 cases passed" in capsys.readouterr().out
    monkeypatch.setattr(
        results_cache.ResultsCache.__init__, "__defaults__", (lambda: "other sources",)
    )
    assert main(words) == 0 and len(ran) == 2


@pytest.mark.parametrize("all_configs", [False, True])
def test_time_budget_exit_status(planted, capsys, all_configs):
    words = [*WORDS, *["--all-configs"] * all_configs, "--time-budget", "1e-9"]
    assert main(words) == command.CUT_SHORT
    assert f"the time is over: {4 if all_configs else 1} did not run" in capsys.readouterr().out


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's sizes take minutes")
def test_case_in_a_process(capsys):
    words = ["--only", "layer_norm_and_input, kept", "--dtype", "fp32", "--jobs", "1", "--json"]
    assert main(words) == 0
    line, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["name"] == "layer_norm_and_input, kept samples" and line["passed"]
    assert {"out0", "dx"} <= {tensor["name"] for tensor in line["tensors"]}
    assert summary["passed"]


PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
for item in json.loads(sys.argv[1]):
    path = pathlib.Path(item["path"])
    if item["do"] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item["do"] == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
        path.write_text(str(child.pid))
        time.sleep(6000)
    while item["do"] == "wait" and not path.exists():
        time.sleep(0.01)
    print(json.dumps({"line": item["do"]}), flush=True)
    if item["do"] == "lose the device":
        sys.exit(4)
"""
ISOLATED = (sys.executable, "-c", PROGRAM)


def items(path, *what):
    return [{"do": do, "path": str(path)} for do in what]


def test_what_a_dead_process_left_runs(tmp_path):
    assert LOST == 4
    does = ["work", "crash", "work", "lose the device", "work", "crash"]
    found = [
        (item["do"], said)
        for item, said in run_isolated([items(tmp_path, *does)], ISOLATED, 1, 3600.0)
    ]
    crash = "the process was ended by SIGSEGV"
    assert found == [(do, crash if do == "crash" else {"line": do}) for do in does]


def gone(pid):
    """Whether a process that was killed ends, however long a loaded machine takes over it."""
    for _ in range(20_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("way", ["timeout", "budget", "interrupt"])
def test_hang_is_killed_with_its_children(tmp_path, way):
    path, ticks = tmp_path / "pid", itertools.count()

    def now():
        """It stands still until the hang begins."""
        return 1e6 * next(ticks) if path.exists() and path.read_text() else 0.0

    chunks = [items(path, "wait"), items(path, "work", "hang")]
    limits = {"timeout": 3600.0, "budget": 3600.0}
    limits["budget" if way == "timeout" else "timeout"] = 1e18
    if way == "interrupt":
        limits["budget"] = 1e18
    found = run_isolated(chunks, ISOLATED, 2, limits["timeout"], budget=limits["budget"], now=now)
    if way == "interrupt":
        next(found)
        found.close()
    else:
        said = {item["do"]: line for item, line in found}
        assert said["work"] == {"line": "work"}
        killed = "not finished after 3600 s, killed"
        assert said.get("hang") == (killed if way == "timeout" else None)
    assert gone(int(path.read_text()))


@pytest.mark.parametrize(("errors", "lost"), [(0, False), (1, False), (2, True)])
def test_device_lost(monkeypatch, errors, lost):
    said = iter([RuntimeError("CUDA error: an illegal memory access")] * errors)

    def synchronize(device):
        for error in said:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert (device_lost(torch.device("cuda")) is not None) == lost
    assert device_lost(CPU) is None


@pytest.mark.parametrize(("wrong", "count"), [(True, 1), (False, 2)])
def test_worker_stops_on_lost_device(planted, monkeypatch, capsys, wrong, count):
    """Every later launch would fail: what is left goes to another process."""
    fault = "RuntimeError: CUDA error" if wrong else None
    run = all_configs.Run("route", RIGHT, "double", 0.5, fault)
    monkeypatch.setattr(all_configs, "run_config", lambda *_: run)
    monkeypatch.setattr(worker, "device_lost", lambda device: "lost")
    two = worker.items_of(CPU, ["fp32"], "", True)[0][:2]
    assert worker.main(CPU, two) == (LOST if wrong else 0)
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == count
    assert ("the device is lost: lost" in said.err) == wrong
