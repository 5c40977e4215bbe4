"""The words of `python -m tests.check`, and what it says."""

import json
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.accuracy.accuracy import Error
from fastvit_kernels.accuracy.runner import Result

from . import __main__ as command, worker
from .__main__ import main
from .all_configs import Run
from .isolated import Outcome


@pytest.fixture
def answers(monkeypatch):
    """What the cases and configs of `check` give, and what was asked."""
    given = SimpleNamespace(results=[], runs=[], left_out=0, asked=None)

    def some(found):
        def run(wanted):
            given.asked, wanted.left_out = wanted, given.left_out
            yield from getattr(given, found)

        return run

    monkeypatch.setattr(command, "run_cases", some("results"))
    monkeypatch.setattr(command, "run_configs", some("runs"))
    return given


@pytest.mark.parametrize("all_configs", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_time_budget_exit_status(answers, capsys, all_configs, wrong):
    words = ["--device", "cpu", *["--all-configs"] * all_configs]
    share, fault = (2.0, "twice too much") if wrong else (0.5, None)
    answers.results = [
        Result("a", "fp32", [Error("out0", share, share, 0.5, 0.5, 1.0, 1.0)], None, 1.0)
    ]
    answers.runs = [Run("layer_norm_fwd", None, "a", share, fault)]
    answers.left_out = 4
    assert main(words) == 3
    assert "the time is over: 4 did not run" in capsys.readouterr().out
    answers.left_out = 0
    assert main([*words, "--only", "a"]) == wrong
    assert main(words) == (wrong or all_configs), "no other table was reached"


def test_cases_share_processes():
    cpu = torch.device("cpu")
    jobs = worker.grouped([worker.check_job(name, "fp32", cpu) for name in "abcde"], 2)
    assert [[json.loads(w)["name"] for w in job.command[3:]] for job in jobs] == [
        ["a", "c", "e"],
        ["b", "d"],
    ]
    right = Result("a", "fp32", [Error("out", 0.1, 0.1, 0.5, 0.5, 1.0, 1.0)], None, 1.0)
    lines = [{"tried": "a"}, right.as_dict(), {"tried": "c"}]
    died = Outcome(jobs[0], lines, "the process was ended by SIGSEGV")
    passed, failed = worker.results_of(died)
    assert passed == right and (failed.name, failed.failure) == ("c", died.failure)
    (rest,) = worker.rest_of(died)
    assert [json.loads(w)["name"] for w in rest.command[3:]] == ["e"]
    lost = Outcome(jobs[0], lines[:2], "the process ended with status 4")  # of the case before
    assert [result.why for result in worker.results_of(lost)] == [lost.failure]
    assert [json.loads(w)["name"] for w in worker.rest_of(lost)[0].command[3:]] == ["c", "e"]
    silent = Outcome(jobs[1], [], "the process ended with status 1: no module named triton")
    assert [result.name for result in worker.results_of(silent)] == ["b"]
    assert [json.loads(w)["name"] for w in worker.rest_of(silent)[0].command[3:]] == ["d"]
    cut = Outcome(jobs[0], lines, None, is_cut=True)
    assert worker.results_of(cut) == [right] and worker.rest_of(cut) == []
