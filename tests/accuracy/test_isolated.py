"""A process for each job: hangs, crashes and what else must not cost the others."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.accuracy.runner import run_case
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.configs import TABLES
from tests.check import all_configs, selection, worker
from tests.check.__main__ import main
from tests.check.isolated import Job, device_lost, run_isolated
from tests.check.results_cache import ResultsCache


def job(name, code):
    return Job(name, (sys.executable, "-c", code))


def planted(code, name, *others):
    """What a `check_job` is told, to a process that runs this code."""
    told, instead = worker.check_job(name, *others), job(name, code)
    return replace(instead, command=(*instead.command, told.command[-1]))


GOOD = 'print(\'{"name": "good"}\', flush=True)'
TIMEOUT = 3600.0  # for those that end by themselves, however slow the machine is
DIES = f"import os, signal; {GOOD}; os.kill(os.getpid(), signal.SIGSEGV)"


def hangs(path):
    """The code of a job that says its line, writes its process's id to `path`, and hangs."""
    write = f"import os, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getpid()))"
    return f"import time; {GOOD}; {write}; time.sleep(6000)"


def clock_of(path):
    """A clock that stands still but while the process runs that wrote its id to `path`."""
    time_ = [0.0]

    def now():
        text = path.read_text() if path.exists() else ""
        if text and _runs(int(text)):
            time_[0] += 1e6
        return time_[0]

    return now


def _runs(pid):
    """Whether it is there, and no zombie."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def ends(pid):
    """Whether a process that was killed is gone, however long a loaded machine takes over it."""
    deadline = time.monotonic() + TIMEOUT
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _runs(pid)


def test_isolated_kills_children(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6000)'])\n"
        f"pathlib.Path({str(path)!r}).write_text(str(child.pid))\n"
        "time.sleep(6000)\n"
    )
    (outcome,) = run_isolated([job("parent", code)], 1, 5.0, now=clock_of(path))
    assert outcome.failure == "not finished after 5 s, killed"
    assert ends(int(path.read_text()))


def test_isolated_interrupt(tmp_path):
    path = tmp_path / "pid"
    head = f"import os, pathlib, time; p = pathlib.Path({str(path)!r})\n"
    quick = job("quick", f"{head}while not p.exists(): time.sleep(0.01)")
    slow = job("slow", f"{head}p.write_text(str(os.getpid())); time.sleep(6000)")
    found = run_isolated([quick, slow], 2, TIMEOUT)
    next(found)
    found.close()  # as an interrupt does
    assert ends(int(path.read_text()))


def test_check_jobs_hang_and_crash(monkeypatch, capsys, tmp_path):
    cases = {c.name: c for c in worker.cases_of(DEVICE, "fp32", False)}
    passes = run_case(cases["layer_norm_and_input"], "fp32").as_dict()
    path = tmp_path / "pid"
    code = {
        "layer_norm": hangs(path),
        "linear": DIES,
        "layer_norm_and_input": f"print({json.dumps(passes)!r})",
    }

    def check_job(name, *others):
        timeout = None if name == "layer_norm" else math.inf
        return replace(planted(code[name], name, *others), timeout=timeout)

    ended, clock = [], clock_of(path)

    def run(*arguments, **options):
        def now():  # the hang's time begins when the two others have ended
            return clock() if len(ended) >= 2 else 0.0

        for outcome in run_isolated(*arguments, **options, now=now):
            ended.append(outcome)
            yield outcome

    monkeypatch.setattr(selection, "run_isolated", run)
    monkeypatch.setattr(selection, "check_job", check_job)
    monkeypatch.setattr(selection, "cases_of", lambda *_: [cases[name] for name in code])
    words = ["--jobs", "3", "--case-timeout", "8", "--dtype", "fp32"]
    assert main([*words, "--json"]) == 1
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    by_name = {line["name"]: line for line in lines}
    assert len(lines) == 3 and lines[-1]["name"] == "layer_norm"  # each as it ends
    assert by_name["layer_norm"]["failure"] == "not finished after 8 s, killed"
    assert by_name["linear"]["failure"] == "the process was ended by SIGSEGV"
    assert by_name["layer_norm_and_input"] == passes and passes["passed"]
    assert summary["failed"] == [f"{line['name']}, fp32" for line in lines if not line["passed"]]
    assert main([*words, "--only", "linear"]) == 1
    out = capsys.readouterr().out
    assert "linear, fp32: the process was ended by SIGSEGV" in out and "0 of 1 cases" in out


@pytest.mark.skipif(not INTERPRETED, reason="the sizes of a GPU take longer than the timeout")
def test_config_job_equals_in_process():
    cases = worker.cases_of(DEVICE, "fp32", True)
    case = next(c for c in cases if c.name.startswith("layer_norm_and_input"))
    found = [r for r in all_configs.reached_by(case, ()) if r.table == "layer_norm_fwd"]
    (outcome,) = run_isolated([worker.config_job(found, "fp32", DEVICE)], 1, TIMEOUT)
    (reached,) = found
    wanted = [c for c in TABLES["layer_norm_fwd"].configs if reached.fits(c)]
    runs = worker.runs_of(outcome)
    assert [run.config for run in runs] == wanted and all(run.fault is None for run in runs)
    assert runs[0] == all_configs.run_config(reached, wanted[0])


def test_isolated_budget(tmp_path):
    path, clock = tmp_path / "pid", [0.0]
    head = f"import os, pathlib, time; p = pathlib.Path({str(path)!r})\n"
    slow = job(
        "slow",
        f"{head}print('{{\"config\": 1}}', flush=True)\n"
        "p.write_text(str(os.getpid())); time.sleep(6000)",
    )
    quick = job("quick", f"{head}while not p.exists(): time.sleep(0.01)\n{GOOD}")
    found = run_isolated([quick, slow], 2, TIMEOUT, budget=100.0, now=lambda: clock[0])
    assert next(found).job is quick
    clock[0] = 101.0
    (cut,) = found  # what it has printed; it runs again
    assert (cut.job, cut.lines, cut.failure, cut.is_cut) == (slow, [{"config": 1}], None, True)
    assert ends(int(path.read_text()))


def config_job(table, indices, code, path=""):
    """A job as `worker.config_job` makes it; `code` finds what it is told in `what`."""
    forced = [{"table": table, "settings": [], "configs": list(indices)}]
    what = {"name": "a case", "dtype": "fp32", "device": "cpu", "forced": forced}
    head = "import json, os, sys, time\nwhat = json.loads(sys.argv[-1])\n"
    return Job("a case", (sys.executable, "-c", head + code, str(path), json.dumps(what)))


LOSES_THE_DEVICE = """
for entry in what["forced"]:
    for i in entry["configs"]:
        line = {"table": entry["table"], "config": i}
        print(json.dumps({**line, "tried": True}), flush=True)
        fault = "RuntimeError: CUDA error: an illegal memory access" if i == 1 else None
        if i == 2:
            open(sys.argv[1], "w").write(str(os.getpid()))
            time.sleep(6000)
        print(json.dumps({**line, "tried": False, "share": 0.5, "fault": fault}), flush=True)
        if fault:
            sys.exit("the device is lost: " + fault)
