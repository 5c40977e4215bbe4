"""A process for each job: hangs, crashes and what else must not cost the others."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from numerics import DEVICE

from fastvit_kernels.commands import check, cli
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.verify import all_configs, worker
from fastvit_kernels.verify.isolated import Job, Outcome, run_isolated
from fastvit_kernels.verify.runner import run_case

pytest.importorskip("rich")


def job(name, code):
    return Job(name, (sys.executable, "-c", code))


GOOD = 'print(\'{"name": "good"}\', flush=True)'
HANGS = f"import time; {GOOD}; time.sleep(600)"
DIES = f"import os, signal; {GOOD}; os.kill(os.getpid(), signal.SIGSEGV)"
EXITS = "import sys; sys.exit('no GPU here')"


def outcomes(*jobs, workers=4, timeout=60.0):
    return {o.job.name: o for o in run_isolated(jobs, workers, timeout)}


def test_a_hang_is_killed_and_a_crash_costs_one_job():
    jobs = [job("hangs", HANGS), job("dies", DIES), job("exits", EXITS), job("good", GOOD)]
    found = outcomes(*jobs, timeout=5.0)
    assert found["good"] == Outcome(jobs[3], [{"name": "good"}], None)
    assert found["hangs"].failure == "not finished after 5 s, killed"
    assert found["hangs"].lines == [{"name": "good"}]  # what it said before
    assert found["dies"].failure == "the process was ended by SIGSEGV"
    assert found["exits"].failure == "the process ended with status 1: no GPU here"


def test_what_a_job_started_dies_with_it(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    outcomes(job("parent", code), timeout=5.0)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(int(pid.read_text())):
        time.sleep(0.05)
    assert not _runs(int(pid.read_text()))


def _runs(pid):
    """Whether it is there and no zombie that nobody has reaped."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_an_interrupt_leaves_no_process(tmp_path):
    path = tmp_path / "pid"
    head = f"import os, pathlib, time; p = pathlib.Path({str(path)!r})\n"
    quick = job("quick", f"{head}while not p.exists(): time.sleep(0.01)")
    slow = job("slow", f"{head}p.write_text(str(os.getpid())); time.sleep(600)")
    found = run_isolated([quick, slow], 2, 600.0)
    next(found)
    found.close()  # as an interrupt does
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(int(path.read_text())):
        time.sleep(0.05)
    assert not _runs(int(path.read_text()))


def test_a_config_that_ends_its_process_is_named():
    table = next(iter(TABLES))
    lines = [
        {"table": table, "config": 0, "tried": True},
        {"table": table, "config": 0, "tried": False, "share": 0.5, "fault": None},
        {"table": table, "config": 1, "tried": True},
    ]
    runs = worker.runs_of(Outcome(job("a case", ""), lines, "not finished after 5 s, killed"))
    first, second, *_ = TABLES[table].configs
    assert [(r.config, r.share, r.fault) for r in runs] == [
        (first, 0.5, None), (second, 0.0, "not finished after 5 s, killed")
    ]  # fmt: skip


def test_check_with_jobs_names_the_hang_and_the_crash(monkeypatch, capsys):
    cases = {c.name: c for c in worker.cases_of(DEVICE, "fp32", False)}
    passes = run_case(cases["layer_norm_and_input"], "fp32").as_dict()
    code = {
        "layer_norm": HANGS,
        "linear": DIES,
        "layer_norm_and_input": f"print({json.dumps(passes)!r})",
    }
    monkeypatch.setattr(check, "check_job", lambda name, *_: job(name, code[name]))
    monkeypatch.setattr(check, "cases_of", lambda *_: [cases[name] for name in code])
    words = ["check", "--jobs", "3", "--case-timeout", "8", "--dtype", "fp32"]
    assert cli.main([*words, "--json"]) == 1
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    by_name = {line["name"]: line for line in lines}
    assert len(lines) == 3 and lines[-1]["name"] == "layer_norm"  # each as it ends
    assert by_name["layer_norm"]["failure"] == "not finished after 8 s, killed"
    assert by_name["linear"]["failure"] == "the process was ended by SIGSEGV"
    assert by_name["layer_norm_and_input"] == passes and passes["passed"]
    assert summary["failed"] == [f"{line['name']}, fp32" for line in lines if not line["passed"]]
    assert cli.main([*words, "--only", "linear"]) == 1
    out = capsys.readouterr().out
    assert "linear, fp32: the process was ended by SIGSEGV" in out and "0 of 1 cases" in out


@pytest.mark.skipif(not INTERPRETED, reason="the sizes of a GPU take longer than the timeout")
def test_check_in_processes_gives_what_this_process_gives(capsys):
    """The numbers too: inputs follow from the case alone."""
    words = ["check", "--only", "layer_norm_and", "--dtype", "fp32", "--json"]
    printed = []
    for jobs in ("0", "1"):
        assert cli.main([*words, "--jobs", jobs]) == 0
        (line, _) = map(json.loads, capsys.readouterr().out.splitlines())
        printed.append({**line, "seconds": 0})
    assert printed[0] == printed[1]


@pytest.mark.skipif(not INTERPRETED, reason="the sizes of a GPU take longer than the timeout")
def test_a_config_job_gives_what_this_process_gives():
    cases = worker.cases_of(DEVICE, "fp32", True)
    case = next(c for c in cases if c.name.startswith("layer_norm_and_input"))
    found = [r for r in all_configs.reached_by(case, ()) if r.table == "layer_norm_fwd"]
    (outcome,) = run_isolated([worker.config_job(found, "fp32", DEVICE)], 1, 120.0)
    (reached,) = found
    wanted = [c for c in TABLES["layer_norm_fwd"].configs if reached.fits(c)]
    runs = worker.runs_of(outcome)
    assert [run.config for run in runs] == wanted and all(run.fault is None for run in runs)
    assert runs[0] == all_configs.run_config(reached, wanted[0])


def test_jobs_are_checked(capsys):
    assert cli.main(["check", "--jobs", "-1"]) == 2
    assert "--jobs must be at least 0, got -1" in capsys.readouterr().err