"""


def test_isolated_lost_device_and_hang(tmp_path):
    """What their processes had left goes to fresh ones."""
    table = next(name for name, table in TABLES.items() if len(table.configs) >= 4)
    path = tmp_path / "pid"
    jobs = [config_job(table, range(4), LOSES_THE_DEVICE, path)]
    found = run_isolated(jobs, 1, TIMEOUT, then=worker.rest_of, now=clock_of(path))
    runs = [run for outcome in found for run in worker.runs_of(outcome)]
    assert [run.config for run in runs] == list(TABLES[table].configs[:4])
    right, lost, hung, again = (run.fault for run in runs)
    assert right is None and again is None
    assert lost.startswith("RuntimeError: CUDA error") and "status 1" in lost
    assert hung == "not finished after 3600 s, killed"


@pytest.mark.parametrize(("errors", "lost"), [(0, False), (1, False), (2, True)])
def test_device_lost(monkeypatch, errors, lost):
    said = iter([RuntimeError("CUDA error: an illegal memory access")] * errors)

    def synchronize(device):
        for error in said:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = device_lost(torch.device("cuda"))
    assert (found is not None) == lost
    assert device_lost(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("fault", "lost", "tried"),
    [("RuntimeError: CUDA error", "lost", 1), (None, "asked in vain", 2)],
)
def test_worker_stops_on_lost_device(monkeypatch, capsys, fault, lost, tried):
    """Every later launch would fail: what is left goes to another process."""
    case = next(c for c in worker.cases_of(DEVICE, "fp32", True) if c.name.startswith("layer_norm"))
    reached = all_configs.reached_by(case, ())[0]
    run = all_configs.Run(reached.table, reached.configs()[0], case.name, 0.5, fault)
    monkeypatch.setattr(worker.all_configs, "run_config", lambda *_: run)
    monkeypatch.setattr(worker, "device_lost", lambda device: lost)
    every = {(reached.table, c) for c in reached.configs()[:2]}
    done = {(reached.table, c) for c in reached.configs()} - every
    status = worker.main([worker.config_job([reached], "fp32", DEVICE, done).command[-1]])
    said = capsys.readouterr()
    lines = [json.loads(line)["tried"] for line in said.out.splitlines()]
    assert lines == [True, False] * tried
    assert (status == worker.LOST) == (tried == 1) == ("the device is lost: lost" in said.err)


def test_kept_results_not_rerun(monkeypatch, tmp_path, capsys):
    cases = {c.name: c for c in worker.cases_of(DEVICE, "fp32", False)}
    passes = run_case(cases["layer_norm_and_input"], "fp32").as_dict()
    code = {"linear": DIES, "layer_norm_and_input": f"print({json.dumps(passes)!r})"}
    started = []

    def check_job(name, *others):
        started.append(name)
        return planted(code[name], name, *others)

    monkeypatch.setattr(selection, "check_job", check_job)
    monkeypatch.setattr(selection, "cases_of", lambda *_: [cases[name] for name in code])
    words = ["--jobs", "2", "--dtype", "fp32", "--keep", str(tmp_path / "check.jsonl")]
    assert main(words) == 1 and sorted(started) == sorted(code)
    first = capsys.readouterr().out
    assert "FAILED linear, fp32: the process was ended by SIGSEGV" in first
    with (tmp_path / "check.jsonl").open("a") as file:
        file.write('{"name": "torn')
    assert main(words) == 1 and len(started) == 2
    assert "1 of 2 cases passed" in capsys.readouterr().out
    monkeypatch.setattr(ResultsCache.__init__, "__defaults__", (lambda: "mended",))
    assert main(words) == 1 and len(started) == 4


TERMINATED = """
import sys
from tests.check.__main__ import main
from tests.check.isolated import Job, run_isolated
jobs = [Job("hangs", (sys.executable, "-c", {code!r}))]
list(run_isolated(jobs, 1, 3600.0))
"""


def test_terminated_run_kills_jobs(tmp_path):
    path = tmp_path / "pid"
    code = TERMINATED.format(code=hangs(path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)
    process.terminate()
    assert process.wait(TIMEOUT) != 0
    assert ends(int(path.read_text()))
